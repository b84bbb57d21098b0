"""Test that latents of short runs do not change, for all presets and granularities on tiny models of several families.

After a change that alters pictures on purpose, write golden.json again and list the change in the changelog ("may
change seeds"):

    TOMA_WRITE_GOLDEN=1 make test ARGS=tests/nodes/adapters/test_golden.py

golden.json has the latents of ComfyUI's default release. If another release computes different latents even without
ToMA, its latents are in entries named "CASE from RELEASE". To write these entries, set COMFYUI_PATH to that release and
run the same command.
"""

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
# Tolerances for values and for mean and rms, as fractions of a latent's rms. On other CPUs, with other instructions,
# threads or calls, rounding changes values by at most 6e-5, and mean and rms by 1.6e-7. The median effect of replacing
# the last destination of one window is 2.5e-3.
CLOSE, CLOSE_SUMS = 1.5e-4, 1e-6

RELEASE: str = import_module("comfyui_version").__version__ if find_spec("comfyui_version") else DEFAULT_RELEASE

FAMILIES: dict[str, Callable[[], Any]] = {
    "sdxl": lambda: models.unet(),
    "sd15": lambda: models.unet(depths=(1, 1, 0), middle=1),
    "flux": lambda: models.flux(double=7, single=7),
    "ltx": lambda: models.ltx_av(),
    "h3": lambda: models.h3(),
}
# By run: size of the latent, and guidance scale. Odd sides give windows of several sizes and numbers of destinations.
RUNS: dict[str, tuple[tuple[int, int], float]] = {"square": ((32, 32), 3.0), "odd": ((38, 29), 1.0)}
HALVED = {"sd15", "ltx"}  # families with one token per latent pixel, whose latents have half the side here
# Use a low `min_tokens`, because Auto would not merge the coarser grids of UNets.
SMALL = {"ratio": 0.5, "min_tokens": 16}
PLAIN: dict[str, dict[str, Any]] = {kind: {"granularity": kind} for kind in ("module", "block", "stack")}
CASES = [" ".join(case) for case in itertools.product(FAMILIES, (*core.PRESETS, *PLAIN), RUNS)]
# The run of each family that `make test` tries with all settings. thorough/test_other_golden.py has the other cases.
QUICK_RUN = {"sdxl": "odd", "sd15": "square", "flux": "odd", "ltx": "square"}
QUICK = [
    case
    for case in CASES
    for family, setting, run in [case.split()]
    if family in QUICK_RUN and (setting == "balanced" or run == QUICK_RUN[family])
]


@pytest.fixture(scope="module")
def golden() -> Iterator[dict[str, Any]]:
    """Yield the content of golden.json. With TOMA_WRITE_GOLDEN=1, write the file at the end."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    yield found
    if WRITE:
        lines = (f"{json.dumps(case)}: {json.dumps(found[case], separators=(',', ':'))}" for case in sorted(found))
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def model_of(pack: Any) -> Callable[[str], Any]:
    """model_of(family): return a tiny model with biases around 0. With biases around 1, as in other tests, tokens are
    so similar (a mean cosine of 0.998 in Flux) that rounding would decide which of them are selected."""
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


def settings_of(family: str, setting: str) -> tuple[Any, Any]:
    """Return the settings to apply, and the config to which they resolve."""
    if setting in core.PRESETS:
        settings = core.UserSettings(setting, SMALL)
        kind = core.ModelKind.UNET if family.startswith("sd") else core.ModelKind.TRANSFORMER
        return settings, settings.resolved(kind)
    # Skip the first five double and single blocks of Flux, as presets do.
    config = core.ToMAConfig(**PLAIN[setting], **SMALL, skip_first_blocks=5 if family == "flux" else 0)
    return config, config


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
    """Store the entry of a case. On a ComfyUI other than the default release, store the entry only if it differs from
    the entry that applies so far."""
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
def test_run(case: str, model_of: Any, stats_of: Any, golden: Any, unsure: Any) -> None:
    """Each run is so long that it selects a second time before the last step, which is full."""
    family, setting, run = case.split()
    settings, config = settings_of(family, setting)
    steps, cached = 9 if config.selection_interval < 9 else 11, config.full_step_interval > 0
    model = pack_module("nodes.adapters.patch_model").apply_toma(model_of(family), settings)

    def found(seed: int) -> dict[str, Any]:
        latent = sampled(model, family, run, steps, seed)
        stats = stats_of(model)
        assert stats.merged_blocks
        assert (stats.cache_bytes > 0) is (len(stats.merged_steps) < steps) is cached
        counts = {"merged_steps": sorted(stats.merged_steps), "selections": stats.selections}
        return {"seed": seed, **counts, **facts(latent)}

    if WRITE:
        store(golden, case, next(entry for entry in map(found, itertools.count()) if not unsure()))
    wanted = stored(golden, case)
    result = found(wanted["seed"])
    assert_close(result, wanted)
    assert (result["merged_steps"], result["selections"]) == (wanted["merged_steps"], wanted["selections"])


@pytest.fixture
def unsure(pack: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """unsure(): return whether a selection since the last call of `unsure` may differ on another CPU, because of
    rounding. Only runs that write golden.json find out: they repeat each selection with slightly changed
    similarities."""
    module, changed = pack_module("toma_core.selection"), list[bool]()
    search, generator = module.greedy_facility_location, torch.Generator().manual_seed(0)

    def watched(similarity: Tensor, *args: Any) -> Tensor:
        order: Tensor = search(similarity, *args)
        for _ in range(8):
            rounding = 4e-6 * (torch.rand(similarity.shape, generator=generator) - 0.5)
            changed.append(not torch.equal(order, search(similarity + rounding, *args)))
        return order

    if WRITE:
        monkeypatch.setattr(module, "greedy_facility_location", watched)

    def since_the_last_call() -> bool:
        found = any(changed)
        changed.clear()
        return found

    return since_the_last_call
