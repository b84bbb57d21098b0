"""Test that the tables of docs/performance.md and benchmarks/results/counts.md have the numbers that the code
counts."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import performance


@pytest.fixture(autouse=True)
def loaded(pack: ModuleType) -> None:
    """Load the pack before a model is built."""


@pytest.mark.parametrize("name", performance.TABLES)
def test_every_table_is_what_the_code_counts(name: str) -> None:
    """If this test fails, run `python -m benchmarks.performance`."""
    text = performance.page_of(name).read_text(encoding="utf-8")
    assert performance.filled(text, {name: performance.TABLES[name]}) == text


def test_every_table_has_markers_and_is_filled() -> None:
    for name in performance.TABLES:
        text = performance.page_of(name).read_text(encoding="utf-8")
        table = text.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0]
        assert table.strip(), name


def test_a_table_without_markers_raises() -> None:
    with pytest.raises(KeyError, match="markers of the table parts"):
        performance.filled("nothing", {"parts": str})


def test_measured_rows_come_from_committed_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    assert "No run" in performance.measured()
    row: dict[str, Any] = {"section": "forward", "model": "sdxl", "size": "64x64", "batch": 1, "variant": "ToMA"}
    rows = [
        {**row, "variant": "unpatched", "speedup": 1.0, "ceiling": 1.0},
        {**row, "speedup": 1.5, "ceiling": 1.66},
        {**row, "variant": "broken", "speedup": None, "ceiling": None},
    ]
    (tmp_path / "card").mkdir()
    result = {"conditions": {"device": "a card"}, "rows": rows}
    (tmp_path / "card" / "results.json").write_text(json.dumps(result))
    table = performance.measured()
    assert "| a card | forward | sdxl | 64x64, batch 1 | ToMA | 1.50x | 1.66x |" in table
    assert "| broken | refused |" in table
    assert "unpatched" not in table
    assert "On a GPU: not measured yet." in table
    result["conditions"]["cuda"] = "13.0"
    (tmp_path / "card" / "results.json").write_text(json.dumps(result))
    assert "not measured yet" not in performance.measured()
