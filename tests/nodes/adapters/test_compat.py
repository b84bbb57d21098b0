"""Test that known signatures of ComfyUI's code are accepted, and that messages name unknown signatures."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

contract = pack_module("nodes.adapters.compat")
hooks = pack_module("nodes.adapters.model_hooks")
report_text = pack_module("nodes.adapters.report_text")


class Hook(hooks.Hook):  # type: ignore[misc, name-defined]
    def __call__(self, x: Any, pe: Any, mask: Any = None, *, options: Any = None, **rest: Any) -> Any:
        return self.original(x, pe, mask, options=options, **rest)


class Strict(hooks.Hook):  # type: ignore[misc, name-defined]
    def __call__(self, x: Any, mask: Any = None) -> Any:
        return self.original(x, mask)


def module_with(forward: Callable[..., Any]) -> nn.Module:
    return type("Block", (nn.Module,), {"forward": forward})()


@loop(
    ("hook", "forward"),
    [
        (Hook, lambda self, x, pe, mask=None, options=None: x),
        (Hook, lambda self, x, pe, mask=None, more=None, options=None: x),
        (Hook, lambda self, x, pe, mask=None, *, options=None, **others: x),
        (Hook, lambda self, *args, **kwargs: args),
        (Strict, lambda self, x, mask=None: x),
    ],
)
def test_signatures_that_are_known(hook: Any, forward: Any) -> None:
    contract.check(module_with(forward), hook())


@loop(
    ("hook", "forward", "named"),
    [
        (Hook, lambda self, x, pe, mask=None: x, "Block.forward(x, pe, mask)"),
        (Hook, lambda self, x, mask=None, pe=None, options=None: x, "Block.forward(x, mask, pe, options)"),
        (Hook, lambda self, y, pe, mask=None, options=None: y, "Block.forward(y, pe, mask, options)"),
        (Hook, lambda self, x, pe, temb, mask=None, options=None: x, "Block.forward(x, pe, temb, mask, options)"),
        (Hook, lambda self, x, pe, mask=None, options=None, *, temb: x, "Block.forward(x, pe, mask, options, temb)"),
        (Hook, lambda self, x: x, "Block.forward(x)"),
        (Hook, getattr, "Block.forward: "),  # a built-in function hides its signature
        (Strict, lambda self, x, mask=None, more=None: x, "Block.forward(x, mask, more)"),
    ],
)
@loop("compiled", [False, True])
def test_signatures_that_are_not(hook: Any, forward: Any, named: str, compiled: bool) -> None:
    module = module_with(forward)
    with pytest.raises(contract.UnsupportedApiError, match="^" + re.escape(named)):
        contract.check(torch.compile(module, backend="eager") if compiled else module, hook())


def test_errors_of_others_go_through() -> None:
    with pytest.raises(RuntimeError, match="no memory"), contract.require_api("a hook"):
        raise RuntimeError("no memory")
    with pytest.raises(contract.UnsupportedApiError, match=r"^a hook: 'sigmas'$"), contract.require_api("a hook"):
        contract.arguments((1, 2), {}, sigmas=3)
    assert (
        contract.arguments((1, 2), {"y": 3}, x=1, y=2) == contract.arguments((), {"x": 2, "y": 3}, x=1, y=2) == [2, 3]
    )


def test_same_warning_once(warnings: Any) -> None:
    for name in ("one", "two", "one"):
        with contract.warned(), contract.require_api(name):
            raise KeyError("gone")
    assert [w.split("(")[1].split(")")[0] for w in warnings()] == ["one: 'gone'", "two: 'gone'"]


@loop("before", [False, True])
def test_replays_are_off_until_the_last_of_several_devices_is_done(before: bool, monkeypatch: Any) -> None:
    from comfy.cli_args import args

    monkeypatch.setattr(args, "disable_comfy_compiler", before, raising=False)
    began, seen = Barrier(2), list[bool]()

    def evaluate(error: type[BaseException]) -> None:
        with contract.without_replays():
            began.wait()
            seen.append(args.disable_comfy_compiler)
            raise error

    def device(error: type[BaseException]) -> None:
        with pytest.raises(error):
            evaluate(error)

    for errors in ((KeyboardInterrupt, ValueError), (ValueError, KeyboardInterrupt)):
        threads = [Thread(target=device, args=(error,)) for error in errors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert args.disable_comfy_compiler is before
    assert seen == [True] * 4
    with contract.without_replays():
        with contract.without_replays():
            assert args.disable_comfy_compiler is True
        assert args.disable_comfy_compiler is True
    assert args.disable_comfy_compiler is before


def test_a_comfyui_without_a_compiler_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy.cli_args import args

    for name in contract._REPLAYS:
        monkeypatch.delattr(args, name, raising=False)
    options = dict(vars(args))
    with contract.without_replays():
        assert vars(args) == options
    assert vars(args) == options


@loop("error", [AttributeError, RuntimeError])
def test_an_evaluation_that_cannot_be_ended_does_not_end_the_run(
    error: type[Exception], warnings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_prefetch = pytest.importorskip("comfy.model_prefetch")

    monkeypatch.setattr(model_prefetch, "cleanup_prefetch_queues", Mock(side_effect=error))
    contract.end_interrupted()
    assert len(warnings()) == 1


@loop(
    ("version", "newer"),
    [("0.16.3", False), ("0.33.0", False), ("0.33.1", True), ("0.100", True), ("1.0.0rc1", True), ("nightly", False)],
)
def test_report_says_which_comfyui_it_is(
    monkeypatch: Any, unet: Any, attach: Any, stats_of: Any, version: str, newer: bool
) -> None:
    monkeypatch.setattr(importlib.import_module("comfyui_version"), "__version__", version)
    monkeypatch.setattr(contract, "NEWEST_TRIED", "0.33.0")
    patched = attach(unet)
    models.sample(patched, 16, 16, steps=1)
    text = report_text.summary(stats_of(patched))
    assert f"; ComfyUI {version};" in f"{text};"
    warning = f"this ComfyUI ({version}) is newer than the newest that ComfyUI-ToMA was tried on (0.33.0)"
    assert (warning in text) is newer
