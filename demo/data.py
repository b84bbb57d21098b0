"""The training batches: scenes, their views, and noise. The batch of step n depends only on n and the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from .clips import FRAMES, clip_from_seed, clip_tokens, render_clips
from .latents import clips_to_model, image_to_model
from .scenes import CANVAS, Scene, render_batch, scene_from_seed, scene_tokens, things

KINDS = ("dit", "unet", "wan")
# Scenes below this seed are for contact sheets and evaluation. Training never sees them.
FIRST_TRAINING_SEED = 1_000_000
MOST_PER_STEP = 4096
# Side of a token in pixels in all shipped models but `few` and `wan`. A picture has 32 x 32 tokens in every model.
PIXELS_PER_TOKEN = 4
# Side of a frame in pixels: 16 x 16 tokens of 2 x 2 pixels.
CLIP_SIZE = 32
# Loss weight of shape and small objects relative to the background, for models with a weighted loss. Shape and objects
# cover a fifth of a picture, and with equal weights they would be learnt last. The weights do not change which network
# minimises the loss.
THINGS_WEIGH = 5.0


@dataclass(frozen=True)
class Plan:
    """All settings that, together with the code, decide the result of a training run."""

    kind: str
    steps: int
    seed: int = 0
    lr: float = 6e-3
    warmup: int = 200
    cooldown: float = 0.2
    crop_batch: int = 16
    full_batch: int = 6
    crop_tokens: int = 16
    # The DiT's width, its double and single blocks, and the side of its tokens in pixels. Smaller tokens make smaller
    # pictures.
    width: int = 128
    blocks: tuple[int, int] = (2, 5)
    token: int = PIXELS_PER_TOKEN
    # Shares of steps with half-size scenes and with full pictures, until the share `late` of all steps and after it.
    # All other steps have crops. Wan has no crops: there the shares are of single frames and of clips.
    early_shares: tuple[float, float] = (0.9, 0.05)
    late_shares: tuple[float, float] = (0.2, 0.6)
    late: float = 0.45
    dropout: float = 0.1
    ema: float = 0.999

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {self.kind!r}")
        if self.token not in (2, 4) or self.width % 64 or min(self.blocks) < 1:
            raise ValueError(f"no model of width {self.width}, {self.blocks} blocks and tokens of {self.token} pixels")
        if self.kind != "dit" and (self.width, self.blocks, self.token) != (Plan.width, Plan.blocks, Plan.token):
            raise ValueError("width, blocks and token are the DiT's")
        if not 1 <= min(self.crop_batch, self.full_batch) <= max(self.crop_batch, self.full_batch) <= MOST_PER_STEP:
            raise ValueError(f"batches must be 1..{MOST_PER_STEP}, not {self.crop_batch} and {self.full_batch}")

    def lr_at(self, step: int) -> float:
        """Return the learning rate: warm-up, constant, then a cosine to zero over the last `cooldown` of the steps."""
        start = self.steps * (1 - self.cooldown)
        decay = 1.0 if step < start else 0.5 + 0.5 * math.cos(math.pi * (step - start) / (self.steps - start))
        return self.lr * min(1.0, (step + 1) / self.warmup) * decay

    def sort_at(self, step: int, draw: float) -> str:
        """Choose the view of a step, "half", "full" or "crop". draw: a random number from 0 to 1."""
        half, full = self.early_shares if step < self.late * self.steps else self.late_shares
        return "half" if draw < half else "full" if draw < half + full else "crop"


@dataclass(frozen=True)
class View:
    """The part and scale of the scenes in a batch."""

    # Corner of a crop, (y, x), in tokens of the full 32 x 32 grid.
    offset: tuple[int, int] = (0, 0)
    # 2 for scenes at half the size, in which a token covers 2 x 2 tokens of the full grid. Otherwise 1.
    scale: int = 1
    # The flow's sigmas are sigmoid(normal(centre, 1.4)). Neighbouring pixels are redundant, so a scene is visible
    # through noise unless sigma is nearly 1. Only where the scene is invisible does the model learn to read the prompt.
    # So centres are far above 0.
    centre: float = 2.0

    def rope_options(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the positions of the tokens for ComfyUI's Flux class.

        Positions are tensors, because torch.compile would recompile for every Python number. The position of a token in
        a half-size scene is the centre of the 2 x 2 tokens that it replaces. In half-size scenes the time index is 1,
        otherwise 0.
        """
        values = {
            "shift_y": self.offset[0] + (self.scale - 1) / 2,
            "shift_x": self.offset[1] + (self.scale - 1) / 2,
            "shift_t": self.scale - 1,
            "scale_y": self.scale,
            "scale_x": self.scale,
        }
        return {name: torch.tensor(float(value), device=device) for name, value in values.items()}


