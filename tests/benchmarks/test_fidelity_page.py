"""Test that docs/fidelity.md and the pages beside the result files have the numbers of the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity.judge import Conditions
from benchmarks.fidelity.page import (
    ANSWERS,
    GAINED,
    GAINS,
    IMAGES,
    PAGE,
    PLOTS,
    RESULTS,
    SHEETS,
    TABLES,
    renewed,
    results_of,
    sheet,
)
from benchmarks.fidelity.store import Store


def test_the_answers_are_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    models = ["Few-step DiT", "Wan", "Deep UNet", "DiT"]
    assert [m[1] for m in map(ANSWERS.match, text.splitlines()) if m] == models
    assert renewed(text) == text, "write it again with `python -m benchmarks.fidelity.page`"
    wrong = re.sub(r"(\| 4 steps \| quality \|) 0\.\d+", r"\1 0.999", text)
    assert wrong != text
    assert renewed(wrong) == text
    with pytest.raises(KeyError, match="no such setting"):
        renewed(text.replace("| 4 steps | quality |", "| 4 steps | no such setting |"))
    assert [image for image in SHEETS if f"images/{image}" not in text] == []


def test_the_tables_show_the_results_as_they_are() -> None:
    text = TABLES.read_text(encoding="utf-8")
    tables = [name for name in map(results_of, text.splitlines()) if name]
    assert {"dit-20steps-128px-22x3", "deep-4steps-128px-8x3", "few-8steps-64px-22x3"} <= set(tables)
    assert renewed(text) == text, "write it again with `python -m benchmarks.fidelity.page`"
    for image, results in PLOTS.items():
        assert (IMAGES / image).is_file()
        assert results in tables
        assert f"images/{image}" in text
    lines = text.split("\n")
    start = next(i for i, line in enumerate(lines) if results_of(line)) + 2
    lines[start], lines[start + 1] = re.sub(r"0\.\d+", "0.9", lines[start + 1]), lines[start]
    assert renewed("\n".join(lines)) == text != "\n".join(lines), "wrong figures and a wrong order are mended"


def test_what_a_calibration_gains_is_what_was_found(tmp_path: Path) -> None:
    text = GAINED.read_text(encoding="utf-8")
    assert sum(map(bool, map(GAINS.match, text.splitlines()))) == 1
    assert renewed(text) == text, "write it again with `python -m benchmarks.fidelity.page`"
    errors = {"preset": 0.25, "calibrated": 0.125, "single": 0.5, "pictures": 4.56}
    row = errors | {"preset cost": 0.731, "calibrated cost": 0.729, "single cost": 0.741}
    rows = {"deep 8 steps balanced": row, "deep 18 steps balanced": {}, "deep 8 steps fast": {}}
    (tmp_path / "calibrated.json").write_text(json.dumps(rows))
    table = "| Deep UNet | `balanced` | calibrated | single | pictures |\n|---|---|---|---|---|\n| 8 steps | 9 | | | |"
    shown = "| 8 steps | 0.250 for 0.73 | 0.125 for 0.73 | 0.500 for 0.74 | 4.6 |"
    assert renewed(table, tmp_path).endswith(shown)


def test_a_row_or_a_table_without_results_is_an_error(tmp_path: Path) -> None:
    head = "| DiT, 8 steps | error | SSIM |\n|---|---|---|\n"
    with pytest.raises(KeyError, match="no such setting"):
        renewed(f"{head}| no such setting | 0 | 0 |\n")
    with pytest.raises(FileNotFoundError):
        renewed(f"{head}| unmerged | 0 | 0 |\n", tmp_path)
    other = "| stack of the UNet | step 1 |\n|---|---|\n| input.4 | 0.76 |"
    assert renewed(other, tmp_path) == other


@pytest.mark.parametrize("name", SHEETS)
def test_a_sheet_needs_all_of_its_pictures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOMA_CACHE", str(tmp_path))
    results, labels = SHEETS[name]
    stored = json.loads((RESULTS / f"{results}.json").read_text())
    store = Store(Conditions(**stored["conditions"]), RESULTS, tmp_path)
    for setting in labels:
        assert setting in stored["rows"]
        assert sheet(name) is None
        store.keep_pictures(setting, torch.zeros(8, 3, 128, 128))
    drawn = sheet(name)
    assert drawn is not None
    assert (drawn.width, drawn.height > len(labels) * 128) == (8 * 128, True)
