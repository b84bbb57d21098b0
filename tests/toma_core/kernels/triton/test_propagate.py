"""Test kernels that propagate cached tensors, against the plain PyTorch of `latent_regression` in fp32."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from testbed.meter import Meter
from tests.toma_core.kernels.cases import BRAIN, DEVICE, FULL, HALF, Case, between, each, views
from tests.toma_core.kernels.triton.test_product import in_dtype, random_plan
from toma_core.kernels.triton.launch import Launch
from toma_core.latent_regression import Regression, Rotation, regress
from toma_core.merge import gather_destinations, stacked

# (case, number of features, rotated pairs of channels per head, number of images with separate rotations). Cases with 0
# pairs represent values and residuals, which are not rotated.
CASES = (
    (Case(5, 7, 4, 0.5, 40, FULL), 5, 0, 0),
    (Case(5, 7, 4, 0.5, 40, FULL, batch=2), 33, 10, 1),
    (Case(13, 19, 8, 0.5, 96, HALF, batch=3), 33, 12, 3),
    (Case(13, 19, 8, 0.75, 77, BRAIN), 16, 0, 0),
    (Case(13, 19, 8, 0.9, 64, FULL), 65, 32, 1),
    (Case(16, 24, 8, 0.25, 320, HALF), 129, 32, 1),
    (Case(13, 19, 16, 0.25, 40, BRAIN), 31, 4, 1),
    (Case(20, 17, 32, 0.5, 77, FULL, batch=3), 129, 0, 0),
    (Case(1, 3, 2, 0.5, 2, FULL), 3, 1, 1),
    (Case(13, 19, 8, 0.5, 40, FULL, batch=3, adaptive=True), 33, 5, 3),
    (Case(16, 30, 16, 0.75, 40, HALF, batch=2, adaptive=True), 33, 20, 1),
)
FULL_SIZE = [
    pytest.param(case, 129, pairs, min(pairs, 1), marks=pytest.mark.gpu)
    for pairs in (0, 64)
    for case in (
        Case(64, 64, 8, 0.5, 3072, BRAIN),
        Case(52, 76, 8, 0.5, 3072, HALF, batch=2),
        Case(64, 64, 8, 0.5, 1280, FULL, batch=2, adaptive=True),
    )
]
TOLERANCE = {FULL: 2e-6, HALF: 2e-3, BRAIN: 1.6e-2}


def operands(
    case: Case, kernels: Any, pairs: int = 0, images: int = 1, features: int = 33
) -> tuple[Regression, Tensor, Tensor, Rotation | None]:
    """Return a regression, a cached and a fresh tensor, and rotations of keys by random angles (None if `pairs` is 0).
    The features are random, but the last one is 1 for every token. The first slots of each window are its
    destinations."""
    plan = replace(random_plan(case), kernels=kernels)
    slots = torch.arange(plan.budget.slots, device=DEVICE).expand_as(plan.dest_slots)
    if plan.budget.valid is not None:
        slots = slots * plan.budget.valid
    plan = replace(plan, dest_slots=slots)
    f = replace(case, channels=features, dtype=FULL).normal(plan.tokens, 5)
    f[..., -1] = 1
    regression, cached, fresh = regress(f, plan), case.tokens(), case.normal(plan.num_destinations, 1)
    if not pairs:
        return regression, cached, fresh, None
    angles = torch.rand(images, plan.tokens, pairs, generator=torch.Generator().manual_seed(3)) * 6
    R = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).view(*angles.shape, 2, 2).to(DEVICE)
    merged = torch.stack([R[n % images, row] for n, row in enumerate(plan.destinations[:images])])
    return regression, cached, fresh, Rotation.of(R[:, :, None], merged[:, :, None], cached)


def error(ours: Tensor, regression: Regression, cached: Tensor, fresh: Tensor, rotation: Rotation | None) -> float:
    """Return the largest error of `ours`, relative to the largest value that plain PyTorch computes in fp32."""
    exact = Regression(in_dtype(regression.plan, FULL), regression.fit.float(), regression.spread.float())
    theirs = exact.propagate(cached.float(), fresh.float(), rotation and replace(rotation, dtype=torch.float32))
    return float((ours.float() - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(("case", "features", "pairs", "images"), [*CASES, *FULL_SIZE], ids=str)
def test_propagate(case: Case, features: int, pairs: int, images: int, kernels: Any) -> None:
    regression, cached, fresh, rotation = operands(case, kernels, pairs, images, features)
    copies = [t.clone() for t in (cached, fresh)]
    ours = regression.propagate(cached, fresh, rotation)
    assert ours.dtype is case.dtype
    assert ours.is_contiguous()
    assert error(ours, regression, cached, fresh, rotation) < TOLERANCE[case.dtype]
    assert all(map(torch.equal, (cached, fresh), copies)), "inputs are left alone"
    assert torch.equal(regression.propagate(cached, fresh, rotation), ours), "the second call is a prepared launch"
    unchanged = gather_destinations(cached, regression.plan)
    assert torch.equal(regression.propagate(cached, unchanged, rotation), cached), "what has not changed stays"
    if rotation is not None:
        rounded = replace(rotation, **dict(zip(("tokens", "destinations"), rotation._in_dtype, strict=True)))
        ours = regression.propagate(cached, fresh, rounded)
        assert error(ours, regression, cached, fresh, rounded) < TOLERANCE[case.dtype]


@each(Case(5, 7, 4, 0.5, 40, HALF, batch=2))
@pytest.mark.parametrize("pairs", [0, 20])
def test_any_strides(case: Case, pairs: int, kernels: Any) -> None:
    regression, cached, fresh, rotation = operands(case, kernels, pairs, 2)
    expected = regression.propagate(cached, fresh, rotation)
    if rotation is not None:
        turned = (t.mT.contiguous().mT for t in (rotation.tokens, rotation.destinations))
        assert torch.equal(regression.propagate(cached, fresh, Rotation.of(*turned, fresh)), expected)
        rotation = replace(rotation, tokens=between(rotation.tokens), destinations=between(rotation.destinations))
    for parts in zip(views(cached), views(fresh), strict=True):
        assert torch.equal(regression.propagate(*parts, rotation), expected)


@each(Case(13, 19, 8, 0.5, 24, FULL), Case(13, 19, 8, 0.5, 24, FULL, adaptive=True))
def test_one_image_several_times(case: Case, kernels: Any) -> None:
    one, *_ = operands(case, kernels)
    plan = stacked([replace(one.plan, kernels=kernels)] * 3)
    both = Regression(plan, one.fit.expand(3, -1, -1), one.spread.expand(3, -1, -1))
    many = replace(case, batch=3)
    cached, fresh = many.tokens(), many.normal(plan.num_destinations, 1)
    got = both.propagate(cached, fresh)
    for n in range(3):
        torch.testing.assert_close(one.propagate(cached[n : n + 1], fresh[n : n + 1])[0], got[n])


@pytest.mark.parametrize("pairs", [0, 20])
def test_three_launches(pairs: int, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Propagating a tensor takes two kernels and one `bmm`."""
    regression, cached, fresh, rotation = operands(Case(13, 19, 8, 0.5, 40, BRAIN), kernels, pairs)
    assert regression.plan.destinations.numel(), "made once for all blocks"
    launched = list[Any]()
    monkeypatch.setattr(Launch, "_launch", lambda *args: launched.append(args))
    with Meter() as meter:
        regression.propagate(cached, fresh, rotation)
    assert meter.cost.operations == {"bmm": 1, "fill_": 2}, "poisoned memory is filled"
    assert len(launched) == 2


