"""Deterministic scenes drawn by code: the training data of the tiny models.

A scene is a smooth gradient background, a band of fine texture, a group of small repeated objects, one sharp-edged
shape and a three-letter word on a flat plate. Sizes are given in units of a 128 x 128 picture, so one scene can be
drawn at any resolution. `scene_tokens` replaces a text encoder: one fixed code per attribute value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from .glyphs import GLYPH_HEIGHT, word_mask

CANVAS = 128
TEXT_DIM = 128

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 48, 49),
    "orange": (236, 137, 34),
    "yellow": (245, 215, 66),
    "green": (46, 160, 67),
    "cyan": (52, 190, 205),
    "blue": (38, 84, 200),
    "purple": (134, 58, 168),
    "grey": (150, 150, 150),
}
_PALETTE = np.array(list(COLOURS.values()), dtype=np.float32) / 127.5 - 1.0
_NAMES = tuple(COLOURS)

# One entry per attribute, in token order. A scene stores the position of an attribute's value in the tuple.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "background": _NAMES,
    "gradient": ("flat", "vertical", "horizontal", "radial"),
    "texture": ("none", "stripes", "checker", "speckle", "dots"),
    "texture_side": ("bottom", "top", "left", "right"),
    "shape": ("circle", "square", "triangle", "ring", "star", "cross"),
    "shape_colour": _NAMES,
    "shape_size": ("small", "medium", "large"),
    "shape_cell": tuple(f"{y}-{x}" for y in ("top", "middle", "bottom") for x in ("left", "centre", "right")),
    "objects": ("none", "discs", "boxes", "diamonds"),
    "object_count": ("3", "6", "12"),
    "object_colour": _NAMES,
    "word": ("TOM", "FLU", "AXE", "KIZ", "HUV", "MIX", "LOT", "ZEK"),
    "word_place": ("top-left", "top-right", "bottom-left", "bottom-right"),
    "plate": ("light", "dark"),
}
# Attribute -> (another attribute, the value of this other attribute that makes the first one invisible).
HIDDEN_BY: dict[str, tuple[str, int]] = {
    "texture_side": ("texture", 0),
    "object_count": ("objects", 0),
    "object_colour": ("objects", 0),
}
# Phrase of a prompt -> (the phrase's attributes, other attributes that decide where the described thing is). Small
# objects are drawn in the space that shape and word leave free.
PHRASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "background": (("background", "gradient"), ()),
    "texture": (("texture", "texture_side"), ()),
    "shape": (("shape", "shape_colour", "shape_size", "shape_cell"), ()),
    "objects": (("objects", "object_count", "object_colour"), ("shape_cell", "word_place")),
    "word": (("word", "word_place", "plate"), ()),
}
SHAPE_RADII = (13.0, 19.0, 26.0)
# Rows and columns of small objects by their count.
OBJECT_GRIDS = ((1, 3), (2, 3), (3, 4))
_SALT = 0x70A
# (down, right), in pixels of the 128 x 128 canvas.
Shift = tuple[float, float]


@dataclass(frozen=True)
class Scene:
    """The attributes of one scene, each an index into `ATTRIBUTES[name]`, and the seed of its random part.

    `detail_seed` decides the jitter of positions, the phase of the texture, and the speckle. It is not part of the
    prompt.
    """

    background: int
    gradient: int
    texture: int
    texture_side: int
    shape: int
    shape_colour: int
    shape_size: int
    shape_cell: int
    objects: int
    object_count: int
    object_colour: int
    word: int
    word_place: int
    plate: int
    detail_seed: int = 0

    def __post_init__(self) -> None:
        for name, values in ATTRIBUTES.items():
            value = getattr(self, name)
            if not 0 <= value < len(values):
                raise ValueError(f"{name} must be 0..{len(values) - 1} ({', '.join(values)}), not {value!r}")

    def values(self) -> tuple[int, ...]:
        """Return the attribute indices in the order of `ATTRIBUTES`."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name in ATTRIBUTES)

    def describe(self) -> str:
        """Return the prompt of the scene as one readable line."""
        return ", ".join(
            f"{name} {ATTRIBUTES[name][value]}" for name, value in zip(ATTRIBUTES, self.values(), strict=True)
        )


