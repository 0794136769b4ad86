"""Linears over packed weights: every product in float64 from the dequantised values (tests/test_formats.py holds the values)."""

import importlib
import math

import pytest
import torch

from dsv4 import formats, ops
from dsv4.formats import Weight

module = importlib.import_module("dsv4.ops.linear")


def packed(kind: str, w: torch.Tensor) -> Weight:
    """w in a storage format."""
    if kind == "nvfp4":
        return formats.quantize_nvfp4(w)
    if kind == "mxfp4":
        return formats.quantize_mxfp4(w)
    if kind == "fp8":
        return formats.quantize_fp8_block(w, (128, 128))
    return Weight.plain(w.to({"bf16": torch.bfloat16, "fp32": torch.float32}[kind]))


def slow(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[S, in] x [out, in], each sum exact in float64."""
    rows = w.double().tolist()
    return torch.tensor([[math.fsum(a * b for a, b in zip(v, row, strict=True)) for row in rows] for v in x.double().tolist()],
                        dtype=torch.float64)


def bound(x, w):
    """How far an fp32 sum may be off: sqrt(in) roundings at random, and 8 for the tails, of 2^-24 of the sum of magnitudes."""
    return (8 + math.sqrt(x.shape[-1])) * 2.0**-24 * (x.double().abs() @ w.double().abs().T) + 1e-30


def project(x, weight):
    (got,) = ops.projections(x, (weight,), ("bf16",))
    return got


KINDS = ["nvfp4", "mxfp4", "fp8", "bf16", "fp32"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("S,out,k", [(1, 1, 32), (3, 130, 192), (2, 7, 64)])
def test_projections(rng, kind, S, out, k):
    x, weight = torch.randn(S, k, generator=rng), packed(kind, torch.randn(out, k, generator=rng) * 0.05)
    values = weight.dequantize()
    got = project(x, weight)
    assert got.dtype == torch.float32
    assert ((got - slow(x, values)).abs() <= bound(x, values)).all()
    low = x.bfloat16()
    assert torch.equal(project(low, weight), project(low.float(), weight))  # bf16 inputs are exact, the sums fp32


@pytest.mark.parametrize("kind", KINDS)
def test_linear_rounds_once(rng, kind):
    x, weight = torch.randn(3, 64, generator=rng), packed(kind, torch.randn(40, 64, generator=rng) * 0.1)
    assert torch.equal(ops.linear(x, (weight,)), project(x, weight))
    got = ops.linear(x.bfloat16(), (weight,))
    assert got.dtype == torch.bfloat16 and got.shape == (3, 40)
    assert torch.equal(got, project(x.bfloat16().float(), weight).bfloat16())


@pytest.mark.parametrize("activations", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("k", [192, 32, 160])
def test_activation_precisions(rng, activations, k):
    """fp8: 1x128 blocks with power-of-two scales; nvfp4: 1x16 and one scale per token; bf16: the input as it is."""
    # Inputs over 2^16: with values of one size, other blocks would give the same numbers.
    x = torch.randn(5, k, generator=rng) * torch.exp2(torch.randint(-16, 1, (5, k), generator=rng))
    weight = packed("fp8", torch.randn(9, k, generator=rng) * torch.exp2(torch.randint(0, 9, (9, k), generator=rng)))
    seen = {"bf16": x, "fp8": ops.fp8_round_trip(x, 128), "nvfp4": ops.nvfp4_round_trip(x)}[activations]
    values = weight.dequantize()
    got = ops.linear(x, (weight,), activations)
    assert ((got - slow(seen, values)).abs() <= bound(seen, values)).all()
    if activations != "bf16":
        assert not torch.equal(got, ops.linear(x, (weight,)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("S,G,R,k", [(3, 2, 64, 128), (2, 3, 24, 160), (1, 1, 40, 32), (2, 4, 5, 32)])
def test_grouped_linear(rng, kind, S, G, R, k):
    """Group g of the input meets rows g*R .. of the weight; R need not be a multiple of FP8's blocks."""
    x, weight = torch.randn(S, G, k, generator=rng), packed(kind, torch.randn(G * R, k, generator=rng) * 0.1)
    values = weight.dequantize()
    got = ops.grouped_linear(x, (weight,))
    assert got.shape == (S, G, R)
    for g in range(G):
        rows = values[g * R : (g + 1) * R]
        assert ((got[:, g] - slow(x[:, g], rows)).abs() <= bound(x[:, g], rows)).all()
    low = x.bfloat16()
    assert torch.equal(ops.grouped_linear(low, (weight,)), ops.grouped_linear(low.float(), (weight,)).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_rows_give_what_one_piece_gives(rng, kind, monkeypatch):
    """A weight of more elements than TILE is dequantised in runs of rows, a multiple of 128, the last one ragged."""
    x, weight = torch.randn(3, 32, generator=rng), packed(kind, torch.randn(300, 32, generator=rng))
    whole, values = project(x, weight), weight.dequantize()
    for tile in (1, 32 * 256, 32 * 300):
        monkeypatch.setattr(module, "TILE", tile)
        tiled = project(x, weight)
        assert tiled.shape == whole.shape and ((tiled.double() - slow(x, values)).abs() <= bound(x, values)).all()


def test_zeros_and_the_largest_values(rng):
    weight = packed("nvfp4", torch.zeros(4, 32))
    assert (ops.linear(torch.randn(2, 32, generator=rng), (weight,)) == 0).all()
    assert (ops.linear(torch.zeros(2, 32), (packed("fp8", torch.randn(4, 32, generator=rng)),)) == 0).all()
    largest = packed("mxfp4", torch.full((3, 32), 6.0 * 2.0**100))
    assert project(torch.ones(1, 32), largest).tolist() == [[32 * 6.0 * 2.0**100] * 3]


def test_projections_of_several_formats_each_with_its_input(rng):
    x = torch.randn(4, 64, generator=rng)
    weights = tuple(packed(kind, torch.randn(out, 64, generator=rng)) for kind, out in (("fp8", 40), ("bf16", 7), ("nvfp4", 24)))
    assert ops.pack_weights(weights) is weights
    got = ops.projections(x, weights, ("fp8", "bf16", "nvfp4"))
    for y, weight, seen in zip(got, weights, (ops.fp8_round_trip(x, 128), x, ops.nvfp4_round_trip(x)), strict=True):
        assert torch.equal(y, project(seen, weight))
    with pytest.raises(ValueError):
        ops.projections(x, weights, ("bf16",))
