from __future__ import annotations

from typing import Any

import pytest

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

report_text = pack_module("nodes.adapters.report_text")


def outcome(model: Any, attach: Any, stats_of: Any, **settings: Any) -> dict[str, Any]:
    """Return the latent, report and chart of a run."""
    charts = pack_module("nodes.report_charts")
    merged = attach(model, **settings)
    latent = models.sample(merged, 24, 24, steps=3)
    stats = stats_of(merged)
    return {
        "latent": latent.tolist(),
        "unmerged": stats.unmerged,
        "report": list(map(pack_module("toma_core.reasons").json_of, report_text.report(stats))),
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
