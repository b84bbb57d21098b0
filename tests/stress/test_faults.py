"""Test faults anywhere in a prompt. Afterwards, the next latent equals the latent before the fault, and no
object of the failed run is alive."""

from collections.abc import Callable, Iterator
from typing import Any

import comfy.model_management as mm
import pytest
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

from scripts.comfy_pack import pack_module
from testbed import models
from tests.nodes.conftest import hooked
from tests.stress.prompt import STEPS

pytestmark = pytest.mark.usefixtures("families_made")
# A UNet and a transformer, for tests that do not depend on the family.
BOTH = ("unet", "flux")
both = pytest.mark.parametrize("kind", BOTH)
# A family that is not in `BOTH` is tested with only the fault and the place that its number selects.
TURNS = {kind: turn % 3 for turn, kind in enumerate(models.FAMILIES)}


class FaultError(Exception):
    """An error of another pack."""


INTERRUPT = mm.InterruptProcessingException


def fail(error: type[BaseException] = FaultError) -> None:
    """Raise an error. For an interrupt, set ComfyUI's flag as its button does. The model's next layer then raises the
    interrupt."""
    if error is INTERRUPT:
        mm.interrupt_current_processing(True)
    else:
        raise error("CUDA out of memory, as a test has it")


class Trap:
    """A pre-forward hook of the layers inside blocks. Its Nth call, with N = `at`, calls `spring`."""

    calls, at = 0, -1
    spring: Callable[[], None]

    def arm(self, at: int, spring: Callable[[], None]) -> None:
        self.calls, self.at, self.spring = 0, at, spring

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.spring()


@pytest.fixture
def trap(model: Any) -> Iterator[Trap]:
    """Hook all linear layers of the blocks. Until the trap is armed, it only counts calls."""
    made, network = Trap(), model.model.diffusion_model
    blocks = [module for module, _ in pack_module("nodes.adapters.registry").find(network).hook_pairs()]
    layers = {layer for block in blocks for layer in block.modules() if isinstance(layer, torch.nn.Linear)}
    handles = [layer.register_forward_pre_hook(made) for layer in layers]
    yield made
    for handle in handles:
        handle.remove()


def named(value: Any) -> str:
    return value if isinstance(value, str) else str(getattr(value, "__name__", value))


STAGES = {"first call": lambda calls: 1, "middle step": lambda calls: calls // 2 + 1, "last call": lambda calls: calls}
MERGED = ("stack", "module", "detail")
FAULTS = [
    (kind, stage, error, MERGED[(m + n) % 3])
    for kind, turn in TURNS.items()
    for m, stage in enumerate(STAGES)
    for n, error in enumerate((INTERRUPT, FaultError, mm.OOM_EXCEPTION))
    if kind in BOTH or m == n == turn
]
# The errors that end a process are not subclasses of `Exception`.
ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)
FAULTS += [(kind, "middle step", error, "stack") for kind in BOTH for error in ENDS]


@pytest.mark.parametrize(("kind", "stage", "error", "case"), FAULTS, ids=named)
def test_fault_inside_a_merged_block(rig: Any, trap: Trap, stage: str, error: type[BaseException], case: str) -> None:
    patched = rig.patched(case)
    assert rig.sampled(patched) == rig.expected[case]
    # In the case "detail" the last step is full, so the fault must come earlier.
    within = trap.calls * (STEPS - 1) // STEPS if case == "detail" else trap.calls
    rig.check_clean()
    before = rig.tensors()

    def spring() -> None:
        # In the case "detail" the first step is full, too, so its first call is in a block without hooks.
        full = (case, stage) == ("detail", "first call")
        assert hooked(rig.model) or full, "the fault was to be inside a merged block"
        fail(error)

    trap.arm(STAGES[stage](within), spring)
    with pytest.raises(error):
        rig.sampled(patched)
    rig.check_clean()
    # There may be fewer tensors than before, because the report of an aborted run has no merge maps.
    assert rig.tensors() <= before
    assert rig.sampled(patched) == rig.expected[case]
    rig.check_clean()
    assert rig.tensors() == before
    assert rig.sampled(rig.model) == rig.expected["plain"]


@both
@pytest.mark.parametrize("step", [None, 0, 1, 2])
def test_interrupt_before_and_between_steps(rig: Any, step: int | None) -> None:
    """step: the step after which the interrupt comes. None: before the first step. An interrupt after the last step has
    no effect."""
    patched = rig.patched()
    if step is None:
        fail(INTERRUPT)

    def after(done: int, *_: Any) -> None:
        if done == step:
            fail(INTERRUPT)

    if step == STEPS - 1:
        assert rig.sampled(patched, callback=after) == rig.expected["stack"]
        assert mm.processing_interrupted()
        mm.interrupt_current_processing(False)  # as ComfyUI does when it starts the next prompt
    else:
        with pytest.raises(INTERRUPT):
            rig.sampled(patched, callback=after)
    rig.check_clean()
    assert rig.sampled(patched) == rig.expected["stack"]
    rig.check_clean()


OWN = [
    ("toma_core.run", "make_windows", mm.OOM_EXCEPTION),
    ("toma_core.run", "weigh", mm.OOM_EXCEPTION),
    ("toma_core.pipeline", "unmerge_residual", mm.OOM_EXCEPTION),
]
MORE = [
    ("toma_core.run", "cosine_similarity", mm.OOM_EXCEPTION),
    ("toma_core.run", "select", INTERRUPT),
    ("toma_core.pipeline", "merge", INTERRUPT),
]


