"""Test which options and tensor shapes ComfyUI passes to blocks. The signatures of blocks do not show them."""

from types import ModuleType
from typing import Any

import pytest

from testbed import models

pytestmark = pytest.mark.compat


def first_calls(model: Any) -> dict[str, tuple[Any, Any]]:
    """Return (args, kwargs) of the first call of each class of modules while ComfyUI samples without ToMA."""
    calls: dict[str, tuple[Any, Any]] = {}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        options = dict(kwargs.get("transformer_options", {}))
        calls.setdefault(type(module).__name__, (args, {**kwargs, "transformer_options": options}))

    for module in model.model.diffusion_model.modules():
        module.register_forward_pre_hook(note, with_kwargs=True)
    models.sample(model, 16, 16, steps=2)
    return calls


def test_blocks_of_the_unet_receive_their_grid(pack: ModuleType) -> None:
    args, kwargs = first_calls(models.unet())["BasicTransformerBlock"]
    assert {"activations_shape", "block", "block_index", "uuids"} <= set(kwargs["transformer_options"])
    height, width = kwargs["transformer_options"]["activations_shape"][-2:]
    assert args[0].shape[1] == height * width


def test_blocks_of_flux_receive_their_token_offsets(pack: ModuleType) -> None:
    calls = first_calls(models.flux())
    args, kwargs = calls["SingleStreamBlock"]
    assert {"img_slice", "uuids"} <= set(kwargs["transformer_options"])
    begin, end = kwargs["transformer_options"]["img_slice"]
    assert (end, end - begin) == (args[0].shape[1], 64), "img_slice no longer says where the image tokens are"
    _, kwargs = calls["DoubleStreamBlock"]
    assert {"block_index", "uuids"} <= set(kwargs["transformer_options"])
    assert kwargs["pe"].ndim == 6
    tokens = kwargs["txt"].shape[1] + kwargs["img"].shape[1]
    assert kwargs["pe"].shape[2] == tokens, "pe no longer has one row a token, text first"
