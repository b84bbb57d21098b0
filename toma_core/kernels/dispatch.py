"""Choose the kernels of a run: Triton's where nothing prevents them and a trial at first use succeeds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..budget import AdaptiveBudget, allocate, budget_of, max_slots, spread
from ..cache import unmerge_residual_cached
from ..merge import MergePlan, merge, unmerge_residual
from ..quant4 import Int4Tensor, group_of, quantize
from ..reasons import Message, MessageId
from ..windows import Budget, Windows
from . import Kernels
from .layout import padded, variant

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# The lowest compute capability that Triton supports.
_CAPABILITY = (8, 0)


class NoTriton(MessageId):
    """Why plain PyTorch computes instead of Triton's kernels."""

    NO_CUDA = "no_cuda"
    NOT_NVIDIA = "not_nvidia"
    DTYPE = "token_dtype"  # dtype
    NOT_INSTALLED = "triton_not_installed"
    NOT_LOADED = "triton_not_loaded"  # error
    INTERPRETED = "triton_interpreted"
    OLD_GPU = "old_gpu"  # least: compute capability
    LARGE_WINDOWS = "large_windows"  # tokens, most
    WRONG_RESULTS = "triton_wrong_results"
    FAILED = "triton_failed"  # error


class KernelName(MessageId):
    """What computes plans and merges."""

    KERNEL = "kernel"  # name
    KERNEL_BECAUSE = "kernel_because"  # name, reason


@dataclass(frozen=True)
class Choice:
    """The kernels to use."""

    # None for plain PyTorch.
    kernels: Kernels | None
    # Why not faster ones.
    reason: Message | None = None

    @property
    def message(self) -> Message:
        """The choice for the report."""
        name = "torch" if self.kernels is None else self.kernels.name
        if self.reason is None:
            return KernelName.KERNEL(name=name)
        return KernelName.KERNEL_BECAUSE(name=name, reason=self.reason)


@dataclass(frozen=True)
class Uses:
    """Which kernels a run needs beside selecting, merging and unmerging."""

    weigh: bool = False
    unmerge_residual_cached: bool = False


_PLAIN = Uses()
_TORCH = Choice(None)


@dataclass(eq=False)
class Dispatch:
    """Chooses kernels once per run and per device, dtype and kind of layout."""

    # The choice, if a caller has made it.
    given: Choice | None = None
    _choices: dict[Hashable, Choice] = field(default_factory=dict)

    def choose(
        self, x: Tensor, windows: Windows, budget: Budget, features: Tensor | None = None, uses: Uses = _PLAIN
    ) -> Choice:
        """Return the choice for tokens x of (B, N, C). features: (B, N, C'), what destinations are selected by; x if
        None."""
        features = (x if features is None else features).detach()
        key = (x.device, x.dtype, uses, *(variant(t.shape[2], windows, budget) for t in (x, features)))
        return self._choice(
            key,
            x,
            windows.slots,
            lambda kernels: all(
                _close(*pair) for pair in _results(kernels, x.detach(), features, windows, budget, uses)
            ),
        )

    def allocate(self, x: Tensor, windows: Windows, budget: Budget) -> AdaptiveBudget:
        """Return an equal budget, reallocated by the spread of tokens x of (B, N, C), see `budget.allocate`."""
        sizes = padded(windows.slots), padded(max_slots(budget, windows)), min(64, padded(x.shape[2]))
        key = "allocate", x.device, x.dtype, windows.valid is not None, *sizes
        kernels = self._choice(key, x, windows.slots, lambda k: _allocates(k, x.detach(), windows, budget)).kernels
        return _allocated(x, windows, budget) if kernels is None else kernels.allocate(x, windows, budget)

    def quantize(self, x: Tensor) -> Int4Tensor | Tensor:
        """Return (B, N, C) in four bits a number, see `quant4.quantize`."""
        kernels = self._choice(_quant_key(x), x, 0, lambda k: _quantizes(k, x[:1, :64].detach())).kernels
        return quantize(x) if kernels is None else kernels.quantize(x)

    def dequantize(self, quantized: Int4Tensor) -> Tensor:
        """Return the inverse of `quantize`, up to half a step."""
        kernels = (self.given or self._choices.get(_quant_key(quantized), _TORCH)).kernels
        return quantized.dequantize() if kernels is None else kernels.dequantize(quantized)

    def _choice(self, key: Hashable, x: Tensor, slots: int, correct: Callable[[Kernels], bool]) -> Choice:
        """Return the choice under a key. slots: of a window. correct: whether kernels compute what PyTorch does."""
        if self.given is not None:
            return self.given
        if key not in self._choices:
            reason = _obstacle(x, slots)
            if not reason:
                from .triton import TritonKernels

                kernels = TritonKernels()
                reason = _tried(key, lambda: correct(kernels))
            self._choices[key] = Choice(None, reason) if reason else Choice(kernels)
        return self._choices[key]


def _quant_key(x: Tensor | Int4Tensor) -> Hashable:
    return "quantize", x.device, x.dtype, group_of(x.shape[-1])


