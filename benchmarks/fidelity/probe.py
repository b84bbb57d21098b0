"""What one evaluation loses by merging, at the unmerged run's own x, and what runs lose with the same plans.

A *site* is what the pack merges in one piece: a block of the DiT, a stack of the UNet. Its merge, positions and text
are the pack's own hooks; only the features that its plans are made from, and which sites are merged, come from here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.variants import EVERY_STEP, TINY
from scripts.comfy_pack import pack_module

from .experiments import replaced

# What plans are made from: the site's own input, as the pack does it; its own output, which only an oracle knows; the
# clean picture that the step before predicted; the site's output at the step before.
PLANS = ("x", "out", "x0", "before")
# Sharing: the site runs whole, and every token is given its destination's exact update. Computing: it runs merged.
WAYS = ("sharing", "computing")
ALL = "all"


def error(merged: Tensor, whole: Tensor, x: Tensor) -> Tensor:
    """|merged - whole| of predicted clean pictures over what the whole prediction takes from x. (B, ...) -> (B,)"""
    return (merged - whole).flatten(1).norm(dim=1) / (x - whole).flatten(1).norm(dim=1)


def plan_apart(hooks: Any) -> None:
    """From here on every block of a model has plans of its own, under its name."""
    for _, hook in hooks.hook_pairs():
        if hasattr(hook, "scope"):
            hook.scope = hook.name


def name_of(scope: Hashable) -> str:
    """The name of a site from the scope under which it is planned for: "double.1", "output.5" for a stack."""
    return ".".join(str(scope).split(".")[:2])


@dataclass
class Errors:
    """Of one step: plan -> site -> [sharing, computing], means over the scenes."""

    step: int
    sigma: float
    by_plan: dict[str, dict[str, list[float]]] = field(default_factory=dict)


class Probe:
    """Evaluates one model whole, or merged at one site or all, with plans made from what is asked for.

    model: a ModelPatcher; `patched` gives a clone to sample with, `begin` comes before each run of it.
    """

    def __init__(self, model: Any, ratio: float) -> None:
        self.model = model
        self.hooks = pack_module("nodes.adapters.registry").find(model.get_model_object("diffusion_model"))
        self.family = sys.modules[type(self.hooks).__module__]
        plan_apart(self.hooks)
        block = self.family.NAME.startswith("Flux")
        settings = {**EVERY_STEP, **TINY, "ratio": ratio}
        settings["granularity"] = "block" if block else "stack"
        config = pack_module("toma_core.config").ToMAConfig(**settings)
        self.schedule = pack_module("toma_core.schedule").Schedule(config)
        self.begin()

    def begin(self) -> None:
        """Forget what an earlier run left."""
        self.step = 0
        self.picture: Tensor | None = None
        self.whole: dict[tuple[str, int], Tensor] = {}
        self.before: dict[tuple[str, int], Tensor] = {}
        self.call: Callable[..., Any] | None = None

    @property
    def sites(self) -> list[str]:
        """In forward order, as far as they were seen in this run."""
        return list(dict.fromkeys(site for site, _ in self.whole))

    def patched(self, predict: Callable[..., Tensor]) -> Any:
        """A clone of the model with which predict(evaluate, x, sigma) gives the clean picture at every evaluation."""
        from comfy.patcher_extension import WrappersMP

        def predict_noise(executor: Any, x: Tensor, timestep: Tensor, *args: Any) -> Tensor:
            picture = predict(partial(self._evaluate, partial(executor, x, timestep, *args)), x, float(timestep[0]))
            self.picture, self.step = picture, self.step + 1
            return picture

        def apply_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
            return executor(*args, **kwargs) if self.call is None else self.call(executor, *args, **kwargs)

        model = self.model.clone()
        model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "probe", predict_noise)
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "probe", apply_model)
        return model

    def plans(self, wanted: tuple[str, ...]) -> list[str]:
        """Those of the wanted plans that there is something to make from at this step."""
        there = {"x": True, "out": True, "x0": self.picture is not None, "before": bool(self.before)}
        return [plan for plan in wanted if there[plan]]

    def _evaluate(self, run: Callable[[], Tensor], plan: str | None = None, site: str = ALL, way: str = "") -> Tensor:
        """The clean picture. plan: what plans are made from, None to run whole and keep what every site puts out."""
        core, merging = pack_module("toma_core"), pack_module("toma_core.merge")
        at, calls, probe = "", 0, self

        class State(pack_module("toma_core.run").RunState):  # type: ignore[misc]
            def plan(self, x: Tensor, grid: Any, scope: Hashable, decision: Any, copies: Any, *rest: Any) -> Any:
                nonlocal at
                at = name_of(scope)
                if site not in (ALL, at):
                    return None
                features = x if plan is None else probe._features(plan, at, calls, x, grid)
                return super().plan(features, grid, scope, decision, copies, *rest)

        class Whole(core.Evaluation):  # type: ignore[misc, name-defined]
            """Sites run whole although they have a plan, as where the pack keeps their detail."""

            class Keeping:
                kept = None

            def detail(self, block: str, x: Tensor) -> Any:
                return self.Keeping()

        def restore(out: Tensor, reduced: Tensor, x: Tensor, given: Any, detail: Any = None, *_: Any) -> Tensor:
            if given is not None and plan is None:
                self.whole[at, calls] = out.clone()  # blocks may add into it
            if given is None or plan is None:
                return out
            shared: Tensor = merging.add_unmerged(x, merging.gather_destinations(out - x, given), given)
            return shared

        whole = plan is None or way == "sharing"
        evaluation = Whole if whole else core.Evaluation
        state = State(self.schedule)
        decision = core.StepPlan(0, core.StepMode.MERGED, self.schedule.config.ratio, 0, 0)

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            options = args[5] if len(args) > 5 else kwargs["transformer_options"]
            copies = (None,) * len(options.get("uuids") or (None,))
            now = evaluation(state, decision, copies, copies)
            with pack_module("nodes.adapters.model_hooks").installed(self.hooks.select(args[0], now, options)):
                out = executor(*args, **kwargs)
            calls += 1
            return out

        if plan is None:
            self.before, self.whole = self.whole, {}
        self.call = call
        try:
            with replaced(pack_module("nodes.adapters.active_chain"), {"restore": restore}) if whole else nullcontext():
                return run()
        finally:
            self.call = None

    def _features(self, plan: str, site: str, call: int, x: Tensor, grid: tuple[int, int]) -> Tensor:
        if plan == "x0":
            assert self.picture is not None
            tokens = pack_module("toma_core.prediction").picture_tokens(self.picture, grid, self.picture)
            return tokens.repeat(len(x) // len(tokens), 1, 1)
        return x if plan == "x" else (self.whole if plan == "out" else self.before)[site, call]


def teacher_forced(probe: Probe, wanted: tuple[str, ...], at: tuple[int, ...]) -> tuple[Any, list[Errors]]:
    """A model to sample with, which samples as without merging, and the list that its steps (counted from 1) fill."""
    found: list[Errors] = []

    def predict(evaluate: Callable[..., Tensor], x: Tensor, sigma: float) -> Tensor:
        whole = evaluate()
        if probe.step + 1 in at:
            errors = Errors(probe.step + 1, sigma)
            for plan in probe.plans(wanted):
                errors.by_plan[plan] = {
                    site: [float(error(evaluate(plan, site, way), whole, x).mean()) for way in WAYS]
                    for site in (*probe.sites, ALL)
                }
            found.append(errors)
        return whole

    return probe.patched(predict), found


def free_run(probe: Probe, plan: str, whole_steps: int = 1) -> Any:
    """A model that samples with every site merged by such plans, all steps but the first ones."""

    def predict(evaluate: Callable[..., Tensor], x: Tensor, sigma: float) -> Tensor:
        merges = probe.step >= whole_steps and plan in probe.plans((plan,))
        return evaluate(plan, ALL, "computing") if merges else evaluate()

    return probe.patched(predict)
