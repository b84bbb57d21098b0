"""Test kernels that propagate cached tensors, against the plain PyTorch of `latent_regression` in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from testbed.meter import Meter
from tests.toma_core.kernels.cases import DEVICE, Case, between, each, views
from tests.toma_core.kernels.triton.test_product import BRAIN, FULL, HALF, in_dtype, normal, random_plan
from toma_core.kernels.triton.launch import Launch
from toma_core.latent_regression import Regression, Rotation, regress
from toma_core.merge import stacked

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


def regression_of(case: Case, features: int, kernels: Any) -> Regression:
    """Return a regression on random features, the last of which is 1 for every token. The first slots of each window
    are its destinations."""
    plan = replace(random_plan(case), kernels=kernels)
    slots = torch.arange(plan.budget.slots, device=DEVICE).expand_as(plan.dest_slots)
    if plan.budget.valid is not None:
        slots = slots * plan.budget.valid
    plan = replace(plan, dest_slots=slots)
    f = normal(replace(case, channels=features, dtype=FULL), plan.tokens, 5)
    f[..., -1] = 1
    return regress(f, plan)


def rotation_of(case: Case, regression: Regression, pairs: int, images: int) -> Rotation | None:
    """Return fp32 rotations of keys by random angles, or None if `pairs` is 0."""
    if not pairs:
        return None
    plan = regression.plan
    angles = torch.rand(images, plan.tokens, pairs, generator=torch.Generator().manual_seed(3)) * 6
    R = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).view(*angles.shape, 2, 2).to(DEVICE)
    there = plan.destinations[:images]
    merged = torch.stack([R[n % images, row] for n, row in enumerate(there)])
    found = Rotation.of(R[:, :, None], merged[:, :, None], torch.empty(1, 1, case.channels, dtype=case.dtype))
    assert found is not None
    return found


def reference(regression: Regression, cached: Tensor, fresh: Tensor, rotation: Rotation | None) -> Tensor:
    """Return what plain PyTorch computes in fp32 from the same operands."""
    exact = Regression(in_dtype(regression.plan, FULL), regression.fit.float(), regression.spread.float())
    assert exact.plan.kernels is None
    return exact.propagate(cached.float(), fresh.float(), rotation and replace(rotation, dtype=torch.float32))


def off(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(("case", "features", "pairs", "images"), [*CASES, *FULL_SIZE], ids=str)
def test_propagate(case: Case, features: int, pairs: int, images: int, kernels: Any) -> None:
    regression = regression_of(case, features, kernels)
    cached, fresh = case.tokens(), normal(case, regression.plan.num_destinations, 1)
    rotation = rotation_of(case, regression, pairs, images)
    copies = [t.clone() for t in (cached, fresh)]
    ours = regression.propagate(cached, fresh, rotation)
    assert ours.dtype is case.dtype
    assert ours.is_contiguous()
    assert off(ours, reference(regression, cached, fresh, rotation)) < TOLERANCE[case.dtype]
    assert all(torch.equal(a, b) for a, b in zip((cached, fresh), copies, strict=True)), "inputs are left alone"
    # The second call is a prepared launch.
    assert torch.equal(regression.propagate(cached, fresh, rotation), ours)
    if rotation is not None:
        rounded = replace(rotation, **dict(zip(("tokens", "destinations"), rotation._in_dtype, strict=True)))
        ours = regression.propagate(cached, fresh, rounded)
        assert off(ours, reference(regression, cached, fresh, rounded)) < TOLERANCE[case.dtype]


@each(Case(5, 7, 4, 0.5, 40, HALF, batch=2))
@pytest.mark.parametrize("pairs", [0, 20])
def test_any_strides(case: Case, pairs: int, kernels: Any) -> None:
    regression = regression_of(case, 33, kernels)
    cached, fresh = case.tokens(), normal(case, regression.plan.num_destinations, 1)
    rotation = rotation_of(case, regression, pairs, min(pairs, 2))
    expected = regression.propagate(cached, fresh, rotation)
    if rotation is not None:
        rotation = replace(rotation, tokens=between(rotation.tokens), destinations=between(rotation.destinations))
    for parts in zip(views(cached), views(fresh), strict=True):
        assert torch.equal(regression.propagate(*parts, rotation), expected)
    if rotation is not None:
        turned = (t.mT.contiguous().mT for t in (rotation.tokens, rotation.destinations))
        found = Rotation.of(*turned, fresh)
        assert found is not None
        assert torch.equal(regression.propagate(cached, fresh, found), expected)


@each(Case(13, 19, 8, 0.5, 24, FULL), Case(13, 19, 8, 0.5, 24, FULL, adaptive=True))
def test_one_image_several_times(case: Case, kernels: Any) -> None:
    one = regression_of(case, 33, kernels)
    plan = stacked([replace(one.plan, kernels=kernels)] * 3)
    both = Regression(plan, one.fit.expand(3, -1, -1), one.spread.expand(3, -1, -1))
    many = replace(case, batch=3)
    cached, fresh = many.tokens(), normal(many, plan.num_destinations, 1)
    got = both.propagate(cached, fresh)
    for n in range(3):
        torch.testing.assert_close(one.propagate(cached[n : n + 1], fresh[n : n + 1])[0], got[n])


@each(Case(5, 7, 4, 0.5, 40, FULL))
def test_what_has_not_changed_stays_bit_for_bit(case: Case, kernels: Any) -> None:
    regression = regression_of(case, 33, kernels)
    cached, rotation = case.tokens(), rotation_of(case, regression, 20, 1)
    fresh = cached[:, regression.plan.destinations[0]]
    assert torch.equal(regression.propagate(cached, fresh, rotation), cached)


@pytest.mark.parametrize("pairs", [0, 20])
def test_three_launches(pairs: int, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Propagating a tensor takes two kernels and one `bmm`."""
    case, launched = Case(13, 19, 8, 0.5, 40, BRAIN), []
    regression = regression_of(case, 33, kernels)
    cached, fresh = case.tokens(), normal(case, regression.plan.num_destinations, 1)
    rotation = rotation_of(case, regression, pairs, 1)
    assert regression.plan.destinations.numel(), "made once for all blocks"
    monkeypatch.setattr(Launch, "_launch", lambda *args: launched.append(args))
    with Meter() as meter:
        regression.propagate(cached, fresh, rotation)
    assert meter.cost.operations == {"bmm": 1, "fill_": 2}, "poisoned memory is filled"
    assert len(launched) == 2


