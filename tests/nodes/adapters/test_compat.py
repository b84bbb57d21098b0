"""Test that known signatures of ComfyUI's code are accepted, and that messages name unknown signatures."""

import importlib
import re
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from comfy.cli_args import args as cli_args
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


@loop(
    ("hook", "forward", "named"),
    [
        (Hook, lambda self, x, pe, mask=None, options=None: x, ""),
        (Hook, lambda self, x, pe, mask=None, more=None, options=None: x, ""),
        (Hook, lambda self, x, pe, mask=None, *, options=None, **others: x, ""),
        (Hook, lambda self, *args, **kwargs: args, ""),
        (Strict, lambda self, x, mask=None: x, ""),
        (Hook, lambda self, x, pe, mask=None: x, "(x, pe, mask)"),
        (Hook, lambda self, x, mask=None, pe=None, options=None: x, "(x, mask, pe, options)"),
        (Hook, lambda self, y, pe, mask=None, options=None: y, "(y, pe, mask, options)"),
        (Hook, lambda self, x, pe, temb, mask=None, options=None: x, "(x, pe, temb, mask, options)"),
        (Hook, lambda self, x, pe, mask=None, options=None, *, temb: x, "(x, pe, mask, options, temb)"),
        (Hook, lambda self, x: x, "(x)"),
        (Hook, getattr, ": "),  # a built-in function hides its signature
        (Strict, lambda self, x, mask=None, more=None: x, "(x, mask, more)"),
    ],
)
@loop("compiled", [False, True])
def test_signatures_that_are_not_known_are_named(hook: Any, forward: Any, named: str, compiled: bool) -> None:
    module = type("Block", (nn.Module,), {"forward": forward})()
    error = pytest.raises(contract.UnsupportedApiError, match="^" + re.escape(f"Block.forward{named}"))
    with error if named else nullcontext():
        contract.check(torch.compile(module, backend="eager") if compiled else module, hook())


def test_errors_of_others_go_through() -> None:
    with pytest.raises(RuntimeError, match="no memory"), contract.require_api("a hook"):
        raise RuntimeError("no memory")
    with pytest.raises(contract.UnsupportedApiError, match=r"^a hook: 'sigmas'$"), contract.require_api("a hook"):
        contract.arguments((1, 2), {}, sigmas=3)
    for args, kwargs in (((1, 2), {"y": 3}), ((), {"x": 2, "y": 3})):
        assert contract.arguments(args, kwargs, x=1, y=2) == [2, 3]


def test_same_warning_once(warnings: Any) -> None:
    for name in ("one", "two", "one"):
        with contract.warned(), contract.require_api(name):
            raise KeyError("gone")
    assert [w.split("(")[1].split(")")[0] for w in warnings()] == ["one: 'gone'", "two: 'gone'"]


@loop("before", [False, True])
def test_replays_are_off_until_the_last_of_several_devices_is_done(before: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(cli_args, "disable_comfy_compiler", before, raising=False)
    with ExitStack() as first, ExitStack() as second:
        for device in (first, second):
            device.enter_context(contract.without_replays())
        for device in (first, second):
            assert cli_args.disable_comfy_compiler is True
            device.close()
    assert cli_args.disable_comfy_compiler is before
    with pytest.raises(KeyboardInterrupt), contract.without_replays():
        raise KeyboardInterrupt
    assert cli_args.disable_comfy_compiler is before


def test_a_comfyui_without_a_compiler_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in contract._REPLAYS:
        monkeypatch.delattr(cli_args, name, raising=False)
    options = dict(vars(cli_args))
    with contract.without_replays():
        assert vars(cli_args) == options
    assert vars(cli_args) == options


def test_an_evaluation_that_cannot_be_ended_does_not_end_the_run(warnings: Any, monkeypatch: Any) -> None:
    model_prefetch = pytest.importorskip("comfy.model_prefetch")
    for error in (AttributeError, RuntimeError):
        monkeypatch.setattr(model_prefetch, "cleanup_prefetch_queues", Mock(side_effect=error))
        contract.end_interrupted()
    assert len(warnings()) == 2


@loop(
    ("version", "newer"),
    [("0.16.3", False), ("0.33.0", False), ("0.33.1", True), ("0.100", True), ("1.0.0rc1", True), ("nightly", False)],
)
def test_the_report_says_which_comfyui_it_is(
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
