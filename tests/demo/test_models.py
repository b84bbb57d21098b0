"""Test that ComfyUI's loader recognises the tiny models and that its samplers can sample them."""

from pathlib import Path
from typing import Any

import comfy.ldm.flux.model
import comfy.model_base
import comfy.model_sampling
import comfy.sample
import comfy.sd
import pytest
import torch
from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

from demo import models, showcase_graphs
from demo.conditioning import conditioning, empty_latent, seeded_noise
from demo.data import Batches, Plan, View
from demo.objectives import VelocityObjective, adm
from demo.scenes import scene_from_seed


@pytest.fixture(scope="module")
def dit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that the demo's server gets if there are no trained weights."""
    folder = tmp_path_factory.mktemp("dit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(showcase_graphs, "WEIGHTS_FOLDER", folder)
        showcase_graphs.place_dit(folder)
    return folder / "diffusion_models" / showcase_graphs.DIT_FILE


def _sample(model: Any, seeds: list[int], scenes: list[Any] | None = None, cfg: float = 2.0) -> torch.Tensor:
    prompts = (
        conditioning([scene_from_seed(seed) for seed in seeds] if scenes is None else scenes),
        conditioning([None]),
    )
    noise, latent = seeded_noise(seeds, 64, 64), empty_latent(64, 64, len(seeds))
    return comfy.sample.sample(model, noise, 2, cfg, "euler", "simple", *prompts, latent, disable_pbar=True, seed=0)


def test_comfyui_recognises_both_models(dit_file: Path) -> None:
    dit, unet = comfy.sd.load_diffusion_model(str(dit_file)).model, models.load_unet(None).model
    assert (type(dit), type(unet)) == (comfy.model_base.Flux, comfy.model_base.SDXL)
    networks = dit.diffusion_model, unet.diffusion_model
    assert tuple(map(type, networks)) == (comfy.ldm.flux.model.Flux, UNetModel)
    assert {name: getattr(networks[0].params, name) for name in models.DIT_CONFIG} == models.DIT_CONFIG
    assert isinstance(dit.model_sampling, comfy.model_sampling.ModelSamplingFlux)
    stacks = [module for module in networks[1].modules() if isinstance(module, SpatialTransformer)]
    assert {(stack.in_channels, len(stack.transformer_blocks)) for stack in stacks} == {(64, 1), (128, 2)}
    assert unet.latent_format.latent_channels == 16


def test_norms_of_the_unet_keep_what_a_flat_background_says() -> None:
    """With ComfyUI's 32 groups, each group would have two channels. The norm would remove the mean of the two, which is
    the colour of a flat background."""
    flat = torch.linspace(0.5, 2.0, 64)[None, :, None, None].expand(1, 64, 4, 4)
    modules = models.load_unet(None).model.diffusion_model.modules()
    norms = [m for m in modules if isinstance(m, torch.nn.GroupNorm) and m.num_channels == 64]
    assert norms
    assert all(norm(flat)[0].mean((1, 2)).std() > 0.3 for norm in norms)


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_two_steps_of_sampling(kind: str, dit_file: Path) -> None:
    model = comfy.sd.load_diffusion_model(str(dit_file)) if kind == "dit" else models.load_unet(None)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.model.diffusion_model.parameters():  # without noise, untrained models return zeros
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    first = _sample(model, [1, 2])
    assert first.shape == (2, 16, 32, 32)
    assert torch.isfinite(first).all()
    assert torch.equal(first, _sample(model, [1, 2]))
    torch.testing.assert_close(first[1:], _sample(model, [2]), atol=2e-3, rtol=1e-2)
    assert (first[0] - first[1]).abs().mean() > 1e-3
    prompts = [_sample(model, [5], [scene], 1.0) for scene in (scene_from_seed(1), scene_from_seed(2), None)]
    for i in range(3):
        assert not torch.allclose(prompts[i], prompts[i - 1], atol=1e-5)


def test_the_unet_learns_what_comfyui_asks_it() -> None:
    """If the network predicts the target of training, ComfyUI's V_PREDICTION turns the noisy picture into the clean
    one."""
    model = models.load_unet(None).model
    pooled, sampling = torch.randn(2, 128), model.model_sampling
    torch.testing.assert_close(
        adm(pooled, View(), (512, 512)), model.encode_adm(pooled_output=pooled, width=512, height=512)
    )
    objective, batch = VelocityObjective(), Batches(Plan("unet", 1, full_batch=4, early_shares=(0.0, 1.0)))[0]
    seen = set[float]()

    def network(x: torch.Tensor, step: torch.Tensor, **_: Any) -> torch.Tensor:
        sigma = sampling.sigma(step)
        level = sigma[:, None, None, None]
        noisy = x * (level**2 + 1).sqrt()
        torch.testing.assert_close(sampling.calculate_input(sigma, noisy), x)
        right = ((noisy - batch.clean) / level - level * batch.clean) / (level**2 + 1).sqrt()
        torch.testing.assert_close(sampling.calculate_denoised(sigma, right, noisy), batch.clean)
        seen.update(sigma.tolist())
        return right

    assert objective.loss(network, batch) < 1e-8
    assert len(seen) == 4