def _quantizes(kernels: Kernels, x: Tensor) -> bool:
    """Return whether kernels quantise and dequantise with the same error as PyTorch."""
    ours, theirs = kernels.quantize(x), quantize(x)
    if not (isinstance(ours, Int4Tensor) and isinstance(theirs, Int4Tensor)):
        return True  # copies, on both sides
    steps = theirs.step.float().repeat_interleave(x.shape[-1] // theirs.step.shape[-1], -1)
    allowed = 0.6 * steps + 2 * torch.finfo(x.dtype).eps * float(x.float().nan_to_num().abs().amax())
    results = kernels.dequantize(ours), kernels.dequantize(theirs), theirs.dequantize()
    return all(
        bool(((each.float() - x.float()).abs() <= allowed).logical_or(allowed.isnan()).all()) for each in results
    )


def _allocated(x: Tensor, windows: Windows, budget: Budget) -> AdaptiveBudget:
    return allocate(budget, spread(windows.split(x), windows), windows)


def _allocates(kernels: Kernels, x: Tensor, windows: Windows, budget: Budget) -> bool:
    """Return whether kernels allocate as PyTorch does, up to one destination a window that rounding decides."""
    ours, theirs = kernels.allocate(x, windows, budget), _allocated(x, windows, budget)
    counts = ours.valid.sum(-1)
    again, apart = budget_of(budget, counts, windows), (counts - theirs.valid.sum(-1)).abs()
    same = all(torch.equal(getattr(ours, name), getattr(again, name)) for name in ("compact", "expand", "valid"))
    return same and int(apart.max()) <= 1 and bool((counts.sum(-1) == budget.total).all())


def _obstacle(x: Tensor, slots: int) -> Message | None:
    """Return why Triton's kernels cannot compute this, None if they can. slots: of a window."""
    if x.device.type != "cuda":
        return NoTriton.NO_CUDA()
    if torch.version.hip:
        return NoTriton.NOT_NVIDIA()
    if x.dtype not in _DTYPES:
        return NoTriton.DTYPE(dtype=str(x.dtype).removeprefix("torch."))
    try:
        from .triton import INTERPRETED, MAX_SLOTS
    except ImportError:
        return NoTriton.NOT_INSTALLED()
    except Exception as error:
        # A Triton that is too old or built for another PyTorch fails in any way while it loads.
        return NoTriton.NOT_LOADED(error=_first_line(error))
    if INTERPRETED:
        return NoTriton.INTERPRETED()
    if torch.cuda.get_device_capability(x.device) < _CAPABILITY:
        return NoTriton.OLD_GPU(least="{}.{}".format(*_CAPABILITY))
    return NoTriton.LARGE_WINDOWS(tokens=slots, most=MAX_SLOTS) if slots > MAX_SLOTS else None


# Why the first use of kernels in this process failed, None if it succeeded.
_trials: dict[Hashable, Message | None] = {}


def _tried(key: Hashable, correct: Callable[[], bool]) -> Message | None:
    """Return why a first use fails, None if it succeeds. correct: compute, and compare with PyTorch.

    Triton compiles at first use and needs a C compiler and a driver. Only this trial is guarded and waits for the
    device: errors in the run itself are not hidden.
    """
    if key not in _trials:
        if not _trials:
            logging.info("ToMA: making its GPU kernels for this model, once; this takes some seconds")
        try:
            _trials[key] = None if correct() else NoTriton.WRONG_RESULTS()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _trials[key] = NoTriton.FAILED(error=_first_line(error))
        if _trials[key]:
            logging.warning("ToMA: plain PyTorch instead of Triton kernels. %s", _trials[key])
    return _trials[key]


def _results(
    kernels: Kernels, x: Tensor, features: Tensor, windows: Windows, budget: Budget, uses: Uses
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results of every kernel that the run will need, and those of PyTorch."""
    images, count = x.shape[0], len(windows.counts)
    used = budget.valid if budget.valid is not None else x.new_ones(count, budget.slots, dtype=torch.bool)
    # The first slots of each window stand for given destinations.
    slots = (torch.arange(budget.slots, device=x.device) * used).expand(images, -1, -1)
    plans = [MergePlan(windows, budget, *kernels.select_weigh(features, windows, budget, 1.0))]
    if uses.weigh:
        plans.append(MergePlan(windows, budget, slots, *kernels.weigh(x, slots, windows, budget, 1.0)))
    for plan in plans:
        yield plan.merge_weights.sum(-1), used.to(x.dtype).expand_as(plan.dest_slots)
    plan, plain = replace(plans[0], kernels=kernels), plans[0]
    theirs = merge(x, plain)
    # The first launch goes through Triton, later ones through a prepared `Launch`.
    for _ in range(2):
        ours = merge(x, plan)
        yield ours, theirs
        yield unmerge_residual(2 * ours, ours, x, plan), unmerge_residual(2 * theirs, theirs, x, plain)
        if uses.unmerge_residual_cached:
            yield (
                unmerge_residual_cached(2 * ours, ours, x, x, plan),
                unmerge_residual_cached(2 * theirs, theirs, x, x, plain),
            )


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two results of the same products differ by rounding only; NaN of the tokens is equal."""
    largest = float(theirs.float().nan_to_num().abs().amax())
    tolerance = 8 * torch.finfo(ours.dtype).eps * max(largest, torch.finfo(ours.dtype).tiny)
    return torch.allclose(ours.float(), theirs.float(), rtol=0.0, atol=tolerance + 1e-5 * largest, equal_nan=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
