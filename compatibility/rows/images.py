"""Image conditioning: ControlNets, boxes, inpainting, references."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..kit import SIDE, Kit, filled, node, part, patcher, random
from ..row import FOR_FLUX, FOR_UNETS, MERGED, NOT_TRIED, Graph, unmerged
from .table import row

GROUP = "Images and references"
PIXELS = 8 * SIDE


def picture(seed: int = 3) -> Tensor:
    """Return an IMAGE (1, H, W, 3) of blurred spots, from 0 to 1."""
    spots = torch.nn.functional.interpolate(random(1, 3, 6, 6, seed=seed), (PIXELS, PIXELS), mode="bilinear")
    return (3 * spots).sigmoid().movedim(1, -1)


def encoder(kit: Kit) -> Any:
    """Return an encoder without a VAE: the means of 8 x 8 pixels, with the colours repeated over all latent
    channels."""

    def encode(pixels: Tensor) -> Tensor:
        small = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8)
        latent = 4 * small[:, torch.arange(kit.channels) % 3] - 2
        return latent.unsqueeze(2) if kit.frames else latent

    return SimpleNamespace(encode=encode, spacial_compression_encode=lambda: 8)


def controlnet(kit: Kit, seed: int = 0) -> Any:
    """Build ComfyUI's ControlNet for the model, with random weights. All of its outputs are non-zero."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ldm.flux.controlnet
    import comfy.ops

    config = dict(kit.model.model.model_config.unet_config)
    common = {"operations": comfy.ops.disable_weight_init, "dtype": torch.float32, "device": torch.device("cpu")}
    cpu = torch.device("cpu")
    if kit.name == "sd3":
        import comfy.cldm.dit_embedder
        import comfy.latent_formats

        shape = {"num_attention_heads": 2, "attention_head_dim": 64, "adm_in_channels": 24, "num_layers": 2}
        small = {"img_size": None, "patch_size": 2, "in_chans": 16, "main_model_double": 2, "double_y_emb": False}
        embedder = comfy.cldm.dit_embedder.ControlNetEmbedder(**shape, **small, **common)
        latent_format = comfy.latent_formats.SD3()
        kind = comfy.controlnet.ControlNetSD35
        return kind(filled(embedder, seed), compression_ratio=1, latent_format=latent_format, load_device=cpu)
    if kit.name == "qwen_image":
        import comfy.latent_formats
        import comfy.ldm.qwen_image.controlnet

        for name in ("dtype", "image_model"):
            config.pop(name, None)
        network = comfy.ldm.qwen_image.controlnet.QwenImageControlNetModel(**{**config, "num_layers": 2}, **common)
        network.main_model_double = config["num_layers"]
        latent_format = comfy.latent_formats.Wan21()
        made = comfy.controlnet.ControlNet
        return made(
            filled(network, seed), compression_ratio=1, latent_format=latent_format, load_device=cpu, extra_conds=[]
        )
    if kit.is_flux:
        config.pop("dtype", None)
        network = comfy.ldm.flux.controlnet.ControlNetFlux(**config, **common)
        extra = ["y", "guidance"]
    else:
        for name in ("out_channels", "dtype"):
            config.pop(name, None)
        network = comfy.cldm.cldm.ControlNet(**config, hint_channels=3, **common)
        extra = ["y"]
    return comfy.controlnet.ControlNet(filled(network, seed), load_device=torch.device("cpu"), extra_conds=extra)


@row(GROUP, "ControlNet", others={"chroma": NOT_TRIED, "qwen_image": MERGED, "sd3": MERGED}, quick=True)
def control(kit: Kit) -> Graph:
    apply, network = node("nodes.ControlNetApplyAdvanced"), controlnet(kit)

    def sample(model: Any, strength: float) -> Tensor:
        vae = {} if network.latent_format is None else {"vae": encoder(kit)}
        positive, negative = apply(*kit.prompts, network, picture(), strength, 0.0, 1.0, **vae)
        return kit.sample(model, positive=positive, negative=negative)

    return Graph(sample=lambda m: sample(m, 0.5), without=Graph(sample=lambda m: sample(m, 0.0)), off=True)


