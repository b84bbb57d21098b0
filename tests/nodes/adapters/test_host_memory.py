"""Test keys and values in main memory: pictures stay bit-identical, and no copies or buffers are left after a run."""

from typing import Any

import pytest
import torch
from comfy.model_management import InterruptProcessingException

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.cards import a_card, compared, sampled
from tests.nodes.adapters.families.layouts import HEIGHT, LAYOUTS, WIDTH, noise
from tests.nodes.adapters.helpers import balanced, prompts_of, split_calls_when
from tests.nodes.adapters.kv_helpers import failing, several_calls

Reason = pack_module("toma_core.reasons").Reason
KINDS = tuple(LAYOUTS)


@loop(("kind", "n"), [(kind, n) for n, kind in enumerate(KINDS)])
def test_the_picture_is_the_same_wherever_they_lie(kind: str, n: int, model_of: Any, stats_of: Any) -> None:
    """All or half of the keys and values are in main memory."""
    merged, share, quantized = balanced(model_of(kind)), 0.5 * (n % 3 == 0), n % 2 == 0
    card = compared(kind, merged, quantized, share)
    stats, (on_card, in_main) = stats_of(merged), card.peak
    assert stats.merged_steps
    assert in_main > 0
    assert 0.2 < on_card / (on_card + in_main) < 0.7 if share else on_card == 0


# By run: kind of model, settings, and options of the run.
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a batch without guidance": ("z_image", {}, {"batch": 2, "cfg": 1.0}),
    "a sampler with two evaluations a step": ("z_image", {}, {"sampler": "heun", "steps": 4}),
    "a sampler that remembers": ("z_image", {}, {"sampler": "dpmpp_2m"}),
    "references that are merged": ("flux", {"merge_references": True}, {}),
}


@loop("run", RUNS)
@loop("quantized", [False, True])
def test_in_other_runs_too(run: str, quantized: bool, model_of: Any, stats_of: Any) -> None:
    kind, settings, options = RUNS[run]
    model = model_of(kind)
    if kind == "flux":
        options = prompts_of(model, reference_latents=[noise(1, 16, HEIGHT, WIDTH)])
    merged = balanced(model, **settings)
    compared(kind, merged, quantized, **options)
    assert stats_of(merged).merged_steps


@loop("split", [False, True])
def test_with_several_conditions(split: bool, model_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If conditions get separate calls after the refresh, each call reads its part of a shared buffer."""
    model = several_calls(model_of("wan"))
    both = [*models.conditioning(model, seed=1), *models.conditioning(model, seed=3)]
    merged = balanced(model)
    if split:
        split_calls_when(monkeypatch, merged, lambda evaluation: evaluation % 5 > 1)
    compared("wan", merged, True, positive=both)


def test_a_run_within_a_run(model_of: Any) -> None:
    """Another model runs inside each step, with separate buffers."""
    outer, inner, found = balanced(model_of("z_image")), balanced(models.z_image(seed=1)), list[Any]()
    with a_card(1.0, False):
        wanted = [sampled("z_image", each) for each in (outer, inner)]
    with a_card(0.0, False) as card:
        again = sampled("z_image", outer, callback=lambda *_: found.append(sampled("z_image", inner)))
    card.ended()
    assert len(card.hosts) == 6
    assert all(map(torch.equal, again, wanted[0]))
    assert len(found) == 5
    assert all(torch.equal(*pair) for each in found for pair in zip(each, wanted[1], strict=True))


@loop("at", [1, 2, 3])
def test_where_memory_runs_out_the_rest_is_full(at: int, model_of: Any, stats_of: Any) -> None:
    """Two runs fail at the same call: one has all keys and values on the GPU, the other has them in main memory. Their
    pictures are equal."""
    model = model_of("z_image")
    merged, block, found = balanced(model), model.model.diffusion_model.layers[1], []
    for share in (1.0, 0.0):
        with a_card(share, True) as card, pytest.MonkeyPatch.context() as patch:
            failing(patch, block, at, torch.OutOfMemoryError())
            found.append(sampled("z_image", merged))
        card.ended()
        assert Reason.KV_CACHE_DISABLED() in stats_of(merged).unmerged_calls
    assert all(map(torch.equal, *found))


@loop("at", [1, 2, 3])
@loop("error", ["an interrupt", "an error"])
def test_a_run_that_ends_early_leaves_nothing(at: int, error: str, model_of: Any) -> None:
    model = model_of("z_image")
    merged, block = balanced(model), model.model.diffusion_model.layers[1]
    raised = InterruptProcessingException() if error == "an interrupt" else ValueError("of another node")
    with a_card(0.0, at % 2 == 0) as card, pytest.MonkeyPatch.context() as patch:
        failing(patch, block, at, raised)
        with pytest.raises(type(raised)):
            sampled("z_image", merged)
        assert card.copies.count
        # The traceback references tensors of the run, so delete it.
        raised.__traceback__ = None
    card.ended()


@loop("quantized", [False, True])
def test_the_card_holds_two_blocks_at_most(quantized: bool) -> None:
    model = models.z_image(layers=6)
    with a_card(0.0, quantized) as card:
        sampled("z_image", balanced(model), cfg=1.0)
    one = card.peak[1] / card.copies.made
    # The GPU holds copies of two tensors that are read ahead, of two that are being written, and of the tensors in use.
    assert 2 * one <= card.copies.peak <= 6 * one
    assert card.copies.made == 12
