"""Test that ComfyUI's loader recognises the tiny models and that its samplers can sample them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.ldm.flux.model
import comfy.model_base
import comfy.model_management
import comfy.model_sampling
import comfy.sample
import comfy.sd
import pytest
import torch
from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from safetensors.torch import save_file

from demo import models
from demo.conditioning import conditioning, empty_latent, seeded_noise
from demo.data import Batches, Plan, View
from demo.objectives import SPREAD, UNET_CENTRE, VelocityObjective, adm
from demo.scenes import scene_from_seed
from tests.loop import loop


@pytest.fixture(scope="module")
def dit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dit") / "dit.safetensors"
    save_file(models.new_dit(0).state_dict(), path)
    return path


def _lively(model: Any) -> Any:
    """Add noise to untrained weights, with which the output of a model would be zero."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.model.diffusion_model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def _sample(model: Any, seeds: list[int], scenes: list[Any] | None = None, cfg: float = 2.0) -> torch.Tensor:
    prompts = (
        conditioning([scene_from_seed(seed) for seed in seeds] if scenes is None else scenes),
        conditioning([None]),
    )
    noise, latent = seeded_noise(seeds, 64, 64), empty_latent(64, 64, len(seeds))
    return comfy.sample.sample(model, noise, 2, cfg, "euler", "simple", *prompts, latent, disable_pbar=True, seed=0)


def test_the_stock_loader_recognises_the_dit(dit_file: Path) -> None:
    model = comfy.sd.load_diffusion_model(str(dit_file))
    network = model.model.diffusion_model
    assert type(model.model) is comfy.model_base.Flux
    assert type(network) is comfy.ldm.flux.model.Flux
    found = {name: getattr(network.params, name) for name in models.DIT_CONFIG}
    assert found == models.DIT_CONFIG
    assert isinstance(model.model.model_sampling, comfy.model_sampling.ModelSamplingFlux)


def test_the_unet_is_an_sdxl_to_comfyui() -> None:
    model = models.load_unet(None)
    network = model.model.diffusion_model
    assert type(model.model) is comfy.model_base.SDXL
    assert type(network) is UNetModel
    stacks = [module for module in network.modules() if isinstance(module, SpatialTransformer)]
    assert {stack.in_channels for stack in stacks} == {64, 128}
    assert {len(stack.transformer_blocks) for stack in stacks} == {1, 2}
    assert model.model.latent_format.latent_channels == 16


def test_norms_of_the_unet_keep_what_a_flat_background_says() -> None:
    """With ComfyUI's 32 groups, a norm would remove the mean of every two channels of a flat background."""
    norms = [m for m in models.load_unet(None).model.diffusion_model.modules() if isinstance(m, torch.nn.GroupNorm)]
    assert len(norms) > 20
    flat = torch.linspace(0.5, 2.0, 64)[None, :, None, None].expand(1, 64, 4, 4)
    for norm in (m for m in norms if m.num_channels == 64):
        means = norm(flat)[0].mean((1, 2))
        assert means.std() > 0.3


@loop("kind", ["dit", "unet"])
def test_two_steps_of_sampling(kind: str, dit_file: Path) -> None:
    model = _lively(comfy.sd.load_diffusion_model(str(dit_file)) if kind == "dit" else models.load_unet(None))
    first = _sample(model, [1, 2])
    assert first.shape == (2, 16, 32, 32)
    assert torch.isfinite(first).all()
    assert torch.equal(first, _sample(model, [1, 2]))
    torch.testing.assert_close(first[1:], _sample(model, [2]), atol=2e-3, rtol=1e-2)
    assert (first[0] - first[1]).abs().mean() > 1e-3
    prompts = [_sample(model, [5], [scene], 1.0) for scene in (scene_from_seed(1), scene_from_seed(2), None)]
    for i in range(3):
        assert not torch.allclose(prompts[i], prompts[i - 1], atol=1e-5)


def test_guidance_value_has_no_effect(dit_file: Path) -> None:
    network = comfy.sd.load_diffusion_model(str(dit_file)).model.diffusion_model
    assert network.guidance_in.out_layer.weight.abs().max() == 0
    assert network.guidance_in.out_layer.bias.abs().max() == 0


