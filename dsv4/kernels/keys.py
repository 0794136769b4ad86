"""Packed keys: the bytes in which the kernels keep cached keys, and their meaning in torch.

    Keys       values uint8 [n, 576]: 448 e4m3, then 64 bf16 (rotary dims)    scales uint8 [n, 8]: one ue8m0 per 64 e4m3, then a pad byte, 0
    IndexKeys  values uint8 [n, 64]: 128 e2m1, element 2j in the low nibble   scales uint8 [n, 4]: one ue8m0 per 32

A scale byte b is 2^(b - 127). Scales and values are those of dsv4/ops/quant.py: unpacking what was packed gives, bit for bit, what
`fp8_round_trip(.., 64)` and `fp4_round_trip` give in bf16, and values that have been through them stay as they are (but a zero of an
IndexKeys may lose its sign). A block that holds a value that is not finite gets the scale byte 255, which is NaN: all of it is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import UserError
from ..formats import E4M3_MAX, e2m1_to_float, e8m0_to_float, power_of_two_ceil, round_e2m1
from . import MAX_TOKENS
from .launch import expect

HEAD_DIM, ROPE_DIM, INDEX_DIM = 512, 64, 128
PLAIN_DIM = HEAD_DIM - ROPE_DIM  # the dims that are e4m3
KEY_BLOCK, INDEX_BLOCK = 64, 32  # values per scale
KEY_BYTES, KEY_SCALES = PLAIN_DIM + 2 * ROPE_DIM, 8
INDEX_BYTES, INDEX_SCALES = INDEX_DIM // 2, INDEX_DIM // INDEX_BLOCK
_NAN_SCALE, _NAN_E4M3 = 255, 0x7F


def _scaled(x: torch.Tensor, block: int, smallest: float, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, K] fp32 -> (x / scale [n, K], NaN in blocks that are not finite; scale bytes [n, K / block])."""
    v = x.unflatten(-1, (-1, block))
    amax = v.abs().amax(-1, keepdim=True)
    finite = amax < float("inf")
    scale = power_of_two_ceil(torch.where(finite, amax, 1.0).clamp_min(smallest) * torch.tensor(1 / largest, dtype=torch.float32).item())
    byte = torch.where(finite, scale.view(torch.int32) >> 23, _NAN_SCALE).to(torch.uint8)
    return torch.where(finite, v / scale, float("nan")).flatten(-2), byte.squeeze(-1)