@row(
    GROUP,
    "ControlNets that are patches (DiffSynth for Qwen-Image, Fun for Z-Image)",
    only={"qwen_image": MERGED, "z_image": MERGED},
)
def control_patch(kit: Kit) -> Graph:
    """Use patches that read and change the image tokens between two blocks."""
    import comfy.ldm.lumina.controlnet
    import comfy.ops

    common = {"operations": comfy.ops.disable_weight_init, "dtype": torch.float32, "device": torch.device("cpu")}
    if kit.name == "qwen_image":
        made = part("nodes_model_patch.QwenImageBlockWiseControlNet")(num_layers=4, dim=48, **common)
        apply = node("nodes_model_patch.QwenImageDiffsynthControlnet")
    else:
        shape = {"dim": 256, "n_heads": 4, "n_kv_heads": 4, "n_control_layers": 3, "ffn_dim_multiplier": 2.0}
        made = comfy.ldm.lumina.controlnet.ZImage_Control(**shape, **common)
        apply = node("nodes_model_patch.ZImageFunControlnet")
    network = patcher(made)

    def patch(strength: float, model: Any) -> Any:
        with torch.no_grad():
            return apply(model, network, encoder(kit), image=picture(), strength=strength)

    return Graph(partial(patch, 0.5), without=Graph(partial(patch, 0.0)))


@row(GROUP, "Several ControlNets, each in some of the steps")
def controls(kit: Kit) -> Graph:
    apply, networks = node("nodes.ControlNetApplyAdvanced"), [controlnet(kit, seed) for seed in (0, 1)]

    def sample(model: Any) -> Tensor:
        conds = apply(*kit.prompts, networks[0], picture(3), 0.5, 0.0, 0.8)
        positive, negative = apply(*conds, networks[1], picture(4), 0.4, 0.3, 1.0)
        return kit.sample(model, steps=3, positive=positive, negative=negative)

    return Graph(sample=sample)


