from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

given, patch = pack_module("nodes.validate_inputs"), pack_module("nodes.toma")
report, benchmark = pack_module("nodes.report"), pack_module("nodes.benchmark")
calibrate = pack_module("nodes.calibrate")
ConfigError = pack_module("toma_core.config").ConfigError

WRONG: dict[str, list[Any]] = {
    "model": [None, 1.5, "x" * 10_000, ["loader"], {"a": 1}],
    "latent": [None, 3, {}, {"samples": None}, "latent"],
    "image": [5, "picture", [], torch.zeros(3), torch.zeros(1, 3, 8, 8), {}],
    "conditioning": [None, 5, [], [1], [[1]], "prompt", {}],
}


@loop(("kind", "value"), [(kind, value) for kind in WRONG for value in WRONG[kind]])
def test_anything_else_is_refused_with_what_to_connect(kind: str, value: Any) -> None:
    check = getattr(given, kind)
    with pytest.raises(ConfigError) as refused:
        check("positive", value) if kind == "conditioning" else check(value)
    message = str(refused.value)
    assert message.startswith("ToMA: ")
    assert "Allowed: a" in message
    assert "Connect " in message
    assert len(message) < 300


def test_every_node_validates(unet: Any) -> None:
    text, latent = models.conditioning(unet), {"samples": torch.zeros(1, 4, 8, 8)}
    timed = {"ratio": 0.5, "preset": "balanced", "sweep": False, "steps": 2, "runs": 2}
    probed = {"target": "balanced", "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}
    sampling = {"model": unet, "positive": text, "negative": text, "latent": latent}
    calls = [
        (patch.ToMA, {"model": None, "ratio": 0.5, "preset": "balanced"}),
        (patch.ToMAAdvanced, {"model": "model", "preset": "balanced", "ratio": 0.5}),
        (report.ToMAReport, {"model": 3, "latent": latent}),
        (report.ToMAReport, {"model": unet, "latent": latent, "image": "picture"}),
    ]
    for node, others in ((benchmark.ToMABenchmark, timed), (calibrate.ToMACalibrate, probed)):
        for wrong in ({"model": None}, {"positive": 3}, {"latent": []}, {"negative": 1}):
            calls.append((node, {**others, **sampling, **wrong}))
    for node, inputs in calls:
        with pytest.raises(ConfigError, match=r"^ToMA: .* Allowed: .* Connect "):
            node.execute(**inputs)
