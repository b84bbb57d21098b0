"""Test training: it runs, an interrupted run resumes exactly, and a seed determines the weights."""

import math
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import torch
from safetensors.torch import load_file

from demo import models
from demo.data import Batches, Plan, View
from demo.objectives import FewStepsObjective
from demo.train import Trainer, arguments, plan_of, run

SMALL = {
    "dit": {**models.DIT_CONFIG, "depth": 1, "depth_single_blocks": 1},
    "unet": {
        **models.UNET_CONFIG,
        "num_res_blocks": [1, 1, 1],
        "transformer_depth": [0, 1, 1],
        "transformer_depth_middle": 1,
        "transformer_depth_output": [0, 0, 1, 1, 1, 1],
    },
    "wan": {**models.WAN_CONFIG, "num_layers": 2},
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.model_management, "in_training", True)


def _plan(kind: str, seed: int = 0, steps: int = 3, **changed: Any) -> Plan:
    shares = {"early_shares": (0.4, 0.3), "late_shares": (0.3, 0.4)}
    return Plan(kind, steps, seed, warmup=1, **{"crop_batch": 2, "full_batch": 1, **shares, **changed})


def _trainer(kind: str, seed: int = 0, **more: Any) -> Trainer:
    return Trainer(_plan(kind, seed), CPU, **{"config": SMALL[kind], **more})