@row(GROUP, "GLIGEN", flux=FOR_UNETS)
def gligen(kit: Kit) -> Graph:
    """Add a box with its own text to the positive prompt."""
    import comfy.gligen

    names = (name for name, _ in kit.model.model.diffusion_model.named_modules())
    stacks = [name for name in names if name.endswith(".transformer_blocks.0")]
    weights: dict[str, Tensor] = {"position_net.null_positive_feature": torch.zeros(48)}
    for name in stacks:
        width = kit.model.model.diffusion_model.get_submodule(name).norm1.weight.shape[0]
        fuser = filled(comfy.gligen.GatedSelfAttentionDense(width, 48, width // 64, 64))
        weights.update({f"{name}.fuser.{key}": value for key, value in fuser.state_dict().items()})
    net = filled(comfy.gligen.PositionNet(48, 48))
    weights.update({f"position_net.{key}": value for key, value in net.state_dict().items()})
    model = patcher(comfy.gligen.load_gligen(weights))
    text = SimpleNamespace(tokenize=lambda t: t, encode_from_tokens=lambda t, **_: (None, random(1, 48, seed=len(t))))
    box = node("nodes.GLIGENTextBoxApply")

    def sample(patched: Any, words: str) -> Tensor:
        positive = box(kit.prompt(1), text, model, words, PIXELS // 2, PIXELS // 2, 0, PIXELS // 4)
        return kit.sample(patched, positive=positive)

    return Graph(sample=lambda m: sample(m, "a tree"), without=Graph(sample=lambda m: sample(m, "a red car")))


@row(GROUP, "Inpainting models (SDXL inpaint, Flux.1 Fill)")
def inpaint_model(kit: Kit) -> Graph:
    """Use a model whose input has additional channels for the picture and the mask."""
    model = kit.build(in_channels=96 if kit.is_flux else 9)
    if not kit.is_flux:
        model.model.set_inpaint()
    condition, mask = node("nodes.InpaintModelConditioning"), torch.zeros(1, PIXELS, PIXELS)
    mask[:, PIXELS // 2 :] = 1.0

    def sample(patched: Any, seed: int) -> Tensor:
        positive, negative, _ = condition(*kit.prompts, pixels=picture(seed), vae=encoder(kit), mask=mask)
        return kit.sample(patched, positive=positive, negative=negative)

    return Graph(sample=lambda m: sample(m, 3), without=Graph(sample=lambda m: sample(m, 4)), model=model)


@row(GROUP, "Inpainting by a noise mask (SetLatentNoiseMask)", others=MERGED, quick=True)
def noise_mask(kit: Kit) -> Graph:
    """Check that the latent stays as it was outside the mask, and changes inside."""
    put, sampler = node("nodes.SetLatentNoiseMask"), node("nodes.KSampler")
    mask = torch.zeros(1, SIDE, SIDE)
    mask[:, : SIDE // 2] = 1.0
    latent = put(kit.latent(seed=6), mask)

    def keeps(result: Tensor) -> None:
        kept, original = result[..., SIDE // 2 :, :], latent["samples"][..., SIDE // 2 :, :]
        torch.testing.assert_close(kept, original, rtol=1e-4, atol=1e-4)
        assert (result - latent["samples"])[..., : SIDE // 2, :].abs().mean() > 0.1

    def sample(model: Any) -> Tensor:
        return sampler(model, 5, 3, 3.0, "euler", "simple", *kit.prompts, latent, 0.8)["samples"]

    return Graph(sample=sample, steered=False, check=keeps)


@row(GROUP, "Image channels (Flux.1 Canny and Depth)", sdxl=FOR_FLUX)
def concat(kit: Kit) -> Graph:
    condition, model = node("nodes_ip2p.InstructPixToPixConditioning"), kit.build(in_channels=32)

    def sample(patched: Any, seed: int) -> Tensor:
        positive, negative, _ = condition(*kit.prompts, picture(seed), encoder(kit))
        return kit.sample(patched, positive=positive, negative=negative)

    return Graph(sample=lambda m: sample(m, 3), without=Graph(sample=lambda m: sample(m, 4)), model=model)


def redux(kit: Kit, model: Any, seed: int, strength: float, kind: str) -> Tensor:
    """Sample with a style picture, which adds nine text tokens. There is no guidance, as is usual for Flux."""
    import comfy.ldm.flux.redux
    import comfy.sd

    style = comfy.sd.StyleModel(filled(comfy.ldm.flux.redux.ReduxImageEncoder(16, 48)))
    seen = SimpleNamespace(last_hidden_state=random(1, 9, 16, seed=seed))
    with torch.no_grad():
        positive = node("nodes.StyleModelApply")(kit.prompt(1), style, seen, strength, kind)
    return kit.sample(model, cfg=1.0, positive=positive)


@row(GROUP, "Flux.1 Redux", sdxl=FOR_FLUX)
def redux_tokens(kit: Kit) -> Graph:
    without = Graph(sample=lambda m: redux(kit, m, 4, 1.0, "multiply"))
    return Graph(sample=lambda m: redux(kit, m, 3, 1.0, "multiply"), without=without)


@row(
    GROUP,
    "Flux.1 Redux with a strength (attention mask)",
    sdxl=FOR_FLUX,
    flux=unmerged("argument_in_use", 6),
    quick=True,
)
def redux_mask(kit: Kit) -> Graph:
    return Graph(sample=lambda m: redux(kit, m, 3, 0.5, "attn_bias"))


def referring(kit: Kit, method: str | None, seeds: tuple[int, ...], model: Any) -> Tensor:
    """Sample with reference pictures of several sizes in both prompts."""
    reference = node("nodes_edit_model.ReferenceLatent")
    method_node = None if method is None else node("nodes_flux.FluxKontextMultiReferenceLatentMethod")
    conds = []
    for cond in kit.prompts:
        for size, seed in zip(((16, 12), (8, 30), (24, 24)), seeds, strict=False):
            cond = reference(cond, {"samples": random(1, kit.channels, *kit.frames, *size, seed=seed)})
        conds.append(cond if method_node is None else method_node(cond, method))
    return kit.sample(model, positive=conds[0], negative=conds[1])


@row(GROUP, "Flux.1 Kontext: one to three references, by offset, index and uxo/uno", sdxl=FOR_FLUX)
def kontext(kit: Kit) -> Iterator[Graph]:
    for method, seeds in ((None, (3,)), ("offset", (3, 4)), ("index", (3, 4, 5)), ("uxo/uno", (3, 4))):
        others = tuple(seed + 10 for seed in seeds)
        yield Graph(
            sample=partial(referring, kit, method, seeds),
            without=Graph(sample=partial(referring, kit, method, others)),
            name=f"{len(seeds)} references, {method}",
        )


@row(
    GROUP,
    "References at timestep zero (index_timestep_zero, on the layout of Flux.2)",
    sdxl=FOR_FLUX,
    others=dict.fromkeys(("flux2", "krea2", "qwen_image"), MERGED),
)
def timestep_zero(kit: Kit) -> Graph:
    like_flux2: dict[str, Any] = {"guidance_embed": False, "vec_in_dim": None, "global_modulation": True}
    model = kit.build(**like_flux2) if kit.is_flux else None
    without = Graph(sample=partial(referring, kit, "index_timestep_zero", (13, 14)))
    return Graph(sample=partial(referring, kit, "index_timestep_zero", (3, 4)), without=without, model=model)


@row(
    GROUP,
    "References of editing models, unmerged and merged (merge_references)",
    only=dict.fromkeys(("flux2", "z_image", "krea2", "qwen_image", "qwen_image21"), MERGED),
)
def references(kit: Kit) -> Iterator[Graph]:
    """Sample with two reference pictures. In Qwen-Image 2.1 references are not merged, because ComfyUI computes them
    only in the first step and caches their keys and values."""
    method = "index" if kit.name == "krea2" else None
    for merged in (False,) if kit.name == "qwen_image21" else (False, True):
        yield Graph(
            sample=partial(referring, kit, method, (3, 4)),
            without=Graph(sample=partial(referring, kit, method, (13, 14))),
            settings={"merge_references": merged},
            name="merged" if merged else "unmerged",
        )
