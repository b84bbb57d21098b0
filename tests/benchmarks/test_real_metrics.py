"""benchmarks.real: metrics on pictures with known results, and messages about unavailable metrics.

Weights cannot be downloaded everywhere, so the networks are random here: equal pictures must still have a distance of
0, and more noise a larger one. Tests of timm, open_clip and torchmetrics need the `real` extra.
"""

from __future__ import annotations

import json
import sys
import urllib.error
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from skimage.metrics import structural_similarity

from benchmarks.real import measure, metrics, report
from benchmarks.real.measure import OTHER_SEED, Pair, Results, pairs_of, summarise
from benchmarks.real.metrics import METRICS, CosineDistance, LeftOutError, Metric, Picture, TextSimilarity, psnr, ssim
from benchmarks.real.pictures import UNMERGED, Folder, Job
from tests.loop import loop

PSNR, SSIM = (next(metric for metric in METRICS if metric.name == name) for name in ("psnr", "ssim"))


def noisy(amount: float, size: int = 96) -> Image.Image:
    """Return the same picture with the same noise at a given strength."""
    y, x = np.mgrid[:size, :size] / size
    base = np.stack([x, y, 0.5 + 0.3 * np.sin(12 * x)], axis=-1) * 0.6 + 0.2
    noise = np.random.default_rng(0).standard_normal(base.shape)
    return Image.fromarray((255 * np.clip(base + amount * noise, 0, 1)).astype(np.uint8))


@pytest.fixture
def pictures(tmp_path: Path) -> list[Picture]:
    """Return pictures without noise and with increasing noise."""
    found = []
    for index, amount in enumerate((0.0, 0.02, 0.1, 0.3)):
        path = tmp_path / f"{index}.png"
        noisy(amount).save(path)
        found.append(Picture(path))
    return found


def check_distance(score: Callable[[Picture, Picture, str], float], pictures: Sequence[Picture]) -> None:
    plain = pictures[0]
    values = [score(picture, plain, "") for picture in pictures]
    assert values[0] == pytest.approx(0.0, abs=1e-6)
    assert values == sorted(values)
    assert values[1] > 0
    assert values[3] > 2 * values[1]


def test_psnr_by_hand(tmp_path: Path) -> None:
    for name, grey in (("a", 100), ("b", 110)):
        Image.new("RGB", (16, 16), (grey, grey, grey)).save(tmp_path / f"{name}.png")
    a, b = Picture(tmp_path / "a.png"), Picture(tmp_path / "b.png")
    assert psnr(a, b) == pytest.approx(20 * np.log10(25.5))
    assert psnr(a, a) == 120


def test_ssim_as_scikit_image_has_it(pictures: list[Picture]) -> None:
    settings: dict[str, Any] = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    plain = pictures[0]
    assert ssim(plain, plain) == 1.0
    for picture in pictures[1:]:
        expected = structural_similarity(picture.array, plain.array, channel_axis=2, data_range=255, **settings)
        assert ssim(picture, plain) == pytest.approx(expected, abs=1e-4)


def test_equal_pixels_are_equal_whatever_the_file_says(tmp_path: Path) -> None:
    about = PngInfo()
    about.add_text("prompt", "another graph")
    noisy(0.1).save(tmp_path / "a.png")
    noisy(0.1).save(tmp_path / "b.png", pnginfo=about)
    noisy(0.2).save(tmp_path / "c.png")
    a, b, c = (Picture(tmp_path / f"{name}.png") for name in "abc")
    assert a.path.read_bytes() != b.path.read_bytes()
    assert a.digest == b.digest != c.digest


def random_embed() -> Callable[[Image.Image], torch.Tensor]:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 5, stride=3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 5))

    @torch.no_grad()
    def embed(image: Image.Image) -> torch.Tensor:
        return network(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255).square().mean((2, 3))[0]

    return embed


def test_cosine_distance_grows_with_noise(pictures: list[Picture]) -> None:
    check_distance(CosineDistance(random_embed()), pictures)


def test_cosine_distance_by_hand(pictures: list[Picture]) -> None:
    vectors = {p.digest: torch.tensor(v) for p, v in zip(pictures, ([2.0, 0.0], [1.0, 1.0], [0.0, 5.0]), strict=False)}
    by_image = {p.image.tobytes(): vectors[p.digest] for p in pictures[:3]}
    distance = CosineDistance(lambda image: by_image[image.tobytes()])
    assert distance(pictures[1], pictures[0]) == pytest.approx(1 - 2**-0.5)
    assert distance(pictures[2], pictures[0]) == pytest.approx(1.0)
    similarity = TextSimilarity(lambda image: by_image[image.tobytes()], lambda text: torch.tensor([0.0, len(text)]))
    assert similarity(pictures[2], pictures[0], "cat") == pytest.approx(1.0)
    assert similarity(pictures[1], pictures[0], "cat") == pytest.approx(2**-0.5)


