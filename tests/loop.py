"""Run one test with many values and name each value that fails."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.scope import Scope

OWN = ("request", "subtests")


class Value:
    """A value in pytest's registry of fixtures, so that fixtures can request it by name."""

    scope, _scope = "function", Scope.Function

    def __init__(self, value: Any) -> None:
        self.cached_result = (value, 0, None)

    def addfinalizer(self, finalizer: Callable[[], object]) -> None:
        """A fixture that asked for the value ends with its test's round."""

    def finish(self, request: pytest.FixtureRequest) -> None:
        """Do nothing: a value needs no teardown."""


def loop(names: str | tuple[str, ...], values: Iterable[Any], ids: Any = None) -> Callable[..., Any]:
    """Decorate a test like `pytest.mark.parametrize` does, but make it one test that tries all values.

    Each value has its own fixtures, as each test has, and a fixture can request the value by name. Several loops try
    all combinations.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    sets = [value.values if hasattr(value, "marks") else value if len(keys) > 1 else (value,) for value in values]
    assert sets, "nothing to try"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        inner = getattr(test, "looped", test)
        rounds = [dict(zip(keys, one, strict=True)) for one in sets]
        loops = [rounds, *getattr(test, "loops", [])]
        parameters = inspect.signature(inner).parameters

        @functools.wraps(test)
        def tried(*args: Any, request: pytest.FixtureRequest, subtests: pytest.Subtests, **_: Any) -> None:
            only = request.config.getoption("only", default="")
            for combined in itertools.product(*loops):
                one = {key: value for part in combined for key, value in part.items()}
                if only not in request.node.nodeid and not any(only in str(value) for value in one.values()):
                    continue
                with subtests.test(**{key: str(value)[:100] for key, value in one.items()}):
                    finish(request)  # what was made before the first value
                    try:
                        inner(*args, **made(request, one, list(parameters)[len(args) :]))
                    finally:
                        finish(request)

        looped = {key for part in loops for key in part[0]}
        rest = [parameter for name, parameter in parameters.items() if name not in (*looped, *OWN)]
        own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in OWN]
        tried.__signature__ = inspect.Signature([*rest, *own])  # type: ignore[attr-defined]
        tried.looped, tried.loops = inner, loops  # type: ignore[attr-defined]
        return tried

    return decorate


def made(request: pytest.FixtureRequest, values: dict[str, Any], parameters: list[str]) -> dict[str, Any]:
    """Return the arguments of a test in one round."""
    request._fixture_defs.update({name: Value(value) for name, value in values.items()})  # type: ignore[attr-defined]
    automatic = [name for name in request.fixturenames if name not in OWN]
    fixtures = {name: request.getfixturevalue(name) for name in dict.fromkeys([*automatic, *values, *parameters])}
    return {name: fixtures[name] for name in parameters}


def finish(request: pytest.FixtureRequest) -> None:
    """Tear down the fixtures of one round, the last first."""
    known = request._fixture_defs  # type: ignore[attr-defined]
    for name, fixture in reversed(list(known.items())):
        if fixture.scope == "function" and name not in OWN:
            del known[name]
            if name == "caplog" and fixture.cached_result:
                fixture.cached_result[0].clear()
            fixture.finish(request)


def concerns(item: pytest.Item, word: str) -> bool:
    """Return whether a test or one of its values has a word in its name."""
    loops = getattr(getattr(item, "function", None), "loops", [])
    return word in item.nodeid or any(word in str(value) for part in loops for one in part for value in one.values())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave fixtures to the rounds of a loop: before the first round there is no value to request."""
    if hasattr(getattr(item, "function", None), "loops"):
        item.funcargs.update({n: None for n in item.fixturenames if n not in OWN})  # type: ignore[attr-defined]
