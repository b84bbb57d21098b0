"""The fast judge measures the pack's own merge, at the unmerged run's own x, and shares what it says it shares."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import models, variants
from benchmarks.fidelity import step
from benchmarks.fidelity.probe import ALL, Probe, error, free_run, name_of, teacher_forced
from scripts.comfy_pack import pack_module

RATIO = 0.5
SETTINGS = {**variants.TINY, "selection_interval": 1, "weight_interval": 1}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small(pack: ModuleType) -> dict[str, Any]:
    return {"dit": models.flux(double=2, single=2), "unet": models.unet(depths=(0, 1, 2), middle=1)}


@pytest.fixture(params=["dit", "unet"])
def model(request: pytest.FixtureRequest, small: dict[str, Any]) -> Any:
    return small[request.param]


def sample(model: Any, **options: Any) -> Tensor:
    return models.sample(model, 32, 32, batch=2, **{"steps": 3, **options})


def test_the_measured_run_is_the_unmerged_one(model: Any) -> None:
    probe = Probe(model, RATIO)
    forced, errors = teacher_forced(probe, ("x", "out", "x0", "before"), (1, 3))
    assert torch.equal(sample(forced), sample(model))
    first, last = errors
    assert (first.step, last.step) == (1, 3)
    assert first.sigma > last.sigma
    assert list(first.by_plan) == ["x", "out"], "before the first step nothing was predicted"
    assert list(last.by_plan) == ["x", "out", "x0", "before"]
    for by_site in last.by_plan.values():
        assert list(by_site) == [*probe.sites, ALL]
        assert all(0 < value < 10 for ways in by_site.values() for value in ways)


def test_sites_are_the_packs_own(small: dict[str, Any]) -> None:
    names = {}
    for kind, model in small.items():
        probe = Probe(model, RATIO)
        sample(teacher_forced(probe, (), ())[0])
        names[kind] = probe.sites
    assert names["dit"] == ["double.0", "double.1", "single.0", "single.1"]
    unet = names["unet"]
    assert unet == sorted(unet, key=lambda name: ("input", "middle", "output").index(name.split(".")[0]))
    assert len(unet) == len(set(unet)) == 11
    assert name_of((("output", 3), 1)) == "output.3"


def test_computing_is_the_packs_merge(model: Any) -> None:
    granularity = "block" if model.get_model_object("diffusion_model").__class__.__name__ == "Flux" else "stack"
    attached = variants.toma("", ratio=RATIO, granularity=granularity, **SETTINGS).patch(model)
    run = free_run(Probe(model, RATIO), "x", whole_steps=0)
    assert torch.equal(sample(run), sample(attached))
    assert not torch.equal(sample(attached), sample(model))


def test_steps_before_a_prediction_stay_whole(model: Any) -> None:
    probe = Probe(model, RATIO)
    run = free_run(probe, "x0", whole_steps=0)
    assert torch.equal(sample(run, steps=1), sample(model, steps=1))
    probe.begin()
    assert not torch.equal(sample(run), sample(model))


def test_sharing_gives_every_token_its_destinations_exact_update(small: dict[str, Any]) -> None:
    """One block of the DiT, by hand: its whole update, looked up at the destinations of a plan on its input."""
    model, pictures = small["dit"], {}
    probe = Probe(model, RATIO)

    def predict(evaluate: Callable[..., Tensor], x: Tensor, sigma: float) -> Tensor:
        pictures["whole"] = evaluate()
        pictures["shared"] = evaluate("x", "single.1", "sharing")
        return pictures["whole"]

    sample(probe.patched(predict), steps=1, cfg=1.0)
    block = model.get_model_object("diffusion_model").single_blocks[1]
    state, merging = pack_module("toma_core.run"), pack_module("toma_core.merge")
    own, original = state.RunState(probe.schedule), block.forward
    decision = pack_module("toma_core").StepPlan(0, pack_module("toma_core").StepMode.MERGED, RATIO, 0, 0)

    def by_hand(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        text = x.shape[1] - 256
        image = x[:, text:].clone()
        out = original(x, *args, **kwargs)
        plan = own.plan(image, (16, 16), "by hand", decision, (None,))
        update = merging.unmerge(merging.gather_destinations(out[:, text:] - image, plan), plan)
        return torch.cat([out[:, :text], image + update], 1)

    block.forward = by_hand
    try:
        expected = sample(model, steps=1, cfg=1.0)
    finally:
        del block.forward
    # One step of Euler ends at the clean picture that it predicts.
    out = model.model.process_latent_out(pictures["shared"])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(pictures["shared"], pictures["whole"], atol=1e-3)


def test_errors_are_relative_to_what_the_model_takes_from_x() -> None:
    whole, x = torch.zeros(2, 1, 4, 4), torch.full((2, 1, 4, 4), 2.0)
    assert error(whole + 0.5, whole, x).tolist() == [0.25, 0.25]


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str], pack: Any) -> None:
    from demo import models as demo_models

    config = demo_models.dit_config(64, (1, 1), 2)
    save_file(demo_models.new_dit(0, config=config, to_train=False).state_dict(), tmp_path / "tiny.safetensors")
    options = ["--model=few", "--steps=3", "--images=2", "--view=crop", "--scenes=report", "--plans", "x", "x0"]
    step.main([f"--weights={tmp_path / 'tiny.safetensors'}", f"--out={tmp_path}", *options])
    stored = json.loads((tmp_path / "tiny-3steps-cfg1-r0.5-crop-report.json").read_text())
    assert step.table(stored) in capsys.readouterr().out
    assert stored["conditions"]["scenes"] == "report"
    assert [found["step"] for found in stored["steps"]] == [3]
    assert list(stored["steps"][0]["by_plan"]["x0"]) == ["double.0", "single.0", "all"]
    assert all(mean > 0 and deviation > 0 for mean, deviation in stored["runs"].values())


def test_the_two_sets_of_scenes_do_not_meet() -> None:
    from demo.checker import FIRST_TEST_SEED
    from demo.data import FIRST_TRAINING_SEED

    firsts = sorted(FIRST_TEST_SEED + first for first in (0, 10_000, *step.SCENES.values()))
    assert all(b - a >= 10_000 for a, b in zip(firsts, [*firsts[1:], FIRST_TRAINING_SEED], strict=True))
