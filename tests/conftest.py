"""ComfyUI first on the path, the pack loaded as ComfyUI loads it, and one real server for the whole session."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

from scripts import archive
from scripts.comfy_pack import load_pack, use_comfyui
from scripts.comfy_server import ComfyServer

# What tests reach for in ComfyUI's source folder. `nodes` is there because it is also a folder of this checkout.
COMFYUI_MODULES = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "nodes", "server"}
HOW_TO = "this test needs a real ComfyUI: run it with `make test`, or set COMFYUI_PATH to the folder of ComfyUI"


class NoComfyUI:
    """Import hook that turns "No module named 'comfy'" into what to do about it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in COMFYUI_MODULES:
            raise ModuleNotFoundError(HOW_TO, name=name)
        return None


if os.environ.get("COMFYUI_PATH"):
    use_comfyui()
else:
    sys.meta_path.insert(0, NoComfyUI())  # type: ignore[arg-type]

# Triton reads this when it is first imported, and ComfyUI imports it: its kernels are interpreted, on CPU tensors.
if find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples every time in CI, fresh ones at a desk; no deadline, since machines differ.
hypothesis.settings.register_profile("desk", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    # Playwright's event loop goes on in the main thread until the browser closes: no other test could start one.
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection() -> None:
    """Take what earlier modules left out of the collector's sight.

    ComfyUI calls `gc.collect()` at every turn, and each call walks all that torch, ComfyUI and pytest ever made.
    What a test makes itself is still collected.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pack() -> ModuleType:
    """The root module of the pack, under the name ComfyUI gives it. Submodules: `scripts.comfy_pack.pack_module`."""
    require_comfyui()
    return load_pack()


@pytest.fixture(scope="session")
def server() -> Iterator[ComfyServer]:
    """A running ComfyUI with the pack; one for all tests, so leave no prompt in its queue."""
    require_comfyui()
    with ComfyServer() as running:
        yield running


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive that the registry gets."""
    return archive.pack(tmp_path_factory.mktemp("packed"))


def require_comfyui() -> None:
    """Fail, not skip: a run without ComfyUI has not tested the pack."""
    if not os.environ.get("COMFYUI_PATH"):
        pytest.fail(HOW_TO, pytrace=False)
