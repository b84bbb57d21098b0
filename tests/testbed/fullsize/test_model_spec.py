"""Test that full-width models have as many weights as published, and are called as ComfyUI calls them."""

from importlib import import_module

import pytest
import torch

from benchmarks import cost, variants
from testbed import fullsize
from testbed.full_model import EDITORS, SPECS
from testbed.fullsize import Shape

# Billions of weights of each model, as published. The file of `ltx_av` is named 22. `h3` is the pruned checkpoint.
WEIGHTS = {
    "sdxl": 2.57, "flux": 11.9, "flux2": 32.2, "klein": 9.1, "chroma": 8.9, "z_image": 6.15, "lumina2": 2.6,
    "krea2": 12.8, "qwen_image": 20.4, "qwen_image21": 7.1, "sd3": 8.06, "omnigen2": 3.97, "ernie": 8.03,
    "ideogram": 9.28, "lens": 4.1, "cosmos": 2.09, "wan": 14.29, "ltx": 1.92, "ltx_av": 21.0, "h3": 20.2,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("pack")  # loads the pack before a model is built
every_model = pytest.mark.parametrize("name", SPECS)


@every_model
def test_as_large_as_its_checkpoint_and_few_blocks_fit_anywhere(name: str) -> None:
    """With as few blocks as `few` in its spec, a model in bf16 takes at most 5.7 GB. With its activations it fits a
    card of 10 GB."""
    full, few = (
        sum(parameter.numel() for parameter in cost.on_meta(name, blocks).model.diffusion_model.parameters()) / 1e9
        for blocks in (None, SPECS[name].few or None)
    )
    assert full == pytest.approx(WEIGHTS[name], rel=0.01)
    assert 2 * few < 5.7


@every_model
def test_few_blocks_are_called_as_the_sampler_calls_them(name: str) -> None:
    shape = Shape(name, 64, 64, 1, tiny=True)
    inputs = shape.inputs(torch.device("cpu"))
    with torch.no_grad():
        out = fullsize.patcher(name, torch.float32, torch.device("cpu"), tiny=True).model.apply_model(**inputs)
    assert out.shape == inputs["x"].shape
    if len(shape.streams) == 1:
        assert out.shape == (1, *shape.latent)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", [name for name in SPECS if name != "sdxl"])
def test_stacks_add_next_to_nothing(name: str) -> None:
    """Merging around stacks at ratio 0.5 halves the FLOPs. In plain PyTorch it adds at most 1.3 % to the number of
    operations."""
    shape = Shape(name, frames=4 if SPECS[name].audio else 1)  # with one frame, the text of these models would dominate
    toma = variants.toma("", ratio=0.5, skip_first_blocks=0)
    base, merged = cost.count(shape), cost.count(shape, toma)
    assert 1.85 < base.flops / merged.flops < 2.3
    assert 0 < merged.launches / base.launches - 1 < 0.013


@pytest.mark.parametrize("name", EDITORS)
def test_references_are_merged_or_in_the_way(name: str) -> None:
    shape = Shape(name, references=1)
    base = cost.count(shape, kernels=True).flops
    both = [variants.toma("", ratio=0.5, merge_references=too, skip_first_blocks=0) for too in (False, True)]
    gains = [base / cost.count(shape, merged, kernels=True).flops for merged in both]
    assert gains[0] < 1.5
    assert gains[1] > 2.0


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [("flux", "flux.FluxTokenizer"), ("klein", "flux.KleinTokenizer8B"), ("ltx", "lt.LTXVT5Tokenizer")],
)
def test_texts_are_as_long_as_comfyui_pads_a_prompt(name: str, tokenizer: str) -> None:
    module, kind = tokenizer.split(".")
    tokenize = getattr(import_module(f"comfy.text_encoders.{module}"), kind)().tokenize_with_weights
    lengths = {len(batch[0]) for key, batch in tokenize("a cat on a mat").items() if key != "l"}
    assert lengths == {SPECS[name].text[0]}
