"""Keep reasons and messages as data: the code compares ids, and text is made where messages are shown.

The core has no texts: used alone, it writes messages by `plain`. In the pack, `nodes/adapters/report_text.py` sets
`reader` to a function that writes English; ComfyUI's page writes the same messages in the user's language.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Union

Value = Union[int, float, str, "Message", tuple["Value", ...]]


class MessageId(str, Enum):
    """The base of every enum of message ids. Calling a member with parameters returns a `Message`."""

    def __call__(self, **params: Value) -> Message:
        return Message(self, tuple(params.items()))


class Reason(MessageId):
    """Why a block, a step or a run is not merged, or a cache is not used. Comments describe the parameters of
    messages."""

    # Settings and profile.
    SETTING = "setting"  # setting: its id; value: its value
    SKIP_FIRST_BLOCKS = "skip_first_blocks"  # count: the setting's value
    SKIP_LAST_BLOCKS = "skip_last_blocks"  # count: the setting's value
    PROFILE = "profile"
    PROFILE_SKIPS_BLOCK = "profile_skips_block"
    EVERY_STEP_FULL = "every_step_full"
    EVERY_STEP_FULL_BY = "every_step_full_by"  # by: the reasons (messages) why steps are full
    TOO_FEW_STEPS = "too_few_steps"
    # Tokens.
    TOO_FEW_TOKENS = "too_few_tokens"  # least: the smallest number of tokens that are merged
    TOO_LITTLE_WORK = "too_little_work"
    REFERENCE_FRAMES = "reference_frames"
    NOTHING_TO_MERGE = "nothing_to_merge"
    TOKENS_CHANGED = "tokens_changed"
    IMAGES_CHANGED = "images_changed"
    UNKNOWN_GRID = "unknown_grid"
    UNKNOWN_IMAGE_POSITION = "unknown_image_position"
    # Other custom nodes, the model, ComfyUI, torch.compile.
    BLOCK_REPLACED = "block_replaced"
    ATTENTION_PATCH = "attention_patch"
    ARGUMENT_IN_USE = "argument_in_use"  # arguments: a text, or a name or a message for each argument
    ARGUMENT_SHAPE = "argument_shape"  # argument: its name
    OWN_MODULATION = "own_modulation"
    SMALLER_GUIDES = "smaller_guides"
    SKIPPED_BY_MODEL = "skipped_by_model"
    UNKNOWN_MODEL = "unknown_model"  # model: its class
    UNKNOWN_LATENT = "unknown_latent"  # model: its class; shape: of the latent
    UNKNOWN_API = "unknown_api"  # name: what ComfyUI lacks or has changed
    UNKNOWN_SIGMA = "unknown_sigma"
    OWN_ERROR = "own_error"  # error: its text
    FULLGRAPH = "fullgraph"
    # Memory.
    OUT_OF_MEMORY = "out_of_memory"
    KV_CACHE_DISABLED = "kv_cache_disabled"
    # Why a run that needs its caches cannot have them, and merges nothing.
    KV_FOREIGN_ATTENTION = "kv_foreign_attention"
    KV_CONTEXT_WINDOWS = "kv_context_windows"
    KV_TOO_LARGE = "kv_too_large"  # needed, limit: memory of the KV cache in GB
    KV_COMPILE_BACKEND = "kv_compile_backend"
    # Why a step that the schedule merges is full.
    GRADIENTS = "gradients"
    NOT_CACHED = "not_cached"
    NEW_NOISE = "new_noise"
    FOREIGN_POSITIONS = "foreign_positions"  # module: class of the module that computes positions
    TILES = "tiles"
    SEVERAL_DEVICES = "several_devices"


@dataclass(frozen=True)
class Message:
    """One message: an id and the values that its text names."""

    id: MessageId
    # (name, value). A value named `setting` is the id of a setting or of a node's input; texts show its label.
    params: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        return reader(self)


def plain(value: Value) -> str:
    """Return a message as its id and parameters, `out_of_range: setting=ratio, value=2`; other values as a string."""
    if isinstance(value, tuple):
        return f"({', '.join(map(plain, value))})"
    if not isinstance(value, Message):
        return str(value)
    params = ", ".join(f"{name}={plain(each)}" for name, each in value.params)
    return f"{value.id.value}: {params}" if params else value.id.value


def json_of(value: Value) -> Any:
    """Return a message or a value as data for ComfyUI's page."""
    if isinstance(value, Message):
        return {"id": value.id.value, "params": {name: json_of(each) for name, each in value.params}}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity and no NaN
    return [json_of(each) for each in value] if isinstance(value, tuple) else value


reader: Callable[[Message], str] = plain


class MessageError(ValueError):
    """An error that is shown on a node, with the name of this pack. details: lines that the user can unfold on the
    node."""

    prefix = "ToMA: "

    def __init__(self, message: Message, *details: Message) -> None:
        super().__init__(" ".join((f"{self.prefix}{message}", *map(str, details))))
        self.message = message
        self.details = details
