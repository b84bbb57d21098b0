"""Find conditions of equal content, such as a prompt that a schedule repeats, so that they share caches.

ComfyUI gives each condition its own id, even if several hold the same text. Contents are compared by digests of their
tensors, before sampling. If another node adds conditions later, their tensors on a device are compared by address,
because reading them would wait for the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Entries of a condition that are not compared: when, where and how strongly the condition takes part, and entries that
# ComfyUI derives from others.
_NOT_CONTENT = {
    *("uuid", "strength", "area", "mask", "mask_strength", "set_area_to_bounds", "default", "model_conds"),
    *("start_percent", "end_percent", "timestep_start", "timestep_end", "clip_start_percent", "clip_end_percent"),
    *("device", "noise", "width", "height", "prompt_type"),
}


class Contents:
    """The contents of one run's conditions."""

    def __init__(self, conds: Mapping[str, Sequence[Mapping[str, Any]] | None] = {}) -> None:
        """Compare all conditions before sampling begins. conds: by group ("positive", "negative")."""
        groups = [members or () for members in conds.values()]
        self._first = [cond for members in groups for cond in members]
        # The id of the first condition with the same content: in `_of` by a condition's id, in `_stands` by content.
        self._of: dict[Hashable, Hashable] = {cond["uuid"]: cond["uuid"] for cond in self._first}
        self._stands: dict[Hashable, Hashable] = {}
        self._digests: dict[int, tuple[Any, Hashable]] = {}
        if any(len(members) > 1 for members in groups):
            self._compare(self._first, wait=True)

    def of(self, uuid: Hashable) -> Hashable:
        """Return the id of the first condition with the same content."""
        return self._of.get(uuid, uuid)

    def note(self, conds: Sequence[Mapping[str, Any]]) -> None:
        """Compare conditions that are about to be evaluated, because another node may have added some after the run
        began."""
        late = [cond for cond in conds if cond["uuid"] not in self._of]
        if late:
            if not self._stands:
                self._compare(self._first, wait=False)
            self._compare(late, wait=False)

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
        # Store the object too, so that its id stays unique during the run.
        if id(value) not in self._digests:
            self._digests[id(value)] = value, _digest(value, wait) if isinstance(value, Tensor) else id(value)
        return self._digests[id(value)][1]


def _digest(tensor: Tensor, wait: bool) -> Hashable:
    """Return a digest of a tensor's values. If they lie on a device and `wait` is False, return their address."""
    shape = tuple(tensor.shape)
    stride = tensor.stride()
    if not wait and tensor.device.type != "cpu":
        return shape, tensor.dtype, stride, tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return shape, tensor.dtype, hashlib.blake2b(data, digest_size=16).digest()
