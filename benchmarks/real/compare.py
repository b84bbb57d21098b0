"""PSNR, SSIM and LPIPS of merged pictures against unmerged ones, and the means of each setting.

PSNR needs only numpy. SSIM is computed by scikit-image, and LPIPS by torchmetrics (with AlexNet, whose weights are
downloaded at first use). A metric whose library or weights are missing is left out with a note.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .pictures import UNMERGED, Folder, Job, say

# Name of the comparison of unmerged pictures of two seeds, which shows how much unrelated pictures of a prompt differ.
OTHER_SEED = "another seed"
# The PSNR of equal pictures, in place of infinity. Even 8-bit pictures that differ in only one value have a lower PSNR.
PSNR_OF_EQUAL = 120.0

Array = np.ndarray[Any, np.dtype[Any]]
Score = Callable[[Array, Array], float]  # score of two pictures, (H, W, 3) uint8


@dataclass
class Pair:
    """A picture, the unmerged picture of the same prompt and seed, and the pair's scores by the name of the metric."""

    setting: str
    prompt: str
    seed: int
    picture: Path
    twin: Path
    seconds: float | None  # None if the time is not comparable with others
    identical: bool = False  # whether all pixels are equal
    figures: dict[str, float] = field(default_factory=dict)


@dataclass
class Summary:
    """One setting: means of the metrics, and the median of comparable times in seconds."""

    setting: str
    pictures: int
    identical: int
    seconds: float | None
    timed: int
    speedup: float | None
    figures: dict[str, float]


def psnr(picture: Array, twin: Array) -> float:
    """Return the peak signal-to-noise ratio in dB, or 120 for equal pictures."""
    error = np.mean((picture.astype(np.float64) - twin) ** 2)
    return PSNR_OF_EQUAL if error == 0 else float(10 * np.log10(255.0**2 / error))


def load_ssim() -> Score:
    """Return structural similarity (Wang et al., 2004): Gaussian windows of sigma 1.5, mean of the colours."""
    from skimage.metrics import structural_similarity

    settings: dict[str, Any] = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    return lambda picture, twin: float(structural_similarity(picture, twin, channel_axis=2, data_range=255, **settings))


def load_lpips() -> Score:
    """Return LPIPS on AlexNet (Zhang et al., 2018), on the CPU."""
    import torch
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    distance = LearnedPerceptualImagePatchSimilarity(net_type="alex", normalize=True).eval()

    @torch.no_grad()
    def score(picture: Array, twin: Array) -> float:
        a, b = (torch.from_numpy(p.copy()).permute(2, 0, 1)[None] / 255 for p in (picture, twin))
        return float(distance(a, b))

    return score


METRICS: dict[str, Callable[[], Score]] = {"LPIPS": load_lpips, "PSNR": lambda: psnr, "SSIM": load_ssim}


def loaded() -> tuple[dict[str, Score], list[str]]:
    """Return the metrics that are available here, and a note for each unavailable metric."""
    found: dict[str, Score] = {}
    notes = []
    for name, load in METRICS.items():
        try:
            found[name] = load()
        except Exception as error:  # libraries raise many kinds for a missing file, network or version
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            notes.append(f'{name} is left out ({first}). To get it: pip install ".[real]", and a network once')
    return found, notes


def pairs_of(folder: Folder, jobs: Sequence[Job]) -> list[Pair]:
    """Pair every picture with the unmerged one of the same prompt and seed. Also pair every unmerged picture with the
    unmerged one of the next seed."""
    twins = {(job.prompt, job.seed): folder.picture(job) for job in jobs if job.setting is None}
    found = []
    for job in jobs:
        record = folder.record(job) or {}
        seconds = record.get("seconds") if record.get("timed") else None
        found.append(Pair(job.name, job.prompt, job.seed, folder.picture(job), twins[job.prompt, job.seed], seconds))
    for ((prompt, _), twin), ((other, seed), picture) in itertools.pairwise(twins.items()):
        if prompt == other:
            found.append(Pair(OTHER_SEED, prompt, seed, picture, twin, None))
    return found


def measure(pairs: Sequence[Pair], metrics: dict[str, Score]) -> None:
    """Compute the metrics of all pairs, except of an unmerged picture and itself, and write them into the pairs."""
    wanted = [pair for pair in pairs if pair.setting != UNMERGED]
    for number, pair in enumerate(wanted, 1):
        picture, twin = _pixels(pair.picture), _pixels(pair.twin)
        pair.identical = np.array_equal(picture, twin)
        pair.figures = {name: score(picture, twin) for name, score in metrics.items()}
        if number % 20 == 0:
            say(f"compared {number}/{len(wanted)}")


def _pixels(path: Path) -> Array:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def summarise(pairs: Sequence[Pair]) -> list[Summary]:
    """Return one summary for each setting. The first is for unmerged pictures, the last for the comparison with another
    seed."""
    groups: dict[str, list[Pair]] = {UNMERGED: []}
    for pair in sorted(pairs, key=lambda p: p.setting == OTHER_SEED):
        groups.setdefault(pair.setting, []).append(pair)
    found = []
    plain: float | None = None
    for setting, group in groups.items():
        times = [pair.seconds for pair in group if pair.seconds is not None]
        seconds = statistics.median(times) if times else None
        if setting == UNMERGED:
            plain = seconds
        speedup = plain / seconds if plain and seconds and setting != UNMERGED else None
        figures = {name: statistics.fmean(pair.figures[name] for pair in group) for name in group[0].figures}
        identical = sum(pair.identical for pair in group)
        found.append(Summary(setting, len(group), identical, seconds, len(times), speedup, figures))
    return found
