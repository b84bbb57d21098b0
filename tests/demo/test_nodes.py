import pytest
import torch

from demo import nodes
from demo.latents import encode
from demo.scenes import ATTRIBUTES, render_batch, scene_from_seed, scene_tokens


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


def test_decode_inverts_the_transform() -> None:
    picture = render_batch([scene_from_seed(1)])
    (image,) = nodes.ToMADemoDecode.execute({"samples": encode(picture)}, scale=2).args
    assert image.shape == (1, 256, 256, 3)
    torch.testing.assert_close(image[:, ::2, ::2].permute(0, 3, 1, 2) * 2 - 1, picture, atol=1e-5, rtol=0)


def test_missing_weights_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "UNET_WEIGHTS", nodes.UNET_WEIGHTS.with_name("nowhere.safetensors"))
    with pytest.raises(ValueError, match=r"nowhere\.safetensors is missing"):
        nodes.ToMADemoUNet.execute("trained", 0)
