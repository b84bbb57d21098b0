"""Small real ComfyUI models of every supported family, with random weights from a seed.

They run every line of the real classes, samplers and hooks; their pictures are noise.
"""

from __future__ import annotations

from testbed.models.build import classes_of, patcher
from testbed.models.images import (
    chroma,
    cosmos,
    ernie,
    flux,
    flux2,
    ideogram,
    krea2,
    lens,
    lumina2,
    omnigen2,
    qwen_image,
    qwen_image21,
    sd3,
    unet,
    z_image,
)
from testbed.models.sampling import AUDIO, conditioning, empty, sample, sample_streams
from testbed.models.videos import h3, hunyuan, ltx, ltx_av, wan

# The models whose blocks all see the image at one resolution, by the name of the family's layout.
TRANSFORMERS = {
    "flux": flux,
    "flux2": flux2,
    "chroma": chroma,
    "z_image": z_image,
    "lumina2": lumina2,
    "omnigen2": omnigen2,
    "krea2": krea2,
    "qwen_image": qwen_image,
    "qwen_image21": qwen_image21,
    "ernie": ernie,
    "ideogram": ideogram,
    "lens": lens,
    "sd3": sd3,
    "cosmos": cosmos,
    "wan": wan,
    "hunyuan": hunyuan,
    "ltx": ltx,
    "ltx_av": ltx_av,
    "h3": h3,
}
KINDS = ("unet", *TRANSFORMERS)
# One model for each file of nodes/adapters/families: the other models share the hooks of flux, lumina2 and ltx.
FAMILIES = tuple(kind for kind in KINDS if kind not in ("flux2", "z_image", "ltx_av"))
__all__ = [
    "AUDIO",
    "FAMILIES",
    "KINDS",
    "TRANSFORMERS",
    "chroma",
    "classes_of",
    "conditioning",
    "cosmos",
    "empty",
    "ernie",
    "flux",
    "flux2",
    "h3",
    "hunyuan",
    "ideogram",
    "krea2",
    "lens",
    "ltx",
    "ltx_av",
    "lumina2",
    "omnigen2",
    "patcher",
    "qwen_image",
    "qwen_image21",
    "sample",
    "sample_streams",
    "sd3",
    "unet",
    "wan",
    "z_image",
]
