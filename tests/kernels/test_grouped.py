"""The kernels around the grouped products (group_choices, group_nvfp4, sum_choices) on the CPU emulator: every byte is the definition's."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels.grouped import group_choices, group_nvfp4, sum_choices
from dsv4.ops.grouped import group_choices_ref, group_nvfp4_ref, sum_choices_ref
from dsv4.ops.nvfp4 import to_nvfp4_ref

from ..emulator.emulator import emulated, needs_gxx

pytestmark = needs_gxx


def draw(rng, S, k, E):
    return torch.randint(0, E, (S, k), generator=rng, dtype=torch.int32)


def check_groups(chosen, E, **how):
    with emulated(**how):
        got = group_choices(chosen, E)
    want = group_choices_ref(chosen, E)
    tiles, pairs = want.counts.tolist()
    for name in ("order", "rows", "offsets", "counts"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for name, count in (("tiles", tiles), ("pairs", pairs)):
        mine, defined = getattr(got, name), getattr(want, name)
        assert mine.shape == defined.shape and torch.equal(mine[:count], defined[:count]), name
    return got


# One choice, more experts than choices, two and a ragged third step of a block (2,048 choices), Pro's number of experts.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("S,k,E", [(1, 1, 1), (3, 6, 33), (700, 6, 3), (1, 6, 384), (2049, 1, 2)])
def test_group_choices(rng, S, k, E, reverse):
    check_groups(draw(rng, S, k, E), E, reverse=reverse)


def test_group_choices_with_idle_experts_and_all_for_one(rng):
    check_groups(torch.full((130, 2), 3, dtype=torch.int32), 6)
    check_groups(draw(rng, 300, 1, 2) * 4, 7)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("K", [32, 96, 288, 7168])
def test_group_nvfp4(rng, K, swizzled):
    """Ragged groups of four scales, a row of more than a warp's; an expert without rows, with one, with more than a tile's."""
    chosen = torch.cat([torch.tensor([[0], [0], [3]]), torch.full((130, 1), 2)]).int()[torch.randperm(133, generator=rng)]
    if K == 7168:
        chosen = chosen[:9]
    x, groups = to_nvfp4_ref(torch.randn(len(chosen), K, generator=rng), swizzled), group_choices_ref(chosen, 4)
    with emulated(reverse=swizzled):
        got = group_nvfp4(x, groups)
    want = group_nvfp4_ref(x, groups)
    used = int(groups.counts[0]) * got.scales.numel() // len(groups.tiles)
    assert torch.equal(got.values, want.values) and torch.equal(got.row_scales, want.row_scales)
    assert got.scales.shape == want.scales.shape and torch.equal(got.scales[:used], want.scales[:used])


@pytest.mark.parametrize("row_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("S,k,D", [(1, 1, 8), (5, 6, 96), (3, 8, 2056), (2, 2, 7168)])
def test_sum_choices(rng, S, k, D, dtype, row_dtype):
    """Sizes that lose bits to each other, so that another order would show."""
    groups = group_choices_ref(draw(rng, S, k, 5), 5)
    y = (torch.randn(S * k, D, generator=rng) * torch.exp2(torch.randint(0, 20, (S * k, 1), generator=rng).float())).to(row_dtype)
    shared = (torch.randn(S, D, generator=rng) * 1000).to(dtype)
    with emulated(reverse=S % 2 == 0):
        assert torch.equal(sum_choices(y, groups, shared), sum_choices_ref(y, groups, shared))


def test_no_token(rng):
    none = group_choices(torch.empty(0, 3, dtype=torch.int32), 4)
    assert none.offsets.tolist() == [0] * 5 and none.counts.tolist() == [0, 0] and none.order.shape == (0,)
    assert group_nvfp4(to_nvfp4_ref(torch.empty(0, 32)), none).values.shape == (0, 16)
    assert sum_choices(torch.empty(0, 8).bfloat16(), none, torch.empty(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("chosen,E", [(torch.zeros(4, dtype=torch.int32), 2), (torch.zeros(2, 2), 2), (torch.zeros(2, 2).int(), 0),
                                      (torch.zeros(2, 2).int(), 8193), (torch.zeros(2, 0).int(), 2)])
def test_group_choices_refuses(chosen, E):
    with pytest.raises(UserError, match=r"group_choices: expected chosen \[S, k\] in int32 and 1 to 8192 experts instead of"):
        group_choices(chosen, E)


def test_the_others_refuse(rng):
    groups = group_choices_ref(torch.zeros(3, 2, dtype=torch.int32), 2)
    for x in (to_nvfp4_ref(torch.ones(2, 32)), to_nvfp4_ref(torch.ones(3, 48)), to_nvfp4_ref(torch.ones(3, 32))._replace(swizzled=True)):
        with pytest.raises(UserError, match=r"group_nvfp4: expected x \[S, K\] of these groups' tokens, K a multiple of 32, found values"):
            group_nvfp4(x, groups)
    good = torch.zeros(6, 8).bfloat16()
    for y, shared in ((good[:5], torch.zeros(3, 8)), (good.double(), torch.zeros(3, 8)), (good, torch.zeros(3, 16)),
                      (good, torch.zeros(3, 8).double()), (good[:, :4], torch.zeros(3, 4))):
        with pytest.raises(UserError, match=r"sum_choices: expected y \[S k, D\] and shared \[S, D\] in bf16 or fp32"):
            sum_choices(y, groups, shared)
