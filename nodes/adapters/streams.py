"""Unpack latents of several streams, such as a video with its sound. For samplers and wrappers, ComfyUI packs the
streams into one tensor of (B, 1, all elements) and lists their shapes. Only the model gets the streams unpacked. Only
tokens of the first stream are merged."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

Shapes = Sequence[Sequence[int]]


def first(x: Tensor, shapes: Shapes | None) -> Tensor:
    """Return the first of several packed streams, (B, C, ..., H, W), as a view; x itself if it is a single stream."""
    if shapes is None or len(shapes) < 2 or x.ndim != 3:
        return x
    sides = shapes[0][1:]
    return x[:, :, : prod(sides)].reshape(len(x), *sides)


def first_of_nested(x: Any) -> Any:
    """Return the first stream of ComfyUI's `NestedTensor`; a tensor is returned as it is."""
    return x.unbind()[0] if getattr(x, "is_nested", False) else x


def shapes_of(conds: Sequence[Any]) -> Shapes | None:
    """Return the shapes of the streams, or of their context windows, from the conditions; None if not listed there."""
    entries = (cond.get("model_conds") or {} for group in conds for cond in group or ())
    return next((each["latent_shapes"].cond for each in entries if "latent_shapes" in each), None)
