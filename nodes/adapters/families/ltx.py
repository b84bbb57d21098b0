"""LTX-Video and LTX-2: videos, and videos with their sound.

A block of LTX-2 takes (video, audio), and each stream attends to the other. Only the video is merged. Guide frames
follow the video's frames in the latent, and are merged like them. With masks, and with guides that have a strength,
modulation is per token. Merged blocks then get the modulation of the destinations.
"""

from __future__ import annotations

from typing import Any

from comfy.ldm.lightricks.model import LTXVModel
from torch import Tensor

from ..family import Block, BlockGroup, BlockSignature, Message, ModelHooks, Reason
from ..signature import CallArguments, TokenReduction

NAME = "LTX-Video and LTX-2"
MODEL = LTXVModel
DERIVED = ("LTXVModel", "LTXAVModel")
# Costs of the video's stream. With sound, the video also attends to the audio, with half as many channels.
COST = Block(14, 70, (1, 4, 4))
AV_COST = Block(16, 282, (1, 4, 4))


class Signature(BlockSignature):
    """Blocks on the video. Positions come as (matrices, layout); modulation is global, per frame or per token."""

    required_kwargs: tuple[str, ...] = ("context", "timestep", "pe", "transformer_options")
    rope_arg, rope_token_dim = "pe", 1
    rope_split_half = True
    row_args: tuple[str, ...] = ("timestep",)
    passthrough_args: tuple[str, ...] = ("context", "attention_mask", "prompt_timestep")
    mutates_input = True

    def unpack(self, value: Any) -> Any:
        if _is_compressed(value):
            return value.data
        return value[0] if isinstance(value, tuple) and len(value) == 2 else value

    def pack(self, value: Any, tensor: Tensor) -> Any:
        if _is_compressed(value):
            return type(value)(tensor, None)
        return (tensor, *value[1:]) if isinstance(value, tuple) else tensor

    def rows(self, call_args: CallArguments) -> dict[str, Any]:
        # Leave out modulation that is global or per frame, because it has no row per token.
        return {name: each for name, each in super().rows(call_args).items() if not _is_shared(call_args[name])}

    def obstacle(self, call_args: CallArguments, before: int, image: int, references: int = 0) -> Message | None:
        if self.tokens(call_args).shape[1] < image:
            return Reason.SMALLER_GUIDES()
        reason = super().obstacle(call_args, before, image, references)
        # Modulation per frame must cover exactly the tokens of the video.
        per_frame: list[Any] = [each for each in map(call_args.get, self.row_args) if _is_per_frame(each)]
        fits = all(each.patches_per_frame * each.num_frames == image for each in per_frame)
        return reason or (None if fits else Reason.OWN_MODULATION())

    def merged_args(self, call_args: CallArguments, reduction: TokenReduction) -> CallArguments:
        merged, ((tokens, destinations),) = super().merged_args(call_args, reduction), reduction.lengths
        for name in self.row_args:
            each: Any = call_args.get(name)
            if _is_per_frame(each):
                left = each.patches_per_frame * destinations // tokens
                merged[name] = type(each)(each.data, left, per_frame=True)
        return merged


def _is_compressed(value: Any) -> bool:
    """Whether a value is LTX-2's `CompressedTimestep`, which has a row of modulation for each frame or each token."""
    return hasattr(value, "patches_per_frame")


def _is_per_frame(value: Any) -> bool:
    return _is_compressed(value) and value.patches_per_frame > 1


def _is_shared(value: Any) -> bool:
    """Whether an argument has fewer rows than there are tokens, as modulation that is global or per frame has."""
    if _is_compressed(value):
        return _is_per_frame(value) or value.num_frames == 1
    return isinstance(value, Tensor) and value.shape[1] == 1


class AVSignature(Signature):
    """Blocks on x = (video, audio), which are modulated separately."""

    required_kwargs = ("v_context", "v_timestep", "v_pe", "v_cross_pe", "transformer_options")
    rope_arg = "v_pe"
    row_args = ("v_cross_pe", "v_timestep", "v_cross_scale_shift_timestep", "v_cross_gate_timestep")
    passthrough_args = (
        *("v_context", "a_context", "attention_mask", "a_timestep", "a_pe", "a_cross_pe"),
        *("a_cross_scale_shift_timestep", "a_cross_gate_timestep", "v_prompt_timestep", "a_prompt_timestep"),
    )

    def has_image(self, call_args: CallArguments) -> bool:
        # Guidance may add a call of the model in which blocks compute only the sound, and leave the video unchanged.
        return bool(call_args["transformer_options"].get("run_vx", True))

    def attention_spans(self, call_args: CallArguments, before: int) -> tuple[tuple[int, int, int], ...]:
        # First the video attends to itself, later the audio attends to the video. If token counts do not tell the
        # audio's attention from earlier ones, leave it out: the audio then attends to merged tokens.
        spans, audio = super().attention_spans(call_args, before), call_args[self.tokens_arg][1].shape[1]
        tokens, text = spans[0][1], call_args["v_context"].shape[1]
        return spans if not audio or tokens in (audio, text) else (*spans, (before, tokens, audio))


class Hooks(ModelHooks):
    takes_frames = True

    def block_groups(self, model: Any) -> tuple[BlockGroup, ...]:
        width = model.inner_dim
        if not hasattr(model, "audio_patchify_proj"):
            return (BlockGroup("double", model.transformer_blocks, Signature(), COST, 1, width),)
        # Count the keys of two attentions: the video attends to itself, and the audio attends to the video.
        keys = width + model.audio_inner_dim
        return (BlockGroup("double", model.transformer_blocks, AVSignature(), AV_COST, 1, width, keys_width=keys),)
