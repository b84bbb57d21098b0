"""Test the metrics of benchmarks.fidelity on pictures with known results."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.fidelity.judge import Conditions, Judge
from benchmarks.fidelity.metrics import measure, relative_error, seam_energy, ssim
from benchmarks.fidelity.report import pareto, plot
from benchmarks.fidelity.settings import Setting
from benchmarks.fidelity.store import Store
from scripts.comfyui import ROOT


@pytest.fixture
def picture() -> torch.Tensor:
    return torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 1.6 - 0.8


def test_known_errors(picture: torch.Tensor) -> None:
    same = measure(picture, picture, picture, picture, window=4)
    assert same["error"].eq(0).all()
    for name in ("ssim", "detail", "seams"):
        assert same[name].tolist() == pytest.approx([1.0, 1.0])
    assert relative_error(1.5 * picture, picture).tolist() == pytest.approx([0.5, 0.5])
    noise = torch.randn(picture.shape, generator=torch.Generator().manual_seed(1))
    assert (ssim(picture + 0.3 * noise, picture) < ssim(picture + 0.05 * noise, picture)).all()


def test_seams_at_window_borders_are_found_and_others_are_not(picture: torch.Tensor) -> None:
    """A window is 4 tokens wide. In banded pictures every second band is brighter. Bands of 16 pixels are as wide as
    windows."""

    def banded(width: int, first: int = 0) -> torch.Tensor:
        bright = (torch.arange(64) + first) // width % 2
        return picture + bright

    plain = seam_energy(picture, window=4)
    assert (seam_energy(banded(16), window=4) > 1.5 * plain).all()
    assert (seam_energy(banded(16, first=8), window=4) < plain).all(), "in the middle of windows"
    small = banded(8)
    assert (seam_energy(small, window=4, token=2) > 1.4 * seam_energy(small, window=4)).all()


def test_the_few_step_model_receives_the_number_of_steps(tmp_path: Path, pack: ModuleType) -> None:
    """A run with half of the steps still tells the model the number of steps of a complete run."""
    from comfy.patcher_extension import WrappersMP

    from demo.models import dit_config, new_dit
    from demo.sampling import DEFAULTS

    save_file(
        new_dit(config=dit_config(64, (1, 1), token=2), to_train=False).state_dict(), tmp_path / "few.safetensors"
    )
    shutil.copyfile(ROOT / "demo" / "weights" / "checker.safetensors", tmp_path / "checker.safetensors")
    own = DEFAULTS["few"]
    about = conditions(model="few", steps=4, dtype="fp32", size=own["size"], cfg=own["cfg"], seeds=1)
    judge = Judge(about, tmp_path)
    passed: list[float] = []

    def watch(executor: Any, x: Any, timestep: Any, context: Any, y: Any, guidance: Any, *more: Any) -> Any:
        passed.extend(guidance.tolist())
        return executor(x, timestep, context, y, guidance, *more)

    def watched(model: Any) -> Any:
        model = model.clone()
        model.add_wrapper(WrappersMP.DIFFUSION_MODEL, watch)
        return model

    half, pictures = judge.row(Setting(watched, steps=0.5))
    assert passed == [4.0] * 4, "two pictures in two steps, and no second prompt"
    assert half["cost"] == pytest.approx(0.5, abs=0.01)
    assert half["error"] > 0.01
    assert pictures.shape == (2, 3, 64, 64)


def test_the_front_holds_what_nothing_beats_and_is_plotted(tmp_path: Path) -> None:
    rows = {
        "unmerged": {"cost": 1.0, "error": 0.0},
        "good": {"cost": 0.5, "error": 0.1},
        "worse and dearer": {"cost": 0.6, "error": 0.2},
        "cheap": {"cost": 0.3, "error": 0.4},
    }
    assert pareto(rows) == ["cheap", "good", "unmerged"]
    plot(tmp_path / "dit.png", {"model": "dit", "steps": 20, "size": 128, "images": 22, "seeds": 3}, rows)
    assert (tmp_path / "dit.png").read_bytes().startswith(b"\x89PNG")


def conditions(**changed: Any) -> Conditions:
    about = {"model": "dit", "weights": "0", "images": 2, "seeds": 2, "steps": 3, "size": 64, "cfg": 2.0, "batch": 2}
    return Conditions(**{**about, "dtype": "bf16", **changed})


def test_rows_and_pictures_survive_and_belong_to_their_conditions(tmp_path: Path) -> None:
    places = tmp_path / "results", tmp_path / "cache"
    store = Store(conditions(), *places)
    store.add("unmerged", {"error": 0.0}, rounding=0.01)
    Store(conditions(), *places).add("a: b", {"error": 0.5})
    assert store.read()["rows"] == {"unmerged": {"error": 0.0}, "a: b": {"error": 0.5}}
    assert store.read()["rounding"] == 0.01
    assert Store(conditions(cfg=1.0), *places).read()["rows"] == {}
    assert store.pictures("a: b") is None
    store.keep_pictures("A: b/2", torch.stack([torch.full((3, 4, 4), -1.0), torch.full((3, 4, 4), 1.0)]))
    strip = store.pictures("A: b/2")
    assert strip is not None
    assert (strip.size, strip.getpixel((0, 0)), strip.getpixel((7, 0))) == ((8, 4), (0, 0, 0), (255, 255, 255))
