"""The pack's use of ComfyUI, item by item. If a release of ComfyUI changes one, its test fails by its name.

`nodes/adapters/compat.py` checks the same at run time, where the model then runs unmerged.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import reduce
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks import models
from scripts.comfy_pack import pack_module
from scripts.comfyui import DEFAULT_RELEASE, ROOT
from tests.loop import loop

pytestmark = pytest.mark.compat

# As main.py does early: ComfyUI's nodes.py puts its comfy/, which has another `utils`, in front of the path.
importlib.import_module("utils.extra_config")

THEIRS = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version", "execution", "server"}


def names_in(source: str) -> Iterator[str]:
    """Yield every dotted name of ComfyUI that a module imports or reaches through an import."""
    bound: dict[str, str] = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in THEIRS:
                    bound[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in THEIRS:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in bound and all(part.isidentifier() for part in rest.split(".")):
                yield f"{bound[root]}.{rest}"


def names() -> list[str]:
    files = [ROOT / "__init__.py", *(ROOT / "nodes").rglob("*.py"), *(ROOT / "toma_core").rglob("*.py")]
    return sorted({name for file in files for name in names_in(file.read_text(encoding="utf-8"))})


def resolve(name: str) -> Any:
    """Return the object of a dotted name; the failure names it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            continue
        try:
            return reduce(getattr, parts[count:], found)
        except AttributeError as error:
            pytest.fail(f"ComfyUI has no {name} any more: {error}", pytrace=False)
    pytest.fail(f"ComfyUI has no {name} any more", pytrace=False)


@loop("name", names())
def test_name_is_there(name: str) -> None:
    older = importlib.import_module("comfyui_version").__version__ != DEFAULT_RELEASE
    if older and name.startswith("comfy.ldm.") and find_spec(".".join(name.split(".")[:3])) is None:
        pytest.skip("a family that came later")
    resolve(name)


def test_names_are_found() -> None:
    source = (
        "import comfy.sample\nfrom comfy_api.latest import io as i\ndef f(x):\n    comfy.sample.sample(i.Model.Input)"
    )
    found = set(names_in(source))
    assert {"comfy.sample", "comfy.sample.sample", "comfy_api.latest.io", "comfy_api.latest.io.Model.Input"} <= found
    assert {"comfy.patcher_extension.WrappersMP.APPLY_MODEL", "comfy.ldm.flux.model.Flux"} <= set(names())
    with pytest.raises(pytest.fail.Exception, match=r"no comfy\.sample\.nothing any more"):
        resolve("comfy.sample.nothing")


# Called functions, with the arguments that the pack passes by position and those that it passes by name.
CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "comfy.sample.sample": (
        ("model", "noise", "steps", "cfg", "sampler_name", "scheduler", "positive", "negative", "latent_image"),
        ("callback", "disable_pbar", "seed"),
    ),
    "comfy.sample.prepare_noise": (("latent_image", "seed"), ()),
    "comfy.sample.fix_empty_latent_channels": (("model", "latent_image", "downscale_ratio_spacial"), ()),
    "comfy.model_management.get_torch_device_name": (("device",), ()),
    "comfy.model_patcher.create_model_options_clone": (("orig_model_options",), ()),
    "comfy.model_patcher.ModelPatcher.clone": (("self",), ()),
    "comfy.model_patcher.ModelPatcher.get_model_object": (("self", "name"), ()),
    "comfy.model_patcher.ModelPatcher.add_wrapper_with_key": (("self", "wrapper_type", "key", "wrapper"), ()),
    "comfy.model_patcher.ModelPatcher.remove_wrappers_with_key": (("self", "wrapper_type", "key"), ()),
    "comfy.nested_tensor.NestedTensor": (("tensors",), ()),
    "comfy.nested_tensor.NestedTensor.unbind": (("self",), ()),
    "comfy.utils.ProgressBar": (("total",), ()),
    "comfy.utils.ProgressBar.update": (("self", "value"), ()),
    "comfy_api.latest.ui.PreviewImage": (("image",), ("cls",)),
    "server.PromptServer.send_sync": (("self", "event", "data", "sid"), ()),
    "execution.PromptQueue.get_current_queue_volatile": (("self",), ()),
}