@pytest.mark.parametrize(
    ("kind", "module", "name", "error", "compiled"),
    [
        (kind, *where, False)
        for kind, turn in TURNS.items()
        for where in (OWN + MORE if kind in BOTH else OWN[turn : turn + 1])
    ]
    + [(kind, *OWN[0], True) for kind in TURNS],
    ids=named,
)
def test_fault_inside_our_own_code(
    rig: Any, monkeypatch: pytest.MonkeyPatch, module: str, name: str, error: type[BaseException], compiled: bool
) -> None:
    """Raise the fault in selection, weights or merging: in `make_windows` at its first call, in any other function at
    its second call, when a plan exists. With torch.compile, ToMA calls `make_windows` before the model runs."""
    base = rig.model.clone()
    if compiled:  # the model is only marked as compiled
        base.model_options["torch_compile_kwargs"] = {"backend": "inductor"}
    patched = rig.patched(model=base, weight_interval=1)
    expected = rig.sampled(patched)
    assert expected != rig.expected["plain"]
    rig.check_clean()
    before = rig.tensors()
    calls, original = list[int](), getattr(pack_module(module), name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == (1 if name == "make_windows" else 2):
            fail(error)
            mm.throw_exception_if_processing_interrupted()
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(pack_module(module), name, failing)
        with pytest.raises(error):
            rig.sampled(patched)
    rig.check_clean()
    assert rig.tensors() <= before
    assert rig.sampled(patched) == expected
    rig.check_clean()
    assert rig.tensors() == before
    assert rig.sampled(rig.model) == rig.expected["plain"]


@pytest.mark.parametrize("kind", ["unet", "flux", "qwen_image"])
def test_call_that_is_made_again(rig: Any, trap: Trap) -> None:
    """A wrapper of another pack, inside ToMA's own, catches an out-of-memory error. It repeats the call, or splits the
    batch into halves (`apart`), which ToMA's plans do not fit."""

    def half(value: Any, index: int) -> Any:
        return value[index : index + 1] if isinstance(value, torch.Tensor) and len(value) == 2 else value

    def again(executor: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return executor(*args, **kwargs)
        except mm.OOM_EXCEPTION:
            if not apart:
                return executor(*args, **kwargs)
            halves = [({name: half(v, n) for name, v in kwargs.items()}, [half(v, n) for v in args]) for n in (0, 1)]
            return torch.cat([executor(*by_place, **by_name) for by_name, by_place in halves])

    patched = rig.patched()
    patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "other", again)
    assert rig.sampled(patched) == rig.expected["stack"]
    middle = trap.calls // 2
    for apart in (False, True):
        trap.arm(middle, lambda: fail(mm.OOM_EXCEPTION))
        found = rig.sampled(patched)
        assert found not in (rig.expected["stack"], rig.expected["plain"]) if apart else found == rig.expected["stack"]
    rig.check_clean()


@both
def test_picture_is_not_lost_with_its_drawing(rig: Any, monkeypatch: Any, stats_of: Any, caplog: Any) -> None:
    """The report's map is drawn after sampling. If memory runs out while it is drawn, the run still returns its
    latent."""
    patched = rig.patched()
    with monkeypatch.context() as patch:
        patch.setattr(pack_module("toma_core.run"), "draw_map", lambda plan: fail(mm.OOM_EXCEPTION))
        assert rig.sampled(patched) == rig.expected["stack"]
    assert stats_of(patched).maps == {}
    assert "could not be drawn: CUDA out of memory" in caplog.text
    rig.check_clean()
    assert rig.sampled(patched) == rig.expected["stack"]
    assert stats_of(patched).maps


def fails(*_: Any, **__: Any) -> None:
    fail()


def fails_after(executor: Any, *args: Any, **kwargs: Any) -> None:
    executor(*args, **kwargs)
    fail()


PATCHES: dict[str, Callable[[Any], Any]] = {
    "outer wrapper": lambda model: model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "other", fails),
    "after cfg": lambda model: model.set_model_sampler_post_cfg_function(fails),
    "unet wrapper": lambda model: model.set_model_unet_function_wrapper(
        lambda apply, args: fails_after(apply, args["input"], args["timestep"], **args["c"])
    ),
    # This wrapper fails inside of ToMA's wrappers, after the model has run.
    "diffusion wrapper": lambda model: model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "other", fails_after),
    "before run": lambda model: model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, "other", fails),
    "cleanup": lambda model: model.add_callback_with_key(CallbacksMP.ON_CLEANUP, "other", fails),
}


# Leave out ERNIE-Image, SD3 and OmniGen2, which call no wrappers of DIFFUSION_MODEL.
@pytest.mark.parametrize(
    ("kind", "patch", "first"),
    [(kind, patch, first) for kind in BOTH for patch in PATCHES for first in (True, False)]
    + [
        (kind, "diffusion wrapper", turn == 0)
        for kind, turn in TURNS.items()
        if kind not in (*BOTH, "ernie", "sd3", "omnigen2")
    ],
    ids=named,
)
def test_exception_in_another_patch(rig: Any, patch: str, first: bool) -> None:
    broken = rig.model.clone() if first else rig.patched()
    PATCHES[patch](broken)
    broken = rig.patched(model=broken) if first else broken
    with pytest.raises(FaultError):
        rig.sampled(broken)
    rig.check_clean()
    assert rig.sampled(rig.patched()) == rig.expected["stack"]
    assert rig.sampled(rig.model) == rig.expected["plain"]
    rig.check_clean()
