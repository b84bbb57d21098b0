"""The presets in one table, by kind of model."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from .config import Granularity, SimilarityFrom

# Name of the preset -> name of the setting -> value.
Fields = Mapping[str, Mapping[str, Any]]


class ModelKind(Enum):
    """The kinds of model that presets distinguish."""

    UNET = "UNet"
    TRANSFORMER = "transformer"  # with a KV cache
    WITHOUT_KV_CACHE = "transformer without a KV cache"


# Plans from the predicted picture, with more destinations in its detailed parts, have a smaller error than plans from
# tokens for equal work.
_PREDICTED: Mapping[str, Any] = {"similarity_from": SimilarityFrom.PREDICTION}
# With a KV cache no block is skipped and every step selects destinations. Small windows then have a smaller error than
# large ones as long as each window has enough destinations, so windows have the side `WIDE` only above the ratio
# `WIDE_ABOVE`.
WIDE_ABOVE, WIDE = 0.6, 8
_KV_CACHE: Mapping[str, Any] = {
    **_PREDICTED,
    "kv_cache": True,
    "window_size": 4,
    "selection_interval": 1,
    "weight_interval": 1,
}
_SKIPPING: Mapping[str, Any] = {**_PREDICTED, "skip_first_blocks": 0.15}
_PAPER: Mapping[str, Any] = {"granularity": Granularity.MODULE, "sharpness": 1000.0}
_EVERY_3, _EVERY_2 = ({"selection_interval": n, "weight_interval": n} for n in (3, 2))

# The settings of each preset, for each kind of model; a model family may override some, see `ModelHooks.own_presets`.
# Nodes default to the first preset. `paper` follows the paper and its released code; the values of the other presets
# were chosen by measurement (docs/fidelity.md). In UNets no step has to be full if the last stacks, which change the
# image most, are not merged. No preset sets `ratio`.
PRESETS: Mapping[str, Mapping[ModelKind, Mapping[str, Any]]] = {
    "balanced": {
        ModelKind.UNET: {**_EVERY_3, "skip_last_blocks": 3},
        ModelKind.TRANSFORMER: {**_KV_CACHE, "full_step_interval": 4},
        ModelKind.WITHOUT_KV_CACHE: {**_EVERY_3, **_SKIPPING, "full_step_interval": 3},
    },
    "quality": {
        ModelKind.UNET: {**_EVERY_2, "skip_last_blocks": 4},
        ModelKind.TRANSFORMER: {**_KV_CACHE, "full_step_interval": 2},
        ModelKind.WITHOUT_KV_CACHE: {**_EVERY_2, **_SKIPPING, "full_step_interval": 2},
    },
    "paper": {
        ModelKind.UNET: _PAPER,
        ModelKind.TRANSFORMER: {**_PAPER, "skip_first_blocks": 0.1},
        ModelKind.WITHOUT_KV_CACHE: {**_PAPER, "skip_first_blocks": 0.1},
    },
}
