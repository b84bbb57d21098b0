"""Random prompts and empty latents for the small models, and runs of ComfyUI's sampler."""

from __future__ import annotations

from typing import Any

import torch

# Families with a second stream: number of frames -> shape of the audio, without the batch.
AUDIO = {"LTXAV": lambda frames: (8, 4 * frames + 1, 16), "MiniMaxH3": lambda frames: (32, 2, 4 * frames + 1)}


def conditioning(model: Any, tokens: int = 7, seed: int = 1, **options: Any) -> list[Any]:
    """Return CONDITIONING for a small model, with `tokens` random text tokens and options such as `area`."""
    import comfy.model_base

    generator = torch.Generator().manual_seed(seed)
    width = 1280 if isinstance(model.model, comfy.model_base.SDXL) else 24
    text = torch.randn(1, tokens, 48, generator=generator)
    # OmniGen2 and LTX-Video require a mask. OmniGen2 counts its text tokens by the mask.
    if type(model.model).__name__ in ("Omnigen2", "LTXV"):
        options = {"attention_mask": torch.ones(1, tokens, dtype=torch.long), **options}
    return [[text, {"pooled_output": torch.randn(1, width, generator=generator), **options}]]


def sample(model: Any, height: int = 32, width: int = 32, **options: Any) -> torch.Tensor:
    """Sample a latent of `height` x `width` latent pixels through ComfyUI's own sampler, and return its first stream.
    See `sample_streams`."""
    return sample_streams(model, height, width, **options)[0]


def empty(model: Any, height: int, width: int, batch: int = 1, frames: int = 1) -> Any:
    """Return an empty latent, as ComfyUI's nodes for the model make it."""
    import comfy.nested_tensor
    import comfy.sample

    audio = AUDIO.get(type(model.model).__name__)
    network = model.model.diffusion_model
    if audio is not None:
        channels = getattr(network, "latents_dim", 0) or network.in_channels
        streams = (channels, frames, height, width), audio(frames)
        return comfy.nested_tensor.NestedTensor([torch.zeros(batch, *shape) for shape in streams])
    channels = model.model.latent_format.latent_channels
    latent = comfy.sample.fix_empty_latent_channels(model, torch.zeros(batch, channels, height, width))
    return latent.expand(-1, -1, frames, -1, -1).contiguous() if frames > 1 else latent


@torch.no_grad()  # ComfyUI runs prompts without gradients
def sample_streams(
    model: Any,
    height: int = 32,
    width: int = 32,
    *,
    batch: int = 1,
    frames: int = 1,
    steps: int = 3,
    cfg: float = 3.0,
    sampler: str = "euler",
    scheduler: str = "simple",
    seed: int = 5,
    positive: Any = None,
    negative: Any = None,
    latent: Any = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Sample a latent through ComfyUI's own sampler and return its streams. frames: number of frames of a video
    model."""
    import comfy.sample

    latent = empty(model, height, width, batch, frames) if latent is None else latent
    noise = comfy.sample.prepare_noise(latent, seed)
    positive = conditioning(model, seed=1) if positive is None else positive
    negative = conditioning(model, seed=2) if negative is None else negative
    given = steps, cfg, sampler, scheduler, positive, negative, latent
    out = comfy.sample.sample(model, noise, *given, seed=seed, disable_pbar=True, **options)
    return out.unbind() if out.is_nested else [out]
