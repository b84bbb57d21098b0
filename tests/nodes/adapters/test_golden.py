"""Test that latents of short runs do not change, for all presets and granularities on tiny models of several families.

After a change that alters pictures on purpose, write golden.json again and list the change in the changelog ("may
change seeds"):

    TOMA_WRITE_GOLDEN=1 make test ARGS=tests/nodes/adapters/test_golden.py

golden.json has the latents of ComfyUI's default release. If a release computes different latents even without ToMA, its
latents are in entries named "CASE from RELEASE". To write these entries, set COMFYUI_PATH to that release and run the
same command.

Tolerances are fractions of a latent's rms. They are larger than the effects of rounding, and smaller than the usual
effect of one replaced destination. On an AVX-512 CPU, these changes had the following largest effects:

    oneDNN switched off           5.8e-5
    AVX2 as newest instructions   2.4e-5
    SSE as newest instructions    2.1e-5
    conditions in separate calls  1.8e-5
    two threads                   1.4e-5

The largest effect on mean and rms was 1.6e-7. The median effect of replacing the last destination of one window is
2.5e-3.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from scripts.comfyui import DEFAULT_RELEASE
from testbed import models
from tests.loop import loop

core = pack_module("toma_core")

FILE = Path(__file__).with_name("golden.json")
WRITE = bool(os.environ.get("TOMA_WRITE_GOLDEN"))
VALUES = 48
CLOSE, CLOSE_SUMS = 1.5e-4, 1e-6

RELEASE: str = import_module("comfyui_version").__version__ if find_spec("comfyui_version") else DEFAULT_RELEASE

FAMILIES: dict[str, Callable[[], Any]] = {
    "sdxl": lambda: models.unet(),
    "sd15": lambda: models.unet(depths=(1, 1, 0), middle=1),
    "flux": lambda: models.flux(double=7, single=7),
    "ltx": lambda: models.ltx_av(),
    "h3": lambda: models.h3(),
}
# By run: size of the latent, and guidance scale. Odd sides give windows of several sizes and budgets.
RUNS: dict[str, tuple[tuple[int, int], float]] = {"square": ((32, 32), 3.0), "odd": ((38, 29), 1.0)}
HALVED = {"sd15", "ltx"}  # families with one token per latent pixel, whose latents have half the side here
# Use a low `min_tokens`, because Auto would not merge the coarser grids of UNets.
SMALL = {"ratio": 0.5, "min_tokens": 16}
# Without a preset, skip the first five double and single blocks of Flux.
FIRST = {"flux": {"skip_first_blocks": 5}}
WHOLE_STEPS = {"full_step_interval": 3, "selection_interval": 3, "weight_interval": 3}
PLAIN: dict[str, dict[str, Any]] = {
    **{kind: {"granularity": kind} for kind in ("module", "block", "stack")},
    # A residual cache without a KV cache. On a UNet, no preset has a residual cache.
    "detail": {"granularity": "block", **WHOLE_STEPS},
}
SETTINGS = (*core.PRESETS, *PLAIN)
CASES = [f"{family} {setting} {run}" for family in FAMILIES for setting in SETTINGS for run in RUNS]
# The cases that `make test` runs. thorough/test_other_golden.py has the others.
QUICK_FAMILIES = ("sdxl", "sd15", "flux", "ltx")
QUICK_RUN = {"sdxl": "odd", "sd15": "square", "flux": "odd", "ltx": "square"}
QUICK = [
    case
    for case in CASES
    for family, setting, run in [case.split()]
    if run == QUICK_RUN.get(family) or (setting == "balanced" and family in QUICK_FAMILIES)
]


@pytest.fixture(scope="module")
def golden() -> Iterator[dict[str, Any]]:
    """Yield the content of golden.json. With TOMA_WRITE_GOLDEN=1, write the file at the end."""
    found = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    yield found
    if WRITE:
        lines = (f"{json.dumps(case)}: {json.dumps(found[case], separators=(',', ':'))}" for case in sorted(found))
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def model_of(pack: Any) -> Callable[[str], Any]:
    """model_of(family): return a tiny model with biases around 0. Other tests use biases around 1. Tokens are then so
    similar (a mean cosine of 0.998 in Flux) that rounding would decide which destinations are selected."""
    made: dict[str, Any] = {}

    def model(family: str) -> Any:
        if family not in made:
            made[family] = FAMILIES[family]()
            for name, parameter in made[family].model.diffusion_model.named_parameters():
                if name.endswith("bias"):
                    parameter.data -= 1.0
        return made[family]

    return model


def sampled(model: Any, family: str, run: str, steps: int, seed: int) -> Tensor:
    (height, width), cfg = RUNS[run]
    part = 2 if family in HALVED else 1
    return models.sample(model, -(-height // part), -(-width // part), steps=steps, cfg=cfg, seed=seed)


def settings_of(family: str, setting: str) -> Any:
    if setting in core.PRESETS:
        return core.UserSettings(setting, SMALL)
    return core.ToMAConfig(**PLAIN[setting], **FIRST.get(family, {}), **SMALL)


def config_of(family: str, setting: str) -> Any:
    settings = settings_of(family, setting)
    return settings.resolved(kind_of(family)) if setting in core.PRESETS else settings


def kind_of(family: str) -> Any:
    return core.ModelKind.UNET if family.startswith("sd") else core.ModelKind.TRANSFORMER


def steps_for(family: str, setting: str) -> int:
    """Return a number of steps. The run is long enough to use a second selection before its last step, which is
    full."""
    return 9 if config_of(family, setting).selection_interval < 9 else 11


def facts(latent: Tensor) -> dict[str, Any]:
    """Return the numbers of a latent to store: evenly spaced values, mean and rms."""
    places = [i * (latent.numel() - 1) // (VALUES - 1) for i in range(VALUES)]
    exact = latent.double()
    sums = {"mean": float(exact.mean()), "rms": float(exact.norm()) / math.sqrt(latent.numel())}
    # Store nine digits, which represent fp32 exactly.
    return {name: float(f"{value:.9g}") for name, value in sums.items()} | {
        "values": [float(f"{value:.9g}") for value in latent.flatten()[places].tolist()]
    }


def assert_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    rms = wanted["rms"]
    assert found["values"] == pytest.approx(wanted["values"], rel=0.0, abs=CLOSE * rms)
    assert (found["mean"], found["rms"]) == pytest.approx((wanted["mean"], rms), rel=0.0, abs=CLOSE_SUMS * rms)


def runs_of(cases: list[str]) -> list[tuple[str, ...]]:
    """Return every pair of family and run that occurs in the cases, once."""
    return [*dict.fromkeys((family, run) for family, _, run in map(str.split, cases))]


def number_of(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def stored(golden: dict[str, Any], case: str) -> dict[str, Any]:
    later = [key.rpartition(" ")[2] for key in golden if key.startswith(f"{case} from ")]
    known = [release for release in later if number_of(release) <= number_of(RELEASE)]
    entry: dict[str, Any] = golden[f"{case} from {max(known, key=number_of)}" if known else case]
    return entry


def store(golden: dict[str, Any], case: str, found: dict[str, Any]) -> None:
    """Store the entry of a case. On a ComfyUI other than the default release, store only entries that differ from the
    default release's."""
    if RELEASE == DEFAULT_RELEASE:
        golden[case] = found
        return
    golden.pop(f"{case} from {RELEASE}", None)
    try:
        assert_close(found, stored(golden, case))
    except AssertionError:
        golden[f"{case} from {RELEASE}"] = found


