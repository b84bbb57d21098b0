"""Metrics: error of a picture against its unmerged counterpart, agreement with its prompt, and distance of two sets.

PSNR and SSIM need only numpy. The others need libraries (the `real` extra) and weights that these download at first
use. Unavailable metrics are skipped with a message.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .pictures import say

# The paper names DINO (Caron et al., 2021) and CLIP-T and leaves backbone and distance open. Both figures come from
# DreamBooth (Ruiz et al., 2022): cosine similarities, DINO ViT-S/16 and CLIP ViT-B/32.
DINO_MODEL = "vit_small_patch16_224.dino"
CLIP_MODEL, CLIP_WEIGHTS = "ViT-B-32-quickgelu", "openai"
LPIPS_NET = "alex"
# Above the value of 8-bit pictures that differ in one value; equal pictures have no finite value.
PSNR_OF_EQUAL = 120.0
INSTALL = 'pip install ".[real]" in the checkout of ComfyUI-ToMA'

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Picture:
    """A picture file, read on demand."""

    path: Path

    @functools.cached_property
    def digest(self) -> str:
        """Return a digest of the pixels: files of equal pictures differ, because ComfyUI writes the graph into them."""
        array = self.array
        return hashlib.sha256(repr(array.shape).encode() + array.tobytes()).hexdigest()[:20]

    @property
    def image(self) -> Image.Image:
        return _opened(self.path)

    @property
    def array(self) -> Array:
        """Return the pixels, (H, W, 3) uint8."""
        return np.asarray(self.image)


# Scores a picture against its unmerged counterpart; both have the prompt.
Score = Callable[[Picture, Picture, str], float]
SetDistance = Callable[[Sequence[Picture], Sequence[Picture]], float]


@dataclass(frozen=True)
class Metric:
    """A metric of single pictures (`load` returns a `Score`), or of sets (a `SetDistance`).

    `identity` names its implementation and is part of the cache's key. `alone`: unmerged pictures have it too.
    """

    name: str
    title: str
    identity: str
    load: Callable[[str], Any]
    packages: str = ""
    higher_is_closer: bool = False
    alone: bool = False


def psnr(picture: Picture, twin: Picture, _: str = "") -> float:
    """Compute the peak signal-to-noise ratio in dB; 120 for equal pictures."""
    error = np.mean((picture.array.astype(np.float64) - twin.array) ** 2)
    return PSNR_OF_EQUAL if error == 0 else float(10 * np.log10(255.0**2 / error))


def ssim(picture: Picture, twin: Picture, _: str = "") -> float:
    """Compute the structural similarity (Wang et al., 2004): Gaussian window of sigma 1.5 cut at 11 values, mean of the
    colours, without the border."""
    a, b = (p.array.astype(np.float32) / 255 for p in (picture, twin))
    mean_a, mean_b = _gaussian(a), _gaussian(b)
    var_a, var_b = _gaussian(a * a) - mean_a**2, _gaussian(b * b) - mean_b**2
    covariance = _gaussian(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    top = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return float(np.mean(top / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))))


def _gaussian(x: Array) -> Array:
    weights = np.exp(-0.5 * (np.arange(-5, 6) / 1.5) ** 2).astype(np.float32)
    weights /= weights.sum()
    for axis in (0, 1):
        length = x.shape[axis] - 10
        if length < 1:
            raise ValueError("pictures must be at least 11 pixels wide and high")
        windows = [x[i : i + length] if axis == 0 else x[:, i : i + length] for i in range(11)]
        x = sum(w * window for w, window in zip(weights, windows, strict=True))
    return x


class CosineDistance:
    """1 - cosine similarity of the features of two pictures. embed: picture -> 1-D tensor."""

    def __init__(self, embed: Callable[[Image.Image], Any]) -> None:
        self._embed = embed
        self._known: dict[str, Any] = {}

    def features(self, picture: Picture) -> Any:
        """Return features of length 1, computed once for each picture."""
        if picture.digest not in self._known:
            features = self._embed(picture.image).double()
            self._known[picture.digest] = features / features.norm()
        return self._known[picture.digest]

    def __call__(self, picture: Picture, twin: Picture, _: str = "") -> float:
        if picture.digest == twin.digest:
            return 0.0
        return 1.0 - float(self.features(picture) @ self.features(twin))


class TextSimilarity:
    """Cosine similarity of a picture and its prompt. embed, embed_text: -> 1-D tensor."""

    def __init__(self, embed: Callable[[Image.Image], Any], embed_text: Callable[[str], Any]) -> None:
        self._pictures = CosineDistance(embed)
        self._embed_text = functools.cache(embed_text)

    def __call__(self, picture: Picture, _: Picture, prompt: str) -> float:
        text = self._embed_text(prompt).double()
        return float(self._pictures.features(picture) @ text / text.norm())


def load_dino(device: str, pretrained: bool = True) -> Score:
    """DINO ViT-S/16 of timm: the features that its linear classifiers are trained on (class token)."""
    import timm
    import torch

    model = timm.create_model(DINO_MODEL, pretrained=pretrained, num_classes=0).to(device).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))

    @torch.no_grad()
    def embed(image: Image.Image) -> Any:
        return model(transform(image)[None].to(device))[0].cpu()

    return CosineDistance(embed)


def load_clip(device: str, pretrained: bool = True) -> Score:
    """CLIP ViT-B/32 of open_clip with the weights of OpenAI; prompts are cut after 77 tokens."""
    import open_clip
    import torch

    weights = CLIP_WEIGHTS if pretrained else None
    model, _, transform = open_clip.create_model_and_transforms(CLIP_MODEL, pretrained=weights, device=device)
    model.eval()
    tokenizer = open_clip.get_tokenizer(CLIP_MODEL)

    @torch.no_grad()
    def embed(image: Image.Image) -> Any:
        return model.encode_image(transform(image)[None].to(device))[0].cpu()

    @torch.no_grad()
    def embed_text(text: str) -> Any:
        return model.encode_text(tokenizer([text]).to(device))[0].cpu()

    return TextSimilarity(embed, embed_text)


def load_lpips(device: str) -> Score:
    """LPIPS on AlexNet (Zhang et al., 2018), by torchmetrics."""
    import torch
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    distance = LearnedPerceptualImagePatchSimilarity(net_type=LPIPS_NET, normalize=True).to(device).eval()

    @torch.no_grad()
    def score(picture: Picture, twin: Picture, _: str = "") -> float:
        a, b = (torch.from_numpy(p.array.copy()).permute(2, 0, 1)[None].to(device) / 255 for p in (picture, twin))
        return float(distance(a, b))

    return score


def load_fid(device: str, feature: Any = 2048) -> SetDistance:
    """Frechet distance of Inception features, by torchmetrics and torch-fidelity. `feature`: another extractor."""
    import torch
    from torchmetrics.image.fid import FrechetInceptionDistance

    metric = FrechetInceptionDistance(feature=feature).to(device)

    def distance(pictures: Sequence[Picture], twins: Sequence[Picture]) -> float:
        if len(pictures) < 2 or len(twins) < 2:
            raise ValueError("it needs two pictures of each kind, better thousands")
        metric.reset()
        for group, real in ((twins, True), (pictures, False)):
            for picture in group:
                metric.update(torch.from_numpy(picture.array.copy()).permute(2, 0, 1)[None].to(device), real=real)
        return float(metric.compute())

    return distance


METRICS = (
    Metric("dino", "DINO distance", DINO_MODEL, load_dino, "timm torch torchvision"),
    Metric("lpips", "LPIPS", f"torchmetrics {LPIPS_NET}", load_lpips, "torchmetrics torch torchvision"),
    Metric("psnr", "PSNR, dB", "rgb8", lambda _: psnr, higher_is_closer=True),
    Metric("ssim", "SSIM", "rgb8 gaussian 11", lambda _: ssim, higher_is_closer=True),
    Metric(
        "clip_t",
        "CLIP-T",
        f"{CLIP_MODEL} {CLIP_WEIGHTS}",
        load_clip,
        "open_clip_torch torch",
        higher_is_closer=True,
        alone=True,
    ),
)
FID = Metric("fid", "FID", "inception", load_fid, "torchmetrics torch-fidelity torch")


class LeftOutError(Exception):
    """A metric that is not available here; the message has the reason."""


def load(metric: Metric, device: str) -> Any:
    """Load the metric. Raises LeftOutError with reason and remedy for any exception: libraries raise many kinds for a
    missing file, network or version."""
    if metric.packages:
        say(f"{metric.title}: loading; weights are downloaded at first use")
    try:
        with _quiet():
            return metric.load(device)
    except ImportError as error:
        raise LeftOutError(
            f"{metric.title} left out: a library is missing ({error}); to get it: {INSTALL}, or pip install "
            f"{metric.packages}"
        ) from None
    except Exception as error:
        raise LeftOutError(
            f"{metric.title} left out: its weights could not be loaded ({_first_line(error)}); to get them: run the "
            f"same command once with a network connection, or on a machine that has one and copy its cache folders "
            "($HF_HOME, else ~/.cache/huggingface, and $TORCH_HOME, else ~/.cache/torch)"
        ) from None


def failed(metric: Metric, error: Exception) -> str:
    """Describe the failure of a loaded metric."""
    memory = "out of memory" in str(error).lower()
    advice = "; measure on the processor with --device cpu" if memory else ""
    return f"{metric.title} left out: it failed ({_first_line(error)}){advice}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 200 else lines[0][:197] + "..."


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence libraries that log every retry of a download; the reason is in the exception."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


@functools.lru_cache(maxsize=8)
def _opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")
