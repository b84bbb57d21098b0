"""Test the drawn scenes: a seed gives one picture, every attribute is visible, and tokens distinguish scenes."""

import dataclasses
from itertools import combinations, count

import numpy as np
import pytest
import torch

from demo.scenes import (
    ATTRIBUTES,
    HIDDEN_BY,
    TEXT_DIM,
    pooled_tokens,
    render,
    scene_from_seed,
    scene_tokens,
    things,
    visible,
)

# A scene whose attributes are all visible.
COMPLETE = next(scene for scene in map(scene_from_seed, count()) if all(visible(scene)))


def test_a_seed_gives_one_picture_at_every_size() -> None:
    for seed in range(6):
        scene = scene_from_seed(seed)
        assert scene == scene_from_seed(seed) != scene_from_seed(seed + 1)
        for size in (64, 128, 256):
            picture = render(scene, size)
            assert np.array_equal(picture, render(scene, size))
            assert (picture.shape, picture.dtype) == ((size, size, 3), np.float32)
            assert -1 <= picture.min() < picture.max() <= 1
        halved = torch.nn.functional.avg_pool2d(torch.from_numpy(picture).permute(2, 0, 1), 2).permute(1, 2, 0).numpy()
        assert np.abs(halved - render(scene, 128)).mean() < 0.06


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_every_visible_value_and_no_hidden_one_changes_the_picture(name: str) -> None:
    def pictures(**changed: int) -> list[np.ndarray]:
        scene = dataclasses.replace(COMPLETE, **changed)
        return [render(dataclasses.replace(scene, **{name: value})) for value in range(len(ATTRIBUTES[name]))]

    assert all(np.abs(a - b).max() > 0.3 for a, b in combinations(pictures(), 2))
    if name in HIDDEN_BY:
        other, value = HIDDEN_BY[name]
        first, *more = pictures(**{other: value})
        assert all(np.array_equal(first, picture) for picture in more)


def test_all_values_occur_in_colours_that_can_be_seen() -> None:
    scenes = [scene_from_seed(seed) for seed in range(600)]
    drawn = np.array([scene.values() for scene in scenes])
    for column, values in zip(drawn.T, ATTRIBUTES.values(), strict=True):
        assert set(column) == set(range(len(values)))
    for scene in scenes:
        assert scene.shape_colour != scene.background
        assert scene.objects == 0 or scene.object_colour != scene.background


@pytest.mark.parametrize("size", [64, 128])
def test_things_hold_shape_and_small_objects(size: int) -> None:
    """If a shape or object gets another colour, pixels may change only inside the boxes that `things` returns."""
    for scene in (scene_from_seed(seed) for seed in range(200)):
        found = things(scene, size)
        for name in ("shape_colour", "object_colour"):
            other = dataclasses.replace(scene, **{name: (getattr(scene, name) + 3) % 8})
            changed = (render(other, size) != render(scene, size)).any(-1)
            assert not (changed & ~found).any()
        assert 0 < found.mean() < 0.5


def test_tokens_are_orthogonal_and_encode_one_attribute_each() -> None:
    tokens = scene_tokens(COMPLETE)
    torch.testing.assert_close(tokens @ tokens.T / TEXT_DIM, torch.eye(len(ATTRIBUTES)), atol=1e-5, rtol=0)
    other = scene_tokens(dataclasses.replace(COMPLETE, shape=(COMPLETE.shape + 1) % 6))
    assert (tokens != other).any(dim=1).nonzero().flatten().tolist() == [list(ATTRIBUTES).index("shape")]
    assert torch.allclose(tokens @ scene_tokens(None).T, torch.zeros(1), atol=1e-4)
    assert (pooled_tokens(tokens) @ tokens.T > 0).all(), "the pooled vector has every attribute"
