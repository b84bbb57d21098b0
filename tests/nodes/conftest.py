"""Provide small real models that tests share, and fixtures that record the internals of a run."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from testbed.selectors import selected_by
from tests.nodes.adapters.families.layouts import errors
from tests.nodes.adapters.helpers import balanced

# Settings that merge every grid, because the grids of small models are small.
EVERYTHING = {"min_tokens": 4}
# By kind: options of the small model. Half the usual channels make the UNet's convolutions three times as fast.
NARROW: dict[str, Any] = {"unet": {"channel_mult": (1, 1, 2)}}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Run on one thread. For tiny models this is faster than several threads, and it fixes the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared() -> dict[str, Any]:
    """Return an empty dict, which `model_of` fills with small models by kind."""
    return {}


@pytest.fixture(scope="session")
def new_model(pack: ModuleType) -> Callable[[str], Any]:
    """new_model(kind): make a small model of a kind in `models.KINDS`."""
    return lambda kind: getattr(models, kind)(**NARROW.get(kind, {}))


@pytest.fixture(scope="session")
def model_of(new_model: Callable[[str], Any], shared: dict[str, Any]) -> Callable[[str], Any]:
    """model_of(kind): return the small model of a kind in `models.KINDS`. All tests share this model."""

    def model(kind: str) -> Any:
        if kind not in shared:
            try:
                shared[kind] = new_model(kind)
            except (ImportError, AttributeError):
                pytest.skip(f"this ComfyUI has no {kind}")
        network = shared[kind].model.diffusion_model
        if kind.startswith("ltx") and not hasattr(import_module("comfy.ldm.lightricks.model"), "freqs_cis_matrix"):
            pytest.skip("an older ComfyUI has LTX's positions in another shape: it is not merged there")
        if kind == "ideogram" and not hasattr(import_module("comfy.ldm.ideogram4.model"), "_split_half_rope_matrix"):
            pytest.skip("an older ComfyUI has Ideogram's positions in another shape: it is not merged there")
        if kind == "ernie" and network.pos_embed(torch.zeros(1, 2, 3)).ndim != 6:
            pytest.skip("ComfyUI 0.20.1 has ERNIE-Image's positions in another shape: it is not merged there")
        return shared[kind]

    return model


@pytest.fixture(scope="session")
def unet(model_of: Callable[[str], Any]) -> Any:
    """Return a UNet with SDXL's structure: attention at half and at a quarter of the latent's side."""
    return model_of("unet")


@pytest.fixture(scope="session")
def flux(model_of: Callable[[str], Any]) -> Any:
    return model_of("flux")


@pytest.fixture(scope="session")
def qwen(model_of: Callable[[str], Any]) -> Any:
    """Return a Qwen-Image model, whose latents have five dimensions."""
    return model_of("qwen_image")


def hooked(model: Any) -> list[str]:
    """Return the names of modules whose instance overrides `forward`."""
    return [name for name, module in model.model.diffusion_model.named_modules() if "forward" in vars(module)]


def held(model: Any) -> list[Any]:
    """Return objects of a run that the model's hooks still reference."""
    found = []
    for _, hook in pack_module("nodes.adapters.registry").find(model.model.diffusion_model).hook_pairs():
        site = getattr(hook, "own_site", None)
        holders = [site, getattr(site, "shared", None), getattr(hook, "signature", None)]
        names = "chain", "pair", "rows", "entry", "image_start", "_row_by_token", "options", "original"
        found += [vars(each)[n] for each in (hook, *holders) if each is not None for n in names if vars(each).get(n)]
    return found


@pytest.fixture(autouse=True)
def left_untouched(shared: dict[str, Any]) -> Iterator[None]:
    """Check after every test that the shared models have no patches and that their hooks reference no objects of a
    run."""
    yield
    for model in shared.values():
        assert hooked(model) == []
        assert held(model) == []
        assert "toma" not in str(model.wrappers)
        assert "toma" not in model.model_options["transformer_options"]


@pytest.fixture(scope="session")
def hooks_left() -> Callable[[Any], list[str]]:
    return hooked


@pytest.fixture(scope="session")
def attach(pack: ModuleType) -> Callable[..., Any]:
    """attach(model, **settings): apply ToMA, by default to every grid and every block. selector: the name of a function
    in `testbed.selectors` that selects destinations."""
    config = pack_module("toma_core.config").ToMAConfig
    run = pack_module("nodes.adapters.patch_model")

    def attached(model: Any, *, selector: str = "", **settings: Any) -> Any:
        def patch(model: Any) -> Any:
            return run.apply_toma(model, config(**{**EVERYTHING, **settings}))

        return (selected_by(patch, selector) if selector else patch)(model)

    return attached


