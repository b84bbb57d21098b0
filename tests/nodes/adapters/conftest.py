"""What the pack has warned of."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from scripts.comfy_pack import pack_module


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """warnings(): what the pack has warned of so far in this test."""
    monkeypatch.setattr(pack_module("nodes.adapters.compat"), "_warned", set())
    caplog.set_level(logging.WARNING)
    return lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith("ToMA")]
