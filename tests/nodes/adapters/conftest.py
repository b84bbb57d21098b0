"""The pack's warnings."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from scripts.comfy_pack import pack_module


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """warnings(): return the pack's warnings in this test so far."""
    monkeypatch.setattr(pack_module("nodes.adapters.compat"), "_warned", set())
    caplog.set_level(logging.WARNING)
    return lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith("ToMA")]
