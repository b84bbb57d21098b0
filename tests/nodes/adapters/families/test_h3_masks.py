"""Test MiniMax H3 with a mask, as in inpainting. With a mask, each video token has its own row of modulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import TEXT, noise
from tests.nodes.adapters.families.test_h3 import (
    AUDIO,
    FRAME,
    FRAMES,
    HEIGHT,
    LAYOUT,
    RUN,
    WIDTH,
    sampled,
)

Reason = pack_module("toma_core.reasons").Reason
START, TOKENS = TEXT + AUDIO, FRAMES * FRAME
Change = Callable[[list[Any]], list[Any]]


@pytest.fixture
def with_segments(model_of: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], Any]:
    """with_segments(change): return a model whose blocks get the segments of modulation that `change` returns."""

    def changed(change: Change) -> Any:
        model, lists = model_of("h3"), list[tuple[Any, Any]]()
        block = type(model.model.diffusion_model.blocks[0])
        call = block.__call__

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) > 2:  # a call by the model; the test's own calls pass keywords
                if not lists or lists[-1][0] is not args[2]:
                    lists.append((args[2], change(args[2])))
                args = (*args[:2], lists[-1][1], *args[3:])
            return call(self, *args, **kwargs)

        monkeypatch.setattr(block, "__call__", called)
        return model

    return changed


def levels(segments: list[Any]) -> Tensor:
    """Choose a row of modulation for each video token, at random from two rows. Return the indices of the chosen
    rows."""
    first, last = segments[0][2], segments[-1][2]
    return torch.where(noise(TOKENS) > 0, first, last)


def by_token(segments: list[Any]) -> list[Any]:
    *others, (start, stop, _) = segments
    return [*others, (start, stop, levels(segments))]


def by_token_of_both(segments: list[Any]) -> list[Any]:
    """Give each audio token and each video token its own row of modulation."""
    *others, (a, b, row), video = by_token(segments)
    return [*others, (a, b, torch.full((b - a,), row)), video]


def by_frame(segments: list[Any]) -> list[Any]:
    """Cut the video into two segments. The first has one row of modulation for all of its tokens, the second a row for
    each token."""
    *others, (start, stop, row) = segments
    middle = start + 2 * FRAME
    return [*others, (start, middle, row), (middle, stop, levels(segments)[: stop - middle])]


@loop("change", [by_token, by_token_of_both, by_frame])
def test_a_block_modulates_each_destination_by_its_own_row(
    change: Change, with_segments: Any, merged_block: Any
) -> None:
    layout = replace(LAYOUT, before=START)
    block = merged_block(with_segments(change), layout, lambda m: sampled(m, steps=1))
    segments = change(block.given["mod_segments"])
    rows = torch.cat([torch.as_tensor(row).expand(stop - start) for start, stop, row in segments])
    kept = torch.cat([rows[:START], rows[START:][block.plan.destinations[0]]])
    block.seen["mod_segments"] = [(n, n + 1, int(row)) for n, row in enumerate(kept)]
    block.agrees()


@loop(
    "segments",
    [
        [(0, START, 1), (START, START + FRAME, 0), (START + FRAME, START + TOKENS, 0)],
        [(0, START, 1), (START, START + TOKENS, torch.zeros(TOKENS))],
        [(0, START, 1), (START, START + TOKENS, torch.zeros(TOKENS - 1, dtype=torch.long))],
        [(0, START, 1), (START, START + TOKENS, torch.zeros(TOKENS, 2, dtype=torch.long))],
        [(0, START, 1), (START + 1, START + TOKENS, 0)],
        [(0, START, 1), (START, START + TOKENS + 1, 0)],
        [(0, START + 1, 1), (START + 1, START + TOKENS, 0)],
        [(0, START), (START, START + TOKENS)],
        [],
        None,
        torch.zeros(2, 3),
    ],
)
def test_segments_that_are_not_known_are_refused_in_words(segments: Any) -> None:
    h3 = pack_module("nodes.adapters.families.h3")
    call_args = {
        **{"x": torch.zeros(START + TOKENS, 4), "t_emb": None, "mod_segments": segments, "transformer_options": {}},
        "rope_freqs": torch.zeros(1, START + TOKENS, 1, 2, 2, 2),
    }
    found = h3.Signature().obstacle(call_args, START, TOKENS)
    assert found == Reason.ARGUMENT_IN_USE(arguments="modulation by token")


def masks(what: str) -> tuple[Tensor, Tensor]:
    """Return masks of video and audio, with 1 where the latent is generated and 0 where it is fixed."""
    video, audio = torch.ones(1, 1, FRAMES, HEIGHT, WIDTH), torch.ones(1, 1, 2, AUDIO // 2)
    if what == "a rectangle":
        video[..., :, :6, :8] = 0
    elif what == "a soft edge":
        video[:] = torch.linspace(0, 1, WIDTH)
    elif what == "all alike":
        video[:] = 0.5
    else:
        video[:, :, : 0 if what == "audio alone" else 2] = 0
        audio[..., :3] = 0
    return video, audio


@loop("what", ["a rectangle", "an extension", "a soft edge", "all alike", "audio alone"])
@loop("cfg", [1.0, 3.0])
def test_a_masked_run(what: str, cfg: float, model_of: Any, run_preset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since ComfyUI 0.33.0 the model reads masks. Before 0.33.0, ComfyUI only blends latents by the mask."""
    from comfy.nested_tensor import NestedTensor

    model, (video, audio) = model_of("h3"), masks(what)
    latent = models.empty(model, HEIGHT, WIDTH, 1, FRAMES)
    latent = NestedTensor([noise(*each.shape) for each in latent.unbind()])
    rows, block = list[Any](), type(model.model.diffusion_model.blocks[0])
    call = block.__call__
    monkeypatch.setattr(
        block, "__call__", lambda self, *args, **kw: rows.append(args[2][-1][2]) or call(self, *args, **kw)
    )
    run_preset(model, **{**RUN, "cfg": cfg}, latent=latent, noise_mask=NestedTensor([video, audio]))
    reads_masks = "denoise_mask" in signature(type(model.model.diffusion_model).forward).parameters
    assert isinstance(rows[0], Tensor) is (reads_masks and what not in ("all alike", "audio alone"))
