"""Test benchmarks.real: metrics of pictures with known results, and the report.

LPIPS has random weights here, because the trained ones cannot be downloaded everywhere. With any weights, equal
pictures have a distance of 0, and more noise gives a larger distance.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.real import compare, report
from benchmarks.real.compare import OTHER_SEED, Array, Score, loaded, measure, pairs_of, psnr, summarise
from benchmarks.real.graphs import Setting, node
from benchmarks.real.pictures import UNMERGED, Folder, Job


def noisy(amount: float, size: int = 96) -> Array:
    """Return a fixed picture plus fixed noise times `amount`."""
    y, x = np.mgrid[:size, :size] / size
    base = np.stack([x, y, 0.5 + 0.3 * np.sin(12 * x)], axis=-1) * 0.6 + 0.2
    noise = np.random.default_rng(0).standard_normal(base.shape)
    return (255 * np.clip(base + amount * noise, 0, 1)).astype(np.uint8)


@pytest.mark.parametrize("name", ["LPIPS", "SSIM"])
def test_more_noise_is_farther(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "LPIPS":
        pytest.importorskip("torchmetrics")
        import torchvision

        alexnet = torchvision.models.alexnet
        monkeypatch.setattr(torchvision.models, "alexnet", lambda weights: alexnet(weights=None))
        torch.manual_seed(0)
    score: Score = compare.METRICS[name]()
    values = [score(noisy(amount), noisy(0.0)) for amount in (0.0, 0.02, 0.1, 0.3)]
    assert values[0] == pytest.approx(0.0 if name == "LPIPS" else 1.0, abs=1e-6)
    assert values == sorted(values, reverse=name == "SSIM")
    assert abs(values[3] - values[0]) > 2 * abs(values[1] - values[0]) > 0


def test_a_missing_library_leaves_its_metric_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.image.lpip", None)
    monkeypatch.setitem(sys.modules, "skimage.metrics", None)
    found, notes = loaded()
    assert list(found) == ["PSNR"]
    assert [note.partition(" is left out (")[0] for note in notes] == ["LPIPS", "SSIM"]
    assert all("pip install" in note for note in notes)


def made(folder: Folder) -> list[Job]:
    """Save pictures of two prompts and two seeds. Merged pictures are noisier than unmerged pictures, but one merged
    picture equals its unmerged counterpart."""
    jobs = []
    for p, prompt in enumerate(("a <script>alert(1)</script> cat", "@@HEAD@@")):
        for seed in (1, 2):
            for setting, amount in ((None, 0.0), (Setting(0.5, "balanced"), 0.05 * (p + seed - 1))):
                about = {"1": node("A", prompt=p, seed=seed, unmerged=setting is None)}
                job = Job(prompt, seed, setting, about)
                picture = noisy(amount + (0.4 if seed == 2 and setting is None else 0), 32)
                Image.fromarray(picture).save(folder.picture(job))
                folder.save(job, folder.picture(job).read_bytes(), 4.0 if setting is None else 2.0 + p, seed == 2)
                jobs.append(job)
    return jobs


def test_summary_by_hand_and_report_files(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out")
    folder.prepare({"device": "cpu"})
    pairs = pairs_of(folder, made(folder))
    measure(pairs, {"PSNR": psnr})
    summaries = summarise(pairs)
    plain, merged, _ = summaries
    shown = [(each.setting, each.pictures, each.seconds) for each in summaries]
    # Only the times of seed 2 count: 4 and 4 s without ToMA, 2 and 3 s with ToMA.
    assert shown == [(UNMERGED, 4, 4.0), ("balanced 0.5", 4, 2.5), (OTHER_SEED, 2, None)]
    assert (plain.speedup, merged.speedup, merged.identical) == (None, pytest.approx(1.6), 1)
    values = [pair.figures["PSNR"] for pair in pairs if pair.setting == "balanced 0.5"]
    assert merged.figures["PSNR"] == pytest.approx(np.mean(values))
    assert plain.figures == {}
    a, b = (np.full((16, 16, 3), grey, np.uint8) for grey in (100, 110))
    assert psnr(a, b) == pytest.approx(20 * np.log10(25.5))

    conditions = {"device": "a card", "comfyui": "0.30.0", "pytorch": "2"}
    said = [*report.notes(summaries, conditions), "LPIPS is left out: because"]
    text = report.write(folder, pairs, summaries, conditions, said).read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert text.count("<figure>") == 4
    for part in ("a &lt;script&gt;alert(1)&lt;/script&gt; cat", "@@HEAD@@</figcaption>", *said[-1:], "1.60x"):
        assert part in text
    assert "1 of 4 pictures equal" in text
    data = json.loads((folder.path / "results.json").read_text())
    assert data["settings"][1]["figures"] == merged.figures
    assert data["conditions"]["device"] == "a card"
    assert len(data["pairs"]) == len(pairs)
