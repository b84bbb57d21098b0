"""Provide nodes of a ComfyUI newer than the tested one, and a loader of a small model for graphs with these nodes.
newer.py makes a pack of this file."""

import torch

from testbed import models


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


class Text:
    def encode(self, text):
        return random(1, 7 + len(text) % 5, 48)


class Pictures:
    """A stand-in for a VAE, whose latent has one cell for 16 x 16 pixels."""

    def encode(self, pixels):
        return random(1, 64, pixels.shape[1] // 16, pixels.shape[2] // 16)

    def decode(self, latent):
        return torch.sigmoid(latent[:, :3].movedim(1, -1))


class TinyQwenImage21:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "CLIP", "VAE"), "load", "tests"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {}}

    def load(self):
        model = models.qwen_image21()
        del model.model_options["transformer_options"]["qwen_image21_cache"]  # ComfyUI chooses the cache's device
        return model, Text(), Pictures()


class QwenImage21Cache:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "place", "tests"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        places, dtypes = ["auto", "gpu", "cpu", "off"], ["default", "int8", "int4"]
        return {"required": {"model": ("MODEL",), "device": (places,), "dtype": (dtypes,)}}

    def place(self, model, device, dtype):
        model = model.clone()
        model.model_options["transformer_options"]["qwen_image21_cache"] = {"device": device, "dtype": dtype}
        return (model,)


class TextEncodeQwenImage21:
    RETURN_TYPES, RETURN_NAMES = ("CONDITIONING", "CONDITIONING", "LATENT"), ("positive", "negative", "latent")
    FUNCTION, CATEGORY = "encode", "tests"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        words = ("STRING", {"multiline": True})
        size = ("INT", {"default": 1024, "min": 0, "max": 4096})
        return {
            "required": {"clip": ("CLIP",), "prompt": words, "negative_prompt": words, "resolution": size},
            "optional": {"vae": ("VAE",), "images.image_1": ("IMAGE",), "images.image_2": ("IMAGE",)},
        }

    def encode(self, clip, prompt, negative_prompt, resolution, vae=None, **images):
        references = {"reference_latents": [vae.encode(image) for image in images.values()]} if images else {}
        side = resolution // 16
        prompts = ([[clip.encode(text), dict(references)]] for text in (prompt, negative_prompt))
        return *prompts, {"samples": torch.zeros(1, 64, side, side)}


NODE_CLASS_MAPPINGS = {kind.__name__: kind for kind in (TinyQwenImage21, QwenImage21Cache, TextEncodeQwenImage21)}
