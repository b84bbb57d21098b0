"""The pack's requirements on ComfyUI: known signatures, and messages about others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from scripts.comfy_pack import pack_module
from tests.loop import loop

contract = pack_module("nodes.adapters.compat")
hooks = pack_module("nodes.adapters.model_hooks")


class Hook(hooks.Hook):  # type: ignore[misc, name-defined]
    def __call__(self, x: Any, pe: Any, mask: Any = None, *, options: Any = None, **rest: Any) -> Any:
        return self.original(x, pe, mask, options=options, **rest)


class Strict(hooks.Hook):  # type: ignore[misc, name-defined]
    def __call__(self, x: Any, mask: Any = None) -> Any:
        return self.original(x, mask)


def module_with(forward: Callable[..., Any]) -> nn.Module:
    return type("Block", (nn.Module,), {"forward": forward})()


@loop(
    "forward",
    [
        lambda self, x, pe, mask=None, options=None: x,
        lambda self, x, pe, mask=None, more=None, options=None: x,
        lambda self, x, pe, mask=None, *, options=None, **others: x,
        lambda self, *args, **kwargs: args,
    ],
)
def test_signatures_that_are_known(forward: Any) -> None:
    contract.check(module_with(forward), Hook())


@loop(
    "forward",
    [
        lambda self, x, pe, mask=None: x,
        lambda self, x, mask=None, pe=None, options=None: x,
        lambda self, y, pe, mask=None, options=None: y,
        lambda self, x, pe, temb, mask=None, options=None: x,
        lambda self, x, pe, mask=None, options=None, *, temb: x,
        lambda self, x: x,
    ],
)
def test_signatures_that_are_not(forward: Any) -> None:
    with pytest.raises(contract.UnsupportedApiError, match=r"^Block\.forward\("):
        contract.check(module_with(forward), Hook())


def test_hook_without_room_for_more_takes_no_more() -> None:
    contract.check(module_with(lambda self, x, mask=None: x), Strict())
    with pytest.raises(contract.UnsupportedApiError, match=r"Block\.forward\(x, mask, more\)"):
        contract.check(module_with(lambda self, x, mask=None, more=None: x), Strict())


def test_forward_that_hides_its_signature_is_not_known() -> None:
    hidden = type("Block", (nn.Module,), {"forward": getattr})()
    with pytest.raises(contract.UnsupportedApiError, match=r"^Block\.forward: .*signature"):
        contract.check(hidden, Hook())


def test_compiled_module_is_unwrapped() -> None:
    compiled = torch.compile(module_with(lambda self, y, mask=None: y), backend="eager")
    with pytest.raises(contract.UnsupportedApiError, match=r"Block\.forward\(y, mask\)"):
        contract.check(compiled, Strict())


def test_errors_of_others_go_through() -> None:
    with pytest.raises(RuntimeError, match="no memory"), contract.require_api("a hook"):
        raise RuntimeError("no memory")
    with pytest.raises(contract.UnsupportedApiError, match=r"^a hook: 'sigmas'$"), contract.require_api("a hook"):
        contract.argument((1, 2), {}, 3, "sigmas")
    assert contract.argument((1, 2), {}, 1, "x") == contract.argument((), {"x": 2}, 1, "x") == 2


def test_same_warning_once(warnings: Any) -> None:
    for name in ("one", "two", "one"):
        with contract.optional_api(name):
            raise KeyError("gone")
    assert [w.split("(")[1].split(")")[0] for w in warnings()] == ["one: 'gone'", "two: 'gone'"]
