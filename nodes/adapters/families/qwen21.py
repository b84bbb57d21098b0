"""Qwen-Image 2.1: one stream of [text and references | image]; blocks get the attention function as an argument.

Tokens before the image never attend to the image. If ComfyUI caches the keys of these tokens, it first calls blocks
with these tokens alone, later with the image alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from comfy.ldm.qwen_image21.model import QwenImage21Transformer2DModel

from ..family import Block, BlockGroup, BlockSignature, ModelHooks
from ..signature import CallArguments, Options

NAME = "Qwen-Image 2.1"
MODEL = QwenImage21Transformer2DModel
COST = Block(13, 22, (1, 5, 5))


class Signature(BlockSignature):
    """ComfyUI calls `attn_fn` without options, so an override must replace `attn_fn` itself."""

    positional_args = ("x", "mod", "pe", "attn_fn", "prefix_len", "transformer_options")
    rope_arg, rope_token_dim = "pe", 1
    attention_arg = "attn_fn"
    passthrough_args = ("mod", "prefix_len")
    mutates_input = clamps_fp16 = True

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        before = int(call_args["prefix_len"])
        return before if call_args["pe"].shape[1] == before + image else None

    def has_image(self, call_args: CallArguments) -> bool:
        return bool(call_args["pe"].shape[1] > call_args["prefix_len"])


# Size of an element in ComfyUI's own cache, by the cache's dtype, as a share of an element's size in the run's dtype.
_STORED = {"int8": 0.5, "int4": 0.25}


class Hooks(ModelHooks):
    between = ("single_block",)

    def model_cache_numel(self, cond: Mapping[str, Any], options: Options) -> float:
        asked: Mapping[str, Any] = options.get("qwen_image21_cache") or {}
        if asked.get("device") in ("off", "cpu"):
            return 0
        text = cond.get("cross_attn")
        references = [prod(each.shape[-2:]) for each in cond.get("reference_latents") or ()]
        tokens = sum(references, 0 if text is None else text.shape[1])
        (group,) = self.groups
        return 2 * len(group.blocks) * tokens * group.width * _STORED.get(str(asked.get("dtype")), 1)

    def block_groups(self, model: QwenImage21Transformer2DModel) -> tuple[BlockGroup, ...]:
        return (BlockGroup("single", model.transformer_blocks, Signature(), COST, 1, model.inner_dim),)
