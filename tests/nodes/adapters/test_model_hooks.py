"""Test `model_hooks`, which replaces the `forward` of modules and restores it, also after errors."""

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


@loop("foreign", [None, lambda x: x + 1])
def test_hooks_nest_and_a_forward_of_another_pack_is_put_back(foreign: Any) -> None:
    module, hooks_of_module = nn.Identity(), [Doubling(), Doubling()]
    if foreign:
        module.forward = foreign
    with hooks.installed([(module, hook) for hook in hooks_of_module]):
        assert module(3) == (16 if foreign else 12)
    assert vars(module).get("forward") is foreign
    for hook in hooks_of_module:
        assert hook.released == 1
        assert "original" not in vars(hook)


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
