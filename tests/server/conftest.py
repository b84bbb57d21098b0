"""Provide a real server that can load small models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT

# A pack with a loader of small models, which the server loads beside ToMA.
TINY_PACK = """
import sys
sys.path.append({root!r})
from testbed import models

class TinyModel:
    RETURN_TYPES = ("MODEL", "CONDITIONING", "CONDITIONING")
    FUNCTION = "load"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{"kind": (["unet", "flux"],), "seed": ("INT", {{"default": 0}})}}}}

    def load(self, kind, seed):
        model = getattr(models, kind)(seed)
        return model, models.conditioning(model, seed=1), models.conditioning(model, seed=2)

NODE_CLASS_MAPPINGS = {{"TinyModel": TinyModel}}
"""


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Iterator[ComfyServer]:
    folder = tmp_path_factory.mktemp("packs") / "tiny"
    folder.mkdir()
    (folder / "__init__.py").write_text(TINY_PACK.format(root=str(ROOT)))
    with ComfyServer(packs=[folder]) as running:
        yield running
