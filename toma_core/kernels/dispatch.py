"""Choose the kernels of a run: Triton's if they can run and pass a trial at first use, plain PyTorch otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..latent_regression import Rotation, regress
from ..merge import MergePlan, merge, unmerge_residual
from ..quant4 import Int4Tensor, group_of, quantize
from ..reasons import Message, MessageId
from ..windows import Layout
from .layout import variant

if TYPE_CHECKING:
    from .triton import TritonKernels

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_CAPABILITY = (8, 0)  # lowest compute capability that Triton supports
_FEATURES = 33  # features in the trial: those of a 4-channel latent
_PAIRS = 64  # rotated channel pairs of a head in the trial, as in most models


class NoTriton(MessageId):
    """Why plain PyTorch computes instead of Triton's kernels. Comments describe the parameters of messages."""

    NO_CUDA = "no_cuda"
    DTYPE = "token_dtype"  # dtype: of the tokens
    OLD_GPU = "old_gpu"  # least: the lowest compute capability that Triton supports
    LARGE_WINDOWS = "large_windows"  # tokens: tokens per window; most: the most that kernels take
    WRONG_RESULTS = "triton_wrong_results"
    FAILED = "triton_failed"  # error: its text


class KernelName(MessageId):
    """Messages that name the implementation that computes plans and merges."""

    KERNEL = "kernel"  # name: of the implementation
    KERNEL_BECAUSE = "kernel_because"  # name: of the implementation; reason: why no faster one is used


@dataclass(frozen=True)
class Choice:
    """The kernels that a run uses."""

    kernels: TritonKernels | None  # None for plain PyTorch
    reason: Message | None = None  # why no faster kernels are used

    @property
    def message(self) -> Message:
        name = "torch" if self.kernels is None else self.kernels.name
        if self.reason:
            return KernelName.KERNEL_BECAUSE(name=name, reason=self.reason)
        return KernelName.KERNEL(name=name)


@dataclass(eq=False)
class Dispatch:
    """Chooses kernels once per run and per device, dtype and kind of layout."""

    given: Choice | None = None  # the choice, if a caller has made it
    _choices: dict[Hashable, Choice] = field(default_factory=dict)

    def choose(
        self, x: Tensor, features: Tensor, layout: Layout, weighs: bool = False, propagates: bool = False
    ) -> Choice:
        """Return the choice for tokens x, (B, N, C). features: (B, N, C'), from which destinations are selected.
        weighs: whether the run computes weights for given destinations. propagates: whether the run propagates cached
        tensors."""
        x, features = x.detach(), features.detach()
        kinds = (variant(t.shape[2], *layout) for t in (x, features))
        key = (x.device, x.dtype, weighs, propagates, *kinds)
        return self._choice(key, x, layout[0].slots, partial(_merges, x, features, layout, weighs, propagates))

    def quantize(self, x: Tensor) -> Int4Tensor | Tensor:
        """Quantise (B, N, C) to four bits per element, see `quant4.quantize`."""
        kernels = self._choice(_quant_key(x), x, 0, lambda kernels: _quantizes(x[:1, :64].detach(), kernels)).kernels
        return quantize(x) if kernels is None else kernels.quantize(x)

    def dequantize(self, quantized: Int4Tensor) -> Tensor:
        """Reverse `quantize`, with an error of at most half a quantisation step."""
        kernels = (self.given or self._choices.get(_quant_key(quantized), Choice(None))).kernels
        return quantized.dequantize() if kernels is None else kernels.dequantize(quantized)

    def _choice(self, key: Hashable, x: Tensor, slots: int, correct: Callable[[TritonKernels], bool]) -> Choice:
        """Return the choice stored under `key`, or make it. slots: tokens per window. correct: see `_tried`."""
        if self.given is None and key not in self._choices:
            self._choices[key] = _tried(key, x, slots, correct)
        return self.given or self._choices[key]


def _quant_key(x: Tensor | Int4Tensor) -> Hashable:
    return "quantize", x.device, x.dtype, group_of(x.shape[-1])


def _obstacle(x: Tensor, slots: int) -> Message | None:
    """Return why Triton's kernels cannot compute on x, None if they can. slots: tokens per window."""
    if x.device.type != "cuda" or torch.version.hip:
        return NoTriton.NO_CUDA()
    if x.dtype not in _DTYPES:
        return NoTriton.DTYPE(dtype=str(x.dtype).removeprefix("torch."))
    try:
        from .triton import INTERPRETED, MAX_SLOTS
    except Exception as error:  # Triton is missing, too old, or built for another PyTorch
        return NoTriton.FAILED(error=_first_line(error))
    if INTERPRETED:
        return NoTriton.FAILED(error="TRITON_INTERPRET=1")
    if torch.cuda.get_device_capability(x.device) < _CAPABILITY:
        return NoTriton.OLD_GPU(least="{}.{}".format(*_CAPABILITY))
    return NoTriton.LARGE_WINDOWS(tokens=slots, most=MAX_SLOTS) if slots > MAX_SLOTS else None


