"""A stand-in for ComfyUI's Qwen-Image 2.1, for older ComfyUIs. It calls blocks with the same arguments as ComfyUI's own
model.

There is one stream of [text with references in it | image]. The tokens before the image are the prefix. These tokens
never attend to the image, and are modulated as at time 0. So their keys and values never change. A block is called

    with all tokens                  without a cache, and where the first release of the model fills the cache
    with the prefix, then the image  where later releases fill the cache; these blocks also change their input in place
    with the image alone             where the cache is filled

`stand_ins.use_newer_models` makes this file importable as `comfy.ldm.qwen_image21.model`, where newer ComfyUIs have the
classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.supported_models
import comfy_kitchen
import torch
from comfy.ldm.flux.layers import timestep_embedding
from comfy.ldm.flux.math import apply_rope1, rope
from comfy.ldm.modules.attention import optimized_attention
from comfy.model_management import cast_to
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

Pair = tuple[Tensor, Tensor]  # modulations: (1, 1, C) for the prefix and (B, 1, C) for the image
Cached = list[Pair]  # keys and values of the prefix, (B, T, heads, d), of each block
NONE: Mapping[str, Any] = {}
_BITS = {"int8": 8, "int4": 4}  # dtype of the cache -> bits of a cached number


def _parts(x: Tensor, prefix_len: int) -> tuple[Tensor, ...]:
    """Split (B, T, C) into the prefix and the image, each a view."""
    return x.split((prefix_len, x.shape[1] - prefix_len), 1)


def _stored(x: Tensor, asked: Mapping[str, Any]) -> Tensor:
    """Return keys or values as the cache holds them. If ComfyUI's cache node asks for 8 or 4 bits, round each token and
    head separately."""
    if bits := _BITS.get(asked.get("dtype", "")):
        unit = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
        x = (x / unit).round() * unit
    return x.to("cpu" if asked.get("device") == "cpu" else x.device, copy=True)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, operations: Any, **made: Any) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (operations.Linear(dim, dim, bias=False, **made) for _ in range(3))
        self.to_out = nn.ModuleList([operations.Linear(dim, dim, bias=False, **made)])
        self.norm_q, self.norm_k = (operations.RMSNorm(dim // heads, eps=1e-6, **made) for _ in range(2))

    def forward(
        self, x: Tensor, pe: Tensor, attn_fn: Callable[..., Tensor], prefix_len: int, options: Mapping[str, Any]
    ) -> Tensor:
        q, k, v = (linear(x).unflatten(2, (self.heads, -1)) for linear in (self.to_q, self.to_k, self.to_v))
        patches = options.get("patches", {}).get("attn1_patch", ())
        if not patches:
            weights = (cast_to(norm.weight, q.dtype, q.device) for norm in (self.norm_q, self.norm_k))
            q, k = comfy_kitchen.rms_rope(q, k, pe, *weights, 1e-6)
            return self.to_out[0](attn_fn(q, k, v, self.heads, preferred_attention=None))
        q, k = self.norm_q(q), self.norm_k(k)
        for patch in patches:
            given = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2), "pe": pe.transpose(1, 2)}
            extra = {**options, "img_slice": [prefix_len, x.shape[1]]}
            given |= patch(**given, attn_mask=None, extra_options=extra)
            q, k, v, pe = (given[name].transpose(1, 2) for name in ("q", "k", "v", "pe"))
        return self.to_out[0](attn_fn(apply_rope1(q, pe), apply_rope1(k, pe), v, self.heads, preferred_attention=None))


class QwenImage21TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int, ratio: int, in_place: bool, operations: Any, **made: Any) -> None:
        super().__init__()
        self.in_place = in_place
        self.attn = Attention(dim, heads, operations, **made)
        self.gate_up = operations.Linear(dim, 2 * ratio * dim, bias=False, **made)
        self.down = operations.Linear(ratio * dim, dim, bias=False, **made)

    def forward(
        self,
        x: Tensor,
        mod: tuple[Any, ...],
        pe: Tensor,
        attn_fn: Callable[..., Tensor],
        prefix_len: int,
        transformer_options: Mapping[str, Any] = NONE,
    ) -> Tensor:
        scale1, gate1, scale2, gate2, zero = mod
        seen = self._scaled(x, scale1, zero, prefix_len)
        x = self._added(x, self.attn(seen, pe, attn_fn, prefix_len, transformer_options), gate1, prefix_len)
        gate, up = self.gate_up(self._scaled(x, scale2, zero, prefix_len)).chunk(2, -1)
        x = self._added(x, self.down(silu(gate) * up), gate2, prefix_len)
        return x.clip(-65504, 65504) if x.dtype is torch.float16 else x

    def _scaled(self, x: Tensor, scale: Pair, zero: Tensor, prefix_len: int) -> Tensor:
        """Return the normed tokens times 1 + scale."""
        parts = zip(_parts(x, prefix_len), scale, strict=True)
        found = [comfy_kitchen.adaln(part, row, zero, 1e-6) for part, row in parts if part.shape[1]]
        return torch.cat(found, 1) if len(found) > 1 else found[0]

    def _added(self, x: Tensor, y: Tensor, gate: Pair, prefix_len: int) -> Tensor:
        out = x if self.in_place else x.clone()
        for part, more, row in zip(_parts(out, prefix_len), _parts(y, prefix_len), gate, strict=True):
            if part.shape[1]:
                part.addcmul_(more, row)
        return out


class QwenImage21Transformer2DModel(nn.Module):
    """in_place: whether blocks change their input and are called as in later releases, see the head of this file."""

    def __init__(
        self,
        in_channels: int = 64,
        out_channels: int = 64,
        num_layers: int = 32,
        attention_head_dim: int = 128,
        num_attention_heads: int = 32,
        context_in_dim: int = 4096,
        mlp_ratio: int = 3,
        axes_dims_rope: tuple[int, ...] = (16, 56, 56),
        in_place: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        made = {"dtype": dtype, "device": device}
        self.dtype, self.out_channels, self.axes, self.in_place = dtype, out_channels, axes_dims_rope, in_place
        self.inner_dim = dim = num_attention_heads * attention_head_dim
        self.img_in = operations.Linear(in_channels, dim, bias=False, **made)
        self.txt_norm = operations.RMSNorm(context_in_dim, eps=1e-6, **made)
        self.txt_in = operations.Linear(context_in_dim, dim, bias=False, **made)
        self.time_in, self.time_out = (operations.Linear(n, dim, bias=False, **made) for n in (256, dim))
        self.modulation = operations.Linear(dim, 4 * dim, bias=False, **made)
        self.transformer_blocks = nn.ModuleList(
            [
                QwenImage21TransformerBlock(dim, num_attention_heads, mlp_ratio, in_place, operations, **made)
                for _ in range(num_layers)
            ]
        )
        self.scale_out = operations.Linear(dim, dim, bias=False, **made)
        self.proj_out = operations.Linear(dim, out_channels, bias=False, **made)
        self.reset_prefix_cache(False)

    def reset_prefix_cache(self, enabled: bool) -> None:
        """Begin (`enabled`) or end a run. Empty the cache of the prefix's keys and values for each prompt."""
        self.prefix_cache_enabled = enabled
        self.prefix_cache: list[tuple[Tensor, Cached]] = []

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        ref_latents: Any = None,
        image_slots: Any = None,
        transformer_options: dict[str, Any] = {},  # noqa: B006 - as in ComfyUI's models
        **kwargs: Any,
    ) -> Tensor:
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, transformer_options)
        executor = WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timestep, context, ref_latents, image_slots, transformer_options, **kwargs)

    def _forward(
        self, x: Tensor, timesteps: Tensor, context: Tensor, ref_latents: Any, image_slots: Any,
        transformer_options: dict[str, Any], **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        references, (height, width) = list(ref_latents or ()), x.shape[-2:]
        stream, pe, segments = self._sequence(x, context, references, list(image_slots or ()))
        prefix_len = stream.shape[1] - height * width
        mod, time = self._modulations(timesteps, x.dtype)
        slot = self._slot(x, (context, *references), transformer_options) if prefix_len else None
        filled = slot is not None and len(slot) == len(self.transformer_blocks)
        prefix, prefix_pe, given = stream[:, :prefix_len].clone(), pe[:, :prefix_len], prefix_len
        if filled or (slot is not None and self.in_place):
            stream, pe, given = stream[:, prefix_len:].clone(), pe[:, prefix_len:], 0
        transformer_options |= {"block_type": "single", "total_blocks": len(self.transformer_blocks)}
        for n, block in enumerate(self.transformer_blocks):
            transformer_options["block_index"] = n
            attention = self._attention(segments, transformer_options)
            if slot is not None and not filled:
                parts = segments[:-1] if self.in_place else segments
                attention = self._filling(parts, slot, prefix_len, transformer_options)
                if self.in_place:
                    prefix = block(prefix, mod, prefix_pe, attention, prefix_len, transformer_options)
            if not given and slot is not None:
                attention = self._with_prefix(slot[n], transformer_options)
            stream = self._called(block, n, stream, mod, pe, attention, given, transformer_options)
            for patch in transformer_options.get("patches", {}).get("single_block", ()):
                args = {"img": stream, "x": x, "block_index": n, "transformer_options": transformer_options}
                stream = patch(args)["img"]
        scale = self.scale_out(silu(time))
        out = comfy_kitchen.adaln(stream[:, given:], scale, torch.zeros_like(scale[:1]), 1e-6)
        return self.proj_out(out).transpose(1, 2).reshape(len(x), self.out_channels, height, width)

    def _called(
        self, block: Any, n: int, x: Tensor, mod: Any, pe: Tensor, attn_fn: Any, prefix_len: int, options: Any
    ) -> Tensor:
        """Run a block, or the function with which another node replaces the block."""

        def original(args: dict[str, Any]) -> dict[str, Any]:
            return {"img": block(args["img"], mod, args["pe"], attn_fn, prefix_len, args["transformer_options"])}

        replacement = options.get("patches_replace", {}).get("dit", {}).get(("single_block", n))
        if replacement is None:
            return block(x, mod, pe, attn_fn, prefix_len, options)
        args = {"img": x, "pe": pe, "mod": mod, "attn_fn": attn_fn, "prefix_len": prefix_len}
        return replacement({**args, "transformer_options": options}, {"original_block": original})["img"]

    def _modulations(self, timesteps: Tensor, dtype: torch.dtype) -> tuple[tuple[Any, ...], Tensor]:
        """Return (scale, gate, scale, gate, 0) for all blocks, and the embedded time. Each scale and each gate is a
        `Pair`."""
        times = torch.cat([timesteps, timesteps.new_zeros(1)])
        embedded = self.time_out(silu(self.time_in(timestep_embedding(times, 256).to(dtype))))
        scale1, gate1, scale2, gate2 = self.modulation(silu(embedded)).chunk(4, -1)
        parts = scale1, gate1.tanh(), scale2, gate2.tanh()
        pairs = [(each[-1:, None], each[:-1, None]) for each in parts]
        return (*pairs, torch.zeros_like(scale1[:1, None])), embedded[:-1, None]

    def _sequence(
        self, x: Tensor, context: Tensor, references: list[Tensor], slots: list[int]
    ) -> tuple[Tensor, Tensor, list[tuple[int, int, Tensor | None]]]:
        """Return the stream (B, T, C), its rotary positions (1, T, 1, d/2, 2, 2), and (start, stop, mask) of its parts.
        slots: how many text tokens come before each reference. Without slots, all references come behind the text."""
        text = self.txt_in(gelu(self.txt_norm(context), approximate="tanh"))
        length = text.shape[1]
        bounds = [0, *(slots + [length] * len(references))[: len(references)], length]
        parts, places, segments = list[Tensor](), list[Tensor](), list[tuple[int, int, Tensor | None]]()
        first = 0
        for start, stop, image in zip(bounds, bounds[1:], [*references, x], strict=False):
            count, at = stop - start, sum(part.shape[1] for part in parts)
            if count:
                causal = torch.ones(count, at + count, dtype=torch.bool, device=x.device).tril(at)
                parts.append(text[:, start:stop])
                places.append(torch.arange(first, first + count, device=x.device)[:, None].expand(-1, 3).float())
                segments.append((at, at + count, causal))
                at, first = at + count, first + count
            rows, columns = image.shape[-2:]
            axes = [torch.arange(side, device=x.device) - side / 2 for side in (rows, columns)]
            grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 1)
            parts.append(self.img_in(image.flatten(2).transpose(1, 2)).expand(len(x), -1, -1))
            places.append(torch.cat([torch.full_like(grid[:, :1], first), grid], 1))
            segments.append((at, at + rows * columns, None))
            first += max(rows, columns)
        ids = torch.cat(places)[None]
        pe = torch.cat([rope(ids[..., n], size, 10000) for n, size in enumerate(self.axes)], -3)
        return torch.cat(parts, 1), pe[:, :, None].float(), segments

    def _slot(self, x: Tensor, contents: Sequence[Tensor], options: Mapping[str, Any]) -> Cached | None:
        """Return the list of this prompt's cached keys and values, which is empty at first. Return None if the cache is
        off or unusable."""
        patches, where = options.get("patches", {}), options.get("qwen_image21_cache", {}).get("device", "auto")
        others = options.get("patches_replace", {}).get("dit") or patches.get("single_block")
        if not self.prefix_cache_enabled or where == "off" or others or patches.get("attn1_patch"):
            return None
        sizes = [float(side) for each in (x, *contents) for side in (len(x), *each.shape[-2:])]
        key = torch.cat([x.new_tensor(sizes).float(), *(each.float().flatten() for each in contents)])
        found = next((slot for known, slot in self.prefix_cache if torch.equal(known, key)), None)
        if found is None:
            self.prefix_cache.append((key, found := []))
        return found

    def _attention(self, segments: Sequence[Any], options: Any) -> Callable[..., Tensor]:
        """Return an attention in which each part of the stream attends to all tokens up to the part's end."""

        def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, preferred_attention: Any = None) -> Tensor:
            found = [
                optimized_attention(
                    *(q[:, start:stop].flatten(2), k[:, :stop].flatten(2), v[:, :stop].flatten(2), heads),
                    mask=mask,
                    transformer_options=options,
                )
                for start, stop, mask in segments
            ]
            return torch.cat(found, 1) if len(found) > 1 else found[0]

        return attend

    def _with_prefix(self, cached: Pair, options: Any) -> Callable[..., Tensor]:
        """Return the attention of the image to the cached prefix and to itself."""

        def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, preferred_attention: Any = None) -> Tensor:
            k, v = (torch.cat([each.to(q), own], 1).flatten(2) for each, own in zip(cached, (k, v), strict=True))
            return optimized_attention(q.flatten(2), k, v, heads, transformer_options=options)

        return attend

    def _filling(
        self, segments: Sequence[Any], slot: Cached, prefix_len: int, options: Mapping[str, Any]
    ) -> Callable[..., Tensor]:
        """Return an attention that caches the keys and values of the prefix."""
        attend, asked = self._attention(segments, options), options.get("qwen_image21_cache", NONE)

        def filling(q: Tensor, k: Tensor, v: Tensor, heads: int, preferred_attention: Any = None) -> Tensor:
            slot.append((_stored(k[:, :prefix_len], asked), _stored(v[:, :prefix_len], asked)))
            return attend(q, k, v, heads, preferred_attention)

        return filling


