"""Test MiniMax H3: tokens have no batch axis, modulation is by segments of tokens, and text and audio come before the
video. With a mask, as in inpainting, each video token has its own row of modulation. In Fast-H3, attention is sparse in
a part of the schedule."""

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
from tests.nodes.adapters.families.layouts import LAYOUTS, TEXT, noise
from tests.nodes.adapters.helpers import balanced, prompts_of

Reason = pack_module("toma_core.reasons").Reason

HEIGHT, WIDTH, FRAMES = 12, 16, 5
FRAME = HEIGHT // 2 * (WIDTH // 2)
AUDIO = 2 * models.AUDIO["MiniMaxH3"](FRAMES)[-1]
(LAYOUT,) = LAYOUTS["h3"]
RUN: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "frames": FRAMES, "cfg": 1.0}
START, TOKENS = TEXT + AUDIO, FRAMES * FRAME
Change = Callable[[list[Any]], list[Any]]
STEPS, BLOCKS = 8, 4


def sampled(model: Any, **options: Any) -> list[Tensor]:
    return models.sample_streams(model, **{**RUN, "steps": 2, **options})


KEYFRAME = {"resolved_frame_index": 0, "latent": noise(1, 24, 1, HEIGHT, WIDTH)}
# A picture, a video with its sound, and a sound.
REFERENCES: list[dict[str, Any]] = [
    {"kind": "image", "latent_h": 6, "latent_w": 8, "latent": noise(1, 24, 1, 6, 8)},
    {
        **{"kind": "video_audio", "latent_t": 2, "latent_h": 4, "latent_w": 6, "ref_audio_t": 3},
        **{"latent": noise(1, 24, 2, 4, 6), "audio_latent": noise(1, 32, 2, 3)},
    },
    {"kind": "audio", "ref_audio_t": 4, "audio_latent": noise(1, 32, 2, 4)},
]
# By case: conditioning options, and the number of tokens that they add before the video.
BEFORE: dict[str, tuple[dict[str, Any], int]] = {
    "audio alone": ({}, 0),
    "a first frame": ({"minimax_keyframes": [KEYFRAME], "minimax_frame_count": 17}, FRAME),
    "references": ({"minimax_refs": REFERENCES}, 3 * 4 + 2 * 3 + 2 * 2 * 3 + 2 * 4),
    "tags": ({"minimax_token_tags": torch.tensor([[1, 1, 0, 0, 0, 1, 1]])}, 0),
}


