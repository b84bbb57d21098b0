"""Quantise cached tensors to four bits per element, for KV caches that do not fit otherwise.

Groups of neighbouring channels of a token share a minimum and a quantisation step, as in the KV caches of language
models (KIVI, arXiv 2402.02750). docs/settings.md lists sizes and errors.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

BITS = 4
_GROUP, _MIN_GROUP = 64, 16  # the most and the fewest channels of a group
WIDER = 1.01  # quantisation steps are enlarged by this factor, so that values rounded up in half precision have a code


class Int4Tensor(NamedTuple):
    """A (B, N, C) tensor in four bits per element."""

    codes: Tensor  # (B, N, C / 2) uint8; the lower four bits are the first half of a group of channels
    low: Tensor  # (B, N, groups), the minimum of each group, in the original dtype
    step: Tensor  # (B, N, groups), the quantisation step of each group

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.low.dtype  # dtype before quantisation

    @property
    def device(self) -> torch.device:
        return self.low.device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)

    def chunk(self, count: int) -> list[Int4Tensor]:
        """Split the batch as `Tensor.chunk` does."""
        return [Int4Tensor(*parts) for parts in zip(*(part.chunk(count) for part in self), strict=True)]

    def clone(self) -> Int4Tensor:
        return Int4Tensor(*(part.clone() for part in self))

    def copy_(self, other: Int4Tensor) -> None:
        """Overwrite this tensor with another of the same shape."""
        for mine, theirs in zip(self, other, strict=True):
            mine.copy_(theirs)

    def dequantize(self) -> Tensor:
        """Return the tensor, (B, N, C), dequantised into new memory."""
        codes = self.codes.unflatten(-1, (self.low.shape[-1], -1))
        low, step, half = self.low[..., None], self.step[..., None], codes.shape[-1]
        # In fp16, compute half of the result first, because a group's range may exceed the range of fp16.
        narrow = self.dtype is torch.float16
        if narrow:
            low, step = low / 2, step / 2
        out = low.new_empty(*codes.shape[:-1], 2 * half)
        for part, nibbles in ((out[..., :half], codes & 15), (out[..., half:], codes >> BITS)):
            torch.mul(nibbles, step, out=part).add_(low)
        return (out.mul_(2).clamp_(-65504, 65504) if narrow else out).flatten(-2)


def group_of(channels: int) -> int:
    """Return how many neighbouring channels make a group; 0 if `channels` channels cannot be grouped."""
    group = gcd(channels, _GROUP)
    return group if group >= _MIN_GROUP else 0


def quantize(x: Tensor) -> Int4Tensor | Tensor:
    """Quantise (B, N, C) of fp16, bf16 or fp32; return a copy of x if its channels cannot be grouped."""
    group = group_of(x.shape[-1])
    if not group:
        return x.clone()
    x = x.unflatten(-1, (-1, group))
    low, high = x.aminmax(dim=-1, keepdim=True)
    # Halve `high` and `low` first: their difference may exceed the range of half precision, and halving is exact.
    step = ((high / 2 - low / 2) * (2 * WIDER / 15)).clamp_min(torch.finfo(x.dtype).tiny)
    middle = high / 2 + low / 2
    # Values from -7.5 to 7.5 are shifted by 8, so that the truncating cast rounds them.
    codes = (x - middle).div_(step).add_(8.0).clamp_(0.0, 15.5).to(torch.uint8)
    low = (middle - 7.5 * step).clamp_min_(torch.finfo(x.dtype).min)
    half = group // 2
    packed = (codes[..., half:] << BITS).bitwise_or_(codes[..., :half])
    return Int4Tensor(packed.flatten(-2), low.squeeze(-1), step.squeeze(-1))


def int4_bytes(numbers: int, itemsize: int) -> int:
    """Return the bytes of `numbers` elements, of `itemsize` bytes each, after quantisation in the largest groups."""
    return numbers * BITS // 8 + 2 * numbers // _GROUP * itemsize
