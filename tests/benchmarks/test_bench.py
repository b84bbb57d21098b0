"""Test the functions that all benchmarks share: quantiles, interleaving, gates and result files."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench
from benchmarks.bench import Row, Timing, compared, interleave, red, table, write

CPU = torch.device("cpu")


def row(variant: str) -> Row:
    return Row("forward", "sdxl", "64x64", 1, variant)


def timing(*seconds: float, output: float = 1.0) -> Timing:
    return Timing(list(seconds), torch.full((1, 4), output))


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


def test_no_turn_begins_that_would_end_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn times every case once. By the clock of this test, each turn takes one second."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(bench, "time", clock)

    def case() -> torch.Tensor:
        clock.now += 1.0
        return torch.zeros(1)

    for warmups, limit, counted, seconds in ((1, 4.5, 3, 4.0), (0, 0.0, 1, 1.0), (5, 0.0, 1, 2.0)):
        clock.now = 0.0
        assert interleave({"a": case}, 50, CPU, warmups, limit)["a"].seconds == [1.0] * counted
        assert clock.now == seconds


def test_speedup_is_the_median_of_the_turns_ratios() -> None:
    """In three turns, the time without ToMA is 2, 2 and 1.5 times the time with ToMA. The median of these ratios is 2.
    The ratio of the two median times would be 1.5."""
    result = compared(row("ToMA"), timing(1.0, 10.0, 4.0), timing(2.0, 20.0, 6.0))
    assert (result.speedup, result.p50, result.gate) == (2.0, 4.0, "")


@pytest.mark.parametrize(
    ("output", "problems", "reason"),
    [
        (torch.full((1, 4), float("nan")), [], "the output is not finite"),
        (torch.zeros(2, 2), [], "output of (2, 2)"),
        (torch.ones(1, 4), ["nothing was merged"], "nothing was merged"),
    ],
)
def test_a_red_gate_reports_no_speed(output: torch.Tensor, problems: list[str], reason: str, tmp_path: Path) -> None:
    result = compared(row("ToMA"), Timing([1.0, 1.0], output), timing(2.0, 2.0), problems)
    assert result.speedup is None
    assert reason in result.gate
    assert reason in red([result])[0]
    assert bench.REFUSED in table([result])
    assert "2.00x" not in table([result])
    with pytest.raises(SystemExit, match=re.escape(reason)):
        bench.finish([result], {"device": "d", "torch": "t"}, tmp_path / "x")
    assert json.loads((tmp_path / "x.json").read_text())["rows"][0]["speedup"] is None


def test_files_hold_conditions_and_rows(tmp_path: Path) -> None:
    base = timing(2.0, 2.0)
    rows = [compared(row("unpatched"), base, base), compared(row("ToMA"), timing(1.0, 1.0, output=1.5), base)]
    rows[1].ceiling, rows[1].shares = 2.5, {"merge": 0.01}
    write(tmp_path / "deep" / "x", {"device": "a card", "torch": "2", "dtype": "bf16"}, rows, "a note")
    stored = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert stored["conditions"]["device"] == "a card"
    assert stored["rows"][1]["speedup"] == 2.0
    assert stored["rows"][1]["error"] == pytest.approx(0.5)
    page = (tmp_path / "deep" / "x.md").read_text()
    for part in ("2.00x (2.00-2.00)", "merge 1.0%", "a note"):
        assert part in page
