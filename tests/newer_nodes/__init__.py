"""Provide, as a pack, nodes of a ComfyUI newer than the tested one."""

import torch


class QwenImage21Cache:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "place", "tests"
    PLACES, DTYPES = (["auto", "gpu", "cpu", "off"],), (["default", "int8", "int4"],)
    INPUT_TYPES = classmethod(
        lambda cls: {"required": {"model": ("MODEL",), "device": cls.PLACES, "dtype": cls.DTYPES}}
    )

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


NODE_CLASS_MAPPINGS = {kind.__name__: kind for kind in (QwenImage21Cache, TextEncodeQwenImage21)}