@each(Case(5, 7, 4, 0.5, 40, FULL))
def test_gradients_go_through_plain_pytorch(case: Case, kernels: Any) -> None:
    regression, cached, fresh, rotation = operands(case, kernels, 20)
    ours = regression.propagate(cached, fresh.requires_grad_(), rotation)
    ours.sum().backward()
    assert fresh.grad is not None
    assert fresh.grad.abs().amin() > 0
    torch.testing.assert_close(ours, regression.propagate(cached, fresh.detach(), rotation))


@each(Case(5, 7, 4, 0.5, 40, FULL, batch=3))
def test_refused(case: Case, kernels: Any) -> None:
    """Kernels refuse sizes with which they would read past the end of a tensor."""
    regression, cached, fresh, rotation = operands(case, kernels, 20)
    assert rotation is not None
    plan, answer = regression.plan, torch.bmm(regression.fit, fresh)
    short, turned = (replace(rotation, tokens=tokens) for tokens in (rotation.tokens[:, 1:], rotation.tokens.mT))

    def propagate(change: Tensor, cached: Tensor, answer: Tensor, images: int = 3) -> None:
        others = None, cached, regression.spread[:images], answer
        kernels.unmerge(change, plan.unmerge_weights, plan.windows, plan.budget, *others)

    for refused, why in (
        (lambda: regression.propagate(cached, fresh, short), "rotations of"),
        (lambda: regression.propagate(cached, fresh, turned), "rotations of"),
        (lambda: kernels.change(fresh, cached, plan.destinations[:2], None), "destinations of"),
        (lambda: kernels.change(fresh, cached[:2], plan.destinations, None), "expected tokens"),
        (lambda: propagate(fresh[:, 1:], cached, answer), "expected tokens"),
        (lambda: propagate(fresh, cached[:, 1:], answer), "expected tokens"),
        (lambda: propagate(fresh, cached, answer[:, 1:]), "expected tokens"),
        (lambda: propagate(fresh, cached, answer.mT.contiguous().mT), "not contiguous"),
        (lambda: propagate(fresh, cached, answer, 2), "does not fit a batch"),
    ):
        with pytest.raises(ValueError, match=why):
            refused()
