"""How near a kernel must be to the exact result: at most twice as far as the torch definition run in the kernel's own precision.

A definition can be right by luck, in a short row or one value. So an error that no fp32 arithmetic of this kind can promise to avoid is
allowed on top: `roundings` steps of 2^-24 of `scale`, the size of what is added up (which is more than the result's where terms cancel),
and one rounding to the output's dtype.
"""

import torch

ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-9}


def assert_as_good(got: torch.Tensor, low: torch.Tensor, exact: torch.Tensor, roundings: int, scale: torch.Tensor | None = None) -> None:
    """Row by row (last dim), in the Euclidean norm. `low`: the definition in the kernel's precision; `exact` and `scale`: float64."""
    assert got.dtype == low.dtype and got.shape == low.shape == exact.shape and exact.dtype == torch.float64
    assert got.isfinite().all()
    error, of_low = ((t.double() - exact).norm(dim=-1) for t in (got, low))
    rounding = ROUNDING[got.dtype] * exact.norm(dim=-1)
    allowed = torch.maximum(2 * of_low, rounding) + roundings * 2**-24 * (exact if scale is None else scale).norm(dim=-1)
    worst = int((error - allowed).argmax())
    assert (error <= allowed).all(), f"row {worst}: error {error.flatten()[worst]:.3g}, allowed {allowed.flatten()[worst]:.3g}"
