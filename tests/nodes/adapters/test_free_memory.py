"""ComfyUI joins conditions in one call or splits them, depending on free memory. Both ways must give the same
picture."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import Control, balanced, every_kind

SIDE = 24
PRESETS = ("balanced", "quality", "paper")


@contextmanager
def short_of_memory(model: Any) -> Iterator[None]:
    """Make ComfyUI evaluate every condition in a separate call, without changing the estimate of memory."""
    with pytest.MonkeyPatch.context() as patch:
        own, together = model.model.apply_model, set()

        def apply_model(*args: Any, **kwargs: Any) -> Any:
            together.add(len(kwargs["transformer_options"]["cond_or_uncond"]))
            return own(*args, **kwargs)

        patch.setattr(model.model, "apply_model", apply_model)
        patch.setattr(type(model), "get_free_memory", lambda *args: 0)
        yield
    assert together == {1}, "conditions were joined"


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def late(model: Any) -> list[Any]:
    """Return one prompt that is active from the beginning, and one prompt that begins later."""
    return [*models.conditioning(model, seed=1), *models.conditioning(model, seed=3, start_percent=0.45)]


RUNS = [("balanced", "two"), ("quality", "late"), ("paper", "two")]


@every_kind
@pytest.mark.compat
@loop(("name", "prompts"), RUNS)
def test_joined_and_split_calls_give_one_picture(model: Any, name: str, prompts: str) -> None:
    options: dict[str, Any] = {"steps": 6} if prompts == "two" else {"steps": 6, "positive": late(model)}
    patched = balanced(model, name, skip_first_blocks=1)
    joined, plain = (models.sample(each, SIDE, SIDE, **options) for each in (patched, model))
    with short_of_memory(model):
        split, plain_split = (models.sample(each, SIDE, SIDE, **options) for each in (patched, model))
    assert distance(plain_split, plain) < 5e-6
    assert distance(split, joined) < 2e-5
    assert distance(joined, plain) > 1e-3, "nothing was merged"


@loop(("kind", "name"), [("unet", "paper"), ("flux", "balanced")])
def test_the_number_of_threads_does_not_matter(model: Any, name: str) -> None:
    patched, before, pictures = balanced(model, name, skip_first_blocks=1), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            pictures.append(models.sample(patched, SIDE, SIDE, steps=6))
    finally:
        torch.set_num_threads(before)
    assert distance(*pictures) < 2e-5


@loop("apart", [False, True])
def test_a_controlnet_that_begins_late_makes_one_step_full(flux: Any, decisions: Any, apart: bool) -> None:
    """A ControlNet splits chains of blocks. apart: whether the ControlNet belongs only to the positive prompt, which
    then has a separate call."""
    residuals = {"input": [torch.full((1, 1, 48), 0.1)] * 3, "output": []}
    control = Control(lambda x, t: residuals, begin=0.2)
    positive, negative = models.conditioning(flux, seed=1), models.conditioning(flux, seed=2)
    positive[0][1].update(control=control, control_apply_to_uncond=not apart)
    options = {"steps": 9, "positive": positive, "negative": negative}
    patched = balanced(flux, skip_first_blocks=1)
    joined = models.sample(patched, SIDE, SIDE, **options)
    assert len([d for d in decisions if d.mode.value == "refresh" and d.step % 4]) == 1
    with short_of_memory(flux):
        assert distance(models.sample(patched, SIDE, SIDE, **options), joined) < 2e-5
