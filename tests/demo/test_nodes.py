from __future__ import annotations

import asyncio

import pytest
import torch

import demo
from demo import nodes
from demo.latents import encode
from demo.scenes import ATTRIBUTES, render_batch, scene_from_seed, scene_tokens


def test_ids_are_fixed() -> None:
    async def listed() -> list[str]:
        extension = await demo.comfy_entrypoint()
        return [node.GET_SCHEMA().node_id for node in await extension.get_node_list()]

    assert asyncio.run(listed()) == ["ToMADemoUNet", "ToMADemoScene", "ToMADemoLatent", "ToMADemoDecode"]


def test_scene_from_seed_is_the_scene() -> None:
    positive, negative, prompt = nodes.ToMADemoScene.execute(seed=3, batch_size=2).args
    assert torch.equal(positive[0][0], torch.stack([scene_tokens(scene_from_seed(seed)) for seed in (3, 4)]))
    assert torch.equal(negative[0][0][0], scene_tokens(None))
    assert positive[0][1]["pooled_output"].shape == (2, 128)
    assert prompt.splitlines()[1] == scene_from_seed(4).describe()


def test_attributes_can_be_set_by_hand() -> None:
    choices = dict.fromkeys(ATTRIBUTES, nodes.FROM_SEED) | {"shape": "star", "word": "MIX"}
    *_, prompt = nodes.ToMADemoScene.execute(seed=3, batch_size=1, **choices).args
    assert "shape star" in prompt
    assert "word MIX" in prompt
    with pytest.raises(ValueError, match="shape must be one of circle, square"):
        nodes.ToMADemoScene.execute(seed=3, batch_size=1, shape="heart")


def test_schema_offers_every_attribute() -> None:
    inputs = {item.id: item for item in nodes.ToMADemoScene.define_schema().inputs}
    for name, values in ATTRIBUTES.items():
        assert inputs[name].options == [nodes.FROM_SEED, *values]


def test_decode_inverts_the_transform() -> None:
    picture = render_batch([scene_from_seed(1)])
    (image,) = nodes.ToMADemoDecode.execute({"samples": encode(picture)}, scale=2).args
    assert image.shape == (1, 256, 256, 3)
    torch.testing.assert_close(image[:, ::2, ::2].permute(0, 3, 1, 2) * 2 - 1, picture, atol=1e-5, rtol=0)


def test_latent_sizes() -> None:
    (latent,) = nodes.ToMADemoLatent.execute(width=192, height=128, batch_size=3).args
    assert latent["samples"].shape == (3, 16, 64, 96)


def test_random_unet_depends_on_its_seed_only() -> None:
    def weight(seed: int) -> torch.Tensor:
        (model,) = nodes.ToMADemoUNet.execute("random", seed).args
        return model.model.diffusion_model.input_blocks[0][0].weight

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))


def test_missing_weights_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "UNET_WEIGHTS", nodes.UNET_WEIGHTS.with_name("nowhere.safetensors"))
    with pytest.raises(ValueError, match=r"nowhere\.safetensors is missing"):
        nodes.ToMADemoUNet.execute("trained", 0)
