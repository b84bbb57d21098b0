"""Test models that several processes share. compatibility/parallel.py simulates how raylight and xDiT share tokens and
conditions. Neither shared tokens nor shared conditions are merged. Models with sharded weights (FSDP) are merged like
others."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from compatibility.parallel import InTurn, Shares, by_condition
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import every_kind, prompts_of

TOKENS_CHANGED = "tokens_changed"
# A picture has 144 tokens, a text has 6. With two references of the picture's size, each process has 219 of 438 tokens,
# more than the 150 tokens of picture and text. 132 + 7 tokens, in the case "odd", give unequal shares.
SIDE, TEXT = 24, 6
SHARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings, and options of the picture
    "one reference": ({}, {"references": 1}),
    "two references": ({}, {"references": 2}),
    "odd": ({}, {"text": 7, "width": 22}),
    "module": ({"granularity": "module"}, {"references": 2}),
    "cached": ({"full_step_interval": 2}, {"references": 2, "steps": 3}),
}


def picture(model: Any, references: int = 0, text: int = TEXT, width: int = SIDE, steps: int = 2) -> Tensor:
    """Sample a latent. references: number of reference images, which have the latent's size."""
    g = torch.Generator().manual_seed(9)
    latents = [torch.randn(1, 16, SIDE, width, generator=g) for _ in range(references)]
    options: dict[str, Any] = {"reference_latents": latents} if latents else {}
    return models.sample(model, SIDE, width, steps=steps, **prompts_of(model, text, **options))


def check_unmerged(stats: Any, shared: Any, merged: Any, reasons: set[str], **options: Any) -> None:
    assert torch.equal(picture(merged, **options), picture(shared, **options))
    found = stats(merged)
    assert found.merged_blocks == set()
    assert {block for parts in found.unmerged.values() for block, _ in parts} == found.blocks != set()
    assert {reason.id.value for reason in found.unmerged} <= reasons


@loop("rejoin", [True, False], ids=["raylight", "xdit"])
@loop("case", SHARED)
def test_shared_tokens_are_not_merged(flux: Any, attach: Any, stats_of: Any, case: str, rejoin: bool) -> None:
    """Each process has a part of the tokens of text, image and references. With references, this part is longer than
    the image, but merging it by the image's grid would be wrong."""
    settings, options = SHARED[case]
    shared, alone = Shares(InTurn(), rejoin).on(flux), picture(flux, **options)
    off = (picture(shared, **options) - alone).norm() / alone.norm()
    # In the case "odd", tokens also attend to padding, and this changes the picture.
    assert 0 < off < (0.05 if case == "odd" else 1e-5), "not the model that it should be"
    # raylight replaces the `forward` of double blocks, so their reason is `block_replaced`.
    check_unmerged(stats_of, shared, attach(shared, **settings), {TOKENS_CHANGED, "block_replaced"}, **options)


@every_kind
@loop("granularity", ["stack", "module"])
def test_shared_conditions_are_not_merged(model: Any, attach: Any, stats_of: Any, granularity: str) -> None:
    """Each process evaluates one of two conditions, and ToMA cannot know which of the two."""
    shared = by_condition(InTurn(), model)
    check_unmerged(stats_of, shared, attach(shared, granularity=granularity), {TOKENS_CHANGED})


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a group of torch.distributed that consists of this process alone."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("PyTorch without gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@every_kind
def test_sharded_weights(kind: str, model: Any, new_model: Any, attach: Any, stats_of: Any, group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    sharded, mesh = new_model(kind), dist.device_mesh.init_device_mesh("cpu", (1,))
    for block in [*sharded.model.diffusion_model.modules()]:
        if type(block).__name__ in ("BasicTransformerBlock", "DoubleStreamBlock", "SingleStreamBlock"):
            fully_shard(block, mesh=mesh)
    merged = attach(sharded)
    assert torch.equal(picture(merged), picture(attach(model)))
    assert stats_of(merged).unmerged == {}
    assert stats_of(merged).merged_blocks
