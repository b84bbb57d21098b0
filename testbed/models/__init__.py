"""Small real ComfyUI models of every supported family, with random weights from a seed.

The models run every line of the real classes, samplers and hooks. Their pictures are noise.
"""

from __future__ import annotations

from testbed.models.build import classes_of, patcher, unet
from testbed.models.sampling import AUDIO, conditioning, empty, sample, sample_streams
from testbed.models.transformers import TRANSFORMERS, Small

KINDS = ("unet", *TRANSFORMERS)
# One model for each file of nodes/adapters/families. The other models share the hooks of flux, lumina2 or ltx.
FAMILIES = tuple(kind for kind in KINDS if kind not in ("flux2", "z_image", "ltx_av"))
__all__ = [
    "AUDIO",
    "FAMILIES",
    "KINDS",
    "TRANSFORMERS",
    "classes_of",
    "conditioning",
    "empty",
    "patcher",
    "sample",
    "sample_streams",
    "unet",
]


def __getattr__(name: str) -> Small:
    """Return a model of `TRANSFORMERS` by its name."""
    if name not in TRANSFORMERS:
        raise AttributeError(name)
    return TRANSFORMERS[name]
