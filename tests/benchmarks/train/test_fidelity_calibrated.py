"""Test calibrations of the trained UNet, evaluated on scenes that calibration has not seen."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity import calibrated, judge
from benchmarks.fidelity.settings import tiny
from demo.conditioning import conditioning, empty_latent, seeded_noise
from demo.sampling import FOLDER, defaults
from demo.scenes import scene_from_seed
from scripts.comfy_pack import pack_module

SIDE = 64  # in pixels: half of the training size


def test_a_run_and_a_repeated_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "calibrated.json"
    asked = ["--steps", "4", "--images", "1", "--out", str(out)]
    calibrated.main(asked)
    (row,) = json.loads(out.read_text()).values()
    assert 0 < row["calibrated"] < row["preset"], "on a trained model, and scenes that were not measured"
    assert row["calibrated cost"] <= row["preset cost"] + 0.01
    assert row["calibrated cost"] < 1
    assert 4 < row["pictures"] < 7, "as the help page says, with the runs that it makes"
    assert "deep 4 steps balanced {" in capsys.readouterr().out
    monkeypatch.setattr(calibrated, "pack_module", lambda name: pytest.fail("measured again"))
    calibrated.main(asked)


def test_a_broken_stack_is_found() -> None:
    """Triple the residual of one stack of the trained UNet. Calibration must leave this stack unmerged."""
    model = judge.load("deep", FOLDER / "deep.safetensors", "fp32")
    with torch.no_grad():
        model.model.diffusion_model.output_blocks[2][1].proj_out.weight.mul_(3.0)
    calibrating, own = pack_module("nodes.calibrate"), defaults("deep", 4)
    task = calibrating.Task(
        positive=conditioning([scene_from_seed(20_000)]),
        negative=conditioning([None]),
        latent=empty_latent(SIDE, SIDE, 1),
        steps=4,
        cfg=own["cfg"],
        sampler_name=own["sampler"],
        scheduler=own["scheduler"],
        noise=seeded_noise([20_000], SIDE, SIDE),
    )
    found = calibrating.calibrate(model, task, "balanced", overrides=tiny(model))
    before, after = found.errors
    assert after < before / 2
    assert found.profile.ratios["output.2.0 - output.2.6"][0] == 0, "unmerged while there is most noise"
