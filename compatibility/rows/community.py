"""Community packs, which are not part of this checkout. A pack is tried if it is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from testbed import models

from ..judge import attach, close
from ..kit import SIDE, AbsentError, Kit, community, filled, found, node, patcher, random
from ..row import FOR_FLUX, FOR_UNETS, Expected, Graph
from .guidance import REPLACED
from .images import controlnet, picture
from .table import row

GROUP = "Community packs"


def runs(kit: Kit, graph: Graph) -> Graph:
    """Return the graph if the pack runs in this ComfyUI without ToMA. Raises `AbsentError`."""
    try:
        graph.run(kit, graph.patch(kit.model if graph.model is None else graph.model))
    except TypeError as error:
        # Packs replace functions of ComfyUI. Later releases of ComfyUI may pass arguments that a pack's function does
        # not accept. The pack then counts as absent. All other errors are raised.
        if "unexpected keyword argument" not in str(error):
            raise
        raise AbsentError(f"without ToMA, too, it fails in this ComfyUI: {error}") from None
    return graph


@row(
    GROUP,
    "IP-Adapter plus, on the layout of SD1.5",
    sdxl=Expected(unmerged={REPLACED: 15}),
    flux=FOR_UNETS,
    pack="ComfyUI_IPAdapter_plus",
)
def ip_adapter(kit: Kit) -> Graph:
    """Run IP-Adapter with random weights and embeddings: attention to an image in the cross-attention of 15 blocks."""
    apply = community("ComfyUI_IPAdapter_plus")("IPAdapterEmbeds")
    widths = [32, 32, 64, 64, 128, 128, 128, 128, 128, 64, 64, 64, 32, 32, 32, 256]
    layers = {
        f"{2 * i + 1}.to_{part}_ip.weight": random(width, 48, seed=i, scale=48**-0.5)
        for i, width in enumerate(widths)
        for part in "kv"
    }
    project = {"proj.weight": random(192, 16, scale=0.25), "proj.bias": torch.zeros(192)}
    norm = {"norm.weight": torch.ones(48), "norm.bias": torch.zeros(48)}
    weights = {"ip_adapter": layers, "image_proj": {**project, **norm}}

    def adapted(model: Any, seed: int) -> Any:
        seen, unseen = random(1, 16, seed=seed), torch.zeros(1, 16)
        return apply(model, weights, seen, 1.0, "linear", 0.0, 1.0, neg_embed=unseen)[0]

    model = models.unet(depths=(1, 1, 1, 0), middle=1)
    return Graph(lambda m: adapted(m, 3), without=Graph(lambda m: adapted(m, 4)), model=model)


@row(GROUP, "Advanced-ControlNet: a ControlNet behind a mask", pack="ComfyUI-Advanced-ControlNet")
def advanced_controlnet(kit: Kit) -> Graph:
    apply, network = community("ComfyUI-Advanced-ControlNet")("ACN_AdvancedControlNetApply_v2"), controlnet(kit)
    mask = torch.linspace(0, 1, SIDE).expand(1, SIDE, SIDE)

    def sample(model: Any, strength: float) -> Tensor:
        positive, negative = apply(*kit.prompts, network, picture(), strength, 0.0, 1.0, mask_optional=mask)
        return kit.sample(model, positive=positive, negative=negative)

    return runs(kit, Graph(sample=lambda m: sample(m, 0.5), without=Graph(sample=lambda m: sample(m, 0.0)), off=True))


@row(GROUP, "GGUF: weights quantised to 8 bits (Q8_0)", pack="ComfyUI-GGUF")
def gguf(kit: Kit) -> Graph:
    """Write a GGUF file and load it with the pack's loader. The pack's layers dequantise the weights in `forward`."""
    import comfy.model_patcher

    community("ComfyUI-GGUF")
    writer = importlib.import_module("gguf")
    pack = str(found("ComfyUI-GGUF")).replace(".", "_x_")  # the name under which ComfyUI imports it
    loader, layers, patchers = (importlib.import_module(f"{pack}.{name}") for name in ("loader", "ops", "nodes"))
    source = kit.build(hidden_size=64, axes_dim=[8, 12, 12]) if kit.is_flux else kit.build()
    path = kit.path("unet", "tiny.gguf")
    file = writer.GGUFWriter(str(path), kit.name)
    for name, weight in source.model.diffusion_model.state_dict().items():
        if weight.ndim == 2 and weight.shape[1] % 32 == 0:
            kind = writer.GGMLQuantizationType.Q8_0
            file.add_tensor(name, writer.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
        else:
            file.add_tensor(name, weight.numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    source.model.model_config.custom_operations = layers.GGMLOps
    cpu = torch.device("cpu")
    model = type(source.model)(source.model.model_config, device=cpu)
    model.load_model_weights(loader.gguf_sd_loader(str(path)))
    plain = comfy.model_patcher.ModelPatcher(model.eval(), load_device=cpu, offload_device=cpu)
    return Graph(model=patchers.GGUFModelPatcher.clone(plain), steered=False)


@row(GROUP, "KJNodes: attention by SageAttention (its place taken by PyTorch's)", pack="ComfyUI-KJNodes")
def kj_attention(kit: Kit) -> Graph:
    """Use the pack's patch for SageAttention, with PyTorch's attention in place of SageAttention, which needs a GPU."""
    patch, library = community("ComfyUI-KJNodes")("PathchSageAttentionKJ"), ModuleType("sageattention")

    def sageattn(q: Tensor, k: Tensor, v: Tensor, tensor_layout: str, **_: Any) -> Tensor:
        if tensor_layout == "NHD":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2) if tensor_layout == "NHD" else out

    library.sageattn = sageattn  # type: ignore[attr-defined]

    def patched(model: Any) -> Any:
        with mock.patch.dict(sys.modules, {"sageattention": library}):
            return patch(model, "auto")

    return Graph(patched, steered=False)


@row(GROUP, "TeaCache", sdxl=FOR_FLUX, pack="ComfyUI-TeaCache")
def teacache(kit: Kit) -> Graph:
    """Run TeaCache without its part for LTX-Video, which needs a function that ComfyUI no longer has."""
    with mock.patch("comfy.ldm.lightricks.model.precompute_freqs_cis", None, create=True):
        patch = community("ComfyUI-TeaCache")("TeaCache")
    options = {"steps": 5, "cfg": 1.0}
    without = Graph(lambda m: patch(m, "flux", 1e-9, 0.0, 1.0, "cpu"), options=options)
    return runs(kit, Graph(lambda m: patch(m, "flux", 0.4, 0.0, 1.0, "cpu"), options=options, without=without))


@row(GROUP, "WaveSpeed: first block cache", pack="Comfy-WaveSpeed")
def wavespeed(kit: Kit) -> Graph:
    patch, options = community("Comfy-WaveSpeed")("ApplyFBCacheOnModel"), {"steps": 5}
    without = Graph(lambda m: patch(m, "diffusion_model", 1e-9), options=options)
    return runs(kit, Graph(lambda m: patch(m, "diffusion_model", 0.9), options=options, without=without))


@row(GROUP, "Tiled Diffusion (MultiDiffusion, Mixture of Diffusers, SpotDiffusion)", pack="ComfyUI-TiledDiffusion")
def tiled_diffusion(kit: Kit) -> Iterator[Graph]:
    """Use tiles of 16 x 16 latent pixels that overlap by 8. The number of tiles per batch changes nothing. Only
    SpotDiffusion's result depends on the order of the tiles, because its last tile overwrites the others."""
    pack = "ComfyUI-TiledDiffusion"
    patch = community(pack)("TiledDiffusion")
    code = importlib.import_module(f"{str(found(pack)).replace('.', '_x_')}.tiled_diffusion")
    cut = code.split_bboxes

    def backwards(*args: Any, **inputs: Any) -> Any:
        tiles, weights = cut(*args, **inputs)
        return tiles[::-1], weights

    def in_order(method: str, result: Tensor) -> None:
        for at_once, cutting in ((1, cut), (4, cut if method == "SpotDiffusion" else backwards)):
            with mock.patch.object(code, "split_bboxes", cutting):
                again = kit.sample(attach(_tiled(patch, method, kit.model, at_once)))
            assert close(again, result), "what a tile becomes depends on the others"

    for method in ("MultiDiffusion", "Mixture of Diffusers", "SpotDiffusion"):
        yield runs(kit, Graph(partial(_tiled, patch, method), name=method, check=partial(in_order, method)))


