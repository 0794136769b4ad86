"""How the public exports store a model: which format each linear has, and under which keys and dtypes its parts lie in a file.

Layouts: checkpoints.md sections 2, 4 and 5. The reader (checkpoint.py) knows none of this, as it recognises formats by what it finds;
those who make checkpoints (helpers/make_checkpoint.py), or weights as if they came from one (synthetic.py), have it from here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from .formats import Weight


@dataclass(frozen=True)
class Format:
    """How an export stores each kind of linear: "nvfp4" (ModelOpt), "nvfp4-ct" (compressed-tensors), "mxfp4", "fp8" or "plain"."""

    routed: str = "plain"
    shared: str = "plain"
    attention: str = "plain"  # wq_a, wq_b, wkv, wo_a, wo_b and the indexer's wq_b
    mtp_routed: str = "plain"
    fp8_scale: tuple[str, str] = ("scale", "E8M0")  # name and dtype (E8M0, F32, BF16) of an FP8 linear's scale
    plain: torch.dtype = torch.bfloat16
    names: str = "native"


FORMATS = {
    "nvidia": Format("nvfp4", "fp8", "fp8", "mxfp4"),
    "official": Format("mxfp4", "fp8", "fp8", "mxfp4"),
    "compressed-tensors": Format("nvfp4-ct", "plain", "fp8", fp8_scale=("weight_scale_inv", "F32")),
    "all-nvfp4": Format("nvfp4", "nvfp4", "nvfp4", "nvfp4"),
    "base-fp8": Format("fp8", "fp8", "fp8", "fp8", fp8_scale=("scale", "F32")),
    "bf16": Format(),
    "f32": Format(plain=torch.float32),
    "transformers": Format(plain=torch.float32, names="transformers"),
    "hybrid": Format(plain=torch.float32, names="hybrid"),
}
# F32 in every export, whatever the rest is (DeepSeek's table): small, and the router and mHC need the precision.
ALWAYS_F32 = re.compile(r"(hc_\w+_(fn|base|scale)|attn_sink|ape|gate\.bias)$")
_QUANTIZED_ATTENTION = re.compile(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)$|mtp\.0\.[eh]_proj$")


def kind_of(fmt: Format, name: str) -> str:
    """How a linear of this native name is stored: one of Format's kinds."""
    if ".ffn.experts." in name:
        return fmt.mtp_routed if name.startswith("mtp.") else fmt.routed
    if ".shared_experts." in name:
        return fmt.shared
    return fmt.attention if _QUANTIZED_ATTENTION.search(name) else "plain"


def plain_dtype(fmt: Format, name: str) -> torch.dtype:
    """The dtype of what is not quantised."""
    return torch.int64 if name.endswith("tid2eid") else torch.float32 if ALWAYS_F32.search(name) else fmt.plain


def to_tensors(name: str, weight: Weight, fmt: Format) -> dict[str, torch.Tensor]:
    """The tensors under which a linear is stored, by key, in the spelling of its export."""
    if weight.kind == "plain":
        return {f"{name}.weight": weight.payload}
    if weight.kind == "mxfp4":
        return {f"{name}.weight": weight.payload.view(torch.int8), f"{name}.scale": weight.scale.view(torch.float8_e8m0fnu)}
    if weight.kind == "fp8":
        suffix, dtype = fmt.fp8_scale
        scale = weight.scale.view(torch.float8_e8m0fnu) if dtype == "E8M0" else weight.scale
        return {f"{name}.weight": weight.payload, f"{name}.{suffix}": scale.to(torch.bfloat16) if dtype == "BF16" else scale}
    if weight.divisor is not None:
        return {f"{name}.weight_packed": weight.payload, f"{name}.weight_scale": weight.scale,
                f"{name}.weight_global_scale": torch.tensor([weight.divisor], dtype=torch.float32),
                f"{name}.input_global_scale": torch.ones(1)}
    return {f"{name}.weight": weight.payload, f"{name}.weight_scale": weight.scale,
            f"{name}.weight_scale_2": torch.tensor(weight.global_scale, dtype=torch.float32), f"{name}.input_scale": torch.tensor(1.0)}
