"""Models at their real widths with random weights, for time and cost. Their pictures are noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from testbed import models
from testbed.full_model import SPECS
from testbed.model_spec import ModelSpec

# Length of a row of noise from which all weights are cut. Drawing 2.6 billion numbers instead would take minutes.
_NOISE = 1 << 24

# Full-size model that has no small version in testbed.models -> the small model to use in its place.
_LIKE = {"klein": "flux2"}
# Number of text tokens, their width, and the width of the pooled vector of small models. The small SDXL is an
# exception, with 77 text tokens and a pooled vector as wide as in the real SDXL.
_TINY = (32, 48, 24)


@dataclass(frozen=True)
class Shape:
    """The model and the sizes of one evaluation."""

    model: str  # a key of `SPECS`
    height: int = 1024  # height of the picture in pixels
    width: int = 1024
    batch: int = 1
    tiny: bool = False  # use the small model of `testbed.models`, to try a benchmark out
    references: int = 0  # number of reference images, of the picture's size
    frames: int = 1  # frames of a video's latent

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.frames}" if self.frames > 1 else "")

    @property
    def spec(self) -> ModelSpec:
        """Return the specification of the full-size model."""
        return SPECS[self.model]

    @property
    def latent(self) -> tuple[int, ...]:
        """Return the shape of the latent's first stream without the batch: (C, H, W) or (C, T, H, W)."""
        pixel, frames = self.spec.pixel, (self.frames,) if self.spec.video else ()
        return (self.spec.channels, *frames, self.height // pixel, self.width // pixel)

    @property
    def streams(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of all streams of the latent."""
        return (self.latent, self.spec.audio(self.frames)) if self.spec.audio else (self.latent,)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the picture or video."""
        side = 32 if self.model in ("ltx", "ltx_av", "h3") else 16
        return self.frames * (self.height // side) * (self.width // side)

    @property
    def _text(self) -> tuple[int, int, int]:
        """Return tokens and width of the text, and the width of the pooled vector."""
        if not self.tiny:
            return *self.spec.text, self.spec.pooled
        text, width, pooled = _TINY
        if self.model == "ltx_av":
            width += 32  # width of the audio's text
        return (77, width, 2816) if self.model == "sdxl" else (text, width, pooled if self.spec.pooled else 0)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Return arguments of `apply_model`, the same on every device."""
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> Tensor:
            return torch.randn(self.batch, *shape, generator=generator).to(device)

        def full(value: float) -> Tensor:
            return torch.full((self.batch,), value, device=device)

        text, width, pooled = self._text
        inputs: dict[str, Any] = {"x": noise(*self.latent), "c_crossattn": noise(text, width)}
        if self.spec.audio:
            from comfy.utils import pack_latents

            streams = [inputs["x"], noise(*self.streams[1])]
            inputs["x"], inputs["latent_shapes"] = pack_latents(streams)
        if pooled:
            inputs["y"] = noise(pooled)
        inputs["t"] = full(5.0 if self.model == "sdxl" else 0.7)
        if self.spec.guidance:
            inputs["guidance"] = full(3.5)
        if self.spec.base in ("Lumina2", "Omnigen2"):
            inputs["num_tokens"] = text
        if self.spec.base == "LTXV":
            inputs["attention_mask"] = torch.ones(self.batch, text, dtype=torch.long, device=device)
        if self.references:
            inputs["ref_latents"] = [noise(*self.latent) for _ in range(self.references)]
            if self.model == "krea2":  # Krea 2's checkpoints name no method for references
                inputs["ref_latents_method"] = "index"
        return inputs

    def conditioning(self, seed: int) -> list[Any]:
        """Return CONDITIONING for a sampler: random text for one picture."""
        generator = torch.Generator().manual_seed(seed)
        text, width, pooled = self._text
        # SDXL's `pooled` includes six sizes; the pooled text alone has 1280 numbers.
        pooled = 1280 if self.model == "sdxl" else pooled
        options: dict[str, Any] = {"guidance": 3.5}
        drawn = torch.randn(1, text, width, generator=generator)
        if pooled:
            options["pooled_output"] = torch.randn(1, pooled, generator=generator)
        return [[drawn, options]]


def patcher(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tiny: bool = False,
    blocks: tuple[int, ...] | None = None,
    seed: int = 0,
) -> Any:
    """Return a `ModelPatcher` around a model of `SPECS` at full width. If `tiny`, return one around the model's small
    version, on the CPU in fp32. blocks: number of blocks of each kind, None for all blocks."""
    if tiny:
        return models.unet() if name == "sdxl" else models.TRANSFORMERS[_LIKE.get(name, name)]()
    from comfy.model_patcher import ModelPatcher

    spec = SPECS[name]
    base, kind = models.classes_of(spec.base, spec.kind)
    config = kind({**spec.at(blocks), "dtype": dtype})
    model = base(config, device=device).eval()
    _fill(model, device, seed)
    return ModelPatcher(model, load_device=device, offload_device=device)


def _fill(model: Any, device: torch.device, seed: int) -> None:
    """Fill in random weights. They are drawn on the CPU, so that every device has the same weights. A model on the meta
    device gets no weights."""
    if device.type == "meta":
        model.diffusion_model.requires_grad_(False)
        return
    model.to(device)
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(seed)).to(device)
    for name, buffer in model.diffusion_model.named_buffers():
        if name in ("pos_embed", "adaln_t_table"):
            buffer.copy_(noise.repeat(-(-buffer.numel() // _NOISE))[: buffer.numel()].view(buffer.shape))
        elif name == "rope.inv_freq":  # a buffer of MiniMax H3, whose values come from its checkpoint
            buffer.copy_(10000.0 ** -torch.linspace(0, 1, len(buffer)))
    for index, parameter in enumerate(model.diffusion_model.parameters()):
        size = parameter.numel()
        start = index * 7919 % max(1, _NOISE - size)
        row = noise.repeat(-(-size // _NOISE))[:size] if size > _NOISE else noise[start : start + size]
        row = row / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 1 + 0.1 * row
        parameter.data.copy_(row.view(parameter.shape))
        parameter.requires_grad_(False)
