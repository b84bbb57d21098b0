"""Scenes in motion: the shape and the small objects drift in separate directions, and everything else stands still.

A clip has the prompt of its scene and one token for each of `MOTIONS`. The middle frame is the scene itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from .scenes import ATTRIBUTES, Scene, Shift, in_phrases, render, scene_from_seed, scene_tokens, spare_codes

FRAMES = 5
_WAYS = ("still", "left", "right", "up", "down")
_STEPS = ((0, 0), (0, -1), (0, 1), (-1, 0), (1, 0))
# Motion -> its values, in token order, as in `scenes.ATTRIBUTES`.
MOTIONS: dict[str, tuple[str, ...]] = {"shape_way": _WAYS, "objects_way": _WAYS, "speed": ("slow", "fast")}
# Shift from frame to frame, in pixels of a 128 x 128 picture, by speed.
_SPEEDS = (3.0, 6.0)
_SALT = 0x70C


@dataclass(frozen=True)
class Clip:
    """A scene and how it moves, each motion an index into `MOTIONS[name]`."""

    scene: Scene
    shape_way: int = 0
    objects_way: int = 0
    speed: int = 0

    def values(self) -> tuple[int, ...]:
        """Return the motions in the order of `MOTIONS`."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name in MOTIONS)


def clip_from_seed(seed: int) -> Clip:
    """Draw a clip from an integer seed >= 0. The clip's scene is `scene_from_seed(seed)`."""
    rng = np.random.default_rng((_SALT, int(seed)))
    return Clip(scene_from_seed(seed), *(int(rng.integers(len(values))) for values in MOTIONS.values()))


def render_clips(clips: list[Clip], size: int, frames: int = FRAMES) -> torch.Tensor:
    """Render clips: float32 (len(clips), 3, frames, size, size) in -1..1. size: a multiple of 32."""
    drawn = [np.stack([_frame(clip, size, frame - (frames - 1) / 2) for frame in range(frames)]) for clip in clips]
    return torch.from_numpy(np.stack(drawn)).permute(0, 4, 1, 2, 3).contiguous()


def _frame(clip: Clip, size: int, time: float) -> np.ndarray:
    far = _SPEEDS[clip.speed] * time

    def shift(way: int) -> Shift:
        down, right = _STEPS[way]
        return far * down, far * right

    return render(clip.scene, size, shift(clip.shape_way), shift(clip.objects_way))


def step_token(steps: int) -> torch.Tensor:
    """Return the text token that encodes the number of sampling steps, 1 to 8: (1, TEXT_DIM)."""
    if not 1 <= steps <= 8:
        raise ValueError(f"the number of steps must be 1 to 8, not {steps}")
    return spare_codes(sum(map(len, MOTIONS.values())) + 8)[-steps][None]


def phrased(tokens: torch.Tensor) -> torch.Tensor:
    """Mix the text tokens of clips as a text encoder would, see `scenes.in_phrases`. Wan has no layers that mix its
    text tokens."""
    scene = len(ATTRIBUTES)
    return torch.cat([in_phrases(tokens[..., :scene, :]), tokens[..., scene:, :]], -2)


def clip_tokens(clip: Clip | None) -> torch.Tensor:
    """Return the text tokens of a clip's scene and motions: (len(ATTRIBUTES) + len(MOTIONS), TEXT_DIM). None is the
    empty prompt."""
    starts = [sum(len(values) for values in list(MOTIONS.values())[:n]) for n in range(len(MOTIONS))]
    codes = spare_codes(sum(map(len, MOTIONS.values())))
    if clip is None:
        return torch.cat([scene_tokens(None), scene_tokens(None)[:1].expand(len(MOTIONS), -1)])
    return torch.cat([scene_tokens(clip.scene), codes[[s + v for s, v in zip(starts, clip.values(), strict=True)]]])