@dataclass(frozen=True)
class Batch:
    """The data of one training step."""

    sort: str  # "half", "full", "crop", "still" or "clip"
    view: View
    clean: torch.Tensor  # (B, 16, h, w) or (B, 16, frames, h, w), in model space
    noise: torch.Tensor  # of the shape of `clean`
    weight: torch.Tensor  # (B, 1, h, w): loss weight of each pixel, with mean 1 over a full scene
    tokens: torch.Tensor  # (B, T, TEXT_DIM)
    quantile: torch.Tensor  # (B,) in 0..1: quantile of each picture's sigma, stratified over the batch

    def to(self, device: torch.device) -> Batch:
        moved = {name: getattr(self, name).to(device) for name in ("clean", "noise", "weight", "tokens", "quantile")}
        return replace(self, **moved)


class Batches(Dataset[Batch]):
    """A map-style dataset: batch n is the data of step n."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.steps

    def __getitem__(self, step: int) -> Batch:
        plan = self.plan
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
        if plan.kind == "wan":
            return self._clips(step, generator)
        draw = torch.rand(3, generator=generator).tolist()
        sort = plan.sort_at(step, draw[0])
        count = plan.full_batch if sort == "full" else plan.crop_batch
        first = self._first(step)
        scenes = [scene_from_seed(first + index) for index in range(count)]
        size = CANVAS * plan.token // PIXELS_PER_TOKEN // (2 if sort == "half" else 1)
        picture = render_batch(scenes, size)
        weight = _weight(scenes, size)
        view = View(scale=2, centre=1.6) if sort == "half" else View()
        if sort == "crop":
            # Offsets are even, because the UNet also has a grid of half the side.
            offsets = (size // plan.token - plan.crop_tokens) // 2 + 1
            view = View(offset=(2 * int(draw[1] * offsets), 2 * int(draw[2] * offsets)), centre=1.0)
            top, left = (value * plan.token for value in view.offset)
            side = plan.crop_tokens * plan.token
            picture, weight = (each[:, :, top : top + side, left : left + side] for each in (picture, weight))
        clean = image_to_model(picture)
        dropped = (torch.rand(count, generator=generator) < plan.dropout).tolist()
        prompted = [None if drop else scene for scene, drop in zip(scenes, dropped, strict=True)]
        return Batch(
            sort=sort,
            view=view,
            clean=clean,
            noise=torch.randn(clean.shape, generator=generator),
            weight=F.avg_pool2d(weight, picture.shape[-1] // clean.shape[-1]),
            tokens=torch.stack([scene_tokens(scene) for scene in prompted]),
            quantile=_stratified(count, generator),
        )

    def _first(self, step: int) -> int:
        return FIRST_TRAINING_SEED + (self.plan.seed * 100_000_000 + step) * MOST_PER_STEP

    def _clips(self, step: int, generator: torch.Generator) -> Batch:
        plan, first = self.plan, self._first(step)
        # Single frames teach the look of scenes with a fraction of a clip's work. So most clips come in later steps.
        still = plan.sort_at(step, float(torch.rand(1, generator=generator))) == "half"
        clips = [clip_from_seed(first + index) for index in range(plan.crop_batch if still else plan.full_batch)]
        clean = clips_to_model(render_clips(clips, CLIP_SIZE, 1 if still else FRAMES))
        dropped = (torch.rand(len(clips), generator=generator) < plan.dropout).tolist()
        prompted = [None if drop else clip for clip, drop in zip(clips, dropped, strict=True)]
        return Batch(
            sort="still" if still else "clip",
            view=View(),
            clean=clean,
            noise=torch.randn(clean.shape, generator=generator),
            weight=torch.ones(len(clips), 1, 1, 1),
            tokens=torch.stack([clip_tokens(clip) for clip in prompted]),
            quantile=_stratified(len(clips), generator),
        )

    def from_step(self, step: int, workers: int = 0) -> Iterator[Batch]:
        """Yield the batches from `step` on, drawn ahead by `workers` processes."""
        order = range(step, len(self))
        return iter(DataLoader(self, batch_size=None, sampler=order, num_workers=workers))


def _weight(scenes: list[Scene], size: int) -> torch.Tensor:
    """Return the loss weight of each pixel, (B, 1, size, size), of mean 1."""
    found = torch.from_numpy(np.stack([things(scene, size) for scene in scenes]))[:, None]
    weight = 1 + (THINGS_WEIGH - 1) * found.float()
    return weight / weight.mean()


def _stratified(count: int, generator: torch.Generator) -> torch.Tensor:
    u = (torch.arange(count) + torch.rand(count, generator=generator)) / count
    return u[torch.randperm(count, generator=generator)].clamp(1e-4, 1 - 1e-4)
