"""The whole model: embedding, the blocks in their order over the planned devices, the head. Loading goes one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from . import ops
from .cache import Cache, LayerCache
from .checkpoint import Checkpoint, needs_of_layer, needs_outside_layers
from .config import ModelConfig
from .errors import CheckpointError, UserError
from .layers import Binder, Numerics
from .layers.attention import Attention
from .layers.mhc import Head, HyperConnection, Streams
from .layers.moe import MoE
from .layers.step import Rope, Step
from .loader import Part, load
from .plan import DevicePlan, Plan
from .streaming import Supply


class Block:
    """One layer: attention and experts, each normed and wrapped in its own hyper-connection (model.md section 2)."""

    def __init__(self, bind: Binder, config: ModelConfig, layer: int):
        self.device = bind.device
        self.attn_mhc, self.ffn_mhc = HyperConnection(bind, config, "attn"), HyperConnection(bind, config, "ffn")
        self.attention = Attention(bind.below("attn"), config, layer)
        self.moe = MoE(bind.below("ffn"), config, layer)

    def __call__(self, streams: Streams, step: Step, cache: LayerCache) -> Streams:
        """The streams after this layer, the experts' output pending; extends the cache."""
        streams = self.attn_mhc(streams, lambda x: self.attention(x, step, cache))
        return self.ffn_mhc(streams, lambda x: self.moe(x, step))


