"""Estimate where merging pays, for `min_tokens` = 0 (Auto).

A GPU runs behind a host that launches its operations one by one. Merging shortens the GPU's time and lengthens the
host's a little, so merging gains only where computing a block takes longer than launching it. `too_little` estimates
both times from shapes and the card's data sheet. Nothing is timed, because the same seed has to give the same picture.

`python -m benchmarks.suite --only break-even` prints the measured gain of merging on a card beside this estimate.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .config import Granularity
from .reasons import Message, Reason

# Smaller token grids are not merged on any device; on a CPU merging gains a little from 64 tokens on
# (docs/performance.md).
FEWEST = 256
LAUNCH = 6e-6  # seconds for launching one operation: PyTorch's few microseconds, and ComfyUI's Python code
# Share of its peak that a card reaches in a block: 0.5 to 0.7 in large products, next to nothing in norms, activations
# and residuals.
EFFICIENCY = 0.4
# Hz, for cards whose clock PyTorch does not report: cards since 2017 boost to 1.4 (A100) up to 2.5 GHz (RTX 4090).
CLOCK = 2.0e9
# FLOPs per clock cycle and multiprocessor, by the lowest compute capability that reaches them, for dense half-precision
# products with fp32 sums. From NVIDIA's data sheets, peak / (multiprocessors x boost clock): V100 125 TFLOP/s and T4
# 65, A100 312, A40 150 and RTX 6000 Ada 364, H100 989, B200 2250, RTX PRO 6000 Blackwell 504.
_HALF = {(12, 0): 1024, (10, 0): 8192, (9, 0): 4096, (8, 6): 1024, (8, 0): 2048, (7, 0): 1024}
# GeForce cards add in fp32 at half these rates: RTX 2080 Ti 54, RTX 3090 71, RTX 4090 165, RTX 5090 210 TFLOP/s.
_GEFORCE = 0.5
# FLOPs per clock cycle and multiprocessor for fp32 (PyTorch uses no TF32 by default), and for any dtype on cards
# without tensor cores: 128 multiply-adds.
_SINGLE = 256


@dataclass(frozen=True)
class Block:
    """Cost of a transformer block, as its family has counted it (tests/benchmarks/fullsize/test_cost.py)."""

    # Multiply-adds of the block's linear layers per token, divided by the width squared. Self-attention has 4; a
    # feed-forward layer has twice its expansion, three times if gated.
    weights: float
    launches: int  # operations per block, the mean over all blocks of an evaluation
    # Operations per block that merging adds: around a stack (divided by the blocks of the family's shortest stack,
    # rounded up), around each block, around each module. With Triton, merging and restoring are one launch each; with
    # the residual cache, restoring takes some 15 launches by PyTorch. For a block without modules to merge, the third
    # number counts merging around the block without the residual cache.
    added: tuple[int, int, int]
    beside: int = 0  # text tokens that the block computes too: the smallest number that ComfyUI pads to

    def launching(self, granularity: Granularity) -> float:
        """Return the seconds that the host takes to launch the merged block."""
        return (self.launches + self.added[_ORDER.index(granularity)]) * LAUNCH

    def flops(self, tokens: int, images: int, width: int, keys: int | None = None) -> float:
        """Return the FLOPs of linear layers and self-attention; a multiply-add counts as two. keys: number of tokens
        attended to."""
        attended = (tokens if keys is None else keys) + self.beside
        return 2.0 * images * (tokens + self.beside) * width * (self.weights * width + 2.0 * attended)


_ORDER = (Granularity.STACK, Granularity.BLOCK, Granularity.MODULE)


@dataclass(frozen=True)
class Card:
    """An NVIDIA GPU as its driver reports it."""

    name: str
    capability: tuple[int, int]
    processors: int  # streaming multiprocessors
    clock: float = CLOCK  # Hz

    def rate(self, dtype: torch.dtype) -> float:
        """Return the estimated FLOP/s in a block."""
        peak: float = _SINGLE
        half = next((flops for since, flops in _HALF.items() if self.capability >= since), None)
        if half is not None and dtype in (torch.float16, torch.bfloat16):
            peak = half * (_GEFORCE if "GeForce" in self.name else 1.0)
        return EFFICIENCY * peak * self.processors * self.clock


@functools.cache
def card_of(device: torch.device) -> Card | None:
    """Return the card behind a device, None if it is no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    facts = torch.cuda.get_device_properties(device)
    clock = 1e3 * (getattr(facts, "clock_rate", 0) or CLOCK / 1e3)  # in kHz
    return Card(facts.name, (facts.major, facts.minor), facts.multi_processor_count, clock)


def computing(tokens: int, images: int, width: int, dtype: torch.dtype, card: Card, block: Block) -> float:
    """Return the estimated seconds that the card takes for a block. The arguments are those of `too_little`."""
    return block.flops(tokens, images, width) / card.rate(dtype)


def too_little(
    tokens: int, images: int, width: int, dtype: torch.dtype, card: Card | None, block: Block, granularity: Granularity
) -> Message | None:
    """Return why Auto does not merge a token grid, None if Auto merges it.

    images: images per condition. The number of conditions in the batch does not count, because it depends on free
    memory, which must not change a picture. card: if None, the grid only needs `FEWEST` tokens. granularity: the part
    of the model around which tokens are merged; a stack of one block counts as a block.
    """
    if tokens < FEWEST:
        return Reason.TOO_FEW_TOKENS(least=FEWEST)
    if card is None or computing(tokens, images, width, dtype, card, block) >= block.launching(granularity):
        return None
    return Reason.TOO_LITTLE_WORK()
