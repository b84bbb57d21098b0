"""Estimate on which token grids merging saves time; used if `min_tokens` is 0 (Auto).

The host launches the GPU's operations one by one, ahead of the GPU. Merging shortens the GPU's time for a block, and
lengthens the host's time a little. So merging saves time only if the GPU takes longer to compute the block than the
host takes to launch it. `too_little` estimates both times from shapes and the card's data sheet. It measures no time,
because measured times vary, and a seed must always give the same picture. `python -m benchmarks.suite --only
break-even` compares the estimates with times measured on a card.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .config import Granularity
from .reasons import Message, Reason

FEWEST = 256  # grids of fewer tokens are not merged on any device
LAUNCH = 6e-6  # seconds that the host takes to launch one operation, in PyTorch and in ComfyUI's Python code
EFFICIENCY = 0.4  # share of the peak FLOP/s that a block reaches: 0.5 to 0.7 in large products, nearly 0 in norms
CLOCK = 2.0e9  # Hz, if PyTorch reports no clock: cards since 2017 boost to between 1.4 (A100) and 2.5 GHz (RTX 4090)
# Lowest compute capability -> FLOPs per clock cycle and multiprocessor, in dense half-precision products with fp32
# sums. Each number is peak / (multiprocessors x boost clock), from NVIDIA's data sheets. The peaks in TFLOP/s: V100
# 125, T4 65, A100 312, A40 150, RTX 6000 Ada 364, H100 989, B200 2250, RTX PRO 6000 Blackwell 504.
_HALF = {(12, 0): 1024, (10, 0): 8192, (9, 0): 4096, (8, 6): 1024, (8, 0): 2048, (7, 0): 1024}
# GeForce cards reach half the rates of `_HALF`: RTX 2080 Ti 54 TFLOP/s, RTX 3090 71, RTX 4090 165, RTX 5090 210.
_GEFORCE = 0.5
# FLOPs per cycle and multiprocessor in fp32 (PyTorch uses no TF32 by default), and in any dtype without tensor cores.
_SINGLE = 256


@dataclass(frozen=True)
class Block:
    """Cost of a transformer block, counted for each model family (tests/benchmarks/fullsize/test_cost.py)."""

    # Multiply-adds of the block's linear layers per token, divided by the width squared. Self-attention has 4; a
    # feed-forward layer has twice its expansion factor, or three times if it is gated.
    weights: float
    launches: int  # operations per block, the mean over all blocks of an evaluation
    # Operations that merging adds to a block, with granularity stack, block and module. The operations that a stack
    # adds are divided by the number of blocks in the family's shortest stack, and rounded up. Transformers have one
    # number for block and module.
    added: tuple[int, int, int]
    beside: int = 0  # text tokens that the block computes too; the shortest length to which ComfyUI pads prompts

    def launching(self, granularity: Granularity) -> float:
        """Return the seconds that the host takes to launch the merged block."""
        order = (Granularity.STACK, Granularity.BLOCK, Granularity.MODULE)
        return (self.launches + self.added[order.index(granularity)]) * LAUNCH

    def flops(self, tokens: int, images: int, width: int, keys: int | None = None) -> float:
        """Return the FLOPs of linear layers and self-attention, two per multiply-add. keys: number of tokens attended
        to, None for `tokens`."""
        attended = (tokens if keys is None else keys) + self.beside
        return 2.0 * images * (tokens + self.beside) * width * (self.weights * width + 2.0 * attended)


@dataclass(frozen=True)
class Card:
    """An NVIDIA GPU as its driver reports it."""

    name: str
    capability: tuple[int, int]
    processors: int  # streaming multiprocessors
    clock: float = CLOCK  # Hz

    def rate(self, dtype: torch.dtype) -> float:
        """Return the estimated FLOP/s that the card reaches in a block."""
        peak: float = _SINGLE
        half = next((flops for since, flops in _HALF.items() if self.capability >= since), None)
        if half is not None and dtype in (torch.float16, torch.bfloat16):
            peak = half * (_GEFORCE if "GeForce" in self.name else 1.0)
        return EFFICIENCY * peak * self.processors * self.clock


@functools.cache
def card_of(device: torch.device) -> Card | None:
    """Return the card behind a device, None if the device is no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    facts = torch.cuda.get_device_properties(device)
    clock = 1e3 * (getattr(facts, "clock_rate", 0) or CLOCK / 1e3)  # PyTorch reports kHz
    return Card(facts.name, (facts.major, facts.minor), facts.multi_processor_count, clock)


def too_little(
    tokens: int, images: int, width: int, dtype: torch.dtype, card: Card | None, block: Block, granularity: Granularity
) -> Message | None:
    """Return why Auto does not merge a token grid, None if Auto merges it.

    images: images per condition. How many conditions the batch holds is ignored: this depends on free memory, which
    must not change a picture. card: None if the device is no NVIDIA GPU. granularity: `BLOCK` for a stack of one block.
    """
    if tokens < FEWEST:
        return Reason.TOO_FEW_TOKENS(least=FEWEST)
    if card is None or block.flops(tokens, images, width) / card.rate(dtype) >= block.launching(granularity):
        return None
    return Reason.TOO_LITTLE_WORK()
