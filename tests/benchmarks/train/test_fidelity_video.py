"""Test metrics of clips against values computed by hand. Also run the command of benchmarks.fidelity.video on random
weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.fidelity import video
from demo import models


def test_flicker_is_what_changes_between_frames() -> None:
    still = torch.rand(2, 3, 1, 8, 8).expand(-1, -1, 5, -1, -1)
    assert torch.equal(video.flicker(still), torch.zeros(2))
    blinking = still.clone()
    blinking[1, :, ::2] += 0.5
    assert video.flicker(blinking).tolist() == pytest.approx([0.0, 0.25], abs=1e-6)


def test_seams_are_found_at_windows_borders() -> None:
    noise = torch.rand(1, 3, 2, 32, 32, generator=torch.Generator().manual_seed(0))
    apart = noise.clone()
    apart[..., 16:] += 2.0  # a window is 8 tokens wide, a token 2 pixels
    assert video.seams(noise).item() == pytest.approx(1.0, abs=0.4)
    assert video.seams(apart).item() > 5 * video.seams(noise).item()


def test_a_complete_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**models.WAN_CONFIG, "num_layers": 3}
    network = models.new_wan(0, config=config, to_train=False)
    save_file(network.state_dict(), tmp_path / "wan.safetensors")
    video.main(["--weights", str(tmp_path / "wan.safetensors"), "--clips", "1", "--out", str(tmp_path)])
    assert "every step: 0.5 {" in capsys.readouterr().err
    rows = json.loads((tmp_path / "wan-4steps-choose.json").read_text())["rows"]
    assert rows["unmerged"]["error"] == 0
    for name, row in rows.items():
        if not name.startswith(("unmerged", "rival")):
            assert row["error"] > 0, name
            assert row["cost"] < 1, name
