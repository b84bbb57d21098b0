"""Prepare ComfyUI and the pack for a benchmark, also on a machine without the packages that no benchmark needs."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from scripts.comfy_pack import load_pack, use_comfyui


def prepare(own_attention: bool = True) -> None:
    """Make ComfyUI and the pack importable. own_attention: ComfyUI's own choice of attention, else PyTorch's."""
    use_comfyui(own_attention=own_attention)
    use_stand_ins()
    load_pack()


class _StandIn(ModuleType):
    """An empty package whose every attribute is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(MetaPathFinder, Loader):
    """Finds the packages that ComfyUI imports only for video."""

    names = ("av",)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.names:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing."""


def use_stand_ins() -> None:
    """Let ComfyUI's nodes load on a machine without packages that no benchmark calls."""
    missing = [name for name in _StandIns.names if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing and not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.append(_StandIns())
