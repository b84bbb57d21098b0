"""Test the fixed transform between pictures and latents."""

import comfy.latent_formats
import pytest
import torch

from demo import latents


def test_pictures_and_latents_are_each_others_inverse() -> None:
    image = torch.rand(2, 3, 32, 48) * 2 - 1
    model, flux = latents.image_to_model(image), comfy.latent_formats.Flux()
    assert model.shape == (2, 16, 16, 24)
    assert model[:, 12:].abs().max() == 0
    assert torch.equal(latents.model_to_image(model), image)
    torch.testing.assert_close(latents.decode(latents.encode(image)), image, atol=1e-6, rtol=0)
    torch.testing.assert_close(flux.process_in(latents.encode(image)), model, atol=1e-6, rtol=0)
    torch.testing.assert_close(flux.process_out(model), latents.encode(image), atol=1e-5, rtol=0)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected pictures"):
        latents.image_to_model(torch.zeros(1, 3, 15, 16))
    with pytest.raises(ValueError, match="expected a latent"):
        latents.model_to_image(torch.zeros(1, 4, 16, 16))
