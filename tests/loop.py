"""Provide `loop`, which parametrises tests that the folder `thorough` repeats with more values."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def loop(names: str | tuple[str, ...], values: Iterable[Any], ids: Any = None) -> Callable[..., Any]:
    """Decorate a test as `pytest.mark.parametrize` does, and keep the undecorated test as its attribute `looped`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        inner = getattr(test, "looped", test)

        @functools.wraps(test)
        def tried(*args: Any, **kwargs: Any) -> None:
            inner(*args, **kwargs)

        tried.looped = inner  # type: ignore[attr-defined]
        return pytest.mark.parametrize(names, list(values), ids=ids)(tried)

    return decorate
