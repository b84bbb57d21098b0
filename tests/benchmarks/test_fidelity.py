"""The figures of benchmarks.fidelity on pictures whose answer is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.fidelity.metrics import high_frequency_energy, measure, psnr, relative_error, seam_energy, ssim
from benchmarks.fidelity.report import pareto, table


@pytest.fixture
def picture() -> torch.Tensor:
    return torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 1.6 - 0.8


def test_a_picture_is_no_distance_from_itself(picture: torch.Tensor) -> None:
    figures = measure(picture, picture, picture, picture, window=4)
    assert figures["distance"].eq(0).all()
    for name in ("ssim", "detail", "seams"):
        assert figures[name].tolist() == pytest.approx([1.0, 1.0])


def test_known_errors(picture: torch.Tensor) -> None:
    assert relative_error(1.5 * picture, picture).tolist() == pytest.approx([0.5, 0.5])
    # An error of 0.1 everywhere in a range of 2: 20 log10(2 / 0.1).
    assert psnr(picture + 0.1, picture).tolist() == pytest.approx([26.0206] * 2, abs=1e-3)
    noise = torch.randn(picture.shape, generator=torch.Generator().manual_seed(1))
    assert (ssim(picture + 0.3 * noise, picture) < ssim(picture + 0.05 * noise, picture)).all()


def test_blur_lowers_and_noise_raises_detail(picture: torch.Tensor) -> None:
    blurred = torch.nn.functional.avg_pool2d(picture, 3, 1, 1)
    noise = torch.randn(picture.shape, generator=torch.Generator().manual_seed(1))
    plain = high_frequency_energy(picture)
    assert (high_frequency_energy(blurred) < plain).all()
    assert (high_frequency_energy(picture + noise) > plain).all()


def test_seams_at_window_borders_are_found_and_others_are_not(picture: torch.Tensor) -> None:
    plain = seam_energy(picture, window=4)
    at_borders, at_tokens = picture.clone(), picture.clone()
    # Windows of 4 tokens of 4 pixels: every second band of 16 pixels is brighter, then bands of 8 off the borders.
    bands = torch.arange(64)
    at_borders[..., (bands // 16) % 2 == 1] += 1.0
    at_tokens[..., ((bands + 8) // 16) % 2 == 1] += 1.0
    assert (seam_energy(at_borders, window=4) > 1.5 * plain).all()
    assert (seam_energy(at_tokens, window=4) < plain).all()


def test_the_front_holds_what_nothing_beats() -> None:
    rows = {
        "unmerged": {"cost": 1.0, "distance": 0.0},
        "good": {"cost": 0.5, "distance": 0.1},
        "worse and dearer": {"cost": 0.6, "distance": 0.2},
        "cheap": {"cost": 0.3, "distance": 0.4},
    }
    assert pareto(rows) == ["cheap", "good", "unmerged"]
    text = table({"model": "dit"}, rows, ("cost", "distance"))
    assert "| good * | 0.500 | 0.100 |" in text
    assert "| worse and dearer | 0.600 | 0.200 |" in text


def test_table_csv_and_plot_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.fidelity.report import write

    file = tmp_path / "dit.json"
    rows = {"unmerged": {"cost": 1.0, "distance": 0.0}, "ratio: 0.5": {"cost": 0.6, "distance": 0.25}}
    write(file, {"model": "dit", "steps": 20, "size": 128}, rows, ("distance", "cost"))
    assert file.with_suffix(".csv").read_text().splitlines()[2] == "ratio: 0.5,0.25,0.6"
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert file.with_suffix(".md").read_text() in capsys.readouterr().out