@loop(
    ("name", "module"),
    [
        ("dino", "timm"),
        ("lpips", "torchmetrics.image.lpip"),
        ("clip_t", "open_clip"),
        ("fid", "torchmetrics.image.fid"),
    ],
)
def test_missing_library_is_said(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = next(metric for metric in (*METRICS, metrics.FID) if metric.name == name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LeftOutError, match=rf"^{metric.title} left out: a library is missing .*; to get it: pip"):
        metrics.load(metric, "cpu")


def test_missing_weights_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> Any:
        raise urllib.error.URLError("no network\nand more lines")

    with pytest.raises(LeftOutError, match=r"^SSIM left out: its weights could not be loaded .*to get them: run"):
        metrics.load(replace(SSIM, load=load), "cpu")


# With the `real` extra.


def test_dino(pictures: list[Picture]) -> None:
    pytest.importorskip("timm")
    torch.manual_seed(0)
    check_distance(metrics.load_dino("cpu", pretrained=False), pictures)


def test_clip_distinguishes_prompts(pictures: list[Picture]) -> None:
    pytest.importorskip("open_clip")
    torch.manual_seed(0)
    score = metrics.load_clip("cpu", pretrained=False)
    a, b = (score(pictures[0], pictures[0], prompt) for prompt in ("a cat", "two dogs"))
    assert a != b
    assert max(abs(a), abs(b)) <= 1
    assert score(pictures[0], pictures[3], "a cat") == a


def test_lpips(pictures: list[Picture], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchmetrics")
    import torchvision

    alexnet = torchvision.models.alexnet
    monkeypatch.setattr(torchvision.models, "alexnet", lambda weights: alexnet(weights=None))
    torch.manual_seed(0)
    check_distance(metrics.load_lpips("cpu"), pictures)


def test_fid(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    pytest.importorskip("torch_fidelity")

    class Features(torch.nn.Module):
        num_features = 3

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.float().mean((2, 3)) / 255

    def group(shift: int) -> list[Picture]:
        found = []
        for index in range(6):
            path = tmp_path / f"{shift}-{index}.png"
            grey = np.random.default_rng(index).integers(0, 100, 3) + shift
            Image.new("RGB", (299, 299), tuple(map(int, grey))).save(path)
            found.append(Picture(path))
        return found

    distance = metrics.load_fid("cpu", feature=Features())
    plain, near, far = (distance(group(shift), group(0)) for shift in (0, 51, 102))
    assert plain == pytest.approx(0.0, abs=1e-5)
    # Equal covariances: the squared distance of the means, 0.2 and 0.4 in three colours.
    assert near == pytest.approx(3 * 0.2**2, rel=1e-2)
    assert far == pytest.approx(3 * 0.4**2, rel=1e-2)
    with pytest.raises(ValueError, match="two pictures"):
        distance(group(0)[:1], group(0)[:1])


@pytest.mark.parametrize(("name", "module"), [("dino", "timm"), ("lpips", "torchmetrics"), ("clip_t", "open_clip")])
def test_weights_that_are_nowhere(name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(module)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)

    def no_network(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    metric = next(metric for metric in METRICS if metric.name == name)
    with pytest.raises(LeftOutError, match="weights could not be loaded"):
        metrics.load(metric, "cpu")


# From pictures to the report.


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(tmp_path / "out")
    found.prepare({"device": "cpu"})
    return found


def made(folder: Folder) -> list[Job]:
    """Make pictures of two prompts and two seeds; merged ones are noisier, except one that equals its unmerged
    picture."""
    from benchmarks.real.graphs import Setting

    jobs = []
    for p, prompt in enumerate(("a <script>alert(1)</script> cat", "@@HEAD@@")):
        for seed in (1, 2):
            for setting, amount in ((None, 0.0), (Setting(0.5, "balanced"), 0.05 * (p + seed - 1))):
                job = Job(prompt, seed, setting, {}, f"{p}-{seed}-{amount:g}-{setting is None}")
                noisy(amount + (0.4 if seed == 2 and setting is None else 0), 32).save(folder.picture(job))
                folder.save(job, folder.picture(job).read_bytes(), 4.0 if setting is None else 2.0 + p, seed == 2)
                jobs.append(job)
    return jobs


def test_scores_are_cached_and_a_failing_metric_is_skipped(folder: Folder) -> None:
    jobs = made(folder)
    calls = []

    def count(_: str) -> metrics.Score:
        return lambda picture, twin, prompt: float(len(calls.append(prompt) or calls))

    def broken(*_: object) -> float:
        raise RuntimeError("CUDA out of memory\nmore")

    counted = Metric("counted", "Counted", "1", count)
    failing = Metric("failing", "Failing", "1", lambda _: broken)
    for _ in range(2):
        pairs = pairs_of(folder, jobs)
        said = measure.measure(folder, pairs, "cpu", [counted, failing, PSNR])
        assert said == ["Failing left out: it failed (CUDA out of memory); measure on the processor with --device cpu"]
        merged = [pair for pair in pairs if pair.setting == "balanced 0.5"]
        assert all({"counted", "psnr"} == set(pair.figures) for pair in merged)
    # Unmerged pictures have no distance; pictures of the same pixels are measured once.
    assert len(calls) <= 6
    (folder.path / "figures.json").write_text("{")
    before = len(calls)
    measure.measure(folder, pairs_of(folder, jobs), "cpu", [counted])
    assert len(calls) > before


def test_summary_by_hand(folder: Folder) -> None:
    pairs = pairs_of(folder, made(folder))
    measure.measure(folder, pairs, "cpu", [PSNR, SSIM])
    plain, merged, other = summarise(pairs, [PSNR, SSIM])
    assert [plain.setting, merged.setting, other.setting] == [UNMERGED, "balanced 0.5", OTHER_SEED]
    assert (plain.pictures, merged.pictures, other.pictures) == (4, 4, 2)
    # Of each setting the runs of seed 2 are timed: 4 and 4 s, 2 and 3 s.
    assert (plain.seconds, merged.seconds, other.seconds) == (4.0, 2.5, None)
    assert merged.speedup == pytest.approx(1.6)
    assert plain.speedup is None
    assert merged.identical == 1
    values = [pair.figures["psnr"] for pair in pairs if pair.setting == "balanced 0.5"]
    assert merged.figures["psnr"]["mean"] == pytest.approx(np.mean(values))
    assert merged.figures["psnr"]["deviation"] == pytest.approx(np.std(values, ddof=1))
    assert merged.figures["psnr"]["worst"] == min(values)
    assert plain.figures == {}


def test_report_files(folder: Folder) -> None:
    pairs = pairs_of(folder, made(folder))
    measure.measure(folder, pairs, "cpu", [PSNR, SSIM])
    summaries = summarise(pairs, [PSNR, SSIM])
    summaries[1].fid = 12.5
    conditions = {"device": "a card", "comfyui": "0.30.0", "pytorch": "2"}
    page = report.write(folder, Results(pairs, summaries, ["CLIP-T left out: because"]), conditions)
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "a &lt;script&gt;alert(1)&lt;/script&gt; cat" in text
    assert text.count("<figure ") == 4
    assert "@@HEAD@@</figcaption>" in text
    assert text.count("@@") == 4  # two pictures of that prompt
    for part in ("CLIP-T left out: because", "1 of 4 pictures equal", "FID of fewer than 2048", "1.60x", "12.50"):
        assert part in text
    data = json.loads((folder.path / "results.json").read_text())
    assert data["settings"][1]["figures"]["psnr"]["mean"] == summaries[1].figures["psnr"]["mean"]
    assert data["conditions"]["device"] == "a card"
    assert (folder.path / "summary.csv").read_text().splitlines()[0].startswith("setting,pictures,DINO distance")
    assert len((folder.path / "pairs.csv").read_text().splitlines()) == 1 + len(pairs)


def test_fid_that_cannot_be_had_is_said(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[Pair] = pairs_of(folder, made(folder))
    measure.measure(folder, pairs, "cpu", [PSNR])
    summaries = summarise(pairs, [PSNR])
    nan = "FID left out: it failed (it came out as nan; more pictures may help)"
    for value, said in ((3.5, []), (float("nan"), [nan])):
        fid = replace(metrics.FID, load=lambda _, value=value: lambda a, b: value, packages="")
        monkeypatch.setattr(measure, "FID", fid)
        assert measure.add_fid(summaries, pairs, "cpu") == said
    assert summaries[1].fid == 3.5
    assert summaries[0].fid is None
