"""Many values in one test: each is tried, and each that fails is named."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def loop(names: str | tuple[str, ...], values: Iterable[Any], ids: Any = None) -> Callable[..., Any]:
    """Decorate a test like `pytest.mark.parametrize` does, but make it one test that tries all values.

    Fixtures are made once for all of them: for tests whose fixtures keep nothing of what a test did. What one value
    patches with `monkeypatch` is taken back before the next.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    sets = [value.values if hasattr(value, "marks") else value if len(keys) > 1 else (value,) for value in values]
    assert sets, "nothing to try"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(test).parameters
        inner = "subtests" in parameters

        @functools.wraps(test)
        def tried(*args: Any, subtests: pytest.Subtests, **fixtures: Any) -> None:
            given = {**fixtures, "subtests": subtests} if inner else fixtures
            for values in sets:
                one = dict(zip(keys, values, strict=True))
                name = {key: str(value)[:100] for key, value in one.items()}
                with subtests.test(**name), pytest.MonkeyPatch.context() as patches:
                    own = {"monkeypatch": patches} if "monkeypatch" in parameters else {}
                    test(*args, **{**given, **own}, **one)

        rest = [parameter for name, parameter in parameters.items() if name not in (*keys, "subtests")]
        asked = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        tried.__signature__ = inspect.Signature([*rest, asked])  # type: ignore[attr-defined]
        return tried

    return decorate
