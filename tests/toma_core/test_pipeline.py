"""Test the public interface of `toma_core` on toy blocks, by hand and without ComfyUI."""

from typing import Any

import pytest
import torch

from tests.loop import loop
from tests.toma_core.plans import UNET_BLOCK, plan_for
from toma_core import Evaluation, RunState, Schedule, ToMAConfig, cost_model, reduce, restore
from toma_core.reasons import Message, Reason


def evaluation_of(sigma: float = 1.0, plan_keys: tuple[object, ...] = (None,), **settings: object) -> Evaluation:
    run = RunState(Schedule(ToMAConfig(**settings), (1.0,)))  # type: ignore[arg-type]
    return Evaluation(run, run.schedule.decide(sigma), plan_keys)  # type: ignore[arg-type]


def obstacle(evaluation: Evaluation, x: torch.Tensor) -> Message | None:
    return evaluation.obstacle(x, UNET_BLOCK, evaluation.run.config.granularity)


def near(a: torch.Tensor, b: list[list[float]]) -> None:
    torch.testing.assert_close(a, torch.tensor([b]), rtol=1e-5, atol=1e-5)


def test_a_block_that_doubles_its_input() -> None:
    """Four tokens form one window. At ratio 0.5 the block gets the means (2, 0) and (0, 4) and returns (4, 0) and
    (0, 8), so its updates are (2, 0) and (0, 4). Each token gets the update of its mean: (1 + 2, 0), (3 + 2, 0),
    (0, 2 + 4), (0, 6 + 4)."""
    x = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 6.0]]])
    plan = plan_for(x, (1, 4), "toy", evaluation_of(min_tokens=4, sharpness=10_000.0, window_size=4))
    reduced = reduce(x, plan)
    near(reduced, [[2.0, 0.0], [0.0, 4.0]])
    inputs = 2 * reduced, reduced, x
    copies = [t.clone() for t in inputs]
    near(restore(*inputs, plan), [[3.0, 0.0], [5.0, 0.0], [0.0, 6.0], [0.0, 10.0]])
    assert all(map(torch.equal, inputs, copies))


def test_a_block_that_does_nothing_changes_nothing() -> None:
    """The update of every merged token is zero, so the output equals x bit for bit."""
    x = torch.randn(2, 117, 8)
    plan = plan_for(x, (13, 9), "toy", evaluation_of(ratio=0.9, min_tokens=4))
    reduced = reduce(x, plan)
    assert reduced.shape[1] < 0.2 * x.shape[1]
    assert torch.equal(restore(reduced.clone(), reduced, x, plan), x)


@loop(
    ("settings", "why"),
    [
        ({"ratio": 0.0, "min_tokens": 4}, None),
        ({"min_tokens": 256}, Reason.TOO_FEW_TOKENS(least=256)),
        ({}, Reason.TOO_FEW_TOKENS(least=256)),
        ({"ratio": 0.0019, "min_tokens": 4}, Reason.NOTHING_TO_MERGE()),
    ],
)
def test_off_is_the_very_same_tensor(settings: dict[str, Any], why: Message | None) -> None:
    evaluation, x = evaluation_of(**settings), torch.randn(1, 255, 4)
    plan = plan_for(x, (1, 255), "toy", evaluation)
    assert plan is None
    assert why is None or obstacle(evaluation, x) == why
    reduced = reduce(x, plan)
    assert reduced is x
    out = 2 * reduced
    assert restore(out, reduced, x, plan) is out
    assert evaluation.run.stats.selections == 0
    if why == Reason.TOO_FEW_TOKENS(least=256):
        assert obstacle(evaluation, torch.randn(1, 256, 4)) is None


def test_auto_on_a_card_asks_for_enough_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100, Auto does not merge one image of 576 tokens and 64 channels, but merges 4096 of them. If `min_tokens`
    is fixed at 576, even one image is merged."""
    monkeypatch.setattr(cost_model, "card_of", lambda device: cost_model.Card("NVIDIA H100", (9, 0), 132, 1.98e9))
    few, many = (torch.randn(1, 576, 64).expand(images, -1, -1) for images in (1, 4096))
    assert plan_for(few, (24, 24), "toy", evaluation_of()) is None
    assert obstacle(evaluation_of(), few) == Reason.TOO_LITTLE_WORK()
    assert obstacle(evaluation_of(), many) is None
    assert obstacle(evaluation_of(plan_keys=(None,) * 4096), many) == Reason.TOO_LITTLE_WORK(), (
        "conditions are no images"
    )
    assert plan_for(few, (24, 24), "toy", evaluation_of(min_tokens=576)) is not None
    assert obstacle(evaluation_of(min_tokens=577), few) == Reason.TOO_FEW_TOKENS(least=577)
    edge = torch.zeros(1, 1024, 1280, dtype=torch.float16)
    merged = [not obstacle(evaluation_of(granularity=g), edge) for g in ("stack", "block", "module")]
    assert merged == [True, True, False], "what merging adds counts as well"


def test_every_plan_merges_something() -> None:
    for width in range(4, 40):
        for ratio in (0.02, 0.5, 0.95):
            evaluation = evaluation_of(ratio=ratio, min_tokens=4, window_size=2)
            plan = plan_for(torch.randn(1, width, 4), (1, width), "toy", evaluation)
            assert (plan is None) == (round(ratio * width) == 0)
            assert plan is None or plan.num_destinations < width
