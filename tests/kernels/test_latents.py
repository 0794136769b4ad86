"""The queries and keys of update_caches on the CPU emulator against their definition: the latents in bf16, the window's keys byte by byte.

They are alone here, as in a layer without pools; test_update_caches.py says that the bits are the same beside them.
"""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels.keys import Keys
from dsv4.kernels.update_caches import update_caches
from dsv4.ops.norm import kv_norm_rope, rms_norm

from ..emulator.emulator import emulated, needs_gxx
from . import compare, packed

pytestmark = needs_gxx
EPS = 1e-6


class Site:
    """Random queries and keys of S tokens from `position`, and a window of R rows that holds random bytes."""

    def __init__(self, rng, S=1, rank=64, position=0, R=136):
        def randn(*shape):
            return torch.randn(*shape, generator=rng)
        angle = randn(S, 32) * 3
        self.qa, self.kv, self.q_norm, self.kv_norm = randn(S, rank), randn(S, 512), randn(rank), randn(512)
        self.cos, self.sin, self.positions = angle.cos(), angle.sin(), position + torch.arange(S)
        self.window = Keys(*(torch.randint(256, (R, n), generator=rng, dtype=torch.uint8) for n in (576, 8)))

    def call(self, window, eps=EPS, quantize=True, compressed=(), pools=(), entry_cos=None, entry_sin=None):
        """Into this window, beside these pools."""
        return update_caches(self.qa, self.kv, self.q_norm, self.kv_norm, self.cos, self.sin, window, compressed, pools, entry_cos,
                             entry_sin, self.positions, eps, quantize)


def run(site: Site, eps=EPS, quantize=True, **how):
    """(qr, the window afterwards)."""
    window = Keys(*(t.clone() for t in site.window))
    with emulated(**how):
        qr = site.call(window, eps, quantize)
    return qr, window


def check(site: Site, qr, window, eps=EPS):
    """Every byte: the keys where they belong, and all other rows as they were."""
    v = site.qa.double()
    exact = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * site.q_norm.double()
    compare.assert_as_good(qr, rms_norm(site.qa, site.q_norm, eps).bfloat16(), exact, roundings=4)
    slots = site.positions % len(window.values)
    kv = site.kv.bfloat16().double()  # a projection's output is rounded before the norm
    packed.assert_keys(Keys(*(t[slots] for t in window)), packed.norm_rope((kv, kv), site.kv_norm, site.cos, site.sin, eps))
    others = torch.ones(len(window.values), dtype=torch.bool)
    others[slots] = False
    assert all(torch.equal(got[others], before[others]) for got, before in zip(window, site.window, strict=True))


# The smallest, less than a warp, ragged, one thread more than a pass of 128, tiny, Flash, Pro, the largest.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("rank", [4, 64, 100, 516, 1024, 1536, 2048])
def test_against_the_definition(rng, rank, reverse):
    site = Site(rng, S=2, rank=rank, position=5)
    check(site, *run(site, reverse=reverse))


@pytest.mark.parametrize("S", range(1, 9))
def test_every_number_of_tokens(rng, S):
    site = Site(rng, S=S, position=int(torch.randint(10**6, (), generator=rng)))
    check(site, *run(site))


# The start, block edges, the ring's end (136) within and at the edge of a call, a million.
@pytest.mark.parametrize("position", [0, 3, 4, 127, 128, 129, 132, 135, 136, 1_048_571])
def test_positions_and_the_rings_end(rng, position):
    site = Site(rng, S=5, position=position)
    check(site, *run(site))


def test_a_ring_of_as_many_rows_as_tokens(rng):
    site = Site(rng, S=8, position=1003, R=8)
    check(site, *run(site))


def test_a_token_alone_gives_the_same_bits(rng):
    """In any order of threads, whatever stands beside it."""
    site = Site(rng, S=8, rank=100, position=133)
    qr, window = run(site)
    again, window_again = run(site, reverse=True)
    assert torch.equal(qr, again) and all(torch.equal(a, b) for a, b in zip(window, window_again, strict=True))
    for s in range(8):
        one = Site(rng, rank=100)
        one.qa, one.kv, one.cos, one.sin, one.positions = (t[s : s + 1] for t in (site.qa, site.kv, site.cos, site.sin, site.positions))
        one.q_norm, one.kv_norm = site.q_norm, site.kv_norm
        qr_alone, alone = run(one)
        slot = (133 + s) % 136
        assert torch.equal(qr_alone[0], qr[s]) and all(torch.equal(a[slot], b[slot]) for a, b in zip(alone, window, strict=True))