class Model:
    """DeepSeek-V4 bound to a checkpoint. `layers` maps the number of each layer that the plan runs to its Block, in order.

    `on_layer`, if set, is called with each layer's number and its output streams: for interrupts and for looking inside. `supplies` bring
    the routed experts that do not stay on their device, one for each that has such layers.
    """

    def __init__(self, checkpoint: Checkpoint, plan: Plan, numerics: Numerics,
                 on_progress: Callable[[int, str, torch.device], None] | None = None):
        """Loads layer by layer, all devices at the same time (loader.py). `on_progress(bytes read since the last call, part, device)` is
        called in this thread, many times a part, also with 0 bytes, and ends the loading if it raises."""
        self.config, self.plan, self.numerics = checkpoint.config, plan, numerics
        self.on_layer: Callable[[int, Streams], None] | None = None
        first, last = plan.device_of(plan.layers[0]), plan.device_of(plan.layers[-1])
        outside, packs = needs_outside_layers(self.config), ops.selected_backend() == "cuda"

        self.supplies = {d.device: Supply(checkpoint, plan.stream, d.device, d.streamed, plan.chunk) for d in plan.devices if d.streamed}

        def block(layer):
            share = plan.share_of(layer)
            streamed = self.supplies[share.device].of(layer) if layer in share.streamed else None
            needs = [need for need in needs_of_layer(self.config, layer) if not plan.left_in_files(layer) or need.kind != "routed experts"]
            return Part(f"layer {layer}", share.device, needs, loaded_bytes(checkpoint, plan, layer),
                        lambda source: Block(Binder(source, f"layers.{layer}.", share.device, numerics, streamed), self.config, layer),
                        packs)

        made = load(checkpoint, [
            Part("embed", first, outside[:1], checkpoint.nbytes("embed"),
                 lambda source: Binder(source, "", first, numerics).stored("embed.weight")),
            *map(block, plan.layers),
            Part("head", last, outside[1:], checkpoint.nbytes("head"),
                 lambda source: Head(Binder(source, "", last, numerics), self.config), packs),
        ], on_progress)
        self.embed: torch.Tensor = made["embed"]
        self.layers: dict[int, Block] = {layer: made[f"layer {layer}"] for layer in plan.layers}
        self.head: Head = made["head"]
        self.rope = Rope(self.config)

    def new_cache(self, context: int | None = None) -> Cache:
        """An empty cache for the planned context, or another, and the planned chunk."""
        context, chunk, dtype = context or self.plan.context, self.plan.chunk, self.numerics.dtype
        layers = {n: LayerCache(self.config, n, context, chunk, dtype, block.device) for n, block in self.layers.items()}
        return Cache(layers, context, chunk)

    @torch.inference_mode()
    def forward(self, ids: list[int], cache: Cache, logits: Literal["none", "last", "all"] = "last") -> torch.Tensor | None:
        """Runs the next len(ids) tokens of the sequence in `cache`: up to its chunk, at any position.

        Returns logits as fp32 on the head's device: [vocab] after the last token, [S, vocab], or None. Raises UserError when the
        tokens do not fit the context or the vocabulary, CheckpointError when streams or logits are not finite, with the first layer.
        """
        self.check(ids, cache)
        if len(ids) > cache.chunk:
            raise UserError(f"the caches take {cache.chunk} tokens a step, found {len(ids)}: give fewer, or plan for a larger chunk")
        device, end = self.embed.device, cache.position + len(ids)
        finite = {}  # each stays on its device until something is wrong
        X = self.run(torch.tensor(ids, device=device), torch.arange(cache.position, end, device=device), cache, finite)
        out = None if logits == "none" else self.head(X if logits == "all" else X[-1:])
        # What is not finite in the streams stays so to the last layer: one look, and only then at which layer it began.
        fine = X.isfinite().all()
        self.refuse_non_finite(bool(fine if out is None else fine & out.isfinite().all()), finite, end)
        cache.position = end  # only now: a refused or interrupted call counts no tokens
        return out if out is None or logits == "all" else out[0]

    def run(self, ids: torch.Tensor, positions: torch.Tensor, cache: Cache, finite: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The streams [S, n, D] after all layers, for tokens at these positions (int64 [S], on the embedding's device).

        `finite`, if given, gets a flag for the embedding and for each layer.
        """
        X = self.embedded(ids, finite)
        for share in self.plan.devices:
            ids, positions = ids.to(share.device), positions.to(share.device)
            X = self.run_share(share, X.to(share.device), ids, positions, cache, finite)
        return X

    def embedded(self, ids: torch.Tensor, finite: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The streams [S, n, D] before the first layer: every stream is the token's embedding."""
        X = self.embed[ids].to(self.numerics.dtype)[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
        if finite is not None:
            finite["the embedding"] = X.isfinite().all()
        return X

    def run_share(self, share: DevicePlan, X: torch.Tensor | Callable[[], torch.Tensor], ids: torch.Tensor, positions: torch.Tensor,
                  cache: Cache, finite: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """One device's layers: all tensors are on it, and the host decides nothing by what they hold, so that the work can be captured in
        a graph. `X`: the streams, or what waits for them and for `ids`, called behind all that needs neither."""
        step = Step.at(positions, ids, self.rope)
        streams = Streams(X() if callable(X) else X)
        for number in share.layers:
            streams = self.layers[number](streams, step, cache.layers[number])
            if finite is not None:  # what is wrong in the attention's part is wrong in X
                finite[f"layer {number} ({self.config.kind(number)})"] = streams.X.isfinite().all() & streams.pending.o.isfinite().all()
            if self.on_layer is not None:
                self.on_layer(number, streams)
        return streams.settled()

    def check(self, ids: list[int], cache: Cache) -> None:
        """Raises UserError unless these tokens are of the vocabulary and fit the cache."""
        if not ids:
            raise UserError("expected at least one token, found none")
        if cache.position + len(ids) > cache.context:
            raise UserError(f"the caches hold {cache.context} tokens, found {cache.position + len(ids)}: plan for more with --context")
        self.config.check_tokens(ids)

    @staticmethod
    def refuse_non_finite(fine: bool, finite: dict[str, torch.Tensor], tokens: int) -> None:
        """Raises CheckpointError unless `fine`, with the first of the flags of `run` that is not set; without any, with how to get them."""
        if fine:
            return
        where = next((name for name, ok in finite.items() if not ok), "the head")
        raise CheckpointError(f"non-finite logits after {tokens} tokens: expected finite numbers, " + (
            f"{where} made the first that are not: its weights are corrupt, or activations overflow; helpers/compare_oracle.py looks inside"
            if finite else "found others: DSV4_SYNC=1 names the first layer that makes them"))


def loaded_bytes(checkpoint: Checkpoint, plan: Plan, layer: int) -> int:
    """Bytes of a layer that are read when the model is loaded, as stored."""
    left = [n for n in needs_of_layer(checkpoint.config, layer) if n.kind == "routed experts"] if plan.left_in_files(layer) else []
    return checkpoint.layer_bytes(layer) - sum(checkpoint.stored(need).nbytes for need in left)
