"""Test that docs/fidelity.md and the pages beside the result files have the numbers of the results."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity.judge import Conditions
from benchmarks.fidelity.page import GAINED, IMAGES, PAGE, PLOTS, RESULTS, SHEETS, TABLES, renewed, results_of, sheet
from benchmarks.fidelity.store import Store


@pytest.mark.parametrize("page", [PAGE, TABLES, GAINED], ids=lambda page: page.stem)
def test_every_table_shows_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert renewed(text) == text, "write it again with `python -m benchmarks.fidelity.page`"
    wrong = re.compile(r"0\.\d{3}( ± | for |, \d)")
    lines = [wrong.sub(r"9.999\1", line) if line.startswith("|") else line for line in text.split("\n")]
    for start in [n for n, line in enumerate(lines) if results_of(line)][:1]:  # rows are ordered by error
        lines[start + 2], lines[start + 3] = lines[start + 3], lines[start + 2]
    assert renewed("\n".join(lines)) == text != "\n".join(lines), "wrong figures and a wrong order are mended"


def test_every_image_is_shown_beside_its_results() -> None:
    page, tables = (path.read_text(encoding="utf-8") for path in (PAGE, TABLES))
    assert [image for image in SHEETS if f"images/{image}" not in page] == []
    for image, results in PLOTS.items():
        assert (IMAGES / image).is_file()
        assert results in map(results_of, tables.splitlines())
        assert f"images/{image}" in tables


def test_a_row_or_a_table_without_results_is_an_error(tmp_path: Path) -> None:
    head = "| DiT, 8 steps | error | SSIM |\n|---|---|---|\n"
    with pytest.raises(KeyError, match="no such setting"):
        renewed(f"{head}| no such setting | 0 | 0 |\n")
    with pytest.raises(KeyError, match="no such setting"):
        renewed("| DiT | setting | error |\n|---|---|---|\n| 8 steps | no such setting | 0 |\n")
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
