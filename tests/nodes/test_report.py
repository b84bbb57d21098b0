import re
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

Report = pack_module("nodes.report").ToMAReport
reasons = pack_module("toma_core.reasons")
Reason = reasons.Reason
charts, report_text = pack_module("nodes.report_charts"), pack_module("nodes.adapters.report_text")
LATENT = {"samples": torch.zeros(1, 4, 8, 8)}


@pytest.fixture
def shown(previews: None) -> Any:
    """shown(model): return the report node's outputs (text, image) and its complete result."""

    def show(model: Any) -> tuple[str, torch.Tensor, Any]:
        out = Report.execute(model, LATENT)
        text, image, latent = out.args
        assert latent is LATENT
        assert (image.ndim, len(image), image.dtype) == (4, 1, torch.float32)
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


def test_report_follows_clones_and_the_last_run(unet: Any, attach: Any, shown: Any) -> None:
    model = attach(unet)
    later = model.clone()
    models.sample(later, 24, 24, steps=1)
    assert "(12 x 12)" in shown(model)[0]
    models.sample(model, 32, 32, steps=1)
    assert "(16 x 16)" in shown(later)[0]


@pytest.mark.compat
@loop(
    ("ratios", "said"),
    [
        ([0.5], "This model has not been sampled yet. Connect the sampler's latent"),
        ([0.5, 0.0], "This model has no ToMA node before it, or one that is bypassed or whose ratio"),
        ([], "This model has no ToMA node before it, or one that is bypassed or whose ratio"),
    ],
)
def test_report_without_a_run(ratios: list[float], said: str, unet: Any, attach: Any, shown: Any) -> None:
    model = unet
    for ratio in ratios:
        model = attach(model, ratio=ratio)
    text, image, _ = shown(model)
    assert text.startswith(said)
    assert image.shape[2] > 700, "an output all the same"


def test_report_with_a_picture_draws_over_it(unet: Any, attach: Any, shown: Any) -> None:
    picture, darker = torch.zeros(1, 48, 48, 3), list[bool]()
    model = attach(unet)
    for steps in (0, 1):
        if steps:
            models.sample(model, 24, 24, steps=steps)
        plain, over = shown(model)[1], Report.execute(model, LATENT, picture).args[1]
        assert over.shape == plain.shape
        darker.append(bool(over.mean() < plain.mean()))
    assert darker == [False, True]


def test_what_the_picture_shows_stands_on_the_node(unet: Any, attach: Any, shown: Any) -> None:
    """If nothing was merged, the charts are shown, but no map."""
    for least, maps, first, steps in (
        (4, ["caption_map"], "On: ", "merged steps: 1"),
        (1000, [], f"Nothing was merged: {Reason.TOO_FEW_TOKENS(least=1000)}.", "full steps: 1"),
    ):
        model = attach(unet, min_tokens=least)
        _, empty, answer = shown(model)
        assert "caption" not in str(answer.ui["toma"])
        models.sample(model, 24, 24, steps=1)
        text, image, answer = shown(model)
        assert text.startswith(first)
        assert re.findall(r"\w+ steps: 1|evaluations: .*", text) == [steps, f"evaluations: 1, merged: {len(maps)}"]
        (message,) = answer.ui["toma"]
        assert re.findall(r"caption_\w+", str(message["lines"])) == [*maps, "caption_steps", "caption_blocks"]
        assert image.shape[1] > empty.shape[1] + 100


def outcome(model: Any, attach: Any, stats_of: Any, **settings: Any) -> dict[str, Any]:
    """Return the latent, report and chart of a run."""
    merged = attach(model, **settings)
    latent = models.sample(merged, 24, 24, steps=3)
    stats = stats_of(merged)
    return {
        "latent": latent.tolist(),
        "unmerged": stats.unmerged,
        "report": list(map(reasons.json_of, report_text.report(stats))),
        "headline": report_text.headline(stats),
        "chart": charts.steps_chart(stats, 400).tobytes(),
    }


@loop(
    "settings", [{"skip_last_blocks": 2, "min_tokens": 40}, {"min_tokens": 1000}, {"full_step_interval": 2}], ids=repr
)
def test_texts_decide_nothing(
    settings: dict[str, Any], unet: Any, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = outcome(unet, attach, stats_of, **settings)
    messages = {name: f"<{name}>" for name in report_text.ENGLISH["messages"]}
    monkeypatch.setattr(report_text, "ENGLISH", {"labels": {}, "messages": messages})
    assert outcome(unet, attach, stats_of, **settings) == before
    assert str(before["headline"]) == f"<{before['headline'].id.value}>"
