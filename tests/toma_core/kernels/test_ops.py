"""The kernels as torch operators: shapes without running them, torch.compile, and two copies in one process."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import toma_core
from tests.toma_core.kernels.cases import DEVICE, Case, each
from toma_core.merge import MergePlan, merge, unmerge_update

CASES = (Case(5, 7, 4, 0.5, 40, torch.float16, batch=3), Case(8, 8, 4, 0.75, 16, torch.bfloat16), Case(5, 6, 3, 0.9, 7))


def calls(case: Case) -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator for one case."""
    from toma_core.kernels.triton.ops import operators

    x, (windows, budget) = case.tokens(), case.layout()
    first = (x, windows.source, windows.valid, budget.valid, budget.slots, 30.0)
    picks, M, back = operators.select_weigh(*first)
    merging = (x, M, windows.source, budget.valid, budget.expand, budget.total)
    reduced = operators.merge(*merging)
    layout = (back, windows.source, windows.valid, budget.expand, windows.tokens)
    hard = (windows.source, windows.valid, budget.valid, budget.expand, budget.slots, budget.total)
    plan = MergePlan(windows, budget, picks, M, back, hard=True)
    owners = plan.owners
    return {
        "select_weigh": first,
        "weigh": (x, picks, windows.source, windows.valid, budget.valid, 30.0),
        "merge": merging,
        "unmerge": (reduced, None, None, *layout),
        "restore": (reduced, reduced, x, *layout),
        "agreement": (reduced, reduced, x, plan.destinations),
        "reuse": (
            *(reduced, reduced, x, x, operators.agreement(reduced, reduced, x, plan.destinations)),
            *(plan.destinations, *layout[:4], 0.5),
        ),
        "merge_hard": (x, owners, *hard),
        "unmerge_hard": (reduced, None, None, owners),
        "restore_hard": (reduced, reduced, x, owners),
    }


def operator(name: str) -> Any:
    from toma_core.kernels.triton.ops import operators

    return getattr(operators, name.replace("restore", "unmerge")).default


NAMES = ["select_weigh", "weigh", "merge", "unmerge", "restore", "agreement", "reuse", "merge_hard", "unmerge_hard"]
NAMES += ["restore_hard"]


@pytest.mark.parametrize("name", NAMES)
@each(*CASES)
def test_fake_tensors(case: Case, name: str, kernels: Any) -> None:
    """Shape, dtype, strides and device of the real results, from tensors without values."""
    arguments = calls(case)[name]
    real = operator(name)(*arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        fake = operator(name)(*fakes)
    for r, f in zip(*((t,) if isinstance(t, Tensor) else t for t in (real, fake)), strict=True):
        assert isinstance(f, FakeTensor)
        assert (f.shape, f.dtype, f.stride(), f.device) == (r.shape, r.dtype, r.stride(), r.device)


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_registered_as_torch_wants_it(name: str, kernels: Any) -> None:
    """No argument is changed or returned, and the fake agrees with the kernel."""
    torch.library.opcheck(operator(name), calls(CASES[2])[name], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("scale", [30.0, math.inf])
def test_traced_into_one_graph(scale: float, kernels: Any) -> None:
    """torch.compile sees opaque operators, no graph break, and the result stays the same."""
    case = CASES[2]
    x, (windows, budget) = case.tokens(), case.layout()
    weights = kernels.select_weigh(x, windows, budget, scale)
    plan = MergePlan(windows, budget, *weights, kernels, hard=math.isinf(scale))

    def block(x: Tensor) -> Tensor:
        reduced = merge(x, plan)
        return unmerge_update(reduced.sin(), reduced, x, plan)

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), block(x))


@pytest.fixture
def second_copy() -> Iterator[ModuleType]:
    """The core once more, under another name, as when ComfyUI loads the pack by its path."""
    name = "a_second_copy"
    folder = Path(str(toma_core.__file__)).parent
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        for loaded in [m for m in sys.modules if m.partition(".")[0] == name]:
            del sys.modules[loaded]


def test_two_copies_in_one_process(second_copy: ModuleType, kernels: Any) -> None:
    ours = importlib.import_module("toma_core.kernels.triton.ops")
    theirs = importlib.import_module(f"{second_copy.__name__}.kernels.triton.ops")
    assert ours.NAMESPACE != theirs.NAMESPACE
    arguments = calls(CASES[2])["merge"]
    assert torch.equal(ours.operators.merge(*arguments), theirs.operators.merge(*arguments))
    assert arguments[0].device.type == DEVICE
