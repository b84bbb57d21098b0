"""After a fault anywhere in a prompt, the next latent equals that of a fresh process, and no object of the failed run
is alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models

pytestmark = pytest.mark.usefixtures("families_made")
# A UNet and a transformer, for tests that do not depend on the family.
BOTH = ("unet", "flux")
both = pytest.mark.parametrize("kind", BOTH)


class Trap:
    """Pre-forward hook of layers inside the blocks that calls `spring` at its call number `at`, counted from 1."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = -1
        self.spring: Callable[[], None] = lambda: None

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


class FaultError(Exception):
    """An error of another pack."""


def interrupt() -> None:
    """Interrupt as ComfyUI's button does. The next layer of the model then raises an error."""
    import comfy.model_management

    comfy.model_management.interrupt_current_processing(True)


def fail() -> None:
    raise FaultError


def run_out_of_memory() -> None:
    import comfy.model_management

    raise comfy.model_management.OOM_EXCEPTION("CUDA out of memory, as a test has it")


def kind_of(spring: Callable[[], None]) -> type[BaseException]:
    import comfy.model_management as mm

    return {interrupt: mm.InterruptProcessingException, fail: FaultError, run_out_of_memory: mm.OOM_EXCEPTION}[spring]


STAGES = {"first call": lambda calls: 1, "middle step": lambda calls: calls // 2 + 1, "last call": lambda calls: calls}
SPRINGS = (interrupt, fail, run_out_of_memory)
MERGED = ("stack", "module", "detail")
# Two families have every combination of fault, stage and setting; each other family has one combination.
TURNS = {kind: turn % 3 for turn, kind in enumerate(models.FAMILIES)}
FAULTS = [
    (kind, stage, spring, MERGED[(m + n) % 3])
    for kind, turn in TURNS.items()
    for m, stage in enumerate(STAGES)
    for n, spring in enumerate(SPRINGS)
    if kind in BOTH or m == n == turn
]


def named(value: Any) -> str:
    return value if isinstance(value, str) else str(getattr(value, "__name__", value))


@pytest.mark.parametrize(("kind", "stage", "spring", "case"), FAULTS, ids=named)
def test_fault_inside_a_merged_block(
    kind: str, model: Any, trap: Trap, attach: Any, prompt: Any, fresh: Any, hooks_left: Any, nothing_alive: Any,
    tensors: Any, uninterrupted: None, stage: str, spring: Any, case: str,
) -> None:  # fmt: skip
    patched = attach(model, **prompt.CASES[case])
    assert prompt.digest(prompt.sample(patched)) == fresh[kind][case]
    calls = trap.calls
    nothing_alive()
    before = tensors()

    hooked: list[str] = []

    def go() -> None:
        hooked.extend(hooks_left(model))
        spring()

    # In the case "detail" the last step is full, so the fault must come earlier.
    within = calls * (prompt.STEPS - 1) // prompt.STEPS if case == "detail" else calls
    trap.arm(STAGES[stage](within), go)
    with pytest.raises(kind_of(spring)):
        prompt.sample(patched)
    assert hooked, "the fault was to be inside a merged block"
    assert hooks_left(model) == []
    nothing_alive()
    # There may be fewer tensors than before, because the report of an aborted run has no maps.
    assert tensors() <= before

    assert prompt.digest(prompt.sample(patched)) == fresh[kind][case]
    nothing_alive()
    assert tensors() == before
    assert prompt.digest(prompt.sample(model)) == fresh[kind]["plain"]


@both
@pytest.mark.parametrize("step", [None, 0, 1, 2])
def test_interrupt_before_and_between_steps(
    kind: str, attach: Any, model: Any, prompt: Any, fresh: Any, hooks_left: Any, nothing_alive: Any,
    uninterrupted: None, step: int | None,
) -> None:  # fmt: skip
    """step: interrupt after this step; None interrupts before the first step. An interrupt after the last step has no
    effect."""
    import comfy.model_management as mm

    patched = attach(model, **prompt.CASES["stack"])
    if step is None:
        interrupt()

    def after(done: int, *_: Any) -> None:
        if done == step:
            interrupt()

    if step == prompt.STEPS - 1:
        assert prompt.digest(prompt.sample(patched, callback=after)) == fresh[kind]["stack"]
        assert mm.processing_interrupted()
        # Clear the pending interrupt, as ComfyUI does when it starts the next prompt.
        mm.interrupt_current_processing(False)
    else:
        with pytest.raises(mm.InterruptProcessingException):
            prompt.sample(patched, callback=after)
    assert hooks_left(model) == []
    nothing_alive()
    assert prompt.digest(prompt.sample(patched)) == fresh[kind]["stack"]
    nothing_alive()


OWN = [
    ("toma_core.run", "make_windows", run_out_of_memory),
    ("toma_core.run", "weigh", run_out_of_memory),
    ("toma_core.pipeline", "unmerge_residual", run_out_of_memory),
]
MORE = [
    ("toma_core.run", "cosine_similarity", run_out_of_memory),
    ("toma_core.run", "select", interrupt),
    ("toma_core.pipeline", "merge", interrupt),
]


@pytest.mark.parametrize(
    ("kind", "module", "name", "spring"),
    [
        (kind, *where)
        for kind, turn in TURNS.items()
        for where in (OWN + MORE if kind in BOTH else OWN[turn : turn + 1])
    ],
    ids=named,
)
def test_fault_inside_our_own_code(
    kind: str, model: Any, attach: Any, prompt: Any, fresh: Any, hooks_left: Any, nothing_alive: Any, tensors: Any,
    uninterrupted: None, monkeypatch: pytest.MonkeyPatch, module: str, name: str, spring: Any,
) -> None:  # fmt: skip
    """Raise the fault in selection, weights or merging: at the second call of a function, when a plan exists, or at the
    first of `make_windows`."""
    import comfy.model_management as mm

    patched = attach(model, **{**prompt.CASES["stack"], "weight_interval": 1})
    expected = prompt.digest(prompt.sample(patched))
    assert expected != fresh[kind]["plain"]
    nothing_alive()
    before = tensors()
    place, calls = pack_module(module), 0
    original = getattr(place, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (1 if name == "make_windows" else 2):
            spring()
            mm.throw_exception_if_processing_interrupted()
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, failing)
        with pytest.raises(kind_of(spring)):
            prompt.sample(patched)
    assert calls
    assert hooks_left(model) == []
    nothing_alive()
    assert prompt.digest(prompt.sample(patched)) == expected
    nothing_alive()
    assert tensors() == before
    assert prompt.digest(prompt.sample(model)) == fresh[kind]["plain"]


def test_no_memory_while_a_graph_is_prepared(
    kind: str, model: Any, attach: Any, prompt: Any, nothing_alive: Any, tensors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch.compile, ToMA makes layouts before the model runs."""
    compiled = model.clone()
    compiled.model_options["torch_compile_kwargs"] = {"backend": "inductor"}  # the model is only marked as compiled
    patched = attach(compiled, **prompt.CASES["stack"])
    expected = prompt.digest(prompt.sample(patched))
    nothing_alive()
    before = tensors()
    with monkeypatch.context() as patch:
        patch.setattr(pack_module("toma_core.run"), "make_windows", lambda *_: run_out_of_memory())
        with pytest.raises(kind_of(run_out_of_memory)):
            prompt.sample(patched)
    nothing_alive()
    assert tensors() <= before
    assert prompt.digest(prompt.sample(patched)) == expected


@pytest.mark.parametrize("kind", ["unet", "flux", "qwen_image"])
def test_call_that_is_made_again(
    kind: str, model: Any, trap: Trap, attach: Any, prompt: Any, fresh: Any, nothing_alive: Any
) -> None:
    """Another pack catches an out-of-memory error inside of ToMA's hooks. Either it repeats the call, or it splits the
    batch into halves, which ToMA's plans do not fit."""
    from comfy.patcher_extension import WrappersMP

    def cut(value: Any, index: int) -> Any:
        halves = isinstance(value, torch.Tensor) and value.shape[:1] == (2,)
        return value[index : index + 1] if halves else value

    def again(executor: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return executor(*args, **kwargs)
        except kind_of(run_out_of_memory):
            if not apart:
                return executor(*args, **kwargs)
            told = [([cut(a, n) for a in args], {name: cut(v, n) for name, v in kwargs.items()}) for n in (0, 1)]
            return torch.cat([executor(*by_place, **by_name) for by_place, by_name in told])

    patched = attach(model, **prompt.CASES["stack"])
    patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "other", again)
    apart = False
    assert prompt.digest(prompt.sample(patched)) == fresh[kind]["stack"]
    middle = trap.calls // 2
    trap.arm(middle, run_out_of_memory)
    assert prompt.digest(prompt.sample(patched)) == fresh[kind]["stack"]
    apart = True
    trap.arm(middle, run_out_of_memory)
    assert prompt.digest(prompt.sample(patched)) not in (fresh[kind]["stack"], fresh[kind]["plain"])
    nothing_alive()


@both
def test_picture_is_not_lost_with_its_drawing(
    kind: str, model: Any, attach: Any, prompt: Any, fresh: Any, nothing_alive: Any, monkeypatch: pytest.MonkeyPatch,
    stats_of: Any, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The report's map is drawn after sampling. If memory runs out there, the run still returns its latent."""
    patched = attach(model, **prompt.CASES["stack"])
    with monkeypatch.context() as patch:
        patch.setattr(pack_module("toma_core.run"), "draw_map", lambda plan: run_out_of_memory())
        assert prompt.digest(prompt.sample(patched)) == fresh[kind]["stack"]
    assert stats_of(patched).maps == {}
    assert "could not be drawn: CUDA out of memory" in caplog.text
    nothing_alive()
    assert prompt.digest(prompt.sample(patched)) == fresh[kind]["stack"]
    assert stats_of(patched).maps


def outer_wrapper(model: Any) -> None:
    from comfy.patcher_extension import WrappersMP

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "other", lambda executor, *a, **k: fail())


def after_cfg(model: Any) -> None:
    model.set_model_sampler_post_cfg_function(lambda args: fail())


def unet_wrapper(model: Any) -> None:
    model.set_model_unet_function_wrapper(
        lambda apply, args: (apply(args["input"], args["timestep"], **args["c"]), fail())
    )


def diffusion_wrapper(model: Any) -> None:
    """Add a wrapper inside of ToMA's wrappers that raises an error after the model has run."""
    from comfy.patcher_extension import WrappersMP

    model.add_wrapper_with_key(
        WrappersMP.DIFFUSION_MODEL, "other", lambda executor, *a, **k: (executor(*a, **k), fail())
    )


def before_run(model: Any) -> None:
    from comfy.patcher_extension import CallbacksMP

    model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, "other", lambda patcher: fail())


def cleanup(model: Any) -> None:
    from comfy.patcher_extension import CallbacksMP

    model.add_callback_with_key(CallbacksMP.ON_CLEANUP, "other", lambda patcher: fail())


PATCHES = (outer_wrapper, after_cfg, unet_wrapper, diffusion_wrapper, before_run, cleanup)


# Leave out ERNIE-Image, SD3 and OmniGen2, which call no wrappers of DIFFUSION_MODEL.
@pytest.mark.parametrize(
    ("kind", "patch", "first"),
    [(kind, patch, first) for kind in BOTH for patch in PATCHES for first in (True, False)]
    + [
        (kind, diffusion_wrapper, turn == 0)
        for kind, turn in TURNS.items()
        if kind not in (*BOTH, "ernie", "sd3", "omnigen2")
    ],
    ids=named,
)
def test_exception_in_another_patch(
    kind: str, model: Any, attach: Any, prompt: Any, fresh: Any, hooks_left: Any, nothing_alive: Any, patch: Any,
    first: bool,
) -> None:  # fmt: skip
    settings = prompt.CASES["stack"]
    broken = model.clone() if first else attach(model, **settings)
    patch(broken)
    broken = attach(broken, **settings) if first else broken
    with pytest.raises(FaultError):
        prompt.sample(broken)
    assert hooks_left(model) == []
    nothing_alive()
    assert prompt.digest(prompt.sample(attach(model, **settings))) == fresh[kind]["stack"]
    assert prompt.digest(prompt.sample(model)) == fresh[kind]["plain"]
    nothing_alive()


@both
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_process_that_is_asked_to_exit(
    kind: str, model: Any, trap: Trap, attach: Any, prompt: Any, fresh: Any, hooks_left: Any, nothing_alive: Any,
    error: type[BaseException],
) -> None:  # fmt: skip
    """The errors that end a process are not subclasses of `Exception`."""

    def go() -> None:
        raise error

    patched = attach(model, **prompt.CASES["stack"])
    prompt.sample(patched)
    trap.arm(trap.calls // 2, go)
    with pytest.raises(error):
        prompt.sample(patched)
    assert hooks_left(model) == []
    nothing_alive()
    assert prompt.digest(prompt.sample(patched)) == fresh[kind]["stack"]