def scene_from_seed(seed: int) -> Scene:
    """Draw the attributes of a scene from an integer seed >= 0. The same seed gives the same scene."""
    rng = np.random.default_rng((_SALT, int(seed)))
    chosen = {name: int(rng.integers(len(values))) for name, values in ATTRIBUTES.items()}
    # Shape and objects get another colour than the background. In the same colour they would be invisible.
    shift = 1 + int(rng.integers(len(_NAMES) - 1))
    chosen["shape_colour"] = (chosen["background"] + shift) % len(_NAMES)
    shift = 1 + int(rng.integers(len(_NAMES) - 1))
    chosen["object_colour"] = (chosen["background"] + shift) % len(_NAMES)
    # Move the word's plate out of the shape's row, so that they do not cover each other.
    shape_row = chosen["shape_cell"] // 3
    if shape_row == 0:
        chosen["word_place"] |= 2
    elif shape_row == 2:
        chosen["word_place"] &= 1
    for name, (other, value) in HIDDEN_BY.items():
        if chosen[other] == value:
            chosen[name] = 0
    return Scene(**chosen, detail_seed=int(rng.integers(2**31)))


def visible(scene: Scene) -> tuple[bool, ...]:
    """Return which attributes are visible in the picture, in the order of `ATTRIBUTES`."""
    hidden = {name for name, (other, value) in HIDDEN_BY.items() if getattr(scene, other) == value}
    return tuple(name not in hidden for name in ATTRIBUTES)


@lru_cache(maxsize=4)
def _grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    line = (np.arange(size, dtype=np.float32) + 0.5) * (CANVAS / size)
    return np.meshgrid(line, line, indexing="ij")  # type: ignore[return-value]


def _shape_distance(kind: int, y: np.ndarray, x: np.ndarray, radius: float) -> np.ndarray:
    """Compute the signed distance to the edge of a shape around the origin, in canvas units, negative inside."""
    if kind == 0:
        return np.hypot(x, y) - radius
    if kind == 1:
        return np.maximum(np.abs(x), np.abs(y)) - radius * 0.88
    if kind == 2:
        return np.maximum(np.abs(x) * 0.873 - (y + radius) * 0.488, y - radius * 0.7)
    if kind == 3:
        return np.abs(np.hypot(x, y) - radius * 0.75) - radius * 0.25
    if kind == 4:
        sector = 2 * math.pi / 5
        folded = np.abs((np.arctan2(x, -y) + sector / 2) % sector - sector / 2)
        reach = np.hypot(x, y)
        return 0.3505 * (reach * np.cos(folded) - radius) + 0.9366 * reach * np.sin(folded)
    across, down, arm = np.abs(x), np.abs(y), radius * 0.34
    return np.minimum(np.maximum(across - arm, down - radius), np.maximum(down - arm, across - radius))


def _shape_anchor(scene: Scene) -> tuple[float, float]:
    row, column = divmod(scene.shape_cell, 3)
    return 30.0 + 34 * row, 30.0 + 34 * column


def _object_anchor(scene: Scene) -> tuple[float, float]:
    """Return the centre (y, x) of the group of small objects. The group is in a row without shape or word, on the side
    opposite to the shape."""
    row, column = divmod(scene.shape_cell, 3)
    y = 64.0 if row != 1 else (28.0 if scene.word_place >= 2 else 100.0)
    return y, (98.0, 30.0, 30.0)[column]