class Keys(NamedTuple):
    """Keys of attention (which are also its values): the window's ring or a layer's entries."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device | str = "cpu") -> Keys:
        """n rows of zero bytes, which unpack to zeros."""
        return cls(*(torch.zeros(n, width, dtype=torch.uint8, device=device) for width in (KEY_BYTES, KEY_SCALES)))

    @classmethod
    def pack(cls, keys: torch.Tensor) -> Keys:
        """keys [n, 512], any float dtype, rounded to bf16 first, after norm and RoPE. Raises UserError for another width."""
        expect(keys.dim() == 2 and keys.shape[1] == HEAD_DIM, "Keys.pack", f"keys [n, {HEAD_DIM}]", keys=keys)
        keys = keys.to(torch.bfloat16)
        scaled, byte = _scaled(keys[:, :PLAIN_DIM].float(), KEY_BLOCK, 1e-4, E4M3_MAX)
        plain = torch.where(scaled.isnan(), _NAN_E4M3, scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8))
        rotary = keys[:, PLAIN_DIM:].contiguous().view(torch.uint8)
        return cls(torch.cat((plain.to(torch.uint8), rotary), 1), torch.nn.functional.pad(byte, (0, KEY_SCALES - byte.shape[1])))

    def unpack(self) -> torch.Tensor:
        """bf16 [n, 512]."""
        plain = self.values[:, :PLAIN_DIM].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, KEY_BLOCK))
        plain = (plain * e8m0_to_float(self.scales[:, : PLAIN_DIM // KEY_BLOCK])[..., None]).flatten(-2).to(torch.bfloat16)
        return torch.cat((plain, self.values[:, PLAIN_DIM:].contiguous().view(torch.bfloat16)), 1)


class IndexKeys(NamedTuple):
    """Keys of the indexer, one per entry of a CSA layer."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device | str = "cpu") -> IndexKeys:
        """n rows of zero bytes, which unpack to zeros."""
        return cls(*(torch.zeros(n, width, dtype=torch.uint8, device=device) for width in (INDEX_BYTES, INDEX_SCALES)))

    @classmethod
    def pack(cls, keys: torch.Tensor) -> IndexKeys:
        """keys [n, 128], any float dtype, rounded to bf16 first, after the Hadamard rotation. Raises UserError for another width."""
        expect(keys.dim() == 2 and keys.shape[1] == INDEX_DIM, "IndexKeys.pack", f"keys [n, {INDEX_DIM}]", keys=keys)
        scaled, byte = _scaled(keys.to(torch.bfloat16).float(), INDEX_BLOCK, 6 * 2.0**-126, 6.0)
        code = round_e2m1(scaled.nan_to_num(0.0))
        return cls(code[:, 0::2] | code[:, 1::2] << 4, byte)

    def unpack(self) -> torch.Tensor:
        """bf16 [n, 128]."""
        code = torch.stack((self.values & 15, self.values >> 4), -1).flatten(-2)
        blocks = e2m1_to_float(code).unflatten(-1, (-1, INDEX_BLOCK)) * e8m0_to_float(self.scales)[..., None]
        return blocks.flatten(-2).to(torch.bfloat16)


def new_keys(rows: int, width: int, dtype: torch.dtype, device: torch.device | str) -> Keys:
    """As ops.new_keys; packed whatever the run's dtype is. Raises UserError for another width than 512."""
    if width != HEAD_DIM:
        raise UserError(f"keys: expected head_dim {HEAD_DIM}, which the kernels are written for, found {width}: run with --backend torch")
    return Keys.empty(rows, device)


class Window(NamedTuple):
    """The window's ring of Keys for steps of up to 8 tokens, and the same keys in a longer one for those of a prompt. Every step writes
    both: so a step of decode has a window's rows to look at, and no chunk's."""

    values: torch.Tensor
    scales: torch.Tensor
    long_values: torch.Tensor
    long_scales: torch.Tensor

    def rings(self, positions: torch.Tensor) -> Keys:
        """Of the step at these positions (int64 [S], consecutive, its keys written): the ring that each 8 tokens of it would have found in
        `values`, one behind the other. Nothing comes from the host."""
        R, last = len(self.values), torch.cat((positions[MAX_TOKENS - 1 : -1 : MAX_TOKENS], positions[-1:]))[:, None]
        held = last - torch.remainder(last - torch.arange(R, device=last.device), R)  # by the row: the latest position of its remainder
        rows = torch.remainder(held, len(self.long_values)).flatten()  # of a position below 0: any row, which no token sees
        wide = (t.view(torch.int64).index_select(0, rows).view(torch.uint8) for t in (self.long_values, self.long_scales))
        return Keys(*wide)


def new_window(window_size: int, chunk: int, width: int, dtype: torch.dtype, device: torch.device | str) -> Keys | Window:
    """As ops.new_window; packed. Raises UserError for another width than 512."""
    ring = new_keys(window_size + min(chunk, MAX_TOKENS), width, dtype, device)
    return ring if chunk <= MAX_TOKENS else Window(*ring, *new_keys(window_size + chunk, width, dtype, device))


def new_index_keys(rows: int, width: int, dtype: torch.dtype, device: torch.device | str) -> IndexKeys:
    """As ops.new_index_keys. Raises UserError for another width than 128."""
    if width != INDEX_DIM:
        raise UserError(f"keys: expected index_head_dim {INDEX_DIM}, which the kernels are written for, found {width}: run with "
                        "--backend torch")
    return IndexKeys.empty(rows, device)