# For each key: why the first use of its kernels in this process failed, None if it succeeded.
_trials: dict[Hashable, Message | None] = {}


def _tried(key: Hashable, x: Tensor, slots: int, correct: Callable[[TritonKernels], bool]) -> Choice:
    """Return Triton's kernels if they pass a trial at their first use in this process, else plain PyTorch and the
    reason. correct: returns whether kernels give PyTorch's results. At first use Triton compiles, which needs a C
    compiler and a driver. Only this trial catches the errors of kernels and waits for the device."""
    if reason := _obstacle(x, slots):
        return Choice(None, reason)
    from .triton import TritonKernels

    kernels = TritonKernels()
    if key not in _trials:
        if not _trials:
            logging.info("ToMA: making its GPU kernels for this model, once; this takes some seconds")
        try:
            _trials[key] = None if correct(kernels) else NoTriton.WRONG_RESULTS()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _trials[key] = NoTriton.FAILED(error=_first_line(error))
        if _trials[key]:
            logging.warning("ToMA: plain PyTorch instead of Triton kernels. %s", _trials[key])
    return Choice(None if _trials[key] else kernels, _trials[key])


def _merges(
    x: Tensor, features: Tensor, layout: Layout, weighs: bool, propagates: bool, kernels: TritonKernels
) -> bool:
    """Return whether every kernel that the run will need gives PyTorch's results."""
    windows, budget = layout
    used = x.new_ones(len(windows.counts), budget.slots, dtype=torch.bool) if budget.valid is None else budget.valid
    priority = torch.ones(features.shape[:2], device=x.device) if propagates else None
    plan = MergePlan(*layout, *kernels.weigh(features, None, *layout, 1.0, priority))
    weights = [plan.merge_weights]
    if weighs:
        # Use the first slots of each window as given destinations.
        slots = (torch.arange(budget.slots, device=x.device) * used).expand(len(x), -1, -1)
        weights.append(kernels.weigh(features, slots, *layout, 1.0)[1])
    reduced = merge(x, plan)
    calls = [partial(merge, x), partial(unmerge_residual, 2 * reduced, reduced, x)]
    if propagates:
        calls += [partial(_propagated, x, 2 * reduced, R) for R in _rotations(x, plan)]
    fast = replace(plan, kernels=kernels)
    sums = used.to(x.dtype).expand_as(plan.dest_slots)
    # Test two launches: the first call of a `Launch` goes through Triton, later calls go directly to the binary.
    right = all(_close(call(fast), call(plan)) for call in 2 * calls)
    return right and all(_close(M.sum(-1), sums) for M in weights)


def _rotations(cached: Tensor, plan: MergePlan) -> list[Rotation | None]:
    """Return the rotations to try: None and, if the number of channels is even, one rotation. cached: (B, N, C)."""
    _, N, C = cached.shape
    if C % 2:
        return [None]
    P = gcd(C // 2, _PAIRS)
    angles = torch.arange(N * P, device=cached.device).view(1, N, 1, P).float()
    R = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))
    return [None, Rotation.of(R, R[0, plan.destinations], cached)]


def _propagated(cached: Tensor, fresh: Tensor, rotation: Rotation | None, plan: MergePlan) -> Tensor:
    """Propagate (B, N, C) by a regression on features that are the same in every process. fresh: (B, D, C)."""
    N = cached.shape[1]
    features = torch.arange(N * _FEATURES, device=cached.device).sin().view(1, N, _FEATURES)
    return regress(features.expand(len(cached), -1, -1), plan).propagate(cached, fresh, rotation)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two results of the same products differ by rounding only; NaN equals NaN."""
    largest = float(theirs.float().nan_to_num().abs().amax())
    tolerance = 8 * torch.finfo(ours.dtype).eps * max(largest, torch.finfo(ours.dtype).tiny)
    return torch.allclose(ours.float(), theirs.float(), rtol=0.0, atol=tolerance + 1e-5 * largest, equal_nan=True)


def _quantizes(x: Tensor, kernels: TritonKernels) -> bool:
    """Return whether kernels quantise and dequantise x with an error of little more than half a quantisation step."""
    ours = kernels.quantize(x)
    theirs = quantize(x)
    if not (isinstance(ours, Int4Tensor) and isinstance(theirs, Int4Tensor)):
        return True  # the channels cannot be grouped, so the result is a copy of x
    steps = theirs.step.float().repeat_interleave(x.shape[-1] // theirs.step.shape[-1], -1)
    allowed = 0.6 * steps + 2 * torch.finfo(x.dtype).eps * float(x.float().nan_to_num().abs().amax())
    results = torch.stack([kernels.dequantize(ours), kernels.dequantize(theirs), theirs.dequantize()])
    return bool((((results.float() - x.float()).abs() <= allowed) | allowed.isnan()).all())


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line[:200]}"
