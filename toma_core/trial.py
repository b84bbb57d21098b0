"""Which kernels a run uses: Triton's, where nothing stands against them and a trial at first use goes well."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .detail import reuse
from .kernels import Kernels
from .merge import MergePlan, merge, unmerge_update
from .windows import Budget, Windows

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What Triton's makers support on NVIDIA cards.
_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Choice:
    """The kernels to use, None for plain PyTorch, and why not the faster ones."""

    kernels: Kernels | None
    reason: str = ""

    def __str__(self) -> str:
        name = "torch" if self.kernels is None else self.kernels.name
        return f"{name} ({self.reason})" if self.reason else name


@dataclass(eq=False)
class Dispatch:
    """Chooses once per run, device, dtype and padded window size: Triton where it works, else PyTorch.

    given: the choice, where somebody has made it already.
    """

    given: Choice | None = None
    _choices: dict[tuple[torch.device, torch.dtype, int], Choice] = field(default_factory=dict)

    def pick(self, x: Tensor, windows: Windows, budget: Budget) -> Choice:
        """The choice for tokens x of (B, N, C) in these windows."""
        if self.given is not None:
            return self.given
        key = (x.device, x.dtype, windows.slots)
        if key not in self._choices:
            self._choices[key] = _chosen(x, windows, budget)
        return self._choices[key]


def _chosen(x: Tensor, windows: Windows, budget: Budget) -> Choice:
    reason = _obstacle(x, windows.slots)
    if reason:
        return Choice(None, reason)
    from .kernels.triton import TritonKernels

    kernels = TritonKernels()
    reason = _trial(kernels, x, windows, budget)
    return Choice(None, reason) if reason else Choice(kernels)


def _obstacle(x: Tensor, slots: int) -> str:
    """Why Triton's kernels cannot take this, or an empty string."""
    if x.device.type != "cuda":
        return "no CUDA device"
    if torch.version.hip:
        return "not an NVIDIA GPU"
    if x.dtype not in _DTYPES:
        return f"tokens in {x.dtype}"
    try:
        from .kernels.triton import INTERPRETED, MOST
    except ImportError:
        return "Triton is not installed"
    except Exception as error:
        # A Triton too old, or built for another PyTorch, fails in its own ways while it loads.
        return _told("Triton does not load", error)
    if INTERPRETED:
        return "TRITON_INTERPRET is set"
    if torch.cuda.get_device_capability(x.device) < _CAPABILITY:
        return "the GPU's compute capability is below {}.{}".format(*_CAPABILITY)
    return f"windows of {slots} tokens, the kernels take {MOST}" if slots > MOST else ""


# What came of the first use of the kernels in this process: an empty string, or why they failed.
_trials: dict[tuple[torch.device, torch.dtype, int], str] = {}


def _trial(kernels: Kernels, x: Tensor, windows: Windows, budget: Budget) -> str:
    """Why the kernels fail on x or compute something else than PyTorch, or an empty string.

    Triton compiles at first use, with a C compiler and a driver that may be missing, for cards nobody here has seen.
    Only this trial is guarded, and waits for the device: an error in the run itself is not hidden.
    """
    x = x.detach()
    key = (x.device, x.dtype, windows.slots)
    if key not in _trials:
        try:
            plan = MergePlan(windows, budget, *kernels.select_weigh(x, windows, budget, 1.0), kernels)
            used = torch.ones_like(plan.picks) if budget.valid is None else budget.valid.expand_as(plan.picks)
            pairs = [(plan.merge_weights.sum(-1), used.to(x.dtype))]
            plain = replace(plan, kernels=None)
            ours, theirs = merge(x, plan), merge(x, plain)
            restored, spread = (unmerge_update(2 * y, y, x, p) for y, p in ((ours, plan), (theirs, plain)))
            pairs += [(ours, theirs), (restored, spread)]
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
