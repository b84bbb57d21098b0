"""Test `model_hooks`, which replaces the `forward` of modules and restores it, also after errors."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from scripts.comfy_pack import pack_module
from tests.loop import loop

hooks = pack_module("nodes.adapters.model_hooks")


class Doubling(hooks.Hook):  # type: ignore[misc, name-defined]
    released = 0

    def __call__(self, x: Any) -> Any:
        return 2 * self.original(x)

    def release(self) -> None:
        self.released += 1


def test_hook_stands_in_for_forward_and_is_taken_out() -> None:
    module, hook = nn.Identity(), Doubling()
    with hooks.installed([(module, hook)]):
        assert module(3) == 6
    assert module(3) == 3
    assert "forward" not in vars(module)
    assert "original" not in vars(hook)
    assert hook.released == 1


def test_two_hooks_on_one_module_nest_and_a_forward_of_another_pack_is_put_back() -> None:
    module = nn.Identity()
    foreign = lambda x: x + 1  # noqa: E731
    module.forward = foreign
    with hooks.installed([(module, Doubling()), (module, Doubling())]):
        assert module(3) == 16
    assert vars(module)["forward"] is foreign


@loop("error", [RuntimeError, KeyboardInterrupt])
@loop("while_chosen", [False, True])
def test_hooks_go_after_an_error(error: type[BaseException], while_chosen: bool) -> None:
    module, hook = nn.Identity(), Doubling()

    def chosen() -> Any:
        yield module, hook
        if while_chosen:
            raise error

    with pytest.raises(error), hooks.installed(chosen()):
        raise error
    assert "forward" not in vars(module)
    assert hook.released == 1
