"""What layers bind their weights from: one checkpoint, one place in it, one device; and the run's choices about numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..checkpoint import Checkpoint
from ..errors import CheckpointError, KernelError, UserError
from ..formats import Weight

T = TypeVar("T")


@dataclass(frozen=True)
class Numerics:
    """The choices a run makes about numbers (docs/design.md, numerics).

    dtype: of activations and caches, float32 or bfloat16. kv_quant: the trained KV FP8 and indexer Hadamard + FP4. activations:
    what quantised linears see of their input, "bf16" (as it is), "fp8" or "nvfp4". keep_dequantised: weights are expanded to fp32 once, at
    load, instead of at each use; the values are the same.
    """

    dtype: torch.dtype = torch.float32
    kv_quant: bool = True
    activations: str = "bf16"
    keep_dequantised: bool = False

    def input_of(self, kind: str) -> str:
        """Input precision of a linear whose weight has this format: only quantised weights get quantised inputs, and NVFP4
        inputs only meet NVFP4 weights (FP8 weights then get FP8 ones)."""
        if kind == "plain" or self.activations == "bf16":
            return "bf16"
        return "nvfp4" if self.activations == "nvfp4" and kind == "nvfp4" else "fp8"


class Binder:
    """Reads the weights below a name prefix on to a device. `streamed`, of a layer whose routed experts do not stay there: what makes its
    experts in place of ops.pack_experts; they have `bring(chosen, ids)` (dsv4/streaming.py)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, device: torch.device, numerics: Numerics, streamed: Callable | None = None):
        self.checkpoint, self.prefix, self.device, self.numerics, self.streamed = checkpoint, prefix, device, numerics, streamed

    def below(self, name: str) -> Binder:
        """The binder of a part: below("attn") reads `<prefix>attn.*`."""
        return Binder(self.checkpoint, f"{self.prefix}{name}.", self.device, self.numerics, self.streamed)

    def fp32(self, name: str) -> torch.Tensor:
        """A small tensor, in fp32: norms, scales, biases, mHC. Raises CheckpointError if it is not finite: a router's NaN would choose
        experts and never show in the logits."""
        value = self.checkpoint.tensor(self.prefix + name).to(self.device).float()
        self.refuse_non_finite(name, value)
        return value

    def refuse_non_finite(self, name: str, value: torch.Tensor) -> None:
        """Raises CheckpointError that names the tensor if `value` holds NaN or infinity."""
        if not value.isfinite().all():
            raise CheckpointError(f"{self.prefix}{name}: expected finite numbers, found NaN or infinity; the checkpoint is damaged: fetch "
                                  "its shard again")

    def stored(self, name: str) -> torch.Tensor:
        """A tensor in the dtype it has on disk."""
        return self.checkpoint.tensor(self.prefix + name).to(self.device)

    def weight(self, name: str) -> Weight:
        """A linear's weight, packed as on disk, or fp32 if the run keeps dequantised copies."""
        weight = self.checkpoint.weight(self.prefix + name)
        return (Weight.plain(weight.dequantize()) if self.numerics.keep_dequantised else weight).to(self.device)

    def input_of(self, name: str) -> str:
        """What a linear sees of its input: the format that its weight has on disk decides, kept dequantised or not. Reads no weight."""
        return self.numerics.input_of(self.checkpoint.kind(self.prefix + name))

    def packing(self, name: str, pack: Callable[..., T], *weights) -> T:
        """pack(*weights), where what the kernels refuse of a weight is said with its name."""
        try:
            return pack(*weights)
        except (CheckpointError, KernelError):  # of reading what is packed; of the kernel that packs
            raise
        except UserError as error:
            raise UserError(f"{self.prefix}{name}: {error}: run with --backend torch") from None
