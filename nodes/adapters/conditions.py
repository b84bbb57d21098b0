"""Read ComfyUI's conditions, and the options of one call of the model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .compat import optional_api


def chunks_of(batch: int, transformer_options: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """Return the ids of the conditions in a batch, one for each chunk of equal size; (None,) if unknown."""
    chunks = tuple(transformer_options.get("uuids") or (None,))
    return chunks if batch % len(chunks) == 0 else (None,)


def frames_of(transformer_options: Mapping[str, Any]) -> Hashable:
    """Return the indices of the frames in a call's context window, None if the call has no window."""
    window = transformer_options.get("context_window")
    return None if window is None else tuple(getattr(window, "index_list", ()))


# Options by which guidance switches off parts of a block in some calls of LTX-2.
_SWITCHES = ("run_vx", "run_ax", "a2v_cross_attn", "v2a_cross_attn")


def patches_of(transformer_options: Mapping[str, Any]) -> Hashable:
    """Return the options in `_SWITCHES` that are off, and the patches by the names of their functions. The functions
    themselves cannot be compared between evaluations, because many nodes create them in each evaluation."""
    added, replaced = (transformer_options.get(kind) or {} for kind in ("patches", "patches_replace"))
    return (
        *(switch for switch in _SWITCHES if not transformer_options.get(switch, True)),
        *((place, *map(_name, functions)) for place, functions in added.items()),
        *((place, key, _name(f)) for place, functions in replaced.items() for key, f in functions.items()),
    )


def _name(function: Any) -> tuple[str, str]:
    named = function if hasattr(function, "__qualname__") else type(function)
    return str(named.__module__), named.__qualname__


def crop(image: Tensor, area: Sequence[int] | None) -> Tensor:
    """Return an area (sizes, then starts) of an image, (B, C, ..., H, W). As in ComfyUI, an area of rows and columns
    alone covers all frames."""
    if area is None:
        return image
    half = len(area) // 2
    dims = range(max(2, image.ndim - half), image.ndim)
    for dim, size, start in zip(dims, area[:half], area[half:], strict=False):
        image = image.narrow(dim, start, min(size, image.shape[dim] - start))
    return image


def area_size(area: Sequence[int] | None, size: Sequence[int]) -> tuple[int, ...]:
    """Return the size of the part of an area that lies inside a latent of this size, (rows, columns) or (frames, rows,
    columns). A number is 0 or negative if the area lies outside of the latent."""
    if area is None:
        return tuple(size)
    half = len(area) // 2
    first = max(0, len(size) - half)
    return *size[:first], *(
        min(n, side - at) for n, side, at in zip(area[:half], size[first:], area[half:], strict=False)
    )


def takes_part(conds: Sequence[Mapping[str, Any]] | None, sigma: float | None) -> bool:
    """Whether any of a group of conditions takes part at this noise level."""
    return sigma is None or any(is_active(cond, sigma) for cond in conds or ())


def is_active(cond: Mapping[str, Any], sigma: float) -> bool:
    """Whether ComfyUI evaluates a condition at this noise level."""
    # Round the limits to single precision, as ComfyUI does when it compares them with the noise level; otherwise a
    # condition that begins exactly at a step could count as inactive there.
    start = np.float32(cond.get("timestep_start", np.inf))
    end = np.float32(cond.get("timestep_end", -np.inf))
    return bool(start >= sigma >= end)


def controls_of(cond: Mapping[str, Any], sigma: float) -> tuple[bool, ...]:
    """Return for each ControlNet of a condition whether it acts at this noise level."""
    active, control = [], cond.get("control")
    while control is not None:
        within = getattr(control, "timestep_range", None)
        active.append(within is None or float(within[0]) >= sigma >= float(within[1]))
        control = getattr(control, "previous_controlnet", None)
    return tuple(active)


def set_keyframes(model: Any, conds: Sequence[Mapping[str, Any]], timestep: Tensor, model_options: Any) -> None:
    """Set the keyframes of the conditions' weight hooks for an evaluation, so that `weights_of` returns the strengths
    with which the model will run. ComfyUI itself sets the keyframes later."""
    for hooks in (cond["hooks"] for cond in conds if cond.get("hooks") is not None):
        with optional_api("ModelPatcher.prepare_hook_patches_current_keyframe"):
            model.current_patcher.prepare_hook_patches_current_keyframe(timestep, hooks, model_options)


def weights_of(cond: Mapping[str, Any]) -> Hashable:
    """Return the current strength of each weight hook of a condition; keyframes of a LoRA change its strength."""
    hooks = getattr(cond.get("hooks"), "hooks", ())
    return tuple((id(hook), hook.strength) for hook in hooks if hasattr(hook, "strength"))


def positions_of(transformer_options: Mapping[str, Any]) -> Hashable:
    """Return how other nodes scale and shift the rotary positions of a call."""
    return tuple(sorted((transformer_options.get("rope_options") or {}).items()))
