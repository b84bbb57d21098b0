"""Run every row of the compatibility matrix, and compare its verdicts with those of docs/compatibility.md."""

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compatibility import page
from compatibility.judge import judge
from compatibility.kit import PRESET, AbsentError, Kit
from compatibility.row import ALL, FAMILIES, Row
from compatibility.rows import ROWS

WRITE = bool(os.environ.get("TOMA_WRITE_COMPATIBILITY"))


@pytest.fixture(scope="session")
def kits(pack: Any) -> Iterator[dict[str, Kit]]:
    """Build the tiny models. Use one thread, so that the order of sums is always the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {family: Kit(family) for family in ALL}
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def results(pack: Any) -> Iterator[dict[str, Any]]:
    """Yield the recorded verdicts. With TOMA_WRITE_COMPATIBILITY=1, write the new verdicts and the page at the end."""
    results = page.recorded()
    yield results
    if WRITE:
        page.write(results)


def cases() -> Iterator[Any]:
    for row in ROWS:
        name = re.sub(r"\W+", "-", row.feature.partition("(")[0]).strip("-")
        for family in row.expected:
            # On older releases of ComfyUI, families that FAMILIES leaves out are tested by
            # tests/nodes/adapters/families.
            marks = [pytest.mark.compat] if row.quick and family in FAMILIES else []
            yield pytest.param(row, family, id=f"{name}-{family}", marks=marks)


@pytest.mark.parametrize(("row", "family"), list(cases()))
def test_row(row: Row, family: str, kits: dict[str, Kit], results: dict[str, Any]) -> None:
    known = page.versions()["comfyui"] == results.get("comfyui")
    try:
        verdict = page.as_json(judge(row, kits[family]))
    except AbsentError as absent:
        if known and not row.pack:
            raise
        pytest.skip(str(absent))
    except Exception:
        if PRESET:
            page.compare(results, row, family, None)
        raise
    if PRESET:
        assert page.compare(results, row, family, verdict), f"under {PRESET}: {verdict}"
    elif WRITE:
        page.record(results, row, family, verdict)
    elif known and not row.pack:
        assert verdict == results["rows"][row.feature][family], "docs/compatibility.md is stale: run make compatibility"


@pytest.mark.skipif(WRITE, reason="the page is written at the end of this run")
def test_page_has_every_row_and_no_other() -> None:
    recorded = page.recorded()["rows"]
    assert list(recorded) == [row.feature for row in ROWS if row.feature in recorded]
    for row in ROWS:
        assert row.pack or set(recorded[row.feature]) == set(row.expected), f"run make compatibility for {row.feature}"
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.updated(text, page.recorded()) == text, "the tables are not those of compatibility/results.json"
    assert all(f"| {row.feature} " in text for row in ROWS)