def _lively(kind: str, file: Path, **more: Any) -> Path:
    """Write weights to a file, with noise, because untrained models return zeros. Return the file."""
    trainer = _trainer(kind, **more)
    for value in trainer.average.values():
        value += 0.02 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    trainer.export(file)
    return file


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["dit", "unet", "wan"])
def test_runs_resumes_and_repeats(kind: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "limited.pt"
    unbroken, limited, resumed = (_trainer(kind) for _ in range(3))
    assert run(unbroken, tmp_path / "unbroken.pt", minutes=600)
    limited.train_step(Batches(limited.plan)[0])
    assert not run(limited, checkpoint, minutes=0), "a time limit leaves a checkpoint"
    resumed.restore(checkpoint)
    assert resumed.step == 1
    assert resumed.seen == limited.seen
    assert run(resumed, checkpoint, minutes=600)
    assert resumed.step == unbroken.step == 3
    assert _same(resumed.average, unbroken.average)
    with pytest.raises(ValueError, match="belongs to another run"):
        _trainer(kind, seed=1).restore(checkpoint)


def test_a_dit_wide_for_its_tokens(tmp_path: Path) -> None:
    given = ["dit", "--width", "64", "--blocks", "1", "2", "--token", "2", "--shares", "0.5", "0.5", "--steps", "3"]
    plan = plan_of(arguments(given))
    assert plan.early_shares == plan.late_shares == (0.5, 0.5)
    sizes = {batch.sort: batch.clean.shape[2:] for batch in (Batches(plan)[step] for step in range(3))}
    assert sizes == {"half": (16, 16), "full": (32, 32)}
    trainer = Trainer(plan, CPU)
    trainer.train_step(Batches(plan)[0])
    trainer.export(tmp_path / "dit.safetensors")
    loaded = models.load_dit(str(tmp_path / "dit.safetensors")).model.diffusion_model
    assert (loaded.patch_size, loaded.hidden_size, len(loaded.single_blocks)) == (1, 64, 2)
    assert _same(trainer.average, dict(loaded.named_parameters()))


@pytest.mark.parametrize(("kind", "taught"), [("dit", False), ("dit", True), ("unet", False), ("wan", False)])
def test_begins_with_exported_weights_and_trains_all_of_them(kind: str, taught: bool, tmp_path: Path) -> None:
    """taught: distil the weights to few steps. Only then does a DiT train its input for the number of steps."""
    exported = _lively(kind, tmp_path / "weights.safetensors")
    given = load_file(exported)
    plan = _plan(kind, crop_batch=4, full_batch=4)
    begun = Trainer(plan, CPU, config=SMALL[kind], teacher=exported if taught else None)
    begun.begin_with(exported)
    for name, value in begun.network.named_parameters():
        torch.testing.assert_close(value, given[name])
        torch.testing.assert_close(begun.average[name], given[name])
    assert begun.step == 0
    assert math.isfinite(begun.train_step(Batches(plan)[0]))
    still = {name for name, value in begun.network.named_parameters() if torch.equal(value, given[name])}
    unused = {name for name in given if kind == "dit" and not taught and name.startswith("guidance_in.in_layer")}
    assert still <= unused
    if taught:
        assert _same(given, dict(begun.objective.teacher.named_parameters()))


@pytest.mark.parametrize("token", [2, 4])
def test_crops_keep_their_positions(token: int) -> None:
    batches = [Batches(_plan("dit", token=token, steps=1000, early_shares=(0.0, 0.0)))[step] for step in range(12)]
    assert {(batch.sort, batch.clean.shape[2:]) for batch in batches} == {("crop", (16 * token // 2,) * 2)}
    assert all(0 <= value <= 16 and value % 2 == 0 for batch in batches for value in batch.view.offset)
    assert len({batch.view.offset for batch in batches}) > 4


def test_workers_change_nothing() -> None:
    plan = _plan("dit", steps=4)
    ahead = Batches(plan).from_step(1, workers=2)
    for step, batch in zip(range(1, 4), ahead, strict=True):
        alone = Batches(plan)[step]
        assert batch.sort == alone.sort
        assert batch.view == alone.view
        assert all(torch.equal(getattr(batch, x), getattr(alone, x)) for x in ("clean", "noise", "tokens", "quantile"))


def test_half_size_scenes_sit_where_they_belong() -> None:
    """A token of a half-size scene has the mean position of the four tokens that it replaces."""
    network = models.new_dit(0, config=SMALL["dit"])
    half = {"rope_options": View(scale=2).rope_options(CPU)}
    _, small = network.process_img(torch.zeros(1, 16, 32, 32), transformer_options=half)
    _, large = network.process_img(torch.zeros(1, 16, 64, 64))
    means = large.reshape(16, 2, 16, 2, 3).mean(dim=(1, 3)).reshape(1, 256, 3)
    torch.testing.assert_close(small[..., 1:], means[..., 1:])
    assert (small[..., 0] == 1).all()


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        ("dit", {"token": 3}, "no model of"),
        ("dit", {"width": 100}, "no model of"),
        ("dit", {"blocks": (0, 2)}, "no model of"),
        ("unet", {"width": 256}, "DiT's"),
        ("vae", {}, "dit, unet or wan"),
    ],
)
def test_impossible_plans_are_refused(
    kind: str, wrong: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(kind, 3, **wrong)
    with pytest.raises(SystemExit):
        arguments(["unet", "--teacher", "weights.safetensors"])
    assert "and, with --deep, for the UNet" in capsys.readouterr().err


# Batch sizes are even, because the two halves of a batch learn different numbers of steps.
EVEN = _plan("dit", crop_batch=4, full_batch=4)


def test_a_straight_flow_has_no_loss_for_few_steps() -> None:
    """Without guidance (cfg 1), one step of the student along a straight path equals two steps of the teacher."""

    def straight(x: torch.Tensor, sigma: torch.Tensor, **given: Any) -> torch.Tensor:
        return given["y"].sum(1)[:, None, None, None].expand_as(x) * 0.01

    batch = Batches(EVEN)[0]
    assert float(FewStepsObjective(straight, cfg=1.0).loss(straight, batch)) < 1e-8
    assert float(FewStepsObjective(straight, cfg=3.0).loss(straight, batch)) > 1e-4


def test_number_of_steps_and_sigmas_of_distillation() -> None:
    seen: list[tuple[str, list[float], list[float]]] = []

    def spy(who: str) -> Any:
        def network(x: torch.Tensor, sigma: torch.Tensor, **given: Any) -> torch.Tensor:
            seen.append((who, sigma.tolist(), given["guidance"].tolist()))
            return x

        return network

    batch = Batches(EVEN)[0]
    objective = FewStepsObjective(spy("teacher"), cfg=2.0)
    objective.loss(spy("student"), batch)
    half = len(batch.quantile) // 2
    assert [who for who, _, _ in seen] == ["student", "teacher", "student", "teacher", "student"]
    assert seen[0][2] == seen[2][2] == [8.0] * half
    assert seen[-1][2] == [4.0] * half + [8.0] * half
    four, eight = objective.sigmas[4].tolist(), objective.sigmas[8].tolist()
    assert set(seen[0][1]) <= set(four)
    assert set(seen[2][1]) <= set(eight[1::2])
    assert set(seen[1][1]) <= set(eight)
    assert seen[1][1][:half] == seen[1][1][half:]  # the same sigmas with the prompt and without it


def test_the_deep_unet_learns_the_answers_of_the_shallow_one(tmp_path: Path) -> None:
    shallow = _lively("unet", tmp_path / "shallow.safetensors", config=None)
    batch = Batches(_plan("unet", early_shares=(1.0, 0.0)))[0]
    itself = _trainer("unet", config=None, teacher=shallow)
    itself.begin_with(shallow)
    with torch.no_grad():
        assert float(itself.objective.loss(itself.network, batch)) < 1e-6, "it is what it is taught"
    deep = _trainer("unet", config=models.DEEP_UNET_CONFIG, teacher=shallow)
    assert math.isfinite(deep.train_step(batch))
    assert not any(value.grad is not None for value in deep.objective.teacher.parameters())