@loop(("family", "run"), runs_of(CASES if WRITE else QUICK))
def test_without_toma(family: str, run: str, model_of: Any, golden: Any) -> None:
    """If this test fails, ComfyUI, PyTorch or the CPU gives latents that differ from golden.json even without ToMA.
    Failures of the other tests in this file then do not show an error of ToMA."""
    found = facts(sampled(model_of(family), family, run, 9, seed=0))
    if WRITE:
        store(golden, f"{family} none {run}", found)
    assert_close(found, stored(golden, f"{family} none {run}"))


@loop("case", CASES if WRITE else QUICK)
def test_run(case: str, model_of: Any, stats_of: Any, golden: Any, sureness: Any) -> None:
    family, setting, run = case.split()
    steps = steps_for(family, setting)
    model = pack_module("nodes.adapters.patch_model").apply_toma(model_of(family), settings_of(family, setting))

    def found(seed: int) -> dict[str, Any]:
        latent = sampled(model, family, run, steps, seed)
        stats = stats_of(model)
        assert stats.merged_blocks
        counts = {"merged_steps": sorted(stats.merged_steps), "selections": stats.selections}
        return {"seed": seed, **counts, "detail": stats.cache_bytes > 0, **facts(latent)}

    if WRITE:
        store(golden, case, next(entry for entry in map(found, itertools.count()) if sureness() > 1.0))
    wanted = stored(golden, case)
    result = found(wanted["seed"])
    assert_close(result, wanted)
    for name in ("merged_steps", "selections", "detail"):
        assert result[name] == wanted[name]


