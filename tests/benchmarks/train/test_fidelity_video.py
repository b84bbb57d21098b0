"""The judge of clips: its figures by hand, and a whole run on random weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.fidelity import experiments, keys, video
from demo import models
from scripts.comfy_pack import pack_module


def test_flicker_is_what_changes_between_frames() -> None:
    still = torch.rand(2, 3, 1, 8, 8).expand(-1, -1, 5, -1, -1)
    assert torch.equal(video.flicker(still), torch.zeros(2))
    blinking = still.clone()
    blinking[1, :, ::2] += 0.5
    assert video.flicker(blinking).tolist() == pytest.approx([0.0, 0.25], abs=1e-6)


def test_seams_are_found_at_windows_borders() -> None:
    noise = torch.rand(1, 3, 2, 32, 32, generator=torch.Generator().manual_seed(0))
    apart = noise.clone()
    apart[..., 16:] += 2.0  # windows of 8 tokens of 2 pixels
    assert video.seams(noise).item() == pytest.approx(1.0, abs=0.4)
    assert video.seams(apart).item() > 5 * video.seams(noise).item()


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**models.WAN_CONFIG, "num_layers": 3}
    network = models.new_wan(0, config=config, to_train=False)
    save_file(network.state_dict(), tmp_path / "wan.safetensors")
    video.main(["--weights", str(tmp_path / "wan.safetensors"), "--clips", "1", "--out", str(tmp_path)])
    assert "| every step: 0.5 |" in capsys.readouterr().out
    rows = json.loads((tmp_path / "wan-4steps-choose.json").read_text())["rows"]
    assert rows["unmerged"]["distance"] == 0
    for name, row in rows.items():
        if not name.startswith(("unmerged", "rival")):
            assert row["distance"] > 0, name
            assert row["cost"] < 1, name
    assert rows["keys only: 0.5"]["distance"] < rows["every step: 0.5"]["distance"]


def test_other_ways_to_look_at_fewer_keys(tmp_path: Path) -> None:
    config = {**models.WAN_CONFIG, "num_layers": 2}
    network = models.new_wan(0, config=config, to_train=False)
    save_file(network.state_dict(), tmp_path / "wan.safetensors")
    given = ["--weights", str(tmp_path / "wan.safetensors"), "--clips", "1", "--steps", "2", "--out", str(tmp_path)]
    video.main([*given, "--ideas"])
    rows = json.loads((tmp_path / "wan-2steps-choose-ideas.json").read_text())["rows"]
    del rows["unmerged"]
    assert set(rows) == set(video.ideas())
    assert all(row["distance"] > 0 and row["cost"] < 1 for row in rows.values())
    assert len({row["distance"] for row in rows.values()}) == len(rows), "no two of them are the same"


def test_a_key_weighs_what_it_stands_for(pack: ModuleType) -> None:
    """A mean of equal keys with the logarithm of their number is as good as all of them."""
    core, state = pack_module("toma_core"), pack_module("toma_core.state")
    generator = torch.Generator().manual_seed(0)
    kinds = torch.nn.functional.normalize(torch.randn(1, 8, 16, generator=generator), dim=-1)
    x = kinds[:, torch.tensor([0] * 9 + [1] * 2 + list(range(2, 8)) * 8 + [7] * 5)]
    assert x.shape[1] == 64
    config = core.ToMAConfig(ratio=0.875, min_tokens=4)
    plan = state.RunState(core.Schedule(config, (1.0,))).plan(
        x, (8, 8), "", core.StepPlan(0, core.StepMode.MERGED, 0.875, 0, 0), (None,)
    )
    counts = keys.sizes(plan)
    assert counts.sum().item() == pytest.approx(64, rel=1e-3)
    q = torch.randn(1, 5, 16, generator=generator)
    means = pack_module("toma_core.merge").merge(x, plan)
    attend = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(attend(q, means, means, counts.log()[:, None]), attend(q, x, x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("rows", "columns", "seen"), [(2, 2, [0, 2, 8, 10]), (1, 2, [0, 2, 4, 6, 8, 10, 12, 14])])
def test_one_row_and_column_in_two(rows: int, columns: int, seen: list[int], pack: ModuleType) -> None:
    """Of every frame: here two of 4 x 4."""
    grid = SimpleNamespace(grid=(2, 4, 4))
    fewer: Any = None

    def note(patch: Any, given: Any) -> Any:
        nonlocal fewer
        fewer = given
        return patch

    with experiments.replaced(keys, {"looking_at": note}):
        keys.strided(lambda model: model, rows, columns)
    tokens = torch.arange(32.0)[None, :, None]
    found = fewer(SimpleNamespace(windows=grid), tokens).flatten().tolist()
    assert found == [*seen, *[16 + token for token in seen]]


def test_windows_through_all_frames(pack: ModuleType) -> None:
    core = pack_module("toma_core.windows")
    made = experiments.through_frames(core.make_windows, 4)(6, 8, core.WindowKind.TILE, 8, False, 5)
    assert made.tokens == 5 * 6 * 8
    assert made.counts == (60, 60, 60, 60)  # rows of three
    x = torch.arange(made.tokens).float()[None, :, None]
    split = made.split(x)
    assert torch.equal(made.join(split), x), "every token is in one window"
    frames, columns = split[0, 0, :, 0] // 48, split[0, 0, :, 0] % 8
    assert frames.unique().tolist() == [0, 1, 2, 3, 4]
    assert columns.max() < 4
    update = torch.randn(1, *made.source.shape, 3)
    assert torch.equal(made.add(x.expand(-1, -1, 3), update), x + made.join(update))
