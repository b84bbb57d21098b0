"""ERNIE-Image: one stream of [image | text]; blocks get only tokens, positions and modulation.

In ComfyUI 0.20.1 positions have a shape that this pack does not know, so the model runs unmerged there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from comfy.ldm.ernie import model as ernie
from comfy.ldm.ernie.model import ErnieImageModel
from torch import Tensor, nn

from ....toma_core import Evaluation
from ..attention_override import KVOverride
from ..family import Block, BlockGroup, BlockSignature, ModelHooks
from ..model_hooks import Hook, HookPair
from ..origin import in_its_own_file, is_original
from ..signature import CallArguments, Options

NAME = "ERNIE-Image"
MODEL = ErnieImageModel
COST = Block(13, 37, (1, 5, 5))


class Signature(BlockSignature):
    """ComfyUI passes no `attention_mask` to blocks. If another node passes one to a block, the block runs unmerged."""

    positional_args = ("x", "rotary_pos_emb", "temb")
    required_kwargs = ()
    rope_arg, rope_token_dim = "rotary_pos_emb", 1
    rope_split_half = True
    passthrough_args = ("temb",)
    override: KVOverride | None = None  # of the last block with hooks; it serves one attention only

    def with_attention(self, call_args: CallArguments, override: KVOverride) -> CallArguments:
        self.override = override
        return call_args

    def release(self) -> None:
        self.override = None


class AttentionHook(Hook):
    """Stands in for the `forward` of a block's attention, which calls `optimized_attention` without options. The hook
    runs the same code, but in it the name `optimized_attention` means `attend`."""

    def __init__(self, module: nn.Module, signature: Signature) -> None:
        self.module, self.block_signature = module, signature
        self.own = forward = type(module).forward
        if in_its_own_file(forward) and not forward.__closure__:
            names = {**forward.__globals__, "optimized_attention": self.attend}
            del names["__name__"]  # by this name torch.compile would look up ComfyUI's function
            self.forward = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)

    def fits(self) -> bool:
        """Return whether the attention's code is ComfyUI's: another pack may replace it at any time."""
        return hasattr(self, "forward") and is_original(self.module) and type(self.module).forward is self.own

    def __call__(self, x: Tensor, attention_mask: Any = None, image_rotary_emb: Any = None) -> Any:
        return self.forward(self.module, x, attention_mask, image_rotary_emb)

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        function, override = ernie.optimized_attention, self.block_signature.override
        return function(*args, **kwargs) if override is None else override(function, *args, **kwargs)


class Hooks(ModelHooks):
    def block_groups(self, model: ErnieImageModel) -> tuple[BlockGroup, ...]:
        signature = Signature()
        # Another pack may have replaced a layer.
        modules = (layer.self_attention for layer in model.layers if hasattr(layer, "self_attention"))
        self.attention_hooks = [(module, AttentionHook(module, signature)) for module in modules]
        return (BlockGroup("layer", model.layers, signature, COST, model.patch_size, model.hidden_size),)

    def select(
        self, x: Tensor, evaluation: Evaluation, options: Options, control: Any, references: Sequence[Tensor]
    ) -> Iterator[HookPair]:
        yield from super().select(x, evaluation, options, control, references)
        if evaluation.step_plan.mode.caches:
            yield from self._original_attention()

    def hook_pairs(self) -> Iterator[HookPair]:
        yield from super().hook_pairs()
        yield from self._original_attention()

    def _original_attention(self) -> Iterator[HookPair]:
        return (pair for pair in self.attention_hooks if pair[1].fits())