@loop("name", CALLS)
def test_call_takes_what_it_is_given(name: str) -> None:
    by_place, by_name = CALLS[name]
    signature = inspect.signature(resolve(name))
    places = tuple(p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY)
    assert places[: len(by_place)] == by_place, f"{name}{signature} has other arguments"
    try:
        signature.bind(*by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        pytest.fail(f"{name}{signature}: {error}", pytrace=False)


# Attributes of objects without an import: the path from a model's patcher.
ATTRIBUTES = {
    "unet": (
        "model_options",
        "load_device",
        "wrappers",
        "model.diffusion_model.input_blocks",
        "model.diffusion_model.middle_block",
        "model.diffusion_model.output_blocks",
        "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1",
        "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2",
        "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.ff",
        "model.model_sampling.percent_to_sigma",
        "model.get_dtype_inference",
    ),
    "flux": (
        "model.diffusion_model.patch_size",
        "model.diffusion_model.double_blocks.0.img_attn.qkv",
        "model.diffusion_model.double_blocks.0.img_attn.proj",
        "model.diffusion_model.double_blocks.0.img_mlp",
        "model.diffusion_model.single_blocks.0",
    ),
}


@loop(("kind", "path"), [(kind, path) for kind in ATTRIBUTES for path in ATTRIBUTES[kind]])
def test_attribute_is_there(request: pytest.FixtureRequest, kind: str, path: str) -> None:
    found = request.getfixturevalue(f"shared_{kind}")
    for part in path.split("."):
        try:
            found = found[int(part)] if part.isdigit() else getattr(found, part)
        except (AttributeError, IndexError):
            pytest.fail(f"ComfyUI's {type(found).__name__} has no {part} any more ({path})", pytrace=False)


@pytest.fixture(scope="module")
def shared_unet(pack: Any) -> Any:
    return models.unet()


@pytest.fixture(scope="module")
def shared_flux(pack: Any) -> Any:
    return models.flux()


@loop("kind", ["unet", "flux"])
def test_every_forward_is_known(request: pytest.FixtureRequest, kind: str) -> None:
    """Blocks, attentions and feed-forwards have the arguments of the hooks that replace them."""
    registry, contract = pack_module("nodes.adapters.registry"), pack_module("nodes.adapters.compat")
    hooks = registry.find(request.getfixturevalue(f"shared_{kind}").model.diffusion_model)
    places = list(hooks.hook_pairs())
    assert len(places) > 5
    for module, hook in places:
        try:
            contract.check(module, hook)
        except contract.UnsupportedApiError as error:
            pytest.fail(f"{error} is not what {type(hook).__name__} stands in for", pytrace=False)


Seen = dict[str, list[Any]]


@pytest.fixture(scope="module", params=["unet", "flux"])
def seen(request: pytest.FixtureRequest) -> tuple[str, Seen]:
    """Record the arguments that ComfyUI passes to wrappers and blocks while it samples without ToMA."""
    from comfy.patcher_extension import WrappersMP

    model = request.getfixturevalue(f"shared_{request.param}").clone()
    calls: Seen = {}

    def probe(name: str) -> Callable[..., Any]:
        def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
            calls.setdefault(name, []).append((executor, args, kwargs))
            return executor(*args, **kwargs)

        return wrapper

    for kind in ("OUTER_SAMPLE", "SAMPLER_SAMPLE", "PREDICT_NOISE", "CALC_COND_BATCH", "APPLY_MODEL"):
        model.add_wrapper_with_key(getattr(WrappersMP, kind), "contract", probe(kind))
    handles = []
    for module in model.model.diffusion_model.modules():
        name = type(module).__name__
        if name in ("BasicTransformerBlock", "CrossAttention", "FeedForward", "DoubleStreamBlock", "SingleStreamBlock"):

            def note(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                options = dict(kwargs.get("transformer_options", {}))
                calls.setdefault(name, []).append((args, {**kwargs, "transformer_options": options}))

            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    models.sample(model, 16, 16, steps=2)
    for handle in handles:
        handle.remove()
    return request.param, calls


def first(seen: tuple[str, Seen], hook: str) -> Any:
    assert hook in seen[1], f"ComfyUI never called {hook}"
    return seen[1][hook][0]


def test_outer_sample(seen: tuple[str, Seen]) -> None:
    executor, args, _ = first(seen, "OUTER_SAMPLE")
    assert len(seen[1]["OUTER_SAMPLE"]) == 1
    guider, sigmas = executor.class_obj, args[3]
    assert "transformer_options" in guider.model_options, "OUTER_SAMPLE: guider.model_options"
    assert guider.model_patcher.get_model_object("model_sampling") is not None, "OUTER_SAMPLE: guider.model_patcher"
    assert sigmas.shape == (3,), "OUTER_SAMPLE: the fourth argument is no longer the schedule"
    assert bool((sigmas.diff() < 0).all()), "OUTER_SAMPLE: the schedule no longer falls"


def test_sampler_sample(seen: tuple[str, Seen]) -> None:
    _, args, _ = first(seen, "SAMPLER_SAMPLE")
    assert args[4].shape[-2:] == (16, 16), "SAMPLER_SAMPLE: the fifth argument is no longer the noise"


def test_predict_noise(seen: tuple[str, Seen]) -> None:
    executor, args, _ = first(seen, "PREDICT_NOISE")
    assert len(seen[1]["PREDICT_NOISE"]) == 2, "PREDICT_NOISE: no longer once an evaluation of the sampler"
    assert "transformer_options" in executor.class_obj.model_options, "PREDICT_NOISE: guider.model_options"
    told = first(seen, "CALC_COND_BATCH")[1][3]
    assert args[1] is told, "PREDICT_NOISE: the second argument is no longer the noise level that conditions are told"


def test_outer_sample_receives_the_sampler(seen: tuple[str, Seen]) -> None:
    from comfy.k_diffusion import sampling

    _, args, _ = first(seen, "OUTER_SAMPLE")
    function = args[2].sampler_function
    assert function is sampling.sample_euler, "OUTER_SAMPLE: the third argument is no longer the sampler"
    assert args[2].extra_options == {}


def test_calc_cond_batch(seen: tuple[str, Seen]) -> None:
    _, args, _ = first(seen, "CALC_COND_BATCH")
    assert len(seen[1]["CALC_COND_BATCH"]) == 2, "CALC_COND_BATCH: no longer once an evaluation"
    _, conds, x, timestep, options = args[:5]
    assert "uuid" in conds[0][0], "CALC_COND_BATCH: conditions no longer have a uuid"
    assert x.ndim == 4
    assert timestep.ndim == 1, "CALC_COND_BATCH: the fourth argument is no longer the noise level"
    assert "transformer_options" in options, "CALC_COND_BATCH: the fifth argument is no longer model_options"


def test_apply_model(seen: tuple[str, Seen]) -> None:
    executor, args, _ = first(seen, "APPLY_MODEL")
    assert hasattr(executor.class_obj, "diffusion_model"), "APPLY_MODEL: executor.class_obj"
    assert args[0].shape[0] == 2, "APPLY_MODEL: the first argument is no longer the joined latent"
    assert isinstance(args[1], torch.Tensor), "APPLY_MODEL: the second argument is no longer the noise level"
    for name in ("uuids", "sample_sigmas", "cond_or_uncond"):
        assert name in args[5], f"APPLY_MODEL: the sixth argument no longer holds {name}"
    assert len(args[5]["uuids"]) == 2, "APPLY_MODEL: uuids are no longer one a condition"


OPTIONS = {
    "unet": {"BasicTransformerBlock": ("activations_shape", "block", "block_index", "uuids")},
    "flux": {"DoubleStreamBlock": ("block_index", "uuids"), "SingleStreamBlock": ("img_slice", "uuids")},
}


def test_blocks_receive_their_token_offsets(seen: tuple[str, Seen]) -> None:
    kind, calls = seen
    for block, wanted in OPTIONS[kind].items():
        _, kwargs = first(seen, block)
        for name in wanted:
            assert name in kwargs["transformer_options"], f"{block}: transformer_options no longer hold {name}"
    if kind == "unet":
        args, kwargs = calls["BasicTransformerBlock"][0]
        height, width = kwargs["transformer_options"]["activations_shape"][-2:]
        assert args[0].shape[1] == height * width, "activations_shape is no longer the grid of the tokens"
    else:
        args, kwargs = calls["SingleStreamBlock"][0]
        begin, end = kwargs["transformer_options"]["img_slice"]
        assert (end, end - begin) == (args[0].shape[1], 64), "img_slice no longer says where the image tokens are"


def test_rope_rows_are_one_a_token(seen: tuple[str, Seen]) -> None:
    if seen[0] != "flux":
        pytest.skip("the UNet has none")
    _, kwargs = first(seen, "DoubleStreamBlock")
    pe, tokens = kwargs["pe"], kwargs["txt"].shape[1] + kwargs["img"].shape[1]
    assert pe.ndim == 6, "DoubleStreamBlock: pe has another shape"
    assert pe.shape[2] == tokens, "DoubleStreamBlock: pe no longer has one row a token, text first"
