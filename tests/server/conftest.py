"""A real server that can load small models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT


@pytest.fixture(scope="module")
def tiny_server(pack: Any) -> Iterator[ComfyServer]:
    """Run a server that can also load the small models."""
    with ComfyServer(packs=[ROOT / "tests" / "lab.py"]) as running:
        yield running
