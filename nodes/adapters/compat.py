"""Check each part of ComfyUI at the place where this pack uses it. A later ComfyUI may change the arguments of a
function, or remove the function. The pack then logs one warning with the function's name, and models run unmerged, so
workflows still work. Errors in this pack's own code are handled in the same way."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from threading import Lock
from typing import Any

import torch
from comfy import model_management
from torch import nn

from ...toma_core.reasons import Message, MessageError, Reason
from .report_text import Line

NEWEST_TRIED = "0.33.0"  # the newest ComfyUI that all tests have run on; `make api-check` lists changes in newer ones
_warned: set[str] = set()
RAISES_OWN_ERRORS = False  # whether `own_code` raises the original errors, as in tests; set by `scripts.comfy_pack`


class UnmergedError(Exception):
    """An error after which a call of the model runs unmerged."""

    @property
    def reason(self) -> Message:
        """The reason why the call is not merged, as shown in the report."""
        own = isinstance(self, OwnError)
        return Reason.OWN_ERROR(error=str(self)) if own else Reason.UNKNOWN_API(name=str(self))


class UnsupportedApiError(UnmergedError):
    """A part of ComfyUI is missing, or not as this pack knows it. The message begins with the part's name."""


class OwnError(UnmergedError):
    """An error of this pack's code, raised from the original error."""


@contextmanager
def require_api(name: str) -> Iterator[None]:
    """Raise `UnsupportedApiError` if code in the `with` block fails to find the part of ComfyUI called `name`. The
    block must not call this pack's code: a TypeError there would be taken for an unknown ComfyUI."""
    try:
        yield
    except (AttributeError, ImportError, IndexError, KeyError, TypeError) as error:
        raise UnsupportedApiError(f"{name}: {error or type(error).__name__}") from error


@contextmanager
def own_code() -> Iterator[None]:
    """Raise `OwnError` for an error in the `with` block. Errors for the user, out-of-memory errors and, in tests, all
    errors stay as they are."""
    try:
        yield
    except (MessageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if RAISES_OWN_ERRORS:
            raise
        raise OwnError(f"{type(error).__name__}: {error}") from error


@contextmanager
def warned() -> Iterator[None]:
    """If the `with` block raises an `UnmergedError`, log it as a warning, and continue after the block."""
    try:
        yield
    except UnmergedError as error:
        warn(error)


_FAILED = "ToMA: this version of ComfyUI-ToMA has failed (%s). Sampling goes on %s; please report it."
_UNKNOWN = (
    "ToMA: this ComfyUI has something that this version of ComfyUI-ToMA does not know (%s). Sampling goes on %s; "
    "please look for a newer version of the pack."
)


def warn(error: UnmergedError, consequence: str = "without merging") -> None:
    """Log an error as a warning, once per process and text. consequence: how sampling continues."""
    text, own = str(error), isinstance(error, OwnError)
    if text not in _warned:
        _warned.add(text)
        logging.warning(_FAILED if own else _UNKNOWN, text, consequence, exc_info=error if own else None)


# Options of ComfyUI that switch off CUDA graphs and ComfyUI's compiler. Graphs and the compiler need all evaluations of
# a model to be alike: the compiler records a block's allocations, and repeats their addresses in the next evaluation.
_REPLAYS = ("disable_comfy_compiler", "disable_cuda_graphs")
_replays_lock = Lock()
_replays_before = list[dict[str, bool]]()


@contextmanager
def without_replays() -> Iterator[None]:
    """Keep ComfyUI from recording or replaying model calls in the `with` block: merged calls allocate other memory, and
    cache tensors that outlive a block. Of several devices, the last to leave its block restores the options."""
    from comfy.cli_args import args

    with _replays_lock:
        _replays_before.append({name: getattr(args, name) for name in _REPLAYS if hasattr(args, name)})
        vars(args).update(dict.fromkeys(_replays_before[-1], True))
    try:
        yield
    finally:
        with _replays_lock:
            before = _replays_before.pop()
            if not _replays_before:
                vars(args).update(before)


def end_interrupted(several_devices: bool = False) -> None:
    """After an error has ended an evaluation, end ComfyUI's recording and prefetching, and free memory. ComfyUI itself
    does so only when a node ends. several_devices: other devices still compute, so end only this one's recording."""
    try:
        from comfy import model_prefetch as prefetch

        name = "cleanup_malloc_graph" if several_devices else "cleanup_prefetch_queues"
        getattr(prefetch, name, lambda: None)()
    except ImportError:
        pass  # an older ComfyUI neither records nor prefetches
    except Exception:
        logging.warning("ToMA: ComfyUI could not end an evaluation that ran out of memory.", exc_info=True)
    model_management.soft_empty_cache()  # by its module, because other packs replace it


def comfyui_lines() -> tuple[Message, ...]:
    """Return lines of the report: the version of ComfyUI, and a line if this version is newer than `NEWEST_TRIED`."""
    try:
        from comfyui_version import __version__ as version
    except (ImportError, AttributeError):
        return ()
    here, tried = ([int(part) if part.isdecimal() else 0 for part in v.split(".")] for v in (version, NEWEST_TRIED))
    untried = [Line.UNTRIED_COMFYUI(version=version, tried=NEWEST_TRIED)] if here > tried else []
    return Line.COMFYUI(version=version), *untried


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any], **positions: int) -> list[Any]:
    """Return the named arguments, which ComfyUI may pass by position or by name. Raises KeyError if one is missing."""
    return [args[position] if position < len(args) else kwargs[name] for name, position in positions.items()]


def with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs with a new value for the argument that has this position or this name."""
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}


def check(module: nn.Module, hook: object) -> None:
    """Raise `UnsupportedApiError` unless `hook` can stand in for the module's `forward`. The hook's `BlockSignature` or
    `__call__` names the arguments that the hook knows. `forward` must begin with the positional ones, by the same names
    except before a `/`, and must take the named ones. Its other arguments must have defaults, and the hook must take
    them as `**rest`."""
    module = getattr(module, "_orig_mod", module)  # not torch.compile's wrapper, which takes any argument
    try:
        theirs = list(signature(type(module).forward).parameters.values())[1:]
    except ValueError as error:  # compiled code may hide its arguments
        raise UnsupportedApiError(f"{type(module).__name__}.forward: {error}") from error
    if any(p.kind is Parameter.VAR_POSITIONAL for p in theirs):
        return  # a `forward` with `*args` passes all arguments on
    taken = getattr(hook, "signature", None)
    if taken is None:
        ours = list(signature(type(hook).__call__).parameters.values())[1:]
        unnamed = sum(p.kind is Parameter.POSITIONAL_ONLY for p in ours)
        ours, theirs = ours[unnamed:], theirs[unnamed:]
        places = [p.name for p in ours if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        names = {p.name for p in ours if p.kind is not Parameter.VAR_KEYWORD}
        has_rest = any(p.kind is Parameter.VAR_KEYWORD for p in ours)
    else:
        places, names, has_rest = list(taken.positional_args), {*taken.positional_args, *taken.required_kwargs}, True
    known = [p.name for p in theirs]
    others = [p for p in theirs if p.name not in names]
    needed = [p for p in others if p.default is Parameter.empty and p.kind is not Parameter.VAR_KEYWORD]
    if known[: len(places)] != places or not names <= {*known} or needed or (others and not has_rest):
        raise UnsupportedApiError(f"{type(module).__name__}.forward({', '.join(known)})")
