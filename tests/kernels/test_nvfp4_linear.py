"""The nvfp4_linear kernel (tcgen05) on the CPU emulator against the exact product of its packed inputs."""

import ctypes

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels import build
from dsv4.kernels import nvfp4 as kernels
from dsv4.kernels.launch import tensor_memory_blocks
from dsv4.kernels.layouts import Nvfp4Operand, nvfp4_operand
from dsv4.kernels.nvfp4 import nvfp4_linear
from dsv4.ops.nvfp4 import nvfp4_linear_ref, to_nvfp4_ref, unpack_nvfp4

from ..emulator.emulator import ON_GPU, emulated, needs_gxx
from . import compare
from .weights import any_weight

pytestmark = needs_gxx
if ON_GPU and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 10:
    pytestmark = pytest.mark.skip(reason="this GPU has no NVFP4 tensor cores")


def inputs(rng, S, rows, K):
    """Tokens of different sizes, a weight of any codes and scales."""
    x = torch.randn(S, K, generator=rng) * torch.exp2(torch.randint(-8, 9, (S, 1), generator=rng).float())
    return to_nvfp4_ref(x, swizzled=True), any_weight(rng, "nvfp4", rows, K)


def run(x, operand, **how):
    with emulated(**how):
        return nvfp4_linear(x, operand)


def check(x, weight, **how):
    got = run(x, nvfp4_operand(weight), **how)
    values, w = unpack_nvfp4(x).double(), weight.dequantize().double()
    # An fp32 sum of K / 16 terms, the two scales' product and that with the sum; the reader's scale * row of unpack_nvfp4 and of w.
    compare.assert_as_good(got, nvfp4_linear_ref(x, nvfp4_operand(weight)), values @ w.T, roundings=values.shape[1] // 16 + 4,
                           scale=values.abs() @ w.abs().T)
    return got


# Every width of the product, its edges; ragged rows; one block of 16, K of less and more than a copy, a step, a chunk, a ring of stages.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("S,rows,K", [
    (1, 128, 64), (1, 1, 16), (16, 200, 256), (17, 128, 320), (3, 130, 48), (33, 384, 96), (64, 64, 512), (65, 128, 272),
    (128, 256, 256), (2, 128, 2000),
])
def test_against_the_exact_product(rng, S, rows, K, reverse):
    check(*inputs(rng, S, rows, K), reverse=reverse)


def test_a_real_width(rng):
    """Flash's K, in 8 splits of two chunks; one tile of rows."""
    check(*inputs(rng, 4, 96, 4096))


def test_a_block_that_goes_round_its_stages(rng, monkeypatch):
    monkeypatch.setattr(kernels, "_splits", lambda *_: 1)
    check(*inputs(rng, 1, 128, 13 * 256 + 64))
    check(*inputs(rng, 128, 16, 5 * 256), reverse=True)


@pytest.mark.parametrize("splits", [2, 3, 5, 8])
def test_splits_cover_k_once(rng, monkeypatch, splits):
    monkeypatch.setattr(kernels, "_splits", lambda *_: splits)
    check(*inputs(rng, 9, 130, 8 * 256 - 160))


def test_how_many_splits():
    """Never more than chunks, nor than what runs at once; 8 at most."""
    cases = {(128, 7168): 8, (6144, 7168): 2, (128, 256): 1, (128, 512): 2, (128 * 80, 7168): 1, (128 * 37, 7168): 4}
    assert {case: kernels._splits(*case, 148) for case in cases} == cases


def test_exact_where_the_sum_is(rng):
    """Codes of whole numbers, scales of 1: sums of at most 2^16 in fp32, so every bit."""
    x, weight = inputs(rng, 20, 130, 512)
    scales, rows = torch.where(x.scales > 0, 0x38, 0).to(torch.uint8), torch.exp2(torch.randint(-3, 4, (20,), generator=rng).float())
    x = x._replace(scales=scales, row_scales=rows)
    weight.scale = torch.ones_like(weight.scale.float()).to(torch.float8_e4m3fn)
    weight.global_scale = 0.25
    exact = unpack_nvfp4(x).double() @ weight.dequantize().double().T
    assert torch.equal(run(x, nvfp4_operand(weight)), exact.bfloat16())


def test_a_token_alone_gives_the_same_bits(rng):
    """Whatever stands beside it, a NaN too."""
    v, weight = torch.randn(20, 80, generator=rng), nvfp4_operand(any_weight(rng, "nvfp4", 40, 80))
    together = run(to_nvfp4_ref(v, True), weight)
    assert torch.equal(run(to_nvfp4_ref(v[7:8], True), weight)[0], together[7])
    v[3, 5], v[4, 70] = float("nan"), float("inf")
    spoilt = run(to_nvfp4_ref(v, True), weight)
    assert spoilt[3:5].isnan().all()
    assert torch.equal(spoilt[[0, 1, 2, *range(5, 20)]], together[[0, 1, 2, *range(5, 20)]])


def test_sm_90a_refuses(nvcc, kernel_cache):
    """The object for sm_90a says cudaErrorNotSupported (801) before it touches anything; that for sm_100a finds these arguments wrong."""
    results = {}
    for arch in ("sm_90a", "sm_100a"):
        function = kernels._nvfp4_linear.bind(ctypes.CDLL(str(build.build("nvfp4_linear", arch))))
        results[arch] = function(None, None, None, None, None, None, 0, 0, 0, 0, 0.0, None)
    assert results == {"sm_90a": 801, "sm_100a": 1}


def test_a_gpu_without_these_tensor_cores_is_named(monkeypatch):
    class Properties:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    with pytest.raises(UserError, match=r"nvfp4_linear: expected a GPU with tensor memory .*found NVIDIA H200 with 9\.0: use linear$"):
        tensor_memory_blocks.__wrapped__("nvfp4_linear", torch.device("cuda:0"), "linear")


@pytest.mark.parametrize("change", [
    lambda x, w: (to_nvfp4_ref(torch.ones(2, 64)), w), lambda x, w: (to_nvfp4_ref(torch.ones(129, 64), True), w),
    lambda x, w: (to_nvfp4_ref(torch.ones(2, 128), True), w), lambda x, w: (to_nvfp4_ref(torch.ones(0, 64), True), w),
    lambda x, w: (x, Nvfp4Operand(w.values, w.scales[:-1], 1.0)),
])
def test_what_the_kernel_does_not_take(rng, change):
    x, weight = inputs(rng, 2, 16, 64)
    with pytest.raises(UserError, match="nvfp4_linear: expected x of 1 to 128 rows, its scales swizzled.*, found values"):
        run(*change(x, nvfp4_operand(weight)))
