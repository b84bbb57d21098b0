"""Processes that sample a picture together, run in turn: shares of tokens or of conditions are not merged.

thorough/test_parallel.py has two real processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compatibility.parallel import InTurn, Shares, by_condition
from testbed import models
from tests.loop import loop

SIDE, TEXT = 24, 6


def picture(model: Any, references: int = 0) -> torch.Tensor:
    """Sample a latent from prompts with a number of references of its size."""
    g = torch.Generator().manual_seed(9)
    latents = [torch.randn(1, 16, SIDE, SIDE, generator=g) for _ in range(references)]
    options: dict[str, Any] = {"reference_latents": latents} if latents else {}
    prompts = {name: models.conditioning(model, TEXT, i, **options) for i, name in enumerate(("positive", "negative"))}
    return models.sample(model, SIDE, SIDE, steps=2, **prompts)


@loop(("rejoin", "references"), [(True, 0), (True, 2), (False, 2)])
def test_shared_tokens(flux: Any, attach: Any, stats_of: Any, rejoin: bool, references: int) -> None:
    """With two references a share is longer than text and picture."""
    shared = Shares(InTurn(), rejoin).on(flux)
    plain, merged = picture(shared, references), attach(shared)
    assert torch.equal(picture(merged, references), plain)
    assert {reason.id.value for reason in stats_of(merged).unmerged} <= {"tokens_changed", "block_replaced"}
    own = picture(flux, references)
    assert 0 < float((plain - own).norm() / own.norm()) < 1e-5, "not the model that it should be"


@loop("kind", ["flux", "unet"])
def test_shared_conditions(request: pytest.FixtureRequest, attach: Any, stats_of: Any, kind: str) -> None:
    shared = by_condition(InTurn(), request.getfixturevalue(kind))
    merged = attach(shared)
    assert torch.equal(picture(merged), picture(shared))
    assert {reason.id.value for reason in stats_of(merged).unmerged} == {"tokens_changed"}
