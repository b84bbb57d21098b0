"""Test probes. During an unmerged run, a probe measures the error of merging one site (a group of blocks)."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.decomposition  # imported here, because the import fails after the opcheck of earlier tests
from comfy.model_management import InterruptProcessingException
from comfy.patcher_extension import WrappersMP

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import every_kind

probing = pack_module("nodes.adapters.probe")
run = pack_module("nodes.adapters.patch_model")
SAMPLING = pack_module("nodes.adapters.model_hooks").SAMPLING
Reason = pack_module("toma_core.reasons").Reason
identity = pack_module("nodes.adapters.registry")
core = pack_module("toma_core")
BlockFacts = pack_module("nodes.adapters.family").BlockFacts
SIDE = 24
CLOSE = {"selection_interval": 3, "weight_interval": 3}
RATIOS = len(probing.RATIOS)


def probes_of(model: Any, sites: int = 12, cancelled: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Return probes of a model, and the model with these probes."""
    probes = probing.Probes(probing.sites_of(identity.blocks_of(model), sites), *([cancelled] if cancelled else []))
    return probes, probes.on(model, core.ToMAConfig(**{"min_tokens": 4, **settings}))


def check_run(model: Any, sites: int = 12, settings: Any = None, **options: Any) -> Any:
    """Check that a run with probes equals a run without probes, and that errors are measured for every site, band of
    sigmas and ratio."""
    probes, patched = probes_of(model, sites, **(settings or {}))
    assert torch.equal(*(models.sample(each, SIDE, SIDE, **options) for each in (patched, model))), options
    errors = probes.squared_errors()
    assert len(errors) == len(probes.sites) * len(probes.bands) * RATIOS, options
    assert all(error > 0 for error in errors.values()), options
    return probes


@every_kind
@pytest.mark.compat
@loop("settings", [{}, CLOSE])
def test_the_run_is_the_unmerged_one(model: Any, settings: dict[str, Any], no_state_left: None) -> None:
    check_run(model, settings=settings, steps=8)


def test_nothing_is_measured_after_memory_ran_out(unet: Any) -> None:
    """After memory has run out, every evaluation is full, so a probe would measure errors of 0."""

    def disable(executor: Any, *args: Any) -> Any:
        args[4]["transformer_options"][SAMPLING].run.disable(Reason.OUT_OF_MEMORY())
        return executor(*args)

    probes, patched = probes_of(unet, 6)
    patched.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "test", disable)
    models.sample(patched, SIDE, SIDE, steps=2)
    assert probes.bands
    assert not probes.squared_errors()


def test_a_probe_is_what_the_run_would_do(flux: Any, apart: Any) -> None:
    """Sample with only one site merged. Then the first evaluation changes by nearly the error that the probe measured.
    A small difference remains, because a probe selects by tokens of the first condition, a run by tokens of the
    negative condition."""
    pictures: list[torch.Tensor] = []

    def record(args: dict[str, Any]) -> torch.Tensor:
        pictures.append(args["cond_denoised"].clone())
        return args["denoised"]

    listening = flux.clone()
    listening.set_model_sampler_post_cfg_function(record)
    apart(flux)
    probes, patched = probes_of(listening)
    models.sample(patched, SIDE, SIDE, steps=3)
    assert [*probes.bands[0].steps] == [0]
    unmerged, errors = pictures[0], probes.squared_errors()
    for site, blocks in probes.sites.items():
        ratio_schedule = ((0.0, dict.fromkeys(blocks, 0.5)),)
        pictures.clear()
        alone = run.apply_toma(listening, core.ToMAConfig(min_tokens=4), None, ratio_schedule)
        models.sample(alone, SIDE, SIDE, steps=3)
        change = float((pictures[0] - unmerged).double().square().sum())
        assert errors[site, 0, 0.5] == pytest.approx(change, rel=0.15), site


def test_interrupted_without_a_trace(unet: Any, no_state_left: None) -> None:
    probes, patched = probes_of(unet, cancelled=Mock(side_effect=InterruptProcessingException))
    with pytest.raises(InterruptProcessingException):
        models.sample(patched, SIDE, SIDE, steps=4)
    assert probes.squared_errors() == {}


def test_samplers_that_read_the_negative_get_the_unmerged_one(unet: Any, no_state_left: None) -> None:
    """CFG++ samplers also read the prediction for the negative prompt. 2S and Heun samplers evaluate twice per step."""
    for sampler in ("euler_cfg_pp", "dpmpp_2m_cfg_pp", "dpmpp_2s_ancestral", "heun"):
        check_run(unet, 6, steps=6, sampler=sampler)