@each(Case(5, 7, 4, 0.5, 40, FULL))
def test_gradients_go_through_plain_pytorch(case: Case, kernels: Any) -> None:
    regression = regression_of(case, 33, kernels)
    cached, fresh = case.tokens(), normal(case, regression.plan.num_destinations, 1).requires_grad_()
    ours = regression.propagate(cached, fresh, rotation_of(case, regression, 20, 1))
    ours.sum().backward()
    assert fresh.grad is not None
    assert fresh.grad.abs().amin() > 0
    torch.testing.assert_close(ours, regression.propagate(cached, fresh.detach(), rotation_of(case, regression, 20, 1)))


@each(Case(5, 7, 4, 0.5, 40, FULL, batch=3))
def test_refused(case: Case, kernels: Any) -> None:
    """Kernels refuse sizes with which they would read past the end of a tensor."""
    regression = regression_of(case, 33, kernels)
    plan = regression.plan
    cached, fresh = case.tokens(), normal(case, plan.num_destinations, 1)
    rotation = rotation_of(case, regression, 20, 1)
    assert rotation is not None
    for wrong in (replace(rotation, tokens=rotation.tokens[:, 1:]), replace(rotation, tokens=rotation.tokens.mT)):
        with pytest.raises(ValueError, match="rotations of"):
            regression.propagate(cached, fresh, wrong)
    with pytest.raises(ValueError, match="destinations of"):
        kernels.change(fresh, cached, plan.destinations[:2], None)
    with pytest.raises(ValueError, match="expected tokens"):
        kernels.change(fresh, cached[:2], plan.destinations, None)
    answer = torch.bmm(regression.fit, fresh)

    def refused(change: Tensor, cached: Tensor, answer: Tensor, spread: Tensor) -> None:
        kernels.unmerge(change, plan.unmerge_weights, plan.windows, plan.budget, None, cached, spread, answer, None)

    for parts in ((fresh[:, 1:], cached, answer), (fresh, cached[:, 1:], answer), (fresh, cached, answer[:, 1:])):
        with pytest.raises(ValueError, match="expected tokens"):
            refused(*parts, regression.spread)
    with pytest.raises(ValueError, match="not contiguous"):
        refused(fresh, cached, answer.mT.contiguous().mT, regression.spread)
    with pytest.raises(ValueError, match="does not fit a batch"):
        refused(fresh, cached, answer, regression.spread[:2])