def test_extremes(rng):
    """Zeros, one value alone, values that underflow when squared, large ones, one sign, a spread that uses every exponent of FP8."""
    site = Site(rng, S=7)
    for x in (site.qa, site.kv):
        x[0], x[2], x[3], x[4] = 0, x[2] * 1e-21, x[3] * 1e15, -x[4].abs()
        x[1, 1:] = 0
        x[5] *= torch.exp2(-torch.arange(x.shape[1]) % 24)
    qr, window = run(site)
    check(site, qr, window)
    assert (qr[0] == 0).all() and (window.values[0] & 0x7F == 0).all() and window.scales[0].tolist() == [105] * 7 + [0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e25])
def test_not_finite_and_overflowing_squares_are_as_defined(rng, bad):
    """A NaN or an infinity spoils its token's vector, a sum of squares beyond fp32 gives zeros; neither touches the other token."""
    site = Site(rng, S=2)
    site.qa[0, 5], site.kv[0, 7] = bad, bad
    qr, window = run(site)
    key = Keys.pack(kv_norm_rope(site.kv.bfloat16(), site.kv_norm, site.cos, site.sin, EPS, False))
    assert torch.equal(qr.isnan(), rms_norm(site.qa, site.q_norm, EPS).isnan()) and qr[1].isfinite().all()
    assert torch.equal(window.values[0, :448], key.values[0, :448]) and torch.equal(window.scales[0], key.scales[0])
    assert torch.equal(window.unpack()[0].isnan(), key.unpack()[0].isnan()) and window.unpack()[1].isfinite().all()
    if bad == 1e25:
        assert (qr[0] == 0).all() and (window.unpack()[0] == 0).all()
    else:
        assert window.scales[0, 0] == 255


def test_eps_counts(rng):
    site = Site(rng, S=2)
    site.qa, site.kv = site.qa * 1e-3, site.kv * 1e-3
    check(site, *run(site, eps=0.5), eps=0.5)


def test_strided_inputs(rng):
    site = Site(rng, S=3)
    want = run(site)
    for name in ("qa", "kv", "cos", "sin"):
        setattr(site, name, getattr(site, name).T.contiguous().T)
    got = run(site)
    assert torch.equal(got[0], want[0]) and all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


@pytest.mark.parametrize("name,change", [
    ("qa", lambda t: t[:, :6]), ("qa", lambda t: t.bfloat16()), ("kv", lambda t: t[:, :256]), ("kv_norm", lambda t: t[:5]),
    ("cos", lambda t: t[:, :16]), ("positions", lambda t: t.int()), ("positions", lambda t: t[:1]), ("q_norm", lambda t: t.bfloat16()),
])
def test_what_the_kernel_does_not_take(rng, name, change):
    site = Site(rng, S=2)
    setattr(site, name, change(getattr(site, name)))
    with pytest.raises(UserError, match=r"update_caches: expected qa \[S, q_rank\], kv \[S, 512\].*, found qa \[2, "):
        run(site)


def test_what_the_window_may_not_be(rng):
    for window in (Keys.empty(1), Keys(torch.zeros(9, 512, dtype=torch.uint8), torch.zeros(9, 8, dtype=torch.uint8))):
        site = Site(rng, S=2)
        site.window = window
        with pytest.raises(UserError, match=r"update_caches: expected a window of values \[R, 576\] and scales \[R, 8\] in uint8, R at"):
            run(site)
    with pytest.raises(UserError, match="update_caches: expected quantize=True.*found False: run with --backend torch"):
        run(Site(rng), quantize=False)
    for S, rank in ((0, 64), (1025, 64), (1, 2052), (1, 6)):
        with pytest.raises(UserError, match="S from 1 to 1024, q_rank a multiple of 4 up to 2048, found"):
            run(Site(rng, S=S, rank=rank))
