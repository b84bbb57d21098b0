"""Which kernels a run uses: Triton's, where nothing stands against them and a trial at first use goes well."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..budget import AdaptiveBudget, dealt, most_slots, moved, spread
from ..cache import unmerge_residual_cached
from ..merge import MergePlan, merge, unmerge_residual
from ..quant4 import Int4Tensor, group_of, pack
from ..reasons import Message, MessageId
from ..windows import Budget, Windows
from . import Kernels
from .sizes import padded, variant

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What Triton's makers support on NVIDIA cards.
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
    """The kernels to use, None for plain PyTorch, and why not the faster ones."""

    kernels: Kernels | None
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
    """What a run does with kernels beside selecting and merging: weights of given picks, detail reuse."""

    weigh: bool = False
    unmerge_residual_cached: bool = False


_PLAIN = Uses()


@dataclass(eq=False)
class Dispatch:
    """Chooses once per run and per device, dtype and kind of layout: Triton where it works, else PyTorch.

    given: the choice, where somebody has made it already.
    """

    given: Choice | None = None
    _choices: dict[Hashable, Choice] = field(default_factory=dict)

    def pick(
        self, x: Tensor, windows: Windows, budget: Budget, features: Tensor | None = None, uses: Uses = _PLAIN
    ) -> Choice:
        """The choice for tokens x of (B, N, C) in these windows. features: (B, N, C'), what destinations are chosen by
        if not by the tokens."""
        if self.given is not None:
            return self.given
        features = x if features is None else features
        key = _key(x, features, windows, budget, uses)
        if key not in self._choices:
            self._choices[key] = _chosen(x, features, windows, budget, uses)
        return self._choices[key]

    def moved(self, x: Tensor, windows: Windows, budget: Budget) -> AdaptiveBudget:
        """An equal budget shared out by how much there is in each window of tokens x of (B, N, C), see `budget`."""
        if self.given is not None:
            kernels = self.given.kernels
        else:
            key = _moving_key(x, windows, budget)
            if key not in self._choices:
                self._choices[key] = _chosen_for(
                    key, x, windows.slots, lambda kernels: _moves(kernels, x.detach(), windows, budget)
                )
            kernels = self._choices[key].kernels
        return _plainly_moved(x, windows, budget) if kernels is None else kernels.moved(x, windows, budget)

    def pack(self, x: Tensor) -> Int4Tensor | Tensor:
        """(B, N, C) in four bits a number."""
        kernels = self._packer(x)
        return pack(x) if kernels is None else kernels.pack(x)

    def unpack(self, packed: Int4Tensor) -> Tensor:
        """The reverse of `pack`, up to half a step."""
        kernels = self._packer(packed)
        return packed.unpack() if kernels is None else kernels.unpack(packed)

    def _packer(self, x: Tensor | Int4Tensor) -> Kernels | None:
        if self.given is not None:
            return self.given.kernels
        key = "packed", x.device, x.dtype, group_of(x.shape[-1])
        if key not in self._choices:
            self._choices[key] = (
                Choice(None)
                if isinstance(x, Int4Tensor)
                else _chosen_for(key, x, 0, lambda kernels: _packs(kernels, x[:1, :64].detach()))
            )
        return self._choices[key].kernels


def _chosen_for(key: Hashable, x: Tensor, slots: int, good: Callable[[Kernels], bool]) -> Choice:
    """The choice for something beside plans and merging. slots: of a window; good: whether kernels compute it right."""
    reason = _obstacle(x, slots)
    if reason:
        return Choice(None, reason)
    from .triton import TritonKernels

    kernels = TritonKernels()
    reason = _tried(key, lambda: good(kernels))
    return Choice(None, reason) if reason else Choice(kernels)


def _packs(kernels: Kernels, x: Tensor) -> bool:
    """Whether what kernels pack and unpack is as near as what PyTorch does."""
    ours, theirs = kernels.pack(x), pack(x)
    if not (isinstance(ours, Int4Tensor) and isinstance(theirs, Int4Tensor)):
        return True  # copies, on both sides
    steps = theirs.step.float().repeat_interleave(x.shape[-1] // theirs.step.shape[-1], -1)
    allowed = 0.6 * steps + 2 * torch.finfo(x.dtype).eps * float(x.float().nan_to_num().abs().amax())
    pairs = kernels.unpack(ours), kernels.unpack(theirs), theirs.unpack()
    return all(bool(((each.float() - x.float()).abs() <= allowed).logical_or(allowed.isnan()).all()) for each in pairs)


def _plainly_moved(x: Tensor, windows: Windows, budget: Budget) -> AdaptiveBudget:
    return moved(budget, spread(windows.split(x), windows), windows)


def _moves(kernels: Kernels, x: Tensor, windows: Windows, budget: Budget) -> bool:
    """Whether kernels share out as PyTorch does, up to a destination that rounding gives to another window."""
    ours, theirs = kernels.moved(x, windows, budget), _plainly_moved(x, windows, budget)
    counts = ours.valid.sum(-1)
    again, apart = dealt(budget, counts, windows), (counts - theirs.valid.sum(-1)).abs()
    same = all(torch.equal(getattr(ours, name), getattr(again, name)) for name in ("compact", "expand", "valid"))
    return same and int(apart.max()) <= 1 and bool((counts.sum(-1) == budget.total).all())


def _moving_key(x: Tensor, windows: Windows, budget: Budget) -> Hashable:
    kinds = padded(windows.slots), padded(most_slots(budget, windows)), min(64, padded(x.shape[2]))
    return "moved", x.device, x.dtype, windows.valid is not None, *kinds


def _key(x: Tensor, features: Tensor, windows: Windows, budget: Budget, uses: Uses) -> Hashable:
    kinds = (variant(t.shape[2], windows, budget) for t in (x, features))
    return (x.device, x.dtype, uses, *kinds)


def _chosen(x: Tensor, features: Tensor, windows: Windows, budget: Budget, uses: Uses) -> Choice:
    reason = _obstacle(x, windows.slots)
    if reason:
        return Choice(None, reason)
    from .triton import TritonKernels

    kernels = TritonKernels()
    reason = _trial(kernels, x, features, windows, budget, uses)
    return Choice(None, reason) if reason else Choice(kernels)


def _obstacle(x: Tensor, slots: int) -> Message | None:
    """Why Triton's kernels cannot take this, None if they can."""
    if x.device.type != "cuda":
        return NoTriton.NO_CUDA()
    if torch.version.hip:
        return NoTriton.NOT_NVIDIA()
    if x.dtype not in _DTYPES:
        return NoTriton.DTYPE(dtype=str(x.dtype).removeprefix("torch."))
    try:
        from .triton import INTERPRETED, MOST
    except ImportError:
        return NoTriton.NOT_INSTALLED()
    except Exception as error:
        # A Triton too old, or built for another PyTorch, fails in its own ways while it loads.
        return NoTriton.NOT_LOADED(error=_first_line(error))
    if INTERPRETED:
        return NoTriton.INTERPRETED()
    if torch.cuda.get_device_capability(x.device) < _CAPABILITY:
        return NoTriton.OLD_GPU(least="{}.{}".format(*_CAPABILITY))
    return NoTriton.LARGE_WINDOWS(tokens=slots, most=MOST) if slots > MOST else None


# What came of the first use of the kernels in this process: None, or why they failed.
_trials: dict[Hashable, Message | None] = {}


def _trial(
    kernels: Kernels, x: Tensor, features: Tensor, windows: Windows, budget: Budget, uses: Uses
) -> Message | None:
    """Why the kernels fail on x or compute something else than PyTorch, None if they do not."""
    x, features = x.detach(), features.detach()
    results = _results(kernels, x, features, windows, budget, uses)
    return _tried(_key(x, features, windows, budget, uses), lambda: all(_close(*pair) for pair in results))


def _tried(key: Hashable, good: Callable[[], bool]) -> Message | None:
    """Why a first use fails, None if it does not. good: whether what is computed in it is right.

    Triton compiles at first use, with a C compiler and a driver that may be missing, for cards nobody here has seen.
    Only this trial is guarded, and waits for the device: an error in the run itself is not hidden.
    """
    if key not in _trials:
        if not _trials:
            logging.info("ToMA: making its GPU kernels for this model, once; this takes some seconds")
        try:
            _trials[key] = None if good() else NoTriton.WRONG_RESULTS()
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
    """What every kernel that the run will need computes, and what it should."""
    images, count = x.shape[0], len(windows.counts)
    used = budget.valid if budget.valid is not None else x.new_ones(count, budget.slots, dtype=torch.bool)
    # The first slots of each window, where nothing is searched.
    picks = (torch.arange(budget.slots, device=x.device) * used).expand(images, -1, -1)
    plans = [MergePlan(windows, budget, *kernels.select_weigh(features, windows, budget, 1.0))]
    if uses.weigh:
        plans.append(MergePlan(windows, budget, picks, *kernels.weigh(x, picks, windows, budget, 1.0)))
    for plan in plans:
        yield plan.merge_weights.sum(-1), used.to(x.dtype).expand_as(plan.picks)
    plan, plain = replace(plans[0], kernels=kernels), plans[0]
    theirs = merge(x, plain)
    # Once as Triton launches, and once as `TritonKernels` does it from then on.
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
    """Whether two results of the same products differ by rounding only; NaN in the tokens is nobody's fault."""
    largest = float(theirs.float().nan_to_num().abs().amax())
    tolerance = 8 * torch.finfo(ours.dtype).eps * max(largest, torch.finfo(ours.dtype).tiny)
    return torch.allclose(ours.float(), theirs.float(), rtol=0.0, atol=tolerance + 1e-5 * largest, equal_nan=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
