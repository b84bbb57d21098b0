"""Calibrations judged on other scenes: a small whole run with the trained UNet, and nothing measured twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fidelity import calibrated


def test_a_whole_run_and_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "calibrated.json"
    asked = ["--model", "unet", "--steps", "4", "--preset", "balanced", "--images", "1", "--out", str(out)]
    calibrated.main(asked)
    (row,) = json.loads(out.read_text()).values()
    assert 0 < row["calibrated"] < row["preset"], "on a trained model, and scenes that were not measured"
    assert row["calibrated cost"] <= row["preset cost"] + 0.01
    assert row["calibrated cost"] < 1
    assert "| unet 4 steps cfg 2 balanced |" in capsys.readouterr().out
    monkeypatch.setattr(calibrated, "pack_module", lambda name: pytest.fail("measured again"))
    calibrated.main(asked)
    assert "| unet 4 steps cfg 2 balanced |" in capsys.readouterr().out
