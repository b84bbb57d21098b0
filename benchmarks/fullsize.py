"""Models at their real widths, with random weights: right for time and cost, meaningless for pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import models
from benchmarks.full_model import WHOLE
from benchmarks.whole import Whole

# One long row of noise that every weight is cut from: drawing 2.6 billion numbers would take minutes.
_NOISE = 1 << 24

# Those of which there is no small one of their own.
_LIKE = {"klein": "flux2"}
# Text tokens, their width, the width of the pooled vector of those in benchmarks.models; SDXL's is that of the whole.
_TINY = (32, 48, 24)


@dataclass(frozen=True)
class Shape:
    """One evaluation: a model of `WHOLE`, picture sides in pixels, images in the batch. tiny: of the small models in
    `benchmarks.models`, to try a benchmark out. references: how many reference images, as large as the picture. frames:
    of a video's latent."""

    model: str
    height: int = 1024
    width: int = 1024
    batch: int = 1
    tiny: bool = False
    references: int = 0
    frames: int = 1

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.frames}" if self.frames > 1 else "")

    @property
    def whole(self) -> Whole:
        """The model at its real size."""
        return WHOLE[self.model]

    @property
    def latent(self) -> tuple[int, ...]:
        """(C, H, W) or (C, T, H, W), without the batch; of several streams the first."""
        pixel, frames = self.whole.pixel, (self.frames,) if self.whole.video else ()
        return (self.whole.channels, *frames, self.height // pixel, self.width // pixel)

    @property
    def streams(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all streams of the latent."""
        return (self.latent, self.whole.audio(self.frames)) if self.whole.audio else (self.latent,)

    @property
    def tokens(self) -> int:
        """Tokens of the picture or video."""
        side = 32 if self.model in ("ltx", "ltx_av", "h3") else 16
        return self.frames * (self.height // side) * (self.width // side)

    @property
    def _text(self) -> tuple[int, int, int]:
        """Tokens, width, and that of the pooled vector."""
        if not self.tiny:
            return *self.whole.text, self.whole.pooled
        text, width, pooled = _TINY
        if self.model == "ltx_av":
            width += 32  # of the audio
        return (77, width, 2816) if self.model == "sdxl" else (text, width, pooled if self.whole.pooled else 0)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Arguments of `apply_model`, the same on every device."""
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> Tensor:
            return torch.randn(self.batch, *shape, generator=generator).to(device)

        def full(value: float) -> Tensor:
            return torch.full((self.batch,), value, device=device)

        text, width, pooled = self._text
        inputs: dict[str, Any] = {"x": noise(*self.latent), "c_crossattn": noise(text, width)}
        if self.whole.audio:
            from comfy.utils import pack_latents

            streams = [inputs["x"], noise(*self.streams[1])]
            inputs["x"], inputs["latent_shapes"] = pack_latents(streams)
        if pooled:
            inputs["y"] = noise(pooled)
        inputs["t"] = full(5.0 if self.model == "sdxl" else 0.7)
        if self.whole.guidance:
            inputs["guidance"] = full(3.5)
        if self.whole.base in ("Lumina2", "Omnigen2"):
            inputs["num_tokens"] = text
        if self.whole.base == "LTXV":
            inputs["attention_mask"] = torch.ones(self.batch, text, dtype=torch.long, device=device)
        if self.references:
            inputs["ref_latents"] = [noise(*self.latent) for _ in range(self.references)]
            if self.model == "krea2":  # its checkpoints do not say
                inputs["ref_latents_method"] = "index"
        return inputs

    def conditioning(self, seed: int) -> list[Any]:
        """CONDITIONING for a sampler: random text for one picture."""
        generator = torch.Generator().manual_seed(seed)
        text, width, pooled = self._text
        # SDXL's vector is the pooled text and six sizes.
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
    """A `ModelPatcher` around a model of `WHOLE`, at full width, with so many blocks of each kind, all if None; or, on
    the CPU in fp32, tiny."""
    if tiny:
        return models.unet() if name == "sdxl" else models.TRANSFORMERS[_LIKE.get(name, name)]()
    import comfy.model_base
    import comfy.supported_models
    from comfy.model_patcher import ModelPatcher

    whole = WHOLE[name]
    config = getattr(comfy.supported_models, whole.kind)({**whole.at(blocks), "dtype": dtype})
    model = getattr(comfy.model_base, whole.base)(config, device=device).eval()
    _fill(model, device, seed)
    return ModelPatcher(model, load_device=device, offload_device=device)


def _fill(model: Any, device: torch.device, seed: int) -> None:
    """Random weights, drawn on the CPU and so the same on every device; none on the meta device."""
    if device.type == "meta":
        model.diffusion_model.requires_grad_(False)
        return
    model.to(device)
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(seed)).to(device)
    for name, buffer in model.diffusion_model.named_buffers():
        if name == "pos_embed":
            buffer.copy_(noise.repeat(-(-buffer.numel() // _NOISE))[: buffer.numel()].view(buffer.shape))
    for index, parameter in enumerate(model.diffusion_model.parameters()):
        size = parameter.numel()
        start = index * 7919 % max(1, _NOISE - size)
        row = noise.repeat(-(-size // _NOISE))[:size] if size > _NOISE else noise[start : start + size]
        row = row / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 1 + 0.1 * row
        parameter.data.copy_(row.view(parameter.shape))
        parameter.requires_grad_(False)
