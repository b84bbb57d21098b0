"""Test `python -m demo`: its metrics, its table, its graphs, and one real run at a tiny size."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from demo import sampling, showcase
from demo.showcase_graphs import DIT, DIT_FILE, KINDS, UNET, Kind, sampling_graph
from demo.showcase_results import Case, Outcome, StepClock, explanation, side_by_side, table
from scripts.comfy_server import free_port
from scripts.comfyui import ROOT

SLOW = "Hardly faster or slower: SDXL UNet, tiny 128x128"
REPORT = "On: half; tokens: 1024 -> 512 (32 x 32), 256 -> 128 (16 x 16); 1 selections"


def outcome(seconds: float, value: float = 1.0, grey: int = 0, report: str = "") -> Outcome:
    picture = Image.new("RGB", (256, 256), (grey, grey, grey))
    return Outcome(seconds, torch.full((1, 4, 8, 8), value), [picture], report, picture if report else None)


def case(unmerged: list[float], merged: list[float], report: str = REPORT) -> Case:
    return Case(UNET, 128, [outcome(s, 2.0) for s in unmerged], [outcome(s, 1.5, 20, report) for s in merged])


def test_clock_leaves_out_the_first_step_and_loading() -> None:
    times = iter([10.0, 17.0])
    steps: list[tuple[int, int]] = []
    clock = StepClock(lambda: next(times), lambda done, total: steps.append((done, total)))
    clock("executing", {"node": "sampler"})
    for value in range(1, 8):
        clock("progress", {"node": "sampler", "value": value, "max": 7})
    clock("progress", {"node": "decode", "value": 1, "max": 1})
    clock("binary", b"preview")
    for node in ("sampler", "decode", None):
        clock("executing", {"node": node})
    assert clock.seconds_per_step == pytest.approx(7.0 / 6)
    assert steps == [(value, 7) for value in range(1, 8)]


def test_models_without_trained_weights_and_other_sizes_are_timing_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("demo.showcase_graphs.WEIGHTS_FOLDER", tmp_path)
    measured = case([2.0, 2.0, 2.5], [1.2, 1.6, 1.6])
    large = dataclasses.replace(measured, pixels=256)
    assert table([measured]).splitlines()[2].split()[-1] == "-"
    assert "Without an error: timing only." in explanation([measured], "CPU")
    (tmp_path / "deep.safetensors").touch()
    head, _, row = table([measured]).splitlines()
    assert (head.index("tokens"), head.index("faster")) == (row.index("1,024 -> 512"), row.index("1.25x"))
    assert row.split()[-5:] == ["(1.25-1.67,", "3)", "2.000", "1.600", "0.250"]
    assert "timing only" not in explanation([measured], "CPU")
    assert "timing only" in explanation([large], "CPU")
    assert measured.seed_error == 0.0
    assert case([1.0], [1.0], "nothing was merged: no step").tokens == "none merged"
    sheet = side_by_side([measured, large])
    assert sheet.size == side_by_side([measured]).size, "noise is not shown"
    # The middle pixel of the unmerged picture (black), and that of the merged picture below it (grey 20).
    middle = [sheet.getpixel((16 + 128, top + 30 + 128)) for top in (16, 16 + 30 + 256 + 16 + 18)]
    assert middle == [(0, 0, 0), (20, 20, 20)]


@pytest.mark.parametrize(
    ("unmerged", "merged", "said"),
    [
        ([1.0], [1.1], [SLOW]),
        ([4.0, 4.0], [1.0, 2.0], ["differ widely"]),
        ([4.0, 4.0], [2.0, 2.1], []),
    ],
)
def test_slow_and_noisy_results_are_called_so(unmerged: list[float], merged: list[float], said: list[str]) -> None:
    measured, busy = [case(unmerged, merged)], "differ widely" in said
    text, row = explanation(measured, "CPU"), table(measured).splitlines()[2]
    assert [part for part in (SLOW, "differ widely") if part in text] == said
    assert ("too busy to tell" in row) == busy != bool(re.search(r"\.\d\dx", row)), "no number that means nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_differ_only_by_the_merge_and_have_the_best_settings(kind: Kind) -> None:
    unmerged, merged = (sampling_graph(kind, 128, 4, 5, on) for on in (False, True))
    assert set(merged) - set(unmerged) == {"toma", "report"}
    assert merged["sampler"]["inputs"].pop("model") == ["toma", 0]
    assert unmerged["sampler"]["inputs"].pop("model") == ["loader", 0]
    assert all(merged[name] == node for name, node in unmerged.items())
    best, inputs = sampling.DEFAULTS[kind.name], unmerged["sampler"]["inputs"]
    found = inputs["cfg"], inputs["sampler_name"], inputs["scheduler"]
    assert found == (best["cfg"], best["sampler"], best["scheduler"])


def test_workflows_of_the_page_fit_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def choice() -> str:
        workflow = json.loads((tmp_path / "default" / "workflows" / "Demo-SDXL.json").read_text())
        return next(n for n in workflow["nodes"] if n["type"] == "ToMADemoUNet")["widgets_values"][0]

    weights = tmp_path / "weights"
    weights.mkdir()
    monkeypatch.setattr("demo.showcase_graphs.WEIGHTS_FOLDER", weights)
    assert showcase.place_workflows(tmp_path) == ["Demo-Flux", "Demo-Flux report", "Demo-SDXL", "Demo-SDXL report"]
    assert choice() == "random"
    (weights / "deep.safetensors").touch()
    showcase.place_workflows(tmp_path)
    assert choice() == "trained"


def test_demo_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = showcase.Settings(sizes=(64,), steps=3, repeats=1, batch=1, kinds=KINDS)
    cases = showcase.compare(settings, tmp_path)
    out, err = capfd.readouterr()
    assert [measured.kind for measured in cases] == [UNET, DIT]
    for measured in cases:
        # Pictures of 64 x 64 pixels have 16 x 16 tokens. The model's coarser grids have fewer tokens than `min_tokens`,
        # so they are not merged.
        assert measured.tokens == "256 -> 128"
        assert torch.isfinite(measured.merged[0].latent).all()
        assert 0 < measured.error < 2
        assert measured.name.split("64x64")[0].strip() in out
    assert "pair 1/1 with ToMA" in err
    for name in ("side_by_side.png", "merge_map.png"):
        assert Image.open(tmp_path / name).width > 250


def test_served_page_lists_the_demo_and_stops() -> None:
    command = [sys.executable, "-m", "demo", "--serve", "--listen", "--port", str(port := free_port())]
    # A shell that runs tests in the background makes all child processes ignore Ctrl-C, so restore the default.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ, preexec_fn=heard
    ) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "Press Ctrl-C" in line:
                    break
            text = "".join(lines)
            names = "Demo-Flux", "Demo-Flux report", "Demo-SDXL", "Demo-SDXL report"
            assert all(name in text for name in names)
            assert f"From other machines: this machine's address, port {port}." in text
            assert f":{port}/" in text
            with socket.create_connection(("127.0.0.2", port), timeout=120):
                pass
            url, _, first = text.split("Open ")[1].split()[0].partition("/?template=")
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            listed = json.load(opener.open(f"{url}/userdata?dir=workflows&recurse=true", timeout=120))
            assert sorted(listed) == sorted(f"{name}.json" for name in names)
            template = f"{url}/api/workflow_templates/demo/{first.partition('&')[0]}.json"
            assert json.load(opener.open(template, timeout=120))["nodes"]
            assert DIT_FILE in json.dumps(json.load(opener.open(f"{url}/object_info/UNETLoader", timeout=120)))
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()
    with pytest.raises(OSError, match="refused"):
        opener.open(url, timeout=120)