@pytest.mark.skipif(WRITE, reason="the file is written at the end of this run")
def test_runs_show_what_they_are_for(golden: dict[str, Any]) -> None:
    """Check that golden.json has exactly these runs, with the full steps, caches and selections of their settings."""
    every = {key.partition(" from ")[0] for key in golden}
    assert every == {*CASES, *(f"{family} none {run}" for family in FAMILIES for run in RUNS)}
    for case in CASES:
        family, setting, _ = case.split()
        config, entry, steps = config_of(family, setting), stored(golden, case), steps_for(family, setting)
        assert (len(entry["merged_steps"]) < steps) is (config.full_step_interval > 0), case
        assert entry["detail"] is (config.full_step_interval > 0), case
        assert steps > config.selection_interval, case
    assert len({entry["selections"] for entry in golden.values() if "selections" in entry}) > 4
    assert FILE.stat().st_size < 70_000


@pytest.fixture
def sureness(pack: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """sureness(): return how clear the selections since the last call were. This is the smallest lead of a destination
    over the next best slot, divided by the largest effect of rounding.

    Above 1, all CPUs select the same destinations. Only runs that write golden.json measure the lead.
    """
    module = pack_module("toma_core.selection")
    search, narrowest = module.greedy_facility_location, [math.inf]

    def watched(similarity: Tensor, valid: Tensor | None, picks: int, priority: Tensor | None = None) -> Tensor:
        order = search(similarity, valid, picks, priority)
        S, slots = similarity.double(), similarity.shape[1]
        open_ = torch.ones(S.shape[:2], dtype=torch.bool) if valid is None else valid.clone()
        S = S.masked_fill(~open_[:, :, None], -1.0)
        by_place = 1e-5 * min(1.0, 256 / slots) * torch.arange(slots)
        represented = torch.full_like(S[:, 0], -1.0)
        for pick in order.T:
            gain = (S - represented[:, :, None]).relu().sum(1)
            gain = gain if priority is None else gain * priority
            best = (gain - by_place).masked_fill(~open_, -torch.inf).topk(2, 1).values
            # A window with at most one open slot has no next best slot. Count its lead as infinite.
            sure = ((best[:, 0] - best[:, 1]) / (4e-6 + 1e-6 * best[:, 0])).nan_to_num(math.inf)
            narrowest[0] = min(narrowest[0], float(sure.min()))
            open_ = open_.scatter(1, pick[:, None], False)
            represented = torch.maximum(represented, S[torch.arange(len(S)), :, pick])
        return order

    if WRITE:
        monkeypatch.setattr(module, "greedy_facility_location", watched)

    def narrow() -> float:
        found, narrowest[0] = narrowest[0], math.inf
        return found

    return narrow
