"""Metrics of clips computed by hand, and a run of the command on random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.fidelity import experiments, stages, video
from demo import models
from scripts.comfy_pack import pack_module


def test_flicker_is_what_changes_between_frames() -> None:
    still = torch.rand(2, 3, 1, 8, 8).expand(-1, -1, 5, -1, -1)
    assert torch.equal(video.flicker(still), torch.zeros(2))
    blinking = still.clone()
    blinking[1, :, ::2] += 0.5
    assert video.flicker(blinking).tolist() == pytest.approx([0.0, 0.25], abs=1e-6)


def test_seams_are_found_at_windows_borders() -> None:
    noise = torch.rand(1, 3, 2, 32, 32, generator=torch.Generator().manual_seed(0))
    apart = noise.clone()
    apart[..., 16:] += 2.0  # windows of 8 tokens of 2 pixels
    assert video.seams(noise).item() == pytest.approx(1.0, abs=0.4)
    assert video.seams(apart).item() > 5 * video.seams(noise).item()


def test_a_complete_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**models.WAN_CONFIG, "num_layers": 3}
    network = models.new_wan(0, config=config, to_train=False)
    save_file(network.state_dict(), tmp_path / "wan.safetensors")
    video.main(["--weights", str(tmp_path / "wan.safetensors"), "--clips", "1", "--out", str(tmp_path)])
    assert "| every step: 0.5 |" in capsys.readouterr().out
    rows = json.loads((tmp_path / "wan-4steps-choose.json").read_text())["rows"]
    assert rows["unmerged"]["error"] == 0
    for name, row in rows.items():
        if not name.startswith(("unmerged", "rival")):
            assert row["error"] > 0, name
            assert row["cost"] < 1, name


def test_windows_through_all_frames(pack: ModuleType) -> None:
    core = pack_module("toma_core.windows")
    made = experiments.through_frames(core.make_windows, 4)(6, 8, core.WindowShape.TILE, 8, False, 5)
    assert made.tokens == 5 * 6 * 8
    assert made.counts == (60, 60, 60, 60)  # rows of three
    x = torch.arange(made.tokens).float()[None, :, None]
    split = made.split(x)
    assert torch.equal(made.join(split), x), "every token is in one window"
    frames, columns = split[0, 0, :, 0] // 48, split[0, 0, :, 0] % 8
    assert frames.unique().tolist() == [0, 1, 2, 3, 4]
    assert columns.max() < 4
    update = torch.randn(1, *made.source.shape, 3)
    assert torch.equal(made.add(x.expand(-1, -1, 3), update), x + made.join(update))


def test_a_pattern_of_steps_is_what_a_preset_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In three steps from a nearly finished picture, the first and the last are full and the second is merged."""
    shape = replace(stages.SHAPES["second stage"], patterns=("FCF", "PFF"))
    monkeypatch.setitem(stages.SHAPES, "second stage", shape)
    stages.main(["--clips", "1", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert rows["FCF"] == rows["preset: balanced"] == rows["preset: quality"]
    assert rows["unmerged"]["cost"] > rows["FCF"]["cost"] > rows["PFF"]["cost"]
