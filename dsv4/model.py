"""The whole model: embedding, the blocks in their order over the planned devices, the head. Loading goes one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from . import ops
from .cache import Cache, LayerCache
from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import CheckpointError, UserError
from .layers import Binder, Numerics
from .layers.attention import Attention
from .layers.mhc import Head, HyperConnection
from .layers.moe import MoE
from .layers.step import Rope, Step
from .plan import Plan


class Block:
    """One layer: attention and experts, each normed and wrapped in its own hyper-connection (model.md section 2)."""

    def __init__(self, bind: Binder, config: ModelConfig, layer: int):
        self.eps, self.device = config.rms_norm_eps, bind.device
        self.attn_norm, self.ffn_norm = bind.fp32("attn_norm.weight"), bind.fp32("ffn_norm.weight")
        self.attn_mhc, self.ffn_mhc = HyperConnection(bind, config, "attn"), HyperConnection(bind, config, "ffn")
        self.attention = Attention(bind.below("attn"), config, layer)
        self.moe = MoE(bind.below("ffn"), config, layer)

    def __call__(self, X: torch.Tensor, step: Step, cache: LayerCache) -> torch.Tensor:
        """The streams X [S, n, D] after this layer; extends the cache."""
        x, post, comb = self.attn_mhc.pre(X)
        X = self.attn_mhc.post(self.attention(ops.rms_norm(x, self.attn_norm, self.eps), step, cache), X, post, comb)
        x, post, comb = self.ffn_mhc.pre(X)
        return self.ffn_mhc.post(self.moe(ops.rms_norm(x, self.ffn_norm, self.eps), step), X, post, comb)


class Model:
    """DeepSeek-V4 bound to a checkpoint. `layers` maps the number of each layer that the plan runs to its Block, in order.

    `on_layer`, if set, is called with each layer's number and its output streams: for interrupts and for looking inside.
    """

    def __init__(self, checkpoint: Checkpoint, plan: Plan, numerics: Numerics,
                 on_progress: Callable[[int, str, torch.device], None] | None = None):
        """Loads layer by layer; `on_progress(bytes read, part, device)` is told after each part."""
        self.config, self.plan, self.numerics = checkpoint.config, plan, numerics
        self.on_layer: Callable[[int, torch.Tensor], None] | None = None
        report = on_progress or (lambda *_: None)
        first, last = plan.device_of(plan.layers[0]), plan.device_of(plan.layers[-1])
        self.embed = Binder(checkpoint, "", first, numerics).stored("embed.weight")
        report(checkpoint.nbytes("embed"), "embed", first)
        self.layers: dict[int, Block] = {}
        for layer in plan.layers:
            device = plan.device_of(layer)
            self.layers[layer] = Block(Binder(checkpoint, f"layers.{layer}.", device, numerics), self.config, layer)
            report(checkpoint.layer_bytes(layer), f"layer {layer}", device)
        self.head = Head(Binder(checkpoint, "", last, numerics), self.config)
        report(checkpoint.nbytes("head"), "head", last)
        self.rope = Rope(self.config)

    def new_cache(self) -> Cache:
        """An empty cache for the planned context."""
        context, dtype = self.plan.context, self.numerics.dtype
        layers = {n: LayerCache(self.config, n, context, dtype, block.device) for n, block in self.layers.items()}
        return Cache(layers, context)

    @torch.inference_mode()
    def forward(self, ids: list[int], cache: Cache, logits: Literal["none", "last", "all"] = "last") -> torch.Tensor | None:
        """Runs the next len(ids) tokens of the sequence in `cache`: any number, at any position.

        Returns logits as fp32 on the head's device: [vocab] after the last token, [S, vocab], or None. Raises UserError when the
        tokens do not fit the context or the vocabulary, CheckpointError when streams or logits are not finite, with the first layer.
        """
        self._check(ids, cache)
        tokens = torch.tensor(ids, device=self.embed.device)
        step = Step.at(cache.position, tokens, self.rope)
        X = self.embed[tokens].to(self.numerics.dtype)[:, None].expand(-1, self.config.hc_mult, -1)
        finite = {"the embedding": X.isfinite().all()}  # each stays on its device until something is wrong
        for number, block in self.layers.items():
            step, X = step.to(block.device), X.to(block.device)
            X = block(X, step, cache.layers[number])
            finite[f"layer {number} ({self.config.kind(number)})"] = X.isfinite().all()
            if self.on_layer is not None:
                self.on_layer(number, X)
        end = cache.position + len(ids)
        out = None if logits == "none" else self.head(X if logits == "all" else X[-1:])
        # What is not finite in the streams stays so to the last layer: one look, and only then at which layer it began.
        fine = X.isfinite().all()
        if not (fine if out is None else fine & out.isfinite().all()):
            where = next((name for name, ok in finite.items() if not ok), "the head")
            raise CheckpointError(f"non-finite logits after {end} tokens: expected finite numbers, {where} made the first that "
                                  "are not: its weights are corrupt, or activations overflow; helpers/compare_oracle.py looks inside")
        cache.position = end  # only now: a refused or interrupted call counts no tokens
        return out if out is None or logits == "all" else out[0]

    def _check(self, ids, cache):
        if not ids:
            raise UserError("expected at least one token, found none")
        if cache.position + len(ids) > cache.context:
            raise UserError(f"the caches hold {cache.context} tokens, found {cache.position + len(ids)}: plan for more with --context")
        self.config.check_tokens(ids)
