"""Test every family on a small model of its real class.

Add a new family to `testbed.models` and `LAYOUTS`. The last test here fails if `testbed.models` or `LAYOUTS` lacks a
family.
"""

import inspect
import math
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import (
    ALONE,
    HEIGHT,
    LAYOUTS,
    PREDICTED,
    WIDTH,
    Layout,
    arguments,
    grid_of,
    of_references,
)

Reason = pack_module("toma_core.reasons").Reason
report_text = pack_module("nodes.adapters.report_text")

BLOCKS = [(family, layout) for family, layouts in LAYOUTS.items() for layout in layouts]
block_kinds = loop(("family", "layout"), BLOCKS, ids=[f"{f}-{la.blocks}" for f, la in BLOCKS])
every_family = loop("family", LAYOUTS)
# By family: number of frames, and height and width of a frame in latent pixels.
VIDEOS = {"wan": (5, 20, 28), "cosmos": (5, 20, 28), "hunyuan": (5, 10, 14), "ltx": (5, 6, 8), "ltx_av": (5, 6, 8)}
SIZES = [*((f, la, (1, HEIGHT, WIDTH)) for f, la in BLOCKS), *((f, la, VIDEOS[f]) for f, la in BLOCKS if f in VIDEOS)]


@pytest.mark.compat
@loop(("family", "layout", "size"), SIZES)
@loop("batch", [1, 2])
def test_block_is_computed_on_merged_tokens(
    family: str, layout: Layout, size: tuple[int, int, int], batch: int, model_of: Any, merged_block: Any
) -> None:
    """A destination represents only tokens of its own frame, and all frames have the same number of destinations."""
    (frames, height, width), batch = size, 1 if family in ALONE else batch
    block = merged_block(model_of(family), layout, height=height, width=width, frames=frames, batch=batch)
    grid = grid_of(layout, height, width, frames)
    assert block.planned[0].grid == grid
    assert block.stats.grids == {grid: math.prod(grid) // 2}
    block.agrees()
    if layout.rope_arg:
        kept = layout.above + block.tokens.shape[1] - block.plan.tokens + block.plan.num_destinations + layout.below
        rows = block.given[layout.rope_arg]
        first = layout.taken(rows).narrow(layout.rope_token_dim, 0, kept)
        block.needs(**{layout.rope_arg: layout.given(rows, first)})
    for name in layout.rows if frames > 1 else ():
        block.needs(**{name: layout.given(block.given[name], layout.taken(block.seen[name]).flip(1))})
    for matrix in (block.M, block.U):
        by_frame = matrix.view(batch, frames, -1, frames, matrix.shape[2] // frames)
        assert torch.equal(by_frame.abs().sum((0, 2, 4)) > 0, torch.eye(frames, dtype=torch.bool))


@pytest.mark.compat
@block_kinds
def test_consecutive_blocks_stay_merged(family: str, layout: Layout, model_of: Any, merged_block: Any) -> None:
    model = model_of(family)
    options = of_references(model) if family == "flux" else {}
    chain = merged_block(model, layout, chain=True, positive=models.conditioning(model, seed=1, **options))
    chain.agrees(10)


# Of each run: settings, number of frames, height, width, batch size and guidance.
PICTURES: list[tuple[Any, ...]] = [
    ({"granularity": "module"}, 1, HEIGHT, WIDTH, 1, 3.0),
    ({"granularity": "block"}, 1, HEIGHT, WIDTH, 1, 3.0),
    ({}, 1, 19, 15, 1, 1.0),
    ({}, 1, 33, 8, 3, 4.0),
    (PREDICTED, 1, 19, 15, 1, 4.0),
    (PREDICTED, 1, HEIGHT, WIDTH, 2, 4.0),
]
MOVING = [({}, 5, 19, 15, 1, 1.0), (PREDICTED, 5, 9, 8, 1, 4.0), ({"full_step_interval": 2}, 21, 8, 11, 1, 4.0)]
RUNS = [*((f, *run) for f in LAYOUTS for run in PICTURES), *((f, *run) for f in (*VIDEOS, "h3") for run in MOVING)]


@pytest.mark.compat
@loop(("family", "settings", "frames", "height", "width", "batch", "cfg"), RUNS)
def test_merged_runs_are_finite_and_repeat(
    family: str, settings: Any, frames: int, height: int, width: int, batch: int, cfg: float, model_of: Any,
    run_merged: Any,
) -> None:  # fmt: skip
    model, batch = model_of(family), 1 if family in ALONE else batch
    stats = run_merged(model, settings, height, width, frames=frames, batch=batch, cfg=cfg)
    blocks = sum(len(getattr(model.model.diffusion_model, layout.blocks)) for layout in LAYOUTS[family])
    assert len(stats.merged_blocks) == blocks
    ((grid, destinations),) = stats.grids.items()
    assert grid == grid_of(LAYOUTS[family][0], height, width, frames)
    assert destinations % frames == 0
    if settings is PREDICTED:  # all blocks and both conditions share one plan in the merged step
        assert (sorted(stats.merged_steps), stats.selections) == ([1], 1)


@every_family
def test_a_picture_of_few_tokens(family: str, model_of: Any, attach: Any, stats_of: Any) -> None:
    """A picture of 2 x 2 latent pixels has one token in some families (not merged) and four tokens in others."""
    merged, (layout, *_) = attach(model_of(family)), LAYOUTS[family]
    assert models.sample(merged, 2, 2, steps=2, cfg=4.0).isfinite().all()
    assert set(stats_of(merged).grids) == (set() if layout.patch == 2 else {(2, 2)})


@every_family
def test_residuals_are_cached_and_reused(family: str, model_of: Any, attach: Any, stats_of: Any) -> None:
    model = model_of(family)
    plain = models.sample(model, HEIGHT, WIDTH, steps=4, cfg=1.0)
    uncached = models.sample(attach(model, ratio=0.5), HEIGHT, WIDTH, steps=4, cfg=1.0)
    reusing = attach(model, **PREDICTED)
    cached = models.sample(reusing, HEIGHT, WIDTH, steps=4, cfg=1.0)
    assert stats_of(reusing).cache_bytes > 0
    assert (cached - plain).norm() < (uncached - plain).norm()
    first = attach(model, **PREDICTED)
    full = models.sample(first, HEIGHT, WIDTH, steps=1, cfg=1.0)
    assert torch.equal(full, models.sample(model, HEIGHT, WIDTH, steps=1, cfg=1.0))


@every_family
@loop("settings", [{}, PREDICTED], ids=["tokens", "prediction"])
def test_conditions_in_calls_of_their_own(
    family: str, settings: Any, model_of: Any, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If memory is low, ComfyUI evaluates prompt and negative prompt in separate calls. Separate calls round
    differently from a joint call."""
    model = model_of(family)
    merged = attach(model, **settings)
    joined = models.sample(merged, HEIGHT, WIDTH, steps=2)
    plain = models.sample(model, HEIGHT, WIDTH, steps=2)
    monkeypatch.setattr(type(model.model), "memory_required", lambda *_, **__: 1e20)
    split, plain_split = models.sample(merged, HEIGHT, WIDTH, steps=2), models.sample(model, HEIGHT, WIDTH, steps=2)
    off = (plain_split - plain).abs().max()
    assert (split - joined).abs().max() <= 10 * off + 1e-4 * joined.abs().max()


@block_kinds
def test_block_with_a_renamed_argument_is_not_merged(
    family: str, layout: Layout, attach: Any, stats_of: Any, warnings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout.names:
        pytest.skip("its blocks take whatever they are given")
    model, new = models.TRANSFORMERS[family](), f"new_{layout.tokens}"
    cls = type(getattr(model.model.diffusion_model, layout.blocks)[0])
    original = cls.forward
    signature = inspect.signature(original)
    assert layout.tokens in signature.parameters
    forward = lambda self, *args, **kwargs: original(self, *args, **kwargs)  # noqa: E731
    parameters = [p.replace(name=new) if p.name == layout.tokens else p for p in signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    plain = models.sample(model, HEIGHT, WIDTH, steps=1)
    monkeypatch.setattr(cls, "forward", forward)
    merged = attach(model)
    assert torch.equal(models.sample(merged, HEIGHT, WIDTH, steps=1), plain)
    (warning,) = warnings()
    assert new in warning
    assert "Nothing was merged" in report_text.summary(stats_of(merged))


REPLACED = ("flux", "flux2", "chroma", "qwen_image", "lens", "sd3", "wan", "hunyuan", "ltx", "ltx_av", "h3")


@pytest.mark.compat
@loop("family", REPLACED)
def test_replaced_block_sees_all_tokens(family: str, model_of: Any, attach: Any, stats_of: Any) -> None:
    model, seen, layout = model_of(family), [], LAYOUTS[family][0]

    def replacement(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        seen.append(layout.taken(args["img"]).shape[1])
        out = extra["original_block"](args)
        return {**out, "img": layout.given(out["img"], layout.taken(out["img"]) * 1.01)}

    def replaced(patched: Any) -> Any:
        patched = patched.clone()
        patched.set_model_patch_replace(replacement, "dit", "double_block", 1)
        return patched

    for merged in (replaced(attach(model)), attach(replaced(model))):
        seen.clear()
        out = models.sample(merged, HEIGHT, WIDTH, steps=1, cfg=1.0)
        assert out.isfinite().all()
        assert seen == [math.prod(grid_of(layout)) + layout.before * layout.flat]
        assert stats_of(merged).unmerged == {}
        assert not torch.equal(out, models.sample(attach(model), HEIGHT, WIDTH, steps=1, cfg=1.0))


@pytest.mark.compat
@loop("family", ["z_image", "lumina2", "qwen_image", "lens", "wan"])
def test_patch_between_blocks_sees_and_changes_all_tokens(family: str, model_of: Any, attach: Any) -> None:
    """Some ControlNets are patches that replace the image tokens after every block."""
    model, seen = model_of(family), []

    def patch(args: dict[str, Any]) -> dict[str, Any]:
        """In odd calls return new image tokens. In even calls change them in place, as the patch of Uni3C does."""
        seen.append(args["img"].shape[1])
        return {**args, "img": args["img"] * 1.01 if len(seen) % 2 else args["img"].mul_(1.01)}

    patched = model.clone()
    patched.set_model_patch(patch, "double_block")
    plain = models.sample(patched, HEIGHT, WIDTH, steps=1, cfg=1.0)
    expected, seen[:] = list(seen), []
    out = models.sample(attach(patched), HEIGHT, WIDTH, steps=1, cfg=1.0)
    assert seen == expected
    assert out.isfinite().all()
    assert not torch.equal(out, plain)
    assert not torch.equal(out, models.sample(attach(model), HEIGHT, WIDTH, steps=1, cfg=1.0))


@loop(("family", "place"), [("cosmos", "mlp_patch"), ("wan", "attn1_patch"), ("wan", "attn2_patch")])
def test_patch_inside_a_block_sees_all_tokens(family: str, place: str, model_of: Any, run_unmerged: Any) -> None:
    model, seen = model_of(family).clone(), []

    def patch(args: dict[str, Any]) -> Any:
        seen.append((args["x"].shape, args["transformer_options"].get("grid_sizes")))
        changed = args["x"] * 1.01
        return {**args, "x": changed} if place == "mlp_patch" else changed

    model.set_model_patch(patch, place)
    assert list(run_unmerged(model, frames=3).unmerged) == [Reason.ATTENTION_PATCH()]
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :] != []


def test_chroma_may_skip_blocks(pack: Any, attach: Any, stats_of: Any) -> None:
    """A chain of merged blocks must not begin or end at a block that the model never calls."""
    model = models.chroma(double=4, single=3)
    network = model.model.diffusion_model
    for skipped in ([0], [3], [1, 2], [0, 1, 2, 3]):
        network.skip_mmdit = skipped
        merged = attach(model)
        assert models.sample(merged, HEIGHT, WIDTH, steps=1).isfinite().all()
        assert stats_of(merged).unmerged_names() == {Reason.SKIPPED_BY_MODEL(): {f"double.{i}" for i in skipped}}


@loop("family", ["z_image", "krea2", "sd3", "wan", "ltx", "ltx_av", "h3"])
def test_another_nodes_loop_sees_all_tokens(family: str, attach: Any, record: Any) -> None:
    """If a node replaces the model's loop over the blocks, its loop may read the tokens between any two blocks."""
    model = models.TRANSFORMERS[family]()
    network, layout = model.model.diffusion_model, LAYOUTS[family][0]
    second = record(getattr(network, layout.blocks)[1])
    own = network.forward
    network.forward = lambda *args, **kwargs: own(*args, **kwargs)
    models.sample(attach(model), HEIGHT, WIDTH, steps=1, cfg=1.0)
    seen = layout.taken(arguments(getattr(network, layout.blocks)[1], layout, second[0])[layout.tokens]).shape[1]
    assert seen >= math.prod(grid_of(layout))


def test_more_positional_arguments_than_known() -> None:
    signature = pack_module("nodes.adapters.families.flux").DoubleSignature()
    args = torch.zeros(1, 140, 4), torch.zeros(1, 7, 4), None, torch.zeros(1, 1, 147, 2), None, "more"
    call_args = signature.call_args(args, {"transformer_options": {}})
    assert signature.obstacle(call_args, 0, 140) == Reason.ARGUMENT_IN_USE(arguments=("argument 6",))


def test_every_supported_transformer_is_tried_here(pack: Any) -> None:
    registry = pack_module("nodes.adapters.registry")
    assert set(LAYOUTS) == set(models.TRANSFORMERS)
    families = {type(registry.find(make().model.diffusion_model)).__module__ for make in models.TRANSFORMERS.values()}
    # `families` lacks the family of the UNets.
    assert len(families) + 1 == len(registry._FAMILIES) == len(models.FAMILIES)
