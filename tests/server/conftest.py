"""Provide a real server that can load small models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.comfy_server import ComfyServer

TINY_MODELS = Path(__file__).with_name("tiny_models.py")


@pytest.fixture(scope="module")
def tiny_server(pack: Any) -> Iterator[ComfyServer]:
    with ComfyServer(packs=[TINY_MODELS]) as running:
        yield running
