"""ComfyUI nodes for the tiny models. ComfyUI's own "Load Diffusion Model" loads the DiT."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from safetensors import SafetensorError

from .checker import WEIGHTS
from .conditioning import conditioning, empty_latent
from .latents import decode
from .models import load_unet
from .scenes import ATTRIBUTES, CANVAS, Scene, scene_from_seed

CATEGORY = "ToMA/demo"
FROM_SEED = "from seed"
UNET_WEIGHTS = WEIGHTS.parent / "deep.safetensors"


class ToMADemoUNet(io.ComfyNode):
    """Load the tiny SDXL-shaped UNet, which none of ComfyUI's loaders recognises."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMADemoUNet",
            display_name="ToMA Demo UNet",
            category=CATEGORY,
            description="The tiny SDXL-shaped UNet that ships with the demo, trained on drawn scenes.",
            inputs=[
                io.Combo.Input(
                    "weights",
                    options=["trained", "random"],
                    default="trained",
                    tooltip="The trained weights, or random ones from the seed (pictures are then only noise).",
                ),
                io.Int.Input("seed", default=0, min=0, max=2**31 - 1, tooltip="Seed of the random weights."),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, weights: str, seed: int) -> io.NodeOutput:
        if weights == "trained" and not UNET_WEIGHTS.exists():
            raise ValueError(
                f"{UNET_WEIGHTS.name} is missing in {UNET_WEIGHTS.parent}: train it, or choose random weights"
            )
        try:
            return io.NodeOutput(load_unet(str(UNET_WEIGHTS) if weights == "trained" else None, seed))
        except (SafetensorError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{UNET_WEIGHTS.name} cannot be read ({reason}): get it again, or train it again"
            ) from error


class ToMADemoScene(io.ComfyNode):
    """Encode scenes for the tiny models, in place of a text encoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        choices: list[Any] = [
            io.Combo.Input(
                name,
                options=[FROM_SEED, *values],
                default=FROM_SEED,
                optional=True,
                advanced=True,
                tooltip=f"The scene's {name.replace('_', ' ')}; '{FROM_SEED}' leaves it to the seed.",
            )
            for name, values in ATTRIBUTES.items()
        ]
        return io.Schema(
            node_id="ToMADemoScene",
            display_name="ToMA Demo Scene",
            category=CATEGORY,
            description="A scene as conditioning: drawn from a seed, with any attribute set by hand.",
            inputs=[
                io.Int.Input(
                    "seed",
                    default=1,
                    min=0,
                    max=2**31 - 1,
                    control_after_generate=True,
                    tooltip="Draws the attributes; in a batch the scenes come from this seed and the ones after it.",
                ),
                io.Int.Input("batch_size", default=1, min=1, max=64, tooltip="Scenes; use the latent's batch size."),
                *choices,
            ],
            outputs=[
                io.Conditioning.Output("positive", display_name="positive"),
                io.Conditioning.Output("negative", display_name="negative"),
                io.String.Output("prompt", display_name="prompt"),
            ],
        )

    @classmethod
    def execute(cls, seed: int, batch_size: int, **choices: str) -> io.NodeOutput:
        scenes = [cls._scene(seed + index, choices) for index in range(batch_size)]
        prompt = "\n".join(scene.describe() for scene in scenes)
        return io.NodeOutput(conditioning(list(scenes)), conditioning([None]), prompt)

    @staticmethod
    def _scene(seed: int, choices: dict[str, str]) -> Scene:
        drawn = scene_from_seed(seed)
        values = {name: getattr(drawn, name) for name in ATTRIBUTES}
        for name, choice in choices.items():
            if choice == FROM_SEED:
                continue
            if choice not in ATTRIBUTES[name]:
                raise ValueError(f"{name} must be one of {', '.join(ATTRIBUTES[name])}, not {choice!r}")
            values[name] = ATTRIBUTES[name].index(choice)
        return Scene(**values, detail_seed=drawn.detail_seed)


class ToMADemoLatent(io.ComfyNode):
    """Make an empty latent for the tiny models."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMADemoLatent",
            display_name="ToMA Demo Latent",
            category=CATEGORY,
            description="An empty latent for the demo models, trained at 128 x 128: one token per 4 x 4 pixels.",
            inputs=[
                io.Int.Input("width", default=CANVAS, min=64, max=1024, step=8, tooltip="Pixels."),
                io.Int.Input("height", default=CANVAS, min=64, max=1024, step=8, tooltip="Pixels."),
                io.Int.Input("batch_size", default=1, min=1, max=64, tooltip="Pictures at once."),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, batch_size: int) -> io.NodeOutput:
        return io.NodeOutput({"samples": empty_latent(width, height, batch_size)})


class ToMADemoDecode(io.ComfyNode):
    """Decode a latent of the tiny models by a fixed transform, without a VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMADemoDecode",
            display_name="ToMA Demo Decode",
            category=CATEGORY,
            description="Latent to picture by the demo's fixed transform (pixel shuffle).",
            inputs=[
                io.Latent.Input("samples", tooltip="A latent sampled with one of the demo models."),
                io.Int.Input(
                    "scale", default=1, min=1, max=8, tooltip="Enlarges every pixel, to make pictures easier to see."
                ),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any], scale: int) -> io.NodeOutput:
        image = decode(samples["samples"].float()).clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 1)
        return io.NodeOutput(image.repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2).cpu().contiguous())


NODES: list[type[io.ComfyNode]] = [ToMADemoUNet, ToMADemoScene, ToMADemoLatent, ToMADemoDecode]