def test_training_uses_comfyuis_sdxl_conventions() -> None:
    model = models.load_unet(None).model
    pooled = torch.randn(2, 128)
    theirs = model.encode_adm(pooled_output=pooled, width=512, height=512)
    torch.testing.assert_close(adm(pooled, View(), (512, 512)), theirs)
    sigmas = VelocityObjective().sigmas
    torch.testing.assert_close(sigmas, model.model_sampling.sigmas)
    torch.testing.assert_close(
        model.model_sampling.timestep(sigmas[[3, 500, 999]]).float(), torch.tensor([3.0, 500, 999])
    )


def test_the_unet_learns_what_comfyui_asks_it() -> None:
    """If the network predicts the target of training, ComfyUI's V_PREDICTION turns the noisy picture into the clean
    one."""
    model = models.load_unet(None).model
    objective, batch = VelocityObjective(), Batches(Plan("unet", 1, full_batch=4, early_shares=(0.0, 1.0)))[0]
    seen: dict[str, Any] = {}

    def network(x: torch.Tensor, step: torch.Tensor, **_: Any) -> torch.Tensor:
        sigma = model.model_sampling.sigma(step)
        noisy = x * (sigma[:, None, None, None] ** 2 + 1).sqrt()
        torch.testing.assert_close(model.model_sampling.calculate_input(sigma, noisy), x)
        noise = (noisy - batch.clean) / sigma[:, None, None, None]
        right = (noise - sigma[:, None, None, None] * batch.clean) / (sigma[:, None, None, None] ** 2 + 1).sqrt()
        torch.testing.assert_close(model.model_sampling.calculate_denoised(sigma, right, noisy), batch.clean)
        seen.update(sigma=sigma)
        return right

    assert objective.loss(network, batch) < 1e-8
    assert len(set(seen["sigma"].tolist())) == 4


def test_sigmas_of_the_unet() -> None:
    """For half-size scenes training draws sigmas near pure noise, for crops it draws steps uniformly. For full pictures
    half of the sigmas follow each rule."""
    half, crop, full = (
        Batches(Plan("unet", 1, early_shares=shares))[0] for shares in ((1.0, 0.0), (0.0, 0.0), (0.0, 1.0))
    )
    objective, quantile = VelocityObjective(), torch.linspace(0.001, 0.999, 999)
    log_sigmas = objective.sigmas[objective.steps(replace(half, quantile=quantile))].log()
    flow = half.view.centre + UNET_CENTRE + SPREAD * torch.special.ndtri(quantile)
    ends = objective.sigmas[[0, -1]].log()
    inside = flow[(flow > ends[0]) & (flow < ends[1])]
    for q in (0.1, 0.5, 0.9):
        torch.testing.assert_close(log_sigmas.quantile(q), inside.quantile(q), atol=0.05, rtol=0)
    steps = objective.steps(replace(crop, quantile=quantile))
    torch.testing.assert_close(steps.float(), 1000 * quantile, atol=1.0, rtol=0)
    both = objective.steps(replace(full, quantile=quantile))
    assert both[quantile > 0.5].float().mean() == pytest.approx(500, abs=5)
    assert both[quantile < 0.5].float().mean() > 650


@loop("kind", ["dit", "unet", "wan"])
def test_gradients_reach_every_weight(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.model_management, "in_training", True)
    network = {"dit": models.new_dit, "unet": models.new_unet, "wan": models.new_wan}[kind](0)
    generator = torch.Generator().manual_seed(2)
    for parameter in network.requires_grad_(True).parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    x, tokens = torch.randn(1, 16, 16, 16), torch.randn(1, 14, 128)
    extra: dict[str, Any] = {
        "dit": {"y": torch.randn(1, 128), "guidance": torch.ones(1)},
        "unet": {"y": torch.randn(1, 128 + 6 * 256)},
        "wan": {"transformer_options": {}},
    }[kind]
    x = x[:, :, None].expand(-1, -1, 2, -1, -1) if kind == "wan" else x
    network(x, torch.rand(1), context=tokens, **extra).square().mean().backward()
    silent = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not [name for name in silent if not name.startswith("guidance_in.in_layer")]


def test_a_file_says_how_deep_its_unet_is(tmp_path: Path) -> None:
    weights = models.new_unet(0, config=models.DEEP_UNET_CONFIG).state_dict()
    save_file(weights, tmp_path / "deep.safetensors")
    network = models.load_unet(str(tmp_path / "deep.safetensors")).model.diffusion_model
    stacks = [module for module in network.modules() if isinstance(module, SpatialTransformer)]
    assert {(stack.in_channels, len(stack.transformer_blocks)) for stack in stacks} == {(64, 2), (128, 7)}
