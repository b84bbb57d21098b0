"""What ComfyUI hands wrappers and blocks while it samples: shapes, order and keys that no signature shows.

`scripts/api_check` compares names and signatures, `nodes/adapters/compat.py` checks at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from testbed import models

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def shared_unet(pack: Any) -> Any:
    return models.unet()


@pytest.fixture(scope="module")
def shared_flux(pack: Any) -> Any:
    return models.flux()


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