def test_a_condition_that_begins_on_the_way(unet: Any, no_state_left: None) -> None:
    """The error in a range of sigmas is measured at one of the range's steps: the first in which the condition is
    active."""
    late = models.conditioning(unet, seed=3, start_percent=0.3, end_percent=1.0)
    probes, patched = probes_of(unet, 6)
    latent = models.sample(patched, SIDE, SIDE, steps=12, positive=late)
    assert torch.equal(latent, models.sample(unet, SIDE, SIDE, steps=12, positive=late))
    assert {band for _, band, _ in probes.squared_errors()} >= {1, 2}


def test_other_ratios_are_scaled_like_all_sites_together() -> None:
    """A site that gives NaN in any band is left out."""
    probes, nan = probing.Probes({"a": ["a"], "b": ["b"]}), float("nan")
    probes._errors = {(0, "a", 0.5): 2.0, (0, "b", 0.5): nan, (1, "b", 0.5): 3.0}
    probes._errors |= {(1, None, 0.25): 1.0, (1, None, 0.5): 4.0, (1, None, 0.75): nan}
    assert probes.squared_errors() == {("a", 0, 0.25): 0.5, ("a", 0, 0.5): 2.0, ("a", 0, 0.75): 4.5}


def test_bands_of_equal_size() -> None:
    bands = probing.bands_of((8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0))
    assert [[*band.steps] for band in bands] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    assert [band.above for band in bands] == pytest.approx([(6 * 5) ** 0.5, (4 * 3) ** 0.5, 0.0])
    assert [n for n in range(8) if bands[0].may_probe(n)] == [1, 2]
    assert [[*band.steps] for band in probing.bands_of((2.0, 1.0))] == [[0], [1]]
    assert probing.bands_of(()) == ()


def test_sites_are_stacks() -> None:
    """If there are more stacks than sites allowed, neighbouring stacks of one resolution are joined, the smallest
    first."""
    work = pack_module("nodes.adapters.families.unet").COST
    tokens = {"input.1": 64, "input.2": 64, "middle.0": 16, "output.0": 64}
    blocks = [BlockFacts(f"{home}.{n}", home, work, tokens[home], 8) for home in tokens for n in range(2)]
    assert list(probing.sites_of(blocks, 12)) == [f"{home}.0 - {home}.1" for home in tokens]
    three = probing.sites_of(blocks, 3)
    assert list(three) == ["input.1.0 - input.2.1", "middle.0.0 - middle.0.1", "output.0.0 - output.0.1"]
    for most in range(1, 5):
        sites = probing.sites_of(blocks, most)
        assert len(sites) == most
        assert [name for names in sites.values() for name in names] == [block.name for block in blocks]
    assert probing.sites_of([], 3) == {}


def test_step_caches(unet: Any) -> None:
    from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode

    reference = models.sample(unet, SIDE, SIDE, steps=8)
    for node in (EasyCacheNode, LazyCacheNode):
        cached = node.execute(unet, 3.0, 0.0, 1.0, False).args[0]
        hurried = models.sample(cached, SIDE, SIDE, steps=8)
        assert not torch.equal(hurried, reference), "it skips evaluations, so that this can fail"
        plain = probing.without_caches(cached)
        assert torch.equal(models.sample(plain, SIDE, SIDE, steps=8), reference)
        assert torch.equal(models.sample(cached, SIDE, SIDE, steps=8), hurried)


def test_compiled(unet: Any) -> None:
    """Either the model is marked for compilation, as by ComfyUI's node, or one block is, as by other packs. Compilation
    is lazy, so nothing is compiled here."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    compiled = unet.clone()
    set_torch_compile_wrapper(compiled, "inductor")
    plain = probing.without_caches(compiled)
    assert "torch_compile_kwargs" in compiled.model_options
    assert "torch_compile_kwargs" not in plain.model_options
    assert not plain.get_wrappers("apply_model", "torch.compile")
    assert compiled.get_wrappers("apply_model", "torch.compile")
    by_block = unet.clone()
    place = "diffusion_model.middle_block.1"
    by_block.add_object_patch(place, torch.compile(unet.get_model_object(place)))
    plain = probing.without_caches(by_block)
    assert plain.get_model_object(place) is unet.get_model_object(place)
    assert place in by_block.object_patches
