from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

Report = pack_module("nodes.report").ToMAReport
Reason = pack_module("toma_core.reasons").Reason
LATENT = {"samples": torch.zeros(1, 4, 8, 8)}


@pytest.fixture
def shown(previews: None) -> Any:
    """shown(model): return the report node's outputs (text, image) and its complete result."""

    def show(model: Any) -> tuple[str, torch.Tensor, Any]:
        out = Report.execute(model, LATENT)
        text, image, latent = out.args
        assert latent is LATENT
        assert image.ndim == 4
        assert image.shape[0] == 1
        assert image.dtype == torch.float32
        assert 0 <= image.min() <= image.max() <= 1
        assert out.ui["text"] == (text,)
        assert len(out.ui["images"]) == 1
        return text, image, out

    return show


@pytest.mark.compat
def test_report_shows_what_was_merged_where_and_when(unet: Any, attach: Any, shown: Any) -> None:
    model = attach(unet, end_percent=0.5, min_tokens=100, skip_last_blocks=1, granularity="block", selection_interval=2)
    models.sample(model, 24, 24, steps=4, scheduler="normal")
    text, _, _ = shown(model)
    lines = [line.strip() for line in text.splitlines()]
    few = f"The other blocks: {Reason.TOO_FEW_TOKENS(least=100)}."
    assert lines[0] == f"On: 50 % of the tokens merged, 4 of 17 blocks, 2 of 4 steps. {few}"
    assert "tokens: 144 -> 72 (12 x 12)" in lines
    assert "1 selections, 1 weightings" in lines
    assert "merged steps: 1-2, at ratio 0.5" in lines
    assert "full steps: 3-4 (end percent = 0.5)" in lines
    assert "model evaluations: 4, merged: 2" in lines
    assert "merged blocks: input.4.0, input.5.0, output.3.0, output.4.0" in lines
    assert f"not merged ({Reason.SKIP_LAST_BLOCKS(count=1)}): output.5.0" in lines
    small = next(line for line in lines if line.startswith(f"not merged ({Reason.TOO_FEW_TOKENS(least=100)}): "))
    assert small.endswith("input.7.0-1, input.8.0-1, middle.0.0-1, output.0.0-1, output.1.0-1, output.2.0-1")


def test_report_does_not_claim_a_merge_that_never_was(unet: Any, attach: Any, shown: Any) -> None:
    model = attach(unet, min_tokens=1000)
    models.sample(model, 24, 24, steps=2)
    text, _, _ = shown(model)
    assert text.splitlines()[0] == f"Nothing was merged: {Reason.TOO_FEW_TOKENS(least=1000)}."
    assert "merged steps" not in text
    assert "full steps: 1-2" in text
    assert "model evaluations: 2, merged: 0" in text


def test_report_follows_clones_and_the_last_run(unet: Any, attach: Any, shown: Any) -> None:
    model = attach(unet)
    later = model.clone()
    models.sample(later, 24, 24, steps=1)
    assert "(12 x 12)" in shown(model)[0]
    models.sample(model, 32, 32, steps=1)
    assert "(16 x 16)" in shown(later)[0]


@pytest.mark.compat
def test_report_without_a_run_says_what_to_connect(unet: Any, attach: Any, shown: Any) -> None:
    text, image, _ = shown(attach(unet))
    assert text.startswith("This model has not been sampled yet. Connect the sampler's latent")
    assert image.shape[2] > 700, "an output all the same"


@loop("removed", [False, True])
def test_report_of_a_model_without_toma(unet: Any, attach: Any, shown: Any, removed: bool) -> None:
    model = attach(attach(unet), ratio=0.0) if removed else unet
    assert shown(model)[0].startswith("This model has no ToMA node before it, or one that is bypassed or whose ratio")


def test_report_after_an_error_has_the_steps_until_then(unet: Any, attach: Any, shown: Any) -> None:
    def stop(step: int, *_: Any) -> None:
        if step == 1:
            raise RuntimeError("enough")

    model = attach(unet)
    with pytest.raises(RuntimeError, match="enough"):
        models.sample(model, 24, 24, steps=4, callback=stop)
    text, image, _ = shown(model)
    assert "2 of 4 steps" in text.splitlines()[0]
    assert image.isfinite().all()


def test_report_with_a_picture_draws_over_it(unet: Any, attach: Any, shown: Any) -> None:
    model = attach(unet, end_percent=0.5)
    models.sample(model, 24, 24, steps=4, scheduler="normal")
    _, plain, _ = shown(model)
    picture = torch.zeros(1, 48, 48, 3)
    over = Report.execute(model, LATENT, picture).args[1]
    assert over.shape == plain.shape
    assert over.mean() < plain.mean()
    without_a_run = attach(unet)
    assert Report.execute(without_a_run, LATENT, picture).args[1].shape == shown(without_a_run)[1].shape


def test_what_the_picture_shows_stands_on_the_node(unet: Any, attach: Any, shown: Any) -> None:
    """Charts are shown even if nothing was merged. Then there is no map."""
    for least, maps in ((4, ["caption_map"]), (1000, [])):
        model = attach(unet, min_tokens=least)
        _, empty, answer = shown(model)
        assert "caption" not in str(answer.ui["toma"])
        models.sample(model, 24, 24, steps=1)
        _, image, answer = shown(model)
        (message,) = answer.ui["toma"]
        assert re.findall(r"caption_\w+", str(message["lines"])) == [*maps, "caption_steps", "caption_blocks"]
        assert image.shape[1] > empty.shape[1] + 100
