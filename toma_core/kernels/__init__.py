"""Fast kernels, and which of them a run uses.

The plain PyTorch of `selection` and `merge` is what the kernels are measured against, and what runs wherever they do
not: on CPUs, on AMD and Apple GPUs, without Triton, on windows of more than 16x16 tokens.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from ..windows import Budget, Windows

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What Triton's makers support on NVIDIA cards.
_CAPABILITY = (8, 0)


class Backend(str, Enum):
    """Who computes selection, weights, merge and unmerge. AUTO: Triton where it works, else PyTorch."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"


class Kernels(Protocol):
    """What a set of fast kernels does, on (B, N, C) tokens whose windows are not laid out yet.

    None of them takes part in autograd. Weights and dtypes are those of `MergePlan`; scores and sums are fp32.
    """

    name: str

    def select_weigh(self, x: Tensor, windows: Windows, budget: Budget, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Picks by greedy facility location, merge weights, and their transposed unmerge weights; at an infinite scale
        those of a hard plan."""
        ...

    def weigh(self, x: Tensor, picks: Tensor, windows: Windows, budget: Budget, scale: float) -> tuple[Tensor, Tensor]:
        """Merge weights and transposed unmerge weights for given picks, ascending and distinct in each window."""
        ...

    def merge(self, x: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """(B, N, C) -> (B, D, C)"""
        ...

    def unmerge(self, y: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """(B, D, C) -> (B, N, C)"""
        ...

    def restore(
        self, out: Tensor, reduced: Tensor, x: Tensor, weights: Tensor, windows: Windows, budget: Budget
    ) -> Tensor:
        """x + unmerge(out - reduced): out, reduced (B, D, C); x and the result (B, N, C)."""
        ...

    def reuse(
        self,
        out: Tensor,
        reduced: Tensor,
        x: Tensor,
        kept: Tensor,
        destinations: Tensor,
        weights: Tensor,
        windows: Windows,
        budget: Budget,
        trust: float,
    ) -> Tensor:
        """`detail.Detail.restore`. kept: (B, N, C); destinations: (B or 1, D) int64, their tokens."""
        ...

    def merge_hard(self, x: Tensor, owners: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """`merge` of a hard plan: the means of what belongs to each destination, by `MergePlan.owners`."""
        ...

    def unmerge_hard(self, y: Tensor, owners: Tensor) -> Tensor:
        """`unmerge` of a hard plan: a copy of each token's destination."""
        ...

    def restore_hard(self, out: Tensor, reduced: Tensor, x: Tensor, owners: Tensor) -> Tensor:
        """`restore` of a hard plan."""
        ...


@dataclass(frozen=True)
class Choice:
    """The kernels to use, None for plain PyTorch, and why not the faster ones."""

    kernels: Kernels | None
    reason: str = ""

    def __str__(self) -> str:
        name = Backend.TORCH.value if self.kernels is None else self.kernels.name
        return f"{name} ({self.reason})" if self.reason else name


@dataclass(eq=False)
class Dispatch:
    """Chooses once per run, device, dtype, padded window size, and for hard plans apart.

    asked: AUTO falls back to PyTorch and tells why; TRITON raises RuntimeError instead.
    """

    asked: Backend = Backend.AUTO
    _choices: dict[tuple[torch.device, torch.dtype, int, bool], Choice] = field(default_factory=dict)

    def pick(self, x: Tensor, windows: Windows, budget: Budget, hard: bool = False) -> Choice:
        """The choice for tokens x of (B, N, C) in these windows."""
        key = (x.device, x.dtype, windows.slots, hard)
        if key not in self._choices:
            self._choices[key] = self._chosen(x, windows, budget, hard)
        return self._choices[key]

    def _chosen(self, x: Tensor, windows: Windows, budget: Budget, hard: bool) -> Choice:
        if self.asked is Backend.TORCH:
            return Choice(None, "as asked")
        reason = _obstacle(x, windows.slots, interpreter=self.asked is Backend.TRITON)
        if reason:
            if self.asked is Backend.TRITON:
                raise RuntimeError(f"ToMA: its Triton kernels were asked for, but cannot run here: {reason}")
            return Choice(None, reason)
        from .triton import TritonKernels

        kernels = TritonKernels()
        if self.asked is Backend.AUTO:
            reason = _trial(kernels, x, windows, budget, hard)
        return Choice(None, reason) if reason else Choice(kernels)


def _obstacle(x: Tensor, slots: int, interpreter: bool) -> str:
    """Why Triton's kernels cannot take this, or an empty string. interpreter: whether Triton's own would do."""
    on_cpu = interpreter and x.device.type == "cpu"
    if not on_cpu and x.device.type != "cuda":
        return "no CUDA device"
    if torch.version.hip:
        return "not an NVIDIA GPU"
    if x.dtype not in _DTYPES:
        return f"tokens in {x.dtype}"
    try:
        from .triton import INTERPRETED, MOST
    except ImportError:
        return "Triton is not installed"
    except Exception as error:
        # A Triton too old, or built for another PyTorch, fails in its own ways while it loads.
        return _told("Triton does not load", error)
    if on_cpu and not INTERPRETED:
        return "no CUDA device"
    if INTERPRETED and not interpreter:
        return "TRITON_INTERPRET is set"
    if not on_cpu and torch.cuda.get_device_capability(x.device) < _CAPABILITY:
        return "the GPU's compute capability is below {}.{}".format(*_CAPABILITY)
    return f"windows of {slots} tokens, the kernels take {MOST}" if slots > MOST else ""


# What came of the first use of the kernels in this process: an empty string, or why they failed.
_trials: dict[tuple[torch.device, torch.dtype, int, bool], str] = {}


def _trial(kernels: Kernels, x: Tensor, windows: Windows, budget: Budget, hard: bool) -> str:
    """Why the kernels fail on x or compute something else than PyTorch, or an empty string.

    Triton compiles at first use, with a C compiler and a driver that may be missing, for cards nobody here has seen.
    Only this trial is guarded, and waits for the device: an error in the run itself is not hidden.
    """
    from ..detail import reuse
    from ..merge import MergePlan, merge, unmerge_update

    x = x.detach()
    key = (x.device, x.dtype, windows.slots, hard)
    if key not in _trials:
        try:
            scale = math.inf if hard else 1.0
            plan = MergePlan(windows, budget, *kernels.select_weigh(x, windows, budget, scale), kernels, hard)
            used = torch.ones_like(plan.picks) if budget.valid is None else budget.valid.expand_as(plan.picks)
            pairs = [(plan.merge_weights.sum(-1), used.to(x.dtype))]
            plain = replace(plan, kernels=None)
            ours, theirs = merge(x, plan), merge(x, plain)
            restored, spread = (unmerge_update(2 * y, y, x, p) for y, p in ((ours, plan), (theirs, plain)))
            pairs += [(ours, theirs), (restored, spread)]
            if not hard:
                pairs.append((reuse(2 * ours, ours, x, x, plan), reuse(2 * theirs, theirs, x, x, plain)))
            _trials[key] = "" if all(_close(*pair) for pair in pairs) else "Triton's results are off"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _trials[key] = _told("Triton failed", error)
        if _trials[key]:
            logging.warning("ToMA: plain PyTorch instead of Triton kernels. %s", _trials[key])
    return _trials[key]


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results of the same products differ by rounding only; NaN in the tokens is nobody's fault."""
    largest = float(theirs.float().nan_to_num().abs().amax())
    tolerance = 8 * torch.finfo(ours.dtype).eps * max(largest, torch.finfo(ours.dtype).tiny)
    return torch.allclose(ours.float(), theirs.float(), rtol=0.0, atol=tolerance + 1e-5 * largest, equal_nan=True)


def _told(what: str, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{what}: {type(error).__name__}: {lines[0][:200]}"
