"""Prepare ComfyUI and the pack for a benchmark, with stand-ins for packages that no benchmark needs and for models that
this ComfyUI lacks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.comfy_pack import load_pack, use_comfyui


def prepare(own_attention: bool = True) -> None:
    """Make ComfyUI and the pack importable. own_attention: True for the attention that ComfyUI chooses, False for
    PyTorch's."""
    use_comfyui(own_attention=own_attention)
    use_stand_ins()
    use_newer_models()
    load_pack()


class _StandIn(ModuleType):
    """An empty package. Each of its attributes is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(MetaPathFinder, Loader):
    """Finds stand-ins for packages that ComfyUI imports only for video."""

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


class _NewerModels(MetaPathFinder, Loader):
    """Finds stand-ins for models that are newer than ComfyUI."""

    folders = ("comfy.ldm.qwen_image21",)
    files: Mapping[str, str] = {"comfy.ldm.qwen_image21.model": "qwen_image21.py"}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in self.folders:
            return ModuleSpec(name, self, is_package=True)
        file = self.files.get(name)
        return importlib.util.spec_from_file_location(name, Path(__file__).with_name(file)) if file else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing, because the module is a folder, which has no code."""


def use_newer_models() -> None:
    """Let models that are newer than ComfyUI be imported. If ComfyUI has one of these models itself, ComfyUI's own is
    imported. Call this function before the pack is loaded."""
    if not any(isinstance(finder, _NewerModels) for finder in sys.meta_path):
        sys.meta_path.append(_NewerModels())
