"""Test the functions that all benchmarks share: quantiles, interleaving, gates and result files."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import bench
from benchmarks.bench import Row, Timing, compared, interleave, quantile, red, table, write
from tests.loop import loop

CPU = torch.device("cpu")


def row(variant: str) -> Row:
    return Row("forward", "sdxl", "64x64", 1, variant)


def timing(*seconds: float, output: float = 1.0) -> Timing:
    return Timing(list(seconds), torch.full((1, 4), output))


def test_quantiles_are_interpolated() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.25, 0.5, 1.0)] == [1.0, 1.5, 2.0, 3.0]
    assert quantile([7.0], 0.8) == 7.0


def test_turns_alternate_and_warm_ups_do_not_count() -> None:
    order: list[str] = []

    def case(name: str) -> torch.Tensor:
        order.append(name)
        return torch.full((1,), float(len(order)))

    timings = interleave({n: (lambda n=n: case(n)) for n in "ab"}, 2, CPU)  # type: ignore[misc]
    assert order == list("ababab")
    assert [len(t.seconds) for t in timings.values()] == [2, 2]
    assert timings["b"].output is not None
    assert timings["b"].output.item() == 6


@loop("warmups", [0, 1, 5])
def test_a_limit_holds_in_warm_up_too(warmups: int) -> None:
    calls: list[int] = []

    def case() -> torch.Tensor:
        calls.append(0)
        return torch.zeros(1)

    timings = interleave({"a": case}, 50, CPU, warmups, limit=0.0)
    assert len(timings["a"].seconds) == 1
    assert len(calls) == min(warmups, 1) + 1


def test_no_turn_begins_that_would_end_after_the_limit() -> None:
    def case() -> torch.Tensor:
        time.sleep(0.1)
        return torch.zeros(1)

    begin = time.monotonic()
    timings = interleave({"a": case}, 50, CPU, limit=0.45)
    assert 1 <= len(timings["a"].seconds) <= 3
    assert time.monotonic() - begin < 0.6


def test_speedup_is_the_median_of_the_turns_ratios() -> None:
    """The ratios of the turns are 2, 2 and 1.5, with the median 2. The ratio of the two medians would be 1.5."""
    base, fast = timing(2.0, 20.0, 6.0), timing(1.0, 10.0, 4.0)
    result = compared(row("ToMA"), fast, base)
    assert result.speedup == 2.0
    assert result.p50 == 4.0
    assert result.gate == ""


@pytest.mark.parametrize(
    ("output", "problems", "reason"),
    [
        (float("nan"), [], "the output is not finite"),
        (float("inf"), [], "the output is not finite"),
        (1.0, ["nothing was merged"], "nothing was merged"),
    ],
)
def test_a_red_gate_reports_no_speed(output: float, problems: list[str], reason: str, tmp_path: Path) -> None:
    result = compared(row("ToMA"), timing(1.0, 1.0, output=output), timing(2.0, 2.0), problems)
    assert result.speedup is None
    assert result.gate == reason
    assert reason in red([result])[0]
    assert bench.REFUSED in table([result])
    assert "2.00x" not in table([result])
    with pytest.raises(SystemExit, match=reason):
        bench.finish([result], {"device": "d", "torch": "t"}, tmp_path / "x")
    assert json.loads((tmp_path / "x.json").read_text())["rows"][0]["speedup"] is None


def test_an_output_of_another_shape_is_refused() -> None:
    other = Timing([1.0], torch.zeros(2, 2))
    assert "output of (2, 2)" in compared(row("ToMA"), other, timing(2.0)).gate


def test_files_hold_conditions_and_rows(tmp_path: Path) -> None:
    base = timing(2.0, 2.0)
    rows = [compared(row("unpatched"), base, base), compared(row("ToMA"), timing(1.0, 1.0, output=1.5), base)]
    rows[1].ceiling, rows[1].shares = 2.5, {"merge": 0.01}
    write(tmp_path / "deep" / "x", {"device": "a card", "torch": "2", "dtype": "bf16"}, rows, "a note")
    path = tmp_path / "deep" / "x"
    stored = json.loads(path.with_suffix(".json").read_text())
    assert stored["conditions"]["device"] == "a card"
    assert stored["rows"][1]["speedup"] == 2.0
    assert stored["rows"][1]["error"] == pytest.approx(0.5)
    page = path.with_suffix(".md").read_text()
    assert "2.00x (2.00-2.00)" in page
    assert "merge 1.0%" in page
    assert "a note" in page