def _tiled(patch: Any, method: str, model: Any, at_once: int = 4) -> Any:
    return patch(model, method, 128, 128, 64, at_once)


@row(
    GROUP,
    "Regional prompting (Attention Couple)",
    sdxl=Expected(unmerged={REPLACED: 60}),
    flux=FOR_UNETS,
    pack="attention-couple-ComfyUI",
)
def attention_couple(kit: Kit) -> Graph:
    """Use a narrow UNet with SDXL's number of blocks, because the pack identifies blocks by number."""
    couple, mask = community("attention-couple-ComfyUI")("Attention couple"), node("nodes.ConditioningSetMask")
    left = torch.zeros(1, SIDE, SIDE)
    left[..., : SIDE // 2] = 1.0
    model = models.unet(depths=(0, 2, 10), middle=10)

    def coupled(patched: Any, seed: int) -> Any:
        positive = [*mask(kit.prompt(seed), left, "default", 1.0), *mask(kit.prompt(3), 1 - left, "default", 1.0)]
        return couple(patched, positive, kit.prompt(2), "Attention")

    def sample(patched: Any) -> Tensor:
        _, positive, negative = coupled(model, 1)
        return kit.sample(patched, positive=positive, negative=negative, steps=1)

    without = Graph(lambda m: coupled(m, 9)[0], sample)
    return Graph(lambda m: coupled(m, 1)[0], sample, without=without, model=model)


# PuLID's libraries for finding and describing faces. They are not installed for these tests.
FACES = (
    *("cv2", "ftfy", "timm", "timm.layers", "timm.loss", "timm.models", "timm.models.layers", "facexlib"),
    *("facexlib.detection", "facexlib.parsing", "facexlib.utils", "facexlib.utils.face_restoration_helper"),
    *("facexlib.utils.misc", "insightface", "insightface.app", "insightface.utils", "insightface.utils.download"),
    "insightface.utils.storage",
)


@contextmanager
def standing_in(names: tuple[str, ...]) -> Iterator[None]:
    """Use empty modules in place of modules that are not installed."""
    absent = {name: mock.MagicMock() for name in names if name not in sys.modules}
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def face(seed: int) -> dict[str, Any]:
    """Return inputs of PuLID's nodes: a picture, a library that finds one face in it, and a network that describes
    it."""
    known = SimpleNamespace(bbox=(0, 0, 9, 9), embedding=random(512, seed=seed).numpy())
    described = random(1, 768, seed=seed), [random(1, 2, 1024, seed=seed)]
    return {
        "image": picture(),
        "face_analysis": SimpleNamespace(det_model=SimpleNamespace(), get=lambda _: [known]),
        "eva_clip": mock.MagicMock(
            image_size=16, image_mean=(0.5,) * 3, image_std=(0.5,) * 3, side_effect=lambda *_, **__: described
        ),
    }


def pulid(pack: str, module: str, name: str) -> tuple[Any, Any]:
    """Return the pack's node and the node's module. Random numbers replace the cropped face."""
    importlib.import_module("comfy.sd")  # before the stand-ins, because this module looks for some of `FACES`
    with standing_in(FACES):
        apply = community(pack)(name)
        code = importlib.import_module(f"{str(found(pack)).replace('.', '_x_')}.{module}")

    def parse(picture: Tensor) -> tuple[Tensor]:
        return (picture,)

    helper = mock.MagicMock(cropped_faces=[random(16, 16, 3).numpy()], face_parse=parse)
    stand_ins: dict[str, Any] = {"FaceRestoreHelper": lambda **_: helper, "init_parsing_model": lambda **_: parse}

    def applied(*args: Any, **inputs: Any) -> Any:
        with mock.patch.multiple(code, create=True, **stand_ins):
            return apply(*args, **inputs)

    return applied, code


@row(
    GROUP,
    "PuLID (without its networks for faces)",
    sdxl=Expected(unmerged={REPLACED: 60}),
    flux=FOR_UNETS,
    pack="PuLID_ComfyUI",
)
def pulid_unet(kit: Kit) -> Iterator[Graph]:
    """Use a narrow UNet with SDXL's number of blocks. All blocks attend to a face except the middle blocks, which the
    pack names differently from ComfyUI."""
    apply, code = pulid("PuLID_ComfyUI", "pulid", "ApplyPulid")
    model = models.unet(depths=(0, 2, 10), middle=10)
    layers, widths = {}, [64] * 4 + [128] * 50 + [64] * 6 + [128] * 10
    for i, width in enumerate(widths):
        for part in "kv":
            layers[f"{2 * i + 1}.to_{part}_ip.weight"] = random(width, 16, seed=i, scale=0.25)
    adapter: Any = SimpleNamespace(
        ip_layers=code.To_KV(layers), get_image_embeds=lambda known, _: known[:, :80].reshape(-1, 5, 16)
    )
    adapter.to = lambda *_, **__: adapter

    def faced(method: str, seed: int, patched: Any) -> Any:
        return apply(patched, adapter, **face(seed), weight=1.0, start_at=0.0, end_at=1.0, method=method)

    options = {"steps": 1}
    for method in ("fidelity", "style", "neutral"):
        without = Graph(partial(faced, method, 4), options=options)
        yield Graph(partial(faced, method, 3), options=options, without=without, model=model, name=method)


@row(
    GROUP,
    "PuLID for Flux (without its networks for faces, and with two of its functions mended for this ComfyUI)",
    sdxl=FOR_FLUX,
    pack="ComfyUI_PuLID_Flux_ll",
)
def pulid_flux(kit: Kit) -> Graph:
    """Use 19 double blocks, as in Flux, and a few single blocks. The pack runs the blocks in its own loop."""
    apply, code = pulid("ComfyUI_PuLID_Flux_ll", "pulidflux", "ApplyPulidFlux")
    # Drop arguments that newer releases of ComfyUI pass and these two functions do not accept.
    code.pulid_forward_orig = _without("timestep_zero_index", code.pulid_forward_orig)
    sample = _without("latent_shapes", code.pulid_outer_sample_wrappers_with_override)
    code.pulid_outer_sample_wrappers_with_override = sample
    model = models.flux(double=19, single=6)
    attentions = [code.PerceiverAttentionCA(dim=48, dim_head=16, heads=2, kv_dim=16) for _ in range(20)]
    network: Any = torch.nn.Module()
    network.pulid_ca = filled(torch.nn.ModuleList(attentions))
    network.double_interval, network.single_interval = 2, 4
    network.get_embeds = lambda known, _: known[:, :80].reshape(-1, 5, 16)
    adapter = patcher(network)

    def faced(seed: int, patched: Any) -> Any:
        inputs = {**face(seed), "weight": 1.0, "start_at": 0.0, "end_at": 1.0}
        return apply(patched, adapter, **inputs, options={"input_faces_align_mode": 0})

    return runs(kit, Graph(partial(faced, 3), without=Graph(partial(faced, 4)), model=model))


def _without(name: str, function: Any) -> Any:
    """Wrap a function so that one argument, which the function does not accept, is dropped."""

    def call(*args: Any, **inputs: Any) -> Any:
        inputs.pop(name, None)
        return function(*args, **inputs)

    return call
