"""Test selection, weights and merging of huge, tiny, equal and non-finite tokens in every dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.comfy_pack import pack_module
from tests.toma_core.kernels.cases import check_slots

config_module = pack_module("toma_core.config")
core, trial = pack_module("toma_core"), pack_module("toma_core.kernels.dispatch")
GRID = (13, 9)
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
LARGEST = torch.finfo(HALF).max

dtypes = pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL], ids=str)
MERGED = core.StepPlan(0, core.StepMode.MERGED, 0.5, 0, 0)


@pytest.fixture
def fast(request: pytest.FixtureRequest) -> Any:
    """Return None, or ToMA's kernels, which run in Triton's interpreter on machines without a GPU."""
    if not request.param:
        return None
    pytest.importorskip("triton", reason="Triton has no build for this system")
    return pack_module("toma_core.kernels.triton").TritonKernels()


def smooth(dtype: torch.dtype, batch: int = 2, channels: int = 40, seed: int = 0) -> Tensor:
    """Return tokens (B, 117, C) whose neighbours are similar, as in a picture. Values are at most 8."""
    x = torch.randn(batch, channels, *GRID, generator=torch.Generator().manual_seed(seed))
    x = torch.nn.functional.avg_pool2d(x, 3, 1, 1) + 0.1 * x
    return x.flatten(2).transpose(1, 2).clamp(-8, 8).contiguous().to(dtype)


def run_of(fast: Any = None, **settings: Any) -> Any:
    settings = {"min_tokens": 4, "window_size": 4, **settings}
    dispatch = trial.Dispatch(None if fast is None else trial.Choice(fast))
    return core.RunState(core.Schedule(core.ToMAConfig(**settings)), dispatch=dispatch)


def plan_of(x: Tensor, **settings: Any) -> Any:
    """Make a plan at ratio 0.5 on windows of different sizes. Smaller windows are padded."""
    return run_of(**settings).plan(x, GRID, "a", MERGED, (None,))


def check_plan(plan: Any) -> None:
    """Check that slots are valid, that weights are finite, and that each destination's merge weights sum to 1 up to
    rounding."""
    check_slots(plan.dest_slots, plan.windows, plan.budget)
    M = plan.merge_weights.float()
    assert M.isfinite().all()
    assert plan.unmerge_weights.isfinite().all()
    rows = plan.budget.pack(M.sum(-1)[..., None])
    tolerance = 16 * torch.finfo(plan.merge_weights.dtype).eps
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=tolerance)


def same_plan(a: Any, b: Any) -> bool:
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("dest_slots", "merge_weights", "unmerge_weights"))


def numbers(name: str, dtype: torch.dtype) -> Tensor:
    """Return finite tokens (2, 117, 40) whose similarity is hard to compute."""
    x, info = smooth(dtype), torch.finfo(dtype)
    if name == "huge":
        return x * (info.max / 32)
    if name == "tiny":  # denormal in each dtype
        return (x.double() * (info.smallest_normal / 64)).to(dtype)
    if name == "one huge channel":
        x[..., 3] = info.max / 2
        return x
    if name == "alternating signs":  # at the limit
        signs = 1.0 - 2.0 * (torch.arange(x.shape[-1]) % 2)
        return (signs.double() * info.max / 2).to(dtype).expand_as(x).clone()
    return torch.full_like(x, {"zero": 0.0, "constant": 3.0}[name])


@dtypes
@pytest.mark.parametrize("name", ["huge", "tiny", "one huge channel", "alternating signs", "zero", "constant"])
def test_finite_tokens_give_finite_results(name: str, dtype: torch.dtype) -> None:
    x = numbers(name, dtype)
    assert x.isfinite().all()
    plan = plan_of(x)
    check_plan(plan)
    merged = core.merge(x, plan)
    assert merged.dtype is plan.merge_weights.dtype is dtype
    assert merged.isfinite().all()
    assert core.restore(merged.clone(), merged, x, plan).equal(x), "a block that does nothing changes nothing"


@dtypes
@pytest.mark.parametrize("fast", [False, True], indirect=True, ids=["pytorch", "triton"])
def test_scale_does_not_matter(dtype: torch.dtype, fast: Any) -> None:
    """Multiply tokens by a power of two, so that their squares overflow the dtype or are denormal. The plan must not
    change."""
    x = smooth(dtype)
    up, down = (2.0**12, 2.0**-18) if dtype is HALF else (2.0**50, 2.0**-30)
    assert (x.float().square().sum(-1) * up**2).min() > LARGEST
    assert same_plan(plan_of(x * up, fast=fast), plan_of(x, fast=fast))
    if fast is None:
        tiny = x * down  # in fp16, some values lose bits
        assert same_plan(plan_of(tiny), plan_of(tiny / down))
        assert dtype is not HALF or (tiny.abs().amax(-1) < torch.finfo(HALF).smallest_normal).any()


# Functions that make values of the second image non-finite.
BROKEN: dict[str, Callable[[Tensor], None]] = {
    "one NaN": lambda x: x[1, 40, 3].fill_(float("nan")),
    "one infinity": lambda x: x[1, 40, 3].fill_(float("inf")),
    "both infinities": lambda x: x[1, 40, 3:5].copy_(torch.tensor([float("inf"), -float("inf")])),
    # These tokens also fill the padding of small windows.
    "the first of each window": lambda x: x[1].view(*GRID, -1)[::3, ::3].fill_(float("nan")),
    "a window of NaN": lambda x: x[1].view(*GRID, -1)[:4, :4].fill_(float("nan")),
    "all of it": lambda x: x[1].fill_(float("nan")),
}


# (name, dtype, window size, whether Triton's kernels are used). Plain PyTorch runs all names and dtypes. Windows of
# size 4 fit into the registers of a kernel. A window of size 13 has all 117 tokens.
BROKEN_CASES = [(name, dtype, 4, False) for name in BROKEN for dtype in (HALF, BRAIN, FULL)]
BROKEN_CASES += [("one infinity", HALF, 4, True), ("the first of each window", HALF, 4, True)]
BROKEN_CASES += [("one NaN", HALF, 13, True), ("all of it", HALF, 13, True)]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize(("name", "dtype", "window_size", "fast"), BROKEN_CASES, indirect=["fast"])
def test_broken_tokens_spoil_their_own_window_only(name: str, dtype: torch.dtype, window_size: int, fast: Any) -> None:
    """Destinations must be valid, also in a plan whose weights were made again. Restored tokens of the first image, and
    of windows whose tokens are finite, must be bit-identical to those of an intact batch."""
    x = smooth(dtype)
    broken = x.clone()
    BROKEN[name](broken)
    assert not broken.isfinite().all()
    clean, plan = (plan_of(t, fast=fast, window_size=window_size) for t in (x, broken))
    check_plan(plan)
    run, later = run_of(fast=fast, window_size=window_size), core.StepPlan(1, core.StepMode.MERGED, 0.5, 0, 1)
    run.plan(x, GRID, "a", MERGED, (None,))
    reweighed = run.plan(broken, GRID, "a", later, (None,))
    check_plan(reweighed)
    assert reweighed.merge_weights[0].equal(clean.merge_weights[0])
    reference, merged = core.merge(x, clean), core.merge(broken, plan)
    expected, out = core.restore(reference * 2, reference, x, clean), core.restore(merged * 2, merged, broken, plan)
    assert out[0].equal(expected[0])
    windows = plan.windows.split(broken)[1].isfinite().flatten(1).all(1)
    spoiled = plan.windows.join((~windows)[None, :, None, None].expand(1, -1, plan.windows.slots, 1))[0, :, 0]
    assert spoiled.any()
    assert out[1][~spoiled].equal(expected[1][~spoiled])


@pytest.mark.parametrize("devices", [("cuda:0", "cpu", "cuda:1", "cuda:0"), ("cpu", "cuda:0", "cpu")], ids=str)
def test_state_is_made_where_the_tokens_are(devices: tuple[str, ...]) -> None:
    """An operation on fake tensors, which have no values, raises an error if they are on two devices. One run moves
    between devices, as in multi-GPU sampling. A new run is made on each device."""
    moving = run_of()
    moving.plan(smooth(HALF), GRID, "a", MERGED, (None,))  # make the layouts of the grid on the CPU
    with FakeTensorMode(allow_non_fake_inputs=True):
        plans: dict[str, Any] = {}
        for device in devices:
            x = torch.empty(2, GRID[0] * GRID[1], 40, dtype=HALF, device=device)
            for run in (moving, run_of()):
                plan = run.plan(x, GRID, "b", MERGED, ("l", "r"))
                merged = core.merge(x, plan)
                out = core.restore(merged * 2, merged, x, plan)
                weights = plan.merge_weights, plan.unmerge_weights
                made = plan.dest_slots, *weights, plan.destinations, plan.windows.source, merged, out
                assert {str(t.device) for t in made} == {device}
                if run is moving:
                    assert plans.setdefault(device, plan) is plan, "the plan of a device is still there afterwards"
        assert len(plans) == len(set(devices))
