"""Test that the tables of docs/performance.md and benchmarks/results/counts.md have the numbers that the code
counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import performance

pytestmark = pytest.mark.usefixtures("pack")  # loaded before a model is built


@pytest.mark.parametrize("name", performance.TABLES)
def test_every_table_is_what_the_code_counts(name: str) -> None:
    text = performance.page_of(name).read_text(encoding="utf-8")
    assert performance.filled(text, {name: performance.TABLES[name]}) == text, "run `python -m benchmarks.performance`"
    assert text.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0].strip()


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

    def table(**conditions: str) -> str:
        result = {"conditions": {"device": "a card", **conditions}, "rows": rows}
        (tmp_path / "card" / "results.json").write_text(json.dumps(result))
        return performance.measured()

    assert "| a card | forward | sdxl | 64x64, batch 1 | ToMA | 1.50x | 1.66x |" in table()
    assert "| broken | refused |" in table()
    assert "unpatched" not in table()
    assert "On a GPU: not measured yet." in table()
    assert "not measured yet" not in table(cuda="13.0")
