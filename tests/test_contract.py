"""Test the shapes, order and keys of the arguments that ComfyUI passes to wrappers and blocks while it samples.
Signatures alone do not show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from testbed import models

pytestmark = pytest.mark.compat


Seen = dict[str, list[Any]]
BLOCKS = ("BasicTransformerBlock", "DoubleStreamBlock", "SingleStreamBlock")


@pytest.fixture(scope="module", params=["unet", "flux"])
def seen(request: pytest.FixtureRequest, pack: Any) -> tuple[str, Seen]:
    """Return the model's name, and the calls of each wrapper and class of blocks while ComfyUI samples without ToMA. A
    call is (executor, args, kwargs); the executor is None for blocks."""
    from comfy.patcher_extension import WrappersMP

    model = getattr(models, request.param)()
    calls: Seen = {}

    def probe(name: str) -> Callable[..., Any]:
        def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
            calls.setdefault(name, []).append((executor, args, kwargs))
            return executor(*args, **kwargs)

        return wrapper

    for kind in ("OUTER_SAMPLE", "SAMPLER_SAMPLE", "PREDICT_NOISE", "CALC_COND_BATCH", "APPLY_MODEL"):
        model.add_wrapper_with_key(getattr(WrappersMP, kind), "contract", probe(kind))
    for module in model.model.diffusion_model.modules():
        if (name := type(module).__name__) in BLOCKS:

            def note(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                kwargs = {**kwargs, "transformer_options": dict(kwargs.get("transformer_options", {}))}
                calls.setdefault(name, []).append((None, args, kwargs))

            module.register_forward_pre_hook(note, with_kwargs=True)
    models.sample(model, 16, 16, steps=2)
    return request.param, calls


def test_wrappers_around_a_run(seen: tuple[str, Seen]) -> None:
    from comfy.k_diffusion import sampling

    ((executor, args, _),) = seen[1]["OUTER_SAMPLE"]
    guider, sampler, sigmas = executor.class_obj, args[2], args[3]
    assert "transformer_options" in guider.model_options, "OUTER_SAMPLE: guider.model_options"
    assert guider.model_patcher.get_model_object("model_sampling") is not None, "OUTER_SAMPLE: guider.model_patcher"
    assert sampler.sampler_function is sampling.sample_euler, (
        "OUTER_SAMPLE: the third argument is no longer the sampler"
    )
    assert sampler.extra_options == {}
    assert sigmas.shape == (3,), "OUTER_SAMPLE: the fourth argument is no longer the schedule"
    assert bool((sigmas.diff() < 0).all()), "OUTER_SAMPLE: the schedule no longer falls"
    ((_, args, _),) = seen[1]["SAMPLER_SAMPLE"]
    assert args[4].shape[-2:] == (16, 16), "SAMPLER_SAMPLE: the fifth argument is no longer the noise"


def test_wrappers_around_an_evaluation(seen: tuple[str, Seen]) -> None:
    (executor, predicted, _), _ = seen[1]["PREDICT_NOISE"]  # once per evaluation of the sampler
    assert "transformer_options" in executor.class_obj.model_options, "PREDICT_NOISE: guider.model_options"
    (_, args, _), _ = seen[1]["CALC_COND_BATCH"]
    _, conds, x, timestep, options = args[:5]
    assert predicted[1] is timestep, "PREDICT_NOISE: the second argument is no longer conditions' noise level"
    assert "uuid" in conds[0][0], "CALC_COND_BATCH: conditions no longer have a uuid"
    assert (x.ndim, timestep.ndim) == (4, 1), "CALC_COND_BATCH: latent and noise level"
    assert "transformer_options" in options, "CALC_COND_BATCH: the fifth argument is no longer model_options"
    executor, args, _ = seen[1]["APPLY_MODEL"][0]
    assert hasattr(executor.class_obj, "diffusion_model"), "APPLY_MODEL: executor.class_obj"
    assert args[0].shape[0] == 2, "APPLY_MODEL: the first argument is no longer the joined latent"
    assert isinstance(args[1], torch.Tensor), "APPLY_MODEL: the second argument is no longer the noise level"
    assert {"uuids", "sample_sigmas", "cond_or_uncond"} <= set(args[5]), "APPLY_MODEL: the sixth argument"
    assert len(args[5]["uuids"]) == 2, "APPLY_MODEL: uuids are no longer one a condition"


def test_blocks_receive_their_token_offsets(seen: tuple[str, Seen]) -> None:
    kind, calls = seen
    if kind == "unet":
        _, args, kwargs = calls["BasicTransformerBlock"][0]
        assert {"activations_shape", "block", "block_index", "uuids"} <= set(kwargs["transformer_options"])
        height, width = kwargs["transformer_options"]["activations_shape"][-2:]
        assert args[0].shape[1] == height * width, "activations_shape is no longer the grid of the tokens"
        return
    _, args, kwargs = calls["SingleStreamBlock"][0]
    assert {"img_slice", "uuids"} <= set(kwargs["transformer_options"])
    begin, end = kwargs["transformer_options"]["img_slice"]
    assert (end, end - begin) == (args[0].shape[1], 64), "img_slice no longer says where the image tokens are"
    _, _, kwargs = calls["DoubleStreamBlock"][0]
    assert {"block_index", "uuids"} <= set(kwargs["transformer_options"])
    pe, tokens = kwargs["pe"], kwargs["txt"].shape[1] + kwargs["img"].shape[1]
    assert pe.ndim == 6, "DoubleStreamBlock: pe has another shape"
    assert pe.shape[2] == tokens, "DoubleStreamBlock: pe no longer has one row a token, text first"