def _texture(kind: int, y: np.ndarray, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a fine pattern, 0..1, over the coordinates (canvas units)."""
    if kind == 1:
        return np.clip((np.abs((x + y + rng.uniform(0, 10)) % 10.0 - 5.0) - 2.5) * 1.5 + 0.5, 0, 1)
    if kind == 2:
        return ((x // 6 + y // 6) % 2).astype(np.float32)
    if kind == 3:
        cells = rng.random((CANVAS // 2, CANVAS // 2), dtype=np.float32)
        return cells[(y // 2).astype(np.int64), (x // 2).astype(np.int64)]
    return np.clip(3.0 - np.hypot(y % 8 - 4, x % 8 - 4), 0, 1)


def _paint(image: np.ndarray, box: tuple[slice, slice], cover: np.ndarray, colour: np.ndarray) -> None:
    part = image[box]
    part += cover[..., None] * (colour - part)


def render(
    scene: Scene, size: int = CANVAS, shape_shift: Shift = (0.0, 0.0), objects_shift: Shift = (0.0, 0.0)
) -> np.ndarray:
    """Draw a scene as float32 RGB of shape (size, size, 3) in -1..1, with edges smoothed over one pixel. The shifts
    move the shape and the group of small objects. Raises ValueError unless `size`, in pixels, is a multiple of 32."""
    if size < 32 or size % 32:
        raise ValueError(f"size must be a positive multiple of 32, not {size}")
    rng = np.random.default_rng(scene.detail_seed)
    y, x = _grid(size)
    pixels = size / CANVAS

    def window(centre_y: float, centre_x: float, half_y: float, half_x: float) -> tuple[slice, slice]:
        spans = ((centre_y - half_y, centre_y + half_y), (centre_x - half_x, centre_x + half_x))
        low_high = [(max(0, math.floor(a * pixels) - 1), min(size, math.ceil(b * pixels) + 1)) for a, b in spans]
        return slice(*low_high[0]), slice(*low_high[1])

    base = _PALETTE[scene.background]
    direction = 1.0 if rng.random() < 0.5 else -1.0
    if scene.gradient == 0:
        ramp = np.zeros_like(y)
    elif scene.gradient == 3:
        ramp = np.hypot(y - 64, x - 64) / 64 - 0.7
    else:
        ramp = (y if scene.gradient == 1 else x) / 64 - 1
    strength = rng.uniform(0.4, 0.6) * direction
    image = base * (1 - 0.25 * np.abs(ramp)[..., None]) + (strength * ramp)[..., None]

    if scene.texture:
        cut = round(40 * pixels)
        box = (
            (slice(size - cut, size), slice(0, size)),
            (slice(0, cut), slice(0, size)),
            (slice(0, size), slice(0, cut)),
            (slice(0, size), slice(size - cut, size)),
        )[scene.texture_side]
        pattern = _texture(scene.texture, y[box], x[box], rng)
        _paint(image, box, 0.75 * pattern, np.full(3, -0.8 if base.mean() > -0.2 else 0.8, dtype=np.float32))

    jitter_y, jitter_x, *shifts = rng.uniform(-3.0, 3.0, size=6).tolist()
    anchor, jitter = _shape_anchor(scene), (jitter_y, jitter_x)
    shape_y, shape_x = (sum(parts) for parts in zip(anchor, jitter, shape_shift, strict=True))

    if scene.objects:
        rows, columns = OBJECT_GRIDS[scene.object_count]
        centre_y, centre_x = (sum(parts) for parts in zip(_object_anchor(scene), objects_shift, strict=True))
        for index in range(rows * columns):
            oy = centre_y + shifts[0] + (index // columns - (rows - 1) / 2) * 13
            ox = centre_x + shifts[1] + (index % columns - (columns - 1) / 2) * 13
            box = window(oy, ox, 6, 6)
            dy, dx = np.abs(y[box] - oy), np.abs(x[box] - ox)
            distance = (np.hypot(dy, dx) - 4.5, np.maximum(dy, dx) - 4.0, dy + dx - 5.5)[scene.objects - 1]
            _paint(image, box, np.clip(0.5 - distance * pixels, 0, 1), _PALETTE[scene.object_colour])

    radius = SHAPE_RADII[scene.shape_size]
    box = window(shape_y, shape_x, radius, radius)
    distance = _shape_distance(scene.shape, y[box] - shape_y, x[box] - shape_x, radius)
    _paint(image, box, np.clip(0.5 - distance * pixels, 0, 1), _PALETTE[scene.shape_colour])

    mask = word_mask(ATTRIBUTES["word"][scene.word])
    text_height, text_width = GLYPH_HEIGHT * 3.0, mask.shape[1] * 3.0
    top = (6.0 if scene.word_place < 2 else CANVAS - 6.0 - text_height) + shifts[2] * 0.5
    left = (8.0 if scene.word_place % 2 == 0 else CANVAS - 8.0 - text_width) + shifts[3] * 0.5
    dark, light = np.full(3, -0.85, dtype=np.float32), np.full(3, 0.95, dtype=np.float32)
    plate, ink = (light, dark) if scene.plate == 0 else (dark, light)
    centre_y, centre_x = top + text_height / 2, left + text_width / 2
    box = window(centre_y, centre_x, text_height / 2 + 4, text_width / 2 + 4)
    off_y, off_x = np.abs(y[box] - centre_y), np.abs(x[box] - centre_x)
    distance = np.maximum(off_y - text_height / 2 - 3, off_x - text_width / 2 - 4)
    _paint(image, box, np.clip(0.5 - distance * pixels, 0, 1), plate)
    row = np.clip(((y[box] - top) / 3).astype(np.int64) + 1, 0, GLYPH_HEIGHT + 1)
    column = np.clip(np.floor((x[box] - left) / 3).astype(np.int64) + 1, 0, mask.shape[1] + 1)
    _paint(image, box, np.pad(mask, 1)[row, column], ink)
    return np.clip(image, -1, 1).astype(np.float32)


def things(scene: Scene, size: int = CANVAS) -> np.ndarray:
    """Mark the boxes of shape and small objects, with room for jitter and smooth edges: bool of shape (size, size)."""
    y, x = _grid(size)
    centre_y, centre_x = _shape_anchor(scene)
    found = np.maximum(np.abs(y - centre_y), np.abs(x - centre_x)) < SHAPE_RADII[scene.shape_size] + 5
    if scene.objects:
        rows, columns = OBJECT_GRIDS[scene.object_count]
        centre_y, centre_x = _object_anchor(scene)
        found |= (np.abs(y - centre_y) < 6.5 * rows + 4) & (np.abs(x - centre_x) < 6.5 * columns + 4)
    return found


def render_batch(scenes: list[Scene], size: int = CANVAS) -> torch.Tensor:
    """Draw many scenes: float32 of shape (len(scenes), 3, size, size) in -1..1."""
    return torch.from_numpy(np.stack([render(scene, size) for scene in scenes])).permute(0, 3, 1, 2).contiguous()


@lru_cache(maxsize=1)
def _all_codes() -> torch.Tensor:
    """Return TEXT_DIM orthogonal rows of mean square 1."""
    generator = torch.Generator().manual_seed(_SALT)
    square = torch.randn(TEXT_DIM, TEXT_DIM, generator=generator, dtype=torch.float64)
    return (torch.linalg.qr(square).Q * math.sqrt(TEXT_DIM)).float()


@lru_cache(maxsize=1)
def _codes() -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a table of codes, and the index of each attribute's first row. The table has one row for each attribute
    value, and a last row for the empty prompt."""
    sizes = [len(values) for values in ATTRIBUTES.values()]
    starts = tuple(sum(sizes[:index]) for index in range(len(sizes)))
    return _all_codes()[: sum(sizes) + 1], starts


def spare_codes(count: int) -> torch.Tensor:
    """Return codes that no attribute value uses: (count, TEXT_DIM)."""
    free = _all_codes()[len(_codes()[0]) :]
    if count > len(free):
        raise ValueError(f"{count} codes are requested, {len(free)} are free")
    return free[:count]


def scene_tokens(scene: Scene | None) -> torch.Tensor:
    """Encode the scene as text tokens: float32 of shape (len(ATTRIBUTES), TEXT_DIM), rows of mean square 1. Each
    attribute value has one fixed code, orthogonal to all others. None gives the tokens of the empty prompt, for
    classifier-free guidance."""
    codes, starts = _codes()
    if scene is None:
        return codes[-1:].repeat(len(starts), 1)
    return codes[[start + value for start, value in zip(starts, scene.values(), strict=True)]]


@lru_cache(maxsize=1)
def _belongs() -> torch.Tensor:
    """Return the mixing weights of tokens within a phrase: (T, T), rows of norm 1."""
    index_of = {name: index for index, name in enumerate(ATTRIBUTES)}
    given = torch.eye(len(index_of))
    for own, others in PHRASES.values():
        for name in own:
            given[index_of[name], [index_of[other] for other in (*own, *others)]] += 1
    return F.normalize(given, dim=1)


def in_phrases(tokens: torch.Tensor) -> torch.Tensor:
    """Mix each token with the others of its phrase, as a text encoder would: (..., n * T, TEXT_DIM) -> the same shape.

    Flux mixes its text tokens itself. A UNet only attends to text tokens. If one token encodes "red" and another token
    "top left", the UNet does not learn to draw red at the top left.
    """
    prompts = tokens.unflatten(-2, (-1, len(ATTRIBUTES)))  # there may be several prompts in a row
    return (_belongs().to(tokens) @ prompts).flatten(-3, -2)


def pooled_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Pool tokens (..., T, TEXT_DIM) to one vector (..., TEXT_DIM), of about unit mean square for a scene."""
    return tokens.sum(dim=-2) / math.sqrt(tokens.shape[-2])