class Latent(comfy.latent_formats.LatentFormat):
    latent_channels = 64


class Config(comfy.supported_models.supported_models_base.BASE):
    unet_config = {"image_model": "qwen_image21"}  # noqa: RUF012 - as in ComfyUI
    sampling_settings = {"multiplier": 1.0, "shift": 0.69}  # noqa: RUF012
    memory_usage_factor = 6.0
    latent_format = Latent
    supported_inference_dtypes = [torch.bfloat16, torch.float16, torch.float32]  # noqa: RUF012


class QwenImage21(comfy.model_base.BaseModel):
    """The model in a ModelPatcher. ComfyUI sets `current_patcher` when a run begins, and unsets it when the run ends.
    Both events reset the cache."""

    def __init__(self, model_config: Any, device: Any = None) -> None:
        kind = comfy.model_base.ModelType.FLUX
        super().__init__(model_config, kind, device=device, unet_model=QwenImage21Transformer2DModel)
        self.memory_usage_factor_conds = ("ref_latents",)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "current_patcher" and hasattr(self, "diffusion_model"):
            self.diffusion_model.reset_prefix_cache(value is not None)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        out: dict[str, Any] = super().extra_conds(**kwargs)
        out["c_crossattn"] = comfy.conds.CONDRegular(kwargs["cross_attn"])
        if (references := kwargs.get("reference_latents")) is not None:
            out["ref_latents"] = comfy.conds.CONDList([self.process_latent_in(each) for each in references])
        if (slots := kwargs.get("image_slots")) is not None:
            out["image_slots"] = comfy.conds.CONDConstant(slots)
        return out

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, Any]:
        references = kwargs.get("reference_latents") or ()
        pixels = sum(math.prod(each.shape[-2:]) for each in references)
        return {"ref_latents": [1, 64, pixels]} if pixels else {}


comfy.model_base.QwenImage21 = QwenImage21
comfy.supported_models.QwenImage21 = Config
