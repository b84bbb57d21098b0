"""Which conditions have equal content: they share what is cached of either, as the prompts of a schedule do.

ComfyUI gives each condition an id of its own, also where several hold the same text. Contents are compared by digests
of their tensors, each made once: before sampling begins for the conditions that a run starts with, and for conditions
that another node makes later only where that needs no wait for a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# What says when, where and how much a condition takes part, and what ComfyUI derives from the rest for a run.
_NOT_CONTENT = frozenset(
    (
        *("uuid", "strength", "area", "mask", "mask_strength", "set_area_to_bounds", "default", "model_conds"),
        *("start_percent", "end_percent", "timestep_start", "timestep_end", "clip_start_percent", "clip_end_percent"),
        *("device", "noise", "width", "height", "prompt_type"),
    )
)


class Contents:
    """The contents of one run's conditions."""

    def __init__(self, conds: Mapping[str, Sequence[Mapping[str, Any]] | None] | None = None) -> None:
        """conds: by group ("positive", "negative"), before sampling begins."""
        self._first = [cond for members in (conds or {}).values() for cond in members or ()]
        # The condition that stands for all of its content, by id; and that of each content.
        self._of: dict[Hashable, Hashable] = {cond["uuid"]: cond["uuid"] for cond in self._first}
        self._stands: dict[Hashable, Hashable] = {}
        self._digests: dict[int, tuple[Any, Hashable]] = {}
        if any(len(members or ()) > 1 for members in (conds or {}).values()):
            self._compare(self._first, wait=True)

    def of(self, uuid: Hashable) -> Hashable:
        """Return what stands for a condition's content: the id of the first that had it."""
        return self._of.get(uuid, uuid)

    def note(self, conds: Sequence[Mapping[str, Any]]) -> None:
        """Note conditions that are about to be evaluated, which another node may have made after the run began."""
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
        if isinstance(value, Mapping):
            return tuple((name, self._key(each, wait)) for name, each in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(self._key(each, wait) for each in value)
        # The object is held: its id is not another's as long as the run goes on.
        if id(value) not in self._digests:
            self._digests[id(value)] = value, _digest(value, wait) if isinstance(value, Tensor) else id(value)
        return self._digests[id(value)][1]


def _digest(tensor: Tensor, wait: bool) -> Hashable:
    """Return a digest of a tensor's numbers; where that would wait for a device, where the numbers lie."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    if not wait and tensor.device.type != "cpu":
        return shape, tensor.dtype, stride, tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return shape, tensor.dtype, hashlib.blake2b(data, digest_size=16).digest()