@loop("what", BEFORE)
def test_a_block(what: str, model_of: Any, merged_block: Any) -> None:
    """Only the video is merged. So its modulation segment, the last one, becomes shorter."""
    model, (options, others) = model_of("h3"), BEFORE[what]
    before, positive = TEXT + others + AUDIO, models.conditioning(model, seed=1, **options)
    block = merged_block(model, replace(LAYOUT, before=before), **RUN, positive=positive)
    assert block.stats.grids == {(FRAMES, HEIGHT // 2, WIDTH // 2): FRAMES * FRAME // 2}
    *segments, (start, end, row) = block.given["mod_segments"]
    assert (start, end) == (before, before + FRAMES * FRAME) == (before, len(block.given["x"]))
    block.seen["mod_segments"] = [*segments, (start, start + block.plan.num_destinations, row)]
    block.agrees()
    assert all(each.bincount().tolist() == [FRAME // 2] * FRAMES for each in block.plan.destinations // FRAME)


@loop("what", BEFORE)
@loop(("sampler", "cfg"), [("euler", 1.0), ("res_multistep", 1.0), ("res_multistep", 3.0)])
def test_runs_of_the_preset(what: str, sampler: str, cfg: float, model_of: Any, run_preset: Any) -> None:
    model, (options, _) = model_of("h3"), BEFORE[what]
    run_preset(model, **{**RUN, "cfg": cfg}, sampler=sampler, **prompts_of(model, **options))


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
    change: Change, model_of: Any, merged_block: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks get the list of segments that `change` returns."""
    model, lists = model_of("h3"), dict[int, list[Any]]()
    kind = type(model.model.diffusion_model.blocks[0])
    call = kind.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 2:  # a call by the model; the test's own calls pass keywords
            args = (*args[:2], lists.setdefault(id(args[2]), change(args[2])), *args[3:])
        return call(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", called)
    block = merged_block(model, replace(LAYOUT, before=START), **RUN)
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
    """Since ComfyUI 0.33.0 the model reads masks. In older releases masks only blend latents."""
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


def sparse(model: Any, start_percent: float, dense: set[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a model in which another node passes an attention function, for sparse attention, to blocks in a part of
    the schedule. Also return two lists: the number of tokens in each sparse call of a block, and in each call of a
    block.

    ComfyUI's own node for sparse attention is newer than 0.33, and needs 12,288 tokens or more.
    start_percent: share of the schedule at which sparse attention begins.
    dense: indices of blocks that never get the function.
    """
    model, calls, lengths = model.clone(), list[int](), list[int]()
    blocks, start = model.model.diffusion_model.blocks, model.get_model_object("model_sampling")
    limit, own = float(start.percent_to_sigma(start_percent)), type(blocks[0]).forward

    def newer(
        self: Any, x: Any, t_emb: Any, mod_segments: Any, rope_freqs: Any, transformer_options: Any = None,
        attention: Any = None,
    ) -> Any:  # fmt: skip
        lengths.append(len(x))
        if attention is not None:
            calls.append(len(x))
        return own(self, x, t_emb, mod_segments, rope_freqs, transformer_options or {})

    def replaced(n: int, block: Any) -> Callable[..., Any]:
        def patch(args: Any, extra: Any) -> Any:
            options = args["transformer_options"]
            is_sparse = float(options["sigmas"][0]) <= limit and n not in dense
            given = [args[name] for name in ("img", "t_emb", "mod_segments", "rope_freqs")]
            attention = block.attn.forward if is_sparse else None
            return {"img": block(*given, transformer_options=options, attention=attention)}

        return patch

    monkeypatch.setattr(type(blocks[0]), "forward", newer)
    for n, block in enumerate(blocks):
        model.set_model_patch_replace(replaced(n, block), "dit", "double_block", n)
    return model, calls, lengths


@loop(
    ("start_percent", "dense", "merged_calls"),
    [
        (0.2, set(), BLOCKS),  # only the second step is neither sparse nor full
        (0.6, set(), 3 * BLOCKS),
        (0.2, {0, 3}, 5 * 2 + 2),  # blocks 0 and 3, never sparse, are merged in 5 steps
        (1.0, set(), 5 * BLOCKS),  # no step is sparse
    ],
)
def test_blocks_merge_before_the_sparse_part_and_around_it(
    start_percent: float,
    dense: set[int],
    merged_calls: int,
    model_of: Any,
    stats_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block with sparse attention runs on all tokens, and the report names the block."""
    model, calls, lengths = sparse(model_of("h3"), start_percent, dense, monkeypatch)
    own, all_dense = sampled(model, steps=STEPS), balanced(model_of("h3"))
    sampled(all_dense, steps=STEPS)
    expected = list(calls)
    calls.clear()
    lengths.clear()
    merged = balanced(model)
    found = sampled(merged, steps=STEPS)
    assert calls == expected
    assert len([n for n in lengths if n < max(lengths)]) == merged_calls
    names = {f"double.{n}" for n in set(range(BLOCKS)) - dense}
    reason = Reason.ARGUMENT_IN_USE(arguments=("attention",))
    assert stats_of(merged).unmerged_names() == ({reason: names} if expected else {})
    pairs = sum(map(len, stats_of(merged).merged_at.values()))
    assert pairs == merged_calls
    times, most = (stats_of(each).times_less_work for each in (merged, all_dense))
    # The saved work is proportional to the number of pairs (step, block merged in this step).
    assert (1 - 1 / times) / (1 - 1 / most) == pytest.approx(pairs / (5 * BLOCKS))
    assert 0 < (found[0] - own[0]).norm() < 0.05 * own[0].norm()
    assert all(map(torch.equal, sampled(merged, steps=STEPS), found))
