"""Test the drawn scenes: a seed gives one picture, every attribute is visible, and tokens distinguish scenes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from demo.scenes import (
    ATTRIBUTES,
    HIDDEN_BY,
    TEXT_DIM,
    Scene,
    pooled_tokens,
    render,
    render_batch,
    scene_from_seed,
    scene_tokens,
    things,
    visible,
)
from tests.loop import loop


def test_same_seed_same_picture() -> None:
    first, second = scene_from_seed(7), scene_from_seed(7)
    assert first == second
    assert np.array_equal(render(first), render(second))
    assert scene_from_seed(8) != first


def test_pictures_are_in_range_at_every_size() -> None:
    for seed in range(6):
        for size in (64, 128, 256):
            picture = render(scene_from_seed(seed), size)
            assert picture.shape == (size, size, 3)
            assert picture.dtype == np.float32
            assert picture.min() >= -1
            assert picture.max() <= 1
            assert picture.std() > 0.05


def test_a_scene_looks_the_same_at_twice_the_size() -> None:
    scene = scene_from_seed(3)
    large = torch.from_numpy(render(scene, 256)).permute(2, 0, 1)
    small = torch.from_numpy(render(scene, 128)).permute(2, 0, 1)
    halved = torch.nn.functional.avg_pool2d(large, 2)
    assert (halved - small).abs().mean() < 0.06


def _plain() -> Scene:
    return Scene(
        background=0,
        gradient=1,
        texture=1,
        texture_side=0,
        shape=0,
        shape_colour=5,
        shape_size=1,
        shape_cell=4,
        objects=1,
        object_count=1,
        object_colour=4,
        word=0,
        word_place=0,
        plate=0,
        detail_seed=11,
    )


@loop("name", list(ATTRIBUTES))
def test_every_value_of_every_attribute_changes_the_picture(name: str) -> None:
    pictures = [render(dataclasses.replace(_plain(), **{name: value})) for value in range(len(ATTRIBUTES[name]))]
    for i in range(len(pictures)):
        for j in range(i):
            assert np.abs(pictures[i] - pictures[j]).max() > 0.3


@loop("name", list(HIDDEN_BY))
def test_hidden_attributes_leave_no_trace(name: str) -> None:
    other, value = HIDDEN_BY[name]
    scene = dataclasses.replace(_plain(), **{other: value})
    assert not visible(scene)[list(ATTRIBUTES).index(name)]
    pictures = [render(dataclasses.replace(scene, **{name: v})) for v in range(len(ATTRIBUTES[name]))]
    assert all(np.array_equal(pictures[0], picture) for picture in pictures[1:])


def test_colours_differ_from_the_background() -> None:
    for seed in range(300):
        scene = scene_from_seed(seed)
        assert scene.shape_colour != scene.background
        assert scene.objects == 0 or scene.object_colour != scene.background


def test_all_values_occur() -> None:
    drawn = np.array([scene_from_seed(seed).values() for seed in range(600)])
    for column, values in zip(drawn.T, ATTRIBUTES.values(), strict=True):
        assert set(column) == set(range(len(values)))


@loop("size", [64, 128])
def test_things_hold_shape_and_small_objects(size: int) -> None:
    """If a shape or object gets another colour, pixels may change only inside the boxes that `things` returns."""
    for scene in (scene_from_seed(seed) for seed in range(200)):
        found = things(scene, size)
        for name in ("shape_colour", "object_colour"):
            other = dataclasses.replace(scene, **{name: (getattr(scene, name) + 3) % 8})
            changed = (render(other, size) != render(scene, size)).any(-1)
            assert not (changed & ~found).any()
        assert 0 < found.mean() < 0.5


def test_tokens_are_fixed_and_orthogonal() -> None:
    scene = _plain()
    tokens = scene_tokens(scene)
    assert tokens.shape == (len(ATTRIBUTES), TEXT_DIM)
    assert tokens.dtype == torch.float32
    assert torch.equal(tokens, scene_tokens(scene))
    gram = tokens @ tokens.T / TEXT_DIM
    torch.testing.assert_close(gram, torch.eye(len(ATTRIBUTES)), atol=1e-5, rtol=0)
    other = scene_tokens(dataclasses.replace(scene, shape=3))
    changed = (tokens != other).any(dim=1)
    assert changed.sum() == 1
    assert changed[list(ATTRIBUTES).index("shape")]
    assert torch.allclose(tokens @ scene_tokens(None).T, torch.zeros(1), atol=1e-4)


def test_pooled_keeps_every_attribute() -> None:
    tokens = scene_tokens(_plain())
    recovered = pooled_tokens(tokens) @ tokens.T
    assert (recovered > 0).all()


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"shape must be 0\.\.5"):
        dataclasses.replace(_plain(), shape=6)
    with pytest.raises(ValueError, match="multiple of 32"):
        render(_plain(), 100)


def test_batches_hold_the_same_pictures() -> None:
    scenes = [scene_from_seed(seed) for seed in range(3)]
    batch = render_batch(scenes)
    assert batch.shape == (3, 3, 128, 128)
    assert np.array_equal(batch[2].permute(1, 2, 0).numpy(), render(scenes[2]))
