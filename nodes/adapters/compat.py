"""What this pack asks of ComfyUI, checked where it is asked.

A later ComfyUI may give a hook other arguments, or take it away. Then the pack says so once, by the name of the hook,
and what it would have merged runs whole: a graph that worked goes on working.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

from torch import nn

_warned: set[str] = set()


class UnsupportedApiError(Exception):
    """Something of ComfyUI is not as this pack knows it. The message begins with its name."""


@contextmanager
def require_api(name: str) -> Iterator[None]:
    """Around the few lines that read something of ComfyUI's: what is not there becomes an `UnsupportedApiError` of
    `name`."""
    try:
        yield
    except (AttributeError, ImportError, IndexError, KeyError, TypeError) as error:
        raise UnsupportedApiError(f"{name}: {error or type(error).__name__}") from error


@contextmanager
def optional_api(name: str) -> Iterator[None]:
    """Like `require_api`, around what the rest can do without: says what is missing and goes on."""
    try:
        with require_api(name):
            yield
    except UnsupportedApiError as error:
        warn(error)


def warn(error: UnsupportedApiError) -> None:
    """Say it once in the life of the process."""
    text = str(error)
    if text not in _warned:
        _warned.add(text)
        logging.warning(
            "ToMA: this ComfyUI has something that this version of ComfyUI-ToMA does not know (%s). Sampling goes on "
            "without merging; please look for a newer version of the pack.",
            text,
        )


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    """An argument that ComfyUI may hand over by place or by name. Raises KeyError if it is not there."""
    return args[position] if position < len(args) else kwargs[name]


def check(module: nn.Module, hook: object) -> None:
    """Raise `UnsupportedApiError` unless `hook` can stand in for the module's `forward`, whoever calls it.

    The hook's `BlockSignature`, or its own `__call__`, says what is known: its arguments by place must be the first
    ones of the class's `forward` and bear the same names (unless they have none, before a `/`), its arguments by name
    must be among the others, and whatever else there is must have a default and a `**rest` to go to, where the hook
    looks at it.
    """
    module = getattr(module, "_orig_mod", module)  # torch.compile's wrapper takes anything
    try:
        theirs = list(signature(type(module).forward).parameters.values())[1:]
    except ValueError as error:  # compiled code may hide what it takes
        raise UnsupportedApiError(f"{type(module).__name__}.forward: {error}") from error
    if any(p.kind is Parameter.VAR_POSITIONAL for p in theirs):
        return  # hands on whatever it is given
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
