"""Read ComfyUI's conditions, and the options of one call of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .compat import require_api, warned


def chunks_of(batch: int, transformer_options: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """Return the ids of the conditions that share a batch, in equal parts and in this order; (None,) if unknown."""
    chunks = tuple(transformer_options.get("uuids") or (None,))
    return chunks if batch % len(chunks) == 0 else (None,)


def frames_of(transformer_options: Mapping[str, Any]) -> Hashable:
    """Return the indices of the frames in a call's context window, None if the call has no window."""
    window = transformer_options.get("context_window")
    return None if window is None else tuple(getattr(window, "index_list", ()))


# Options of LTX-2 by which some guiders switch off parts of all blocks during one call of the model.
_SWITCHES = ("run_vx", "run_ax", "a2v_cross_attn", "v2a_cross_attn")


def patches_of(transformer_options: Mapping[str, Any]) -> Hashable:
    """Return the `_SWITCHES` that are off, and all patches as names of functions. Functions themselves would not
    compare equal, because many nodes create new ones in each evaluation."""
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
    """Cut an area (sizes, then starts) out of an image, (B, C, ..., H, W). An area without frames covers all frames."""
    if area is None:
        return image
    half = len(area) // 2
    dims = range(max(2, image.ndim - half), image.ndim)
    for dim, size, start in zip(dims, area[:half], area[half:], strict=False):
        image = image.narrow(dim, start, min(size, image.shape[dim] - start))
    return image


def area_size(area: Sequence[int] | None, size: Sequence[int]) -> tuple[int, ...]:
    """Return the size of an area after cutting it to a latent of this size: (rows, columns) or (frames, rows, columns).
    Some number is 0 or negative if the area lies outside of the latent."""
    half = len(area or ()) // 2
    first = max(0, len(size) - half)
    cut = zip(area[:half], size[first:], area[half:], strict=False) if area else ()
    return *size[:first], *(min(n, side - at) for n, side, at in cut)


def is_active(cond: Mapping[str, Any], sigma: float) -> bool:
    """Whether ComfyUI evaluates a condition at this noise level."""
    # In single precision, as in ComfyUI: otherwise a condition could count as inactive in the step where it begins.
    start = np.float32(cond.get("timestep_start", np.inf))
    end = np.float32(cond.get("timestep_end", -np.inf))
    return bool(start >= sigma >= end)


def set_hooks(model: Any, conds: Sequence[Mapping[str, Any]], timestep: Tensor, model_options: Any) -> None:
    """Set the weight hooks of conditions to their keyframes at this timestep. ComfyUI itself does so only later, but
    `state_of` has to return the strengths with which the model will run."""
    for hooks in (cond["hooks"] for cond in conds if cond.get("hooks") is not None):
        with warned(), require_api("ModelPatcher.prepare_hook_patches_current_keyframe"):
            model.current_patcher.prepare_hook_patches_current_keyframe(timestep, hooks, model_options)


def state_of(cond: Mapping[str, Any], sigma: float, transformer_options: Mapping[str, Any]) -> Hashable:
    """Return what may change for a condition from one noise level to another: whether each ControlNet acts, the
    strength of each weight hook (keyframes of a LoRA change it), and `positions_of`."""
    active, control = [], cond.get("control")
    while control is not None:
        within = getattr(control, "timestep_range", None)
        active.append(within is None or float(within[0]) >= sigma >= float(within[1]))
        control = getattr(control, "previous_controlnet", None)
    hooks = getattr(cond.get("hooks"), "hooks", ())
    strengths = tuple((id(hook), hook.strength) for hook in hooks if hasattr(hook, "strength"))
    return tuple(active), strengths, positions_of(transformer_options)


def positions_of(transformer_options: Mapping[str, Any]) -> Hashable:
    """Return how other nodes scale and shift the rotary positions of a call."""
    return tuple(sorted((transformer_options.get("rope_options") or {}).items()))


# Entries that are not content: they say when, where and how strongly a condition acts, or follow from other entries.
_NOT_CONTENT = {
    *("uuid", "strength", "area", "mask", "mask_strength", "set_area_to_bounds", "default", "model_conds"),
    *("start_percent", "end_percent", "timestep_start", "timestep_end", "clip_start_percent", "clip_end_percent"),
    *("device", "noise", "width", "height", "prompt_type"),
}


class Contents:
    """Find conditions of equal content, such as a prompt that a schedule repeats. Such conditions share caches. ComfyUI
    gives each condition its own id, even if several hold the same text. Contents are compared by digests of their
    tensors, before sampling. If another node adds conditions later, their tensors on a device are compared by address:
    to read tensors, the host would have to wait for the device."""

    def __init__(self, conds: Mapping[str, Sequence[Mapping[str, Any]] | None] = {}) -> None:
        """conds: all conditions before sampling begins, by group ("positive", "negative")."""
        self._first = [cond for members in conds.values() for cond in members or ()]
        # The id of the first condition with the same content: `_of` finds it by a condition's id, `_stands` by content.
        self._of: dict[Hashable, Hashable] = {cond["uuid"]: cond["uuid"] for cond in self._first}
        self._stands: dict[Hashable, Hashable] = {}
        self._digests: dict[int, tuple[Any, Hashable]] = {}
        if any(len(members or ()) > 1 for members in conds.values()):
            self._compare(self._first, wait=True)

    def of(self, uuid: Hashable) -> Hashable:
        return self._of.get(uuid, uuid)

    def note(self, conds: Sequence[Mapping[str, Any]]) -> None:
        """Compare conditions before they are evaluated: another node may have added some after the run began."""
        late = [cond for cond in conds if cond["uuid"] not in self._of]
        if late:
            self._compare(late if self._stands else [*self._first, *late], wait=False)

    def _compare(self, conds: Sequence[Mapping[str, Any]], wait: bool) -> None:
        for cond in conds:
            entries = ((name, value) for name, value in cond.items() if name not in _NOT_CONTENT)
            content = frozenset((name, self._key(value, wait)) for name, value in entries)
            self._of[cond["uuid"]] = self._stands.setdefault(content, cond["uuid"])

    def _key(self, value: Any, wait: bool) -> Hashable:
        if isinstance(value, (str, int, float, bool, type(None))):
            return value
        if isinstance(value, (Mapping, list, tuple)):
            value = value.items() if isinstance(value, Mapping) else value
            return tuple(self._key(each, wait) for each in value)
        # Store the object too, so that no other object gets its id during the run.
        if id(value) not in self._digests:
            self._digests[id(value)] = value, _digest(value, wait) if isinstance(value, Tensor) else id(value)
        return self._digests[id(value)][1]


def _digest(tensor: Tensor, wait: bool) -> Hashable:
    """Return a digest of a tensor's values, or their address if they lie on a device and `wait` is False."""
    kind = tuple(tensor.shape), tensor.dtype
    if not wait and tensor.device.type != "cpu":
        return *kind, tensor.stride(), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return *kind, hashlib.blake2b(data, digest_size=16).digest()
