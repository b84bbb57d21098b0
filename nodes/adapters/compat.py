"""Check the parts of ComfyUI that this pack uses, where it uses them.

A later ComfyUI may call a hook with other arguments, or remove the hook. Then one warning names the hook, and models
run unmerged: a workflow that worked still works. Errors of this pack are treated alike; in tests they are raised.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from threading import Lock
from typing import Any

import torch
from torch import nn

from ...toma_core.reasons import Message, MessageError, Reason
from .report_text import Line

NEWEST_TRIED = "0.33.0"  # the newest ComfyUI that all tests have run on; `make api-check` lists changes in newer ones
_warned: set[str] = set()
RAISES_OWN_ERRORS = False  # set by `scripts.comfy_pack`, for tests and measurements


class UnmergedError(Exception):
    """The call that runs next cannot be merged."""

    @property
    def reason(self) -> Message:
        """The reason as the report shows it."""
        raise NotImplementedError


class UnsupportedApiError(UnmergedError):
    """A part of ComfyUI is not as this pack knows it. The message begins with the part's name."""

    @property
    def reason(self) -> Message:
        return Reason.UNKNOWN_API(name=str(self))


class OwnError(UnmergedError):
    """This pack has failed. Raised from the error itself."""

    @property
    def reason(self) -> Message:
        return Reason.OWN_ERROR(error=str(self))


@contextmanager
def require_api(name: str) -> Iterator[None]:
    """Raise `UnsupportedApiError` with `name` where the lines inside do not find a part of ComfyUI.

    The lines inside must call no code of this pack, whose own TypeError would pass for an unknown ComfyUI.
    """
    try:
        yield
    except (AttributeError, ImportError, IndexError, KeyError, TypeError) as error:
        raise UnsupportedApiError(f"{name}: {error or type(error).__name__}") from error


@contextmanager
def own_code() -> Iterator[None]:
    """Raise `OwnError` where code of this pack fails, so that the run goes on unmerged. Errors for the user and
    out-of-memory errors pass through; in tests all errors do."""
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
    """Warn instead of raising an `UnmergedError`, and go on: for lines that later ones do not need."""
    try:
        yield
    except UnmergedError as error:
        warn(error)


@contextmanager
def optional_api(name: str) -> Iterator[None]:
    """Warn instead of raising, see `require_api`, and go on."""
    with warned(), require_api(name):
        yield


def warn(error: UnmergedError, consequence: str = "without merging") -> None:
    """Log a warning, once in the life of the process. consequence: how sampling goes on."""
    text = str(error)
    if text in _warned:
        return
    _warned.add(text)
    if isinstance(error, OwnError):
        logging.warning(
            "ToMA: this version of ComfyUI-ToMA has failed (%s). Sampling goes on %s; please report it.",
            text,
            consequence,
            exc_info=error,
        )
        return
    logging.warning(
        "ToMA: this ComfyUI has something that this version of ComfyUI-ToMA does not know (%s). Sampling goes on %s; "
        "please look for a newer version of the pack.",
        text,
        consequence,
    )


# Options of ComfyUI that switch off features for which all evaluations of a model must be alike: CUDA graphs, and its
# compiler, which records a block's allocations and repeats the addresses in the next evaluation.
_REPLAYS = ("disable_comfy_compiler", "disable_cuda_graphs")
_replays_lock, _replays_before = Lock(), list[dict[str, bool]]()


@contextmanager
def without_replays() -> Iterator[None]:
    """Have ComfyUI neither record nor replay the evaluations inside: merged evaluations allocate otherwise than full
    ones, and cache tensors that outlive their block. Several devices may be inside at a time."""
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
    """End ComfyUI's recording and prefetching in an evaluation that an error ended: ComfyUI does so only when a node
    ends. several_devices: end only this device's recording; other devices still compute."""
    try:
        from comfy import model_prefetch as prefetch
    except ImportError:  # an older ComfyUI begins nothing of the kind
        return
    name = "cleanup_malloc_graph" if several_devices else "cleanup_prefetch_queues"
    try:
        getattr(prefetch, name, lambda: None)()
    except Exception:
        logging.warning("ToMA: ComfyUI could not end an evaluation that ran out of memory.", exc_info=True)


def comfyui_lines() -> tuple[Message, ...]:
    """Return lines of the report: the version of this ComfyUI, and whether it is newer than `NEWEST_TRIED`."""
    try:
        from comfyui_version import __version__ as version
    except (ImportError, AttributeError):
        return ()
    newer = _numbers(version) > _numbers(NEWEST_TRIED)
    untried = (Line.UNTRIED_COMFYUI(version=version, tried=NEWEST_TRIED),) if newer else ()
    return (Line.COMFYUI(version=version), *untried)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split("."))


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    """Return an argument that ComfyUI may pass by position or by name. Raises KeyError without it."""
    return args[position] if position < len(args) else kwargs[name]


def with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with one value replaced, see `argument`."""
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}


def check(module: nn.Module, hook: object) -> None:
    """Raise `UnsupportedApiError` unless `hook` can stand in for the module's `forward`.

    The hook's `BlockSignature`, or its own `__call__`, lists the known arguments. Its positional arguments must be
    the first of the class's `forward`, with the same names (nameless before a `/`); its named arguments must follow
    there. Any further argument of `forward` must have a default; the hook must take and check it by a `**rest`.
    """
    module = getattr(module, "_orig_mod", module)  # torch.compile's wrapper takes any argument
    try:
        theirs = list(signature(type(module).forward).parameters.values())[1:]
    except ValueError as error:  # compiled code may hide its arguments
        raise UnsupportedApiError(f"{type(module).__name__}.forward: {error}") from error
    if any(p.kind is Parameter.VAR_POSITIONAL for p in theirs):
        return  # passes on all arguments
    taken = getattr(hook, "signature", None)
    if taken is None:
        ours = list(signature(type(hook).__call__).parameters.values())[1:]
        theirs = theirs[sum(p.kind is Parameter.POSITIONAL_ONLY for p in ours) :]
        ours = [p for p in ours if p.kind is not Parameter.POSITIONAL_ONLY]
        places = [p.name for p in ours if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        names = {p.name for p in ours if p.kind is not Parameter.VAR_KEYWORD}
        has_rest = any(p.kind is Parameter.VAR_KEYWORD for p in ours)
    else:
        places, names, has_rest = list(taken.positional_args), {*taken.positional_args, *taken.required_kwargs}, True
    others = [p for p in theirs if p.name not in names]
    if (
        [p.name for p in theirs[: len(places)]] != places
        or not names <= {p.name for p in theirs}
        or any(p.default is Parameter.empty and p.kind is not Parameter.VAR_KEYWORD for p in others)
        or (others and not has_rest)
    ):
        arguments = ", ".join(p.name for p in theirs)
        raise UnsupportedApiError(f"{type(module).__name__}.forward({arguments})")
