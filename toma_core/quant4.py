"""Tensors kept in four bits a number, for what is kept of every block of a video.

Not in the paper. Keys and values of all tokens are most of what a run holds: 27 GB of Wan 14B at 832 x 480 x 81 in
bf16, 7.5 GB so. Neighbouring channels of a token share a least value and a step, as caches of language models have it
(KIVI, arXiv 2402.02750). Pictures and clips are nearly as near with them (docs/settings.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

BITS = 4
# So many channels share a least value and a step at most.
_GROUP = 64
# With fewer there would be little to gain.
_LEAST = 16
# A step is this much wider than the range asks for, so that what rounds up in half precision still has a code.
WIDER = 1.01


@dataclass(frozen=True, eq=False)
class Int4Tensor:
    """(B, N, C) in four bits a number: codes (B, N, C / 2) uint8, of which the lower half of the bits is the first half
    of a group of channels; low, step (B, N, groups) in the dtype that it was."""

    codes: Tensor
    low: Tensor
    step: Tensor

    @property
    def shape(self) -> torch.Size:
        """As unpacked."""
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        """As unpacked."""
        return self.low.dtype

    @property
    def device(self) -> torch.device:
        return self.low.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.low.nbytes + self.step.nbytes

    def chunk(self, count: int) -> list[Int4Tensor]:
        """See `Tensor.chunk`, of the batch."""
        parts = zip(*(t.chunk(count) for t in (self.codes, self.low, self.step)), strict=True)
        return [Int4Tensor(*part) for part in parts]

    def assign(self, other: Int4Tensor) -> None:
        """The numbers of another of this shape in the place of its own."""
        for mine, theirs in ((self.codes, other.codes), (self.low, other.low), (self.step, other.step)):
            mine.copy_(theirs)

    def unpack(self) -> Tensor:
        """(B, N, C), a new tensor."""
        codes = self.codes.unflatten(-1, (self.low.shape[-1], -1))
        low, step, half = self.low[..., None], self.step[..., None], codes.shape[-1]
        # Half precision may hold both ends of a group, and not what lies between them.
        narrow = self.dtype is torch.float16
        if narrow:
            low, step = low / 2, step / 2
        out = low.new_empty(*codes.shape[:-1], 2 * half)
        for part, nibbles in ((out[..., :half], codes & 15), (out[..., half:], codes >> BITS)):
            torch.mul(nibbles, step, out=part).add_(low)
        return (out.mul_(2).clamp_(-65504, 65504) if narrow else out).flatten(-2)


def group_of(channels: int) -> int:
    """How many of so many channels share a least value and a step; 0 where they do not come in groups."""
    group = gcd(channels, _GROUP)
    return group if group >= _LEAST else 0


def pack(x: Tensor) -> Int4Tensor | Tensor:
    """(B, N, C) of fp16, bf16 or fp32 in four bits a number; a copy of x where its channels do not come in groups."""
    group = group_of(x.shape[-1])
    if not group:
        return x.clone()
    x = x.unflatten(-1, (-1, group))
    low, high = x.aminmax(dim=-1, keepdim=True)
    # Each halved for itself: their difference may be more than half precision holds. Halving rounds nothing.
    step = ((high / 2 - low / 2) * (2 * WIDER / 15)).clamp_min(torch.finfo(x.dtype).tiny)
    middle = high / 2 + low / 2
    # From -7.5 to 7.5, and what lies beyond for rounding has the last code; what casting cuts off rounding would.
    codes = (x - middle).div_(step).add_(8.0).clamp_(0.0, 15.5).to(torch.uint8)
    low = (middle - 7.5 * step).clamp_min_(torch.finfo(x.dtype).min)
    half = group // 2
    packed = (codes[..., half:] << BITS).bitwise_or_(codes[..., :half])
    return Int4Tensor(packed.flatten(-2), low.squeeze(-1), step.squeeze(-1))


def int4_bytes(numbers: int, itemsize: int) -> int:
    """What so many numbers of so many bytes take when packed, at most in groups as large as can be."""
    return numbers * BITS // 8 + 2 * numbers // _GROUP * itemsize