@pytest.fixture
def apart(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """apart(model): give every block of the model its own plans in this test."""
    registry = pack_module("nodes.adapters.registry")

    def plan_apart(model: Any) -> None:
        for _, hook in registry.find(model.model.diffusion_model).hook_pairs():
            if hasattr(hook, "scope"):
                monkeypatch.setattr(hook, "scope", hook.name)

    return plan_apart


@pytest.fixture(scope="session")
def stats_of(pack: ModuleType) -> Callable[[Any], Any]:
    """Return a function that returns the stats of a model's last run, or None."""
    return pack_module("nodes.adapters.attachment").last_stats  # type: ignore[no-any-return]


@dataclass
class PlanCall:
    """A block's request for a plan, and the plan. x: a copy of the block's tokens (B, N, C)."""

    x: Tensor
    grid: tuple[int, int]
    scope: Any
    step_plan: Any
    copies: tuple[Any, ...]
    plan: Any


@pytest.fixture
def plan_calls(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[PlanCall]:
    """Record every plan that blocks request, in order."""
    state = pack_module("toma_core.run").RunState
    original, calls = state.plan, []

    def spy(self: Any, x: Tensor, grid: Any, scope: Any, step_plan: Any, copies: Any, *rest: Any) -> Any:
        plan = original(self, x, grid, scope, step_plan, copies, *rest)
        calls.append(PlanCall(x.clone(), grid, scope, step_plan, copies, plan))
        return plan

    monkeypatch.setattr(state, "plan", spy)
    return calls


@pytest.fixture
def decisions(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record what `decide` returns for every evaluation of the model, in order."""
    sampling = pack_module("nodes.adapters.sampling_run")
    original, made = sampling.decide, []

    def spy(*args: Any, **kwargs: Any) -> Any:
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(sampling, "decide", spy)
    return made


@dataclass
class BlockCall:
    """One call of a module, with copies of its inputs.

    first_plan: index in `plan_calls` of the first plan that the call requested.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    out: Any
    first_plan: int


@pytest.fixture
def record(plan_calls: list[PlanCall], monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.nn.Module], list[BlockCall]]:
    """record(module): return a list that receives the module's calls from now on. PyTorch's hooks cannot be used here,
    because a chain of merged blocks would end at a block that has them."""

    def copied(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(copied, value))
        return value.clone() if isinstance(value, Tensor) else dict(value) if isinstance(value, dict) else value

    def start(module: torch.nn.Module) -> list[BlockCall]:
        calls: list[BlockCall] = []
        original = type(module).__call__

        def called(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self is not module:
                return original(self, *args, **kwargs)
            copies = {name: copied(value) for name, value in kwargs.items()}
            call = BlockCall([copied(a) for a in args], copies, None, len(plan_calls))
            calls.append(call)
            out = original(self, *args, **kwargs)
            call.out = copied(out)
            return out

        monkeypatch.setattr(type(module), "__call__", called)
        return calls

    return start


@pytest.fixture(scope="session")
def dense() -> Callable[[Any], tuple[Tensor, Tensor]]:
    """dense(plan): return the merge matrix (B, D, N) and the unmerge matrix (B, N, D), filled row by row."""

    def matrices(plan: Any) -> tuple[Tensor, Tensor]:
        batch, windows, slots, _ = plan.merge_weights.shape
        merge = torch.zeros(batch, plan.num_destinations, plan.tokens)
        unmerge = torch.zeros(batch, plan.tokens, plan.num_destinations)
        used = torch.ones(batch, windows, slots) if plan.budget.valid is None else plan.budget.valid
        for image, valid in enumerate(used.expand(batch, -1, -1)):
            for row, (w, k) in enumerate(valid.nonzero().tolist()):
                tokens = plan.windows.source[w, : plan.windows.counts[w]]
                merge[image, row, tokens] = plan.merge_weights[image, w, k, : len(tokens)]
                unmerge[image, tokens, row] = plan.unmerge_weights[image, w, : len(tokens), k]
            assert row == plan.num_destinations - 1
        return merge, unmerge

    return matrices


@pytest.fixture
def previews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nodes save their preview pictures to a temporary folder."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))


@pytest.fixture
def no_state_left(pack: ModuleType) -> Iterator[None]:
    """Check after the test that every run state and plan that it created is gone."""
    kinds = (pack_module("toma_core.run").RunState, pack_module("toma_core.merge").MergePlan)
    gc.collect()
    before = {id(o) for o in gc.get_objects() if issubclass(type(o), kinds)}
    yield
    gc.collect()
    alive = [o for o in gc.get_objects() if issubclass(type(o), kinds) and id(o) not in before]
    assert alive == []


@pytest.fixture(scope="session")
def stranger(pack: ModuleType) -> Any:
    """Return a small AuraFlow model. Its latents are like Flux's, but the pack does not support AuraFlow."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.supported_models

    config: dict[str, Any] = {"in_channels": 16, "out_channels": 16, "dim": 64, "n_layers": 2, "n_double_layers": 1}
    config |= {"n_heads": 2, "global_conddim": 32, "cond_seq_dim": 48, "max_seq": 256, "dtype": torch.float32}
    model_config = comfy.supported_models.AuraFlow(config)
    model_config.latent_format = comfy.latent_formats.SD3()
    return models.patcher(comfy.model_base.AuraFlow(model_config, device=torch.device("cpu")), seed=0)


@pytest.fixture
def run_preset(stats_of: Callable[[Any], Any]) -> Callable[..., tuple[list[Tensor], list[Tensor]]]:
    """run_preset(model, most, **options of sampling): sample eight steps without and with the preset `balanced`. Check
    that merging changes the video by less than `most`, relative to its norm, and the sound by less than the video.
    Check that no block or call is left out, and that both runs can be repeated. Return the streams of both runs."""

    def checked(model: Any, most: float = 0.05, **asked: Any) -> tuple[list[Tensor], list[Tensor]]:
        merged = balanced(model)
        own, found, again, after = (
            models.sample_streams(each, steps=8, **asked) for each in (model, merged, merged, model)
        )
        video, *audio = errors(found, own)
        assert 0 < video < most
        assert all(error < video for error in audio)
        assert len(stats_of(merged).merged_steps) == 5
        assert (stats_of(merged).unmerged, stats_of(merged).unmerged_calls) == ({}, {})
        assert all(map(torch.equal, again, found))
        assert all(map(torch.equal, after, own))
        return own, found

    return checked
