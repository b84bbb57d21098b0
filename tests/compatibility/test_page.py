"""Test the sentence of docs/compatibility.md on a preset: how many verdicts stay equal, and which do not."""

from typing import Any

import pytest

from compatibility import page
from compatibility.rows import ROWS

LORA, ATTENTION = ROWS[0], next(row for row in ROWS if row.feature.startswith("Attention multipliers"))
MERGED = {"cell": "merged", "unmerged": {}}


def test_verdicts_under_a_preset_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PRESET", "fast")
    results: dict[str, Any] = page.recorded()
    results["presets"] = {}
    assert page.compare(results, LORA, "sdxl", MERGED)
    assert not page.compare(results, LORA, "flux", None)
    assert not page.compare(results, ATTENTION, "flux", None)
    assert results["presets"] == {"fast": {"LoRA": {"sdxl": True, "flux": False}}}
    tables = page.tables(results)
    assert "Under the preset `fast`, 1 of 2 verdicts equal those in the tables; these differ: LoRA (Flux).\n" in tables
    results["presets"]["fast"]["LoRA"]["flux"] = True
    assert "Under the preset `fast`, 2 of 2 verdicts equal those in the tables.\n" in page.tables(results)
