"""Reproduce public bug reports about token merging and step caches in ComfyUI, each with a small input.

The table in docs/reliability.md has a row for each report.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import comfy.model_management as management
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from scripts.comfy_pack import pack_module
from scripts.comfyui import ROOT
from testbed import models
from tests.nodes.adapters.helpers import balanced
from tests.nodes.adapters.test_evaluations import Trained

report_text = pack_module("nodes.adapters.report_text")

STEPS, HEIGHT, WIDTH = 6, 18, 26


class Lab:
    """A small Flux with and without ToMA, and its pictures."""

    def __init__(self, stats_of: Any) -> None:
        self.model = models.flux()
        self.stats_of = stats_of
        self.merged = balanced(self.model)
        self.plain, self.first = self.drawn(self.model), self.drawn()
        assert not torch.equal(self.first, self.plain)

    def drawn(self, model: Any = None, height: int = HEIGHT, width: int = WIDTH, **options: Any) -> Tensor:
        return models.sample(model or self.merged, height, width, **{"steps": STEPS, **options})

    def as_fresh(self, **options: Any) -> Tensor:
        """Check that the latent equals the latent of a merged model that has never run before. Return the latent."""
        out = self.drawn(**options)
        assert torch.equal(out, self.drawn(balanced(models.flux()), **options))
        return out


Tried = Callable[[Lab], None]
REPORTS: dict[str, Tried] = {}  # by report: the function that reproduces it


@pytest.fixture(scope="module")
def lab(pack: Any, stats_of: Any) -> Lab:
    return Lab(stats_of)


def report(*sources: str) -> Callable[[Tried], Tried]:
    def added(tried: Tried) -> Tried:
        REPORTS.update(dict.fromkeys(sources, tried))
        return tried

    return added


def enlarged(lab: Lab) -> dict[str, Any]:
    latent = torch.nn.functional.interpolate(lab.first, scale_factor=2)
    return {"height": 2 * HEIGHT, "width": 2 * WIDTH, "latent": latent, "steps": 4, "denoise": 0.5, "seed": 9}


# By report: options of a second run.
SECOND_RUNS: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "welltop-cn/ComfyUI-TeaCache#7": lambda lab: {"height": 30, "width": 20},
    "welltop-cn/ComfyUI-TeaCache#15": lambda lab: {  # a detailer with fewer steps
        "height": 13, "width": 11, "steps": 4, "noise_mask": torch.ones(1, 1, 13, 11).tril(),
    },
    "welltop-cn/ComfyUI-TeaCache#17": enlarged,
    "chengzeyi/Comfy-WaveSpeed#14": enlarged,
    "chengzeyi/Comfy-WaveSpeed#40": lambda lab: {"positive": models.conditioning(lab.model, 13, seed=3)},
    "chengzeyi/Comfy-WaveSpeed#114": lambda lab: {"positive": models.conditioning(lab.model, 5, seed=3)},
    "shiimizu/ComfyUI-TiledDiffusion#67": lambda lab: {"positive": models.conditioning(lab.model, seed=8), "seed": 11},
}  # fmt: skip


@report(*SECOND_RUNS)
def a_second_run(lab: Lab) -> None:
    for options in SECOND_RUNS.values():
        lab.as_fresh(**options(lab))


@report("welltop-cn/ComfyUI-TeaCache#8", "Comfy-Org/ComfyUI#8888")
def a_node_with_ratio_zero_or_taken_out(lab: Lab) -> None:
    for model in (lab.model, balanced(lab.merged, ratio=0.0)):
        assert torch.equal(lab.drawn(model), lab.plain)


@report("nunchux-ai/nunchaku#597", "chengzeyi/Comfy-WaveSpeed#57")
def a_batch_of_three(lab: Lab) -> None:
    alone = float((lab.first - lab.plain).norm() / lab.plain.norm())
    batches = lab.drawn(batch=3), lab.drawn(lab.model, batch=3)
    errors = [float((merged - plain).norm() / plain.norm()) for merged, plain in zip(*batches, strict=True)]
    assert errors[0] == pytest.approx(alone, rel=0.02)
    assert max(errors) < 2 * alone


@report("nunchux-ai/ComfyUI-nunchaku#690", "lldacing/ComfyUI_Patches_ll#7", "kijai/ComfyUI-KJNodes#344")
def an_interrupt_or_an_error_inside_a_step(lab: Lab) -> None:
    for error in (management.InterruptProcessingException, ValueError):
        with pytest.raises(error):
            lab.drawn(callback=Mock(side_effect=[None, None, error]))
        assert torch.equal(lab.drawn(), lab.first)


@report("Comfy-Org/ComfyUI#10344", "Acly/krita-ai-diffusion#2093")
def another_number_of_conditions_in_the_middle(lab: Lab) -> None:
    """The batch has two pictures, and a region is active in a part of the run."""
    positive = [
        *models.conditioning(lab.model, seed=1),
        *models.conditioning(lab.model, seed=3, start_percent=0.3, end_percent=0.7, area=(10, 12, 4, 6), strength=1.0),
    ]
    assert lab.as_fresh(batch=2, positive=positive).isfinite().all()
    stats = lab.stats_of(lab.merged)
    assert 0 < stats.merged_in.total() < stats.evaluations


@report("dbolya/tomesd#25")
def global_random_numbers(lab: Lab) -> None:
    for options in ({}, {"sampler": "euler_ancestral"}):
        states = []
        for model in (lab.model, lab.merged):
            torch.manual_seed(3)
            lab.drawn(model, **options)
            states.append(torch.get_rng_state())
        assert torch.equal(*states)


@report("ussoewwin/ComfyUI-QwenImageLoraLoader#17", "welltop-cn/ComfyUI-TeaCache#24")
def a_lora_put_on_and_taken_off(lab: Lab) -> None:
    weights = lab.model.model.state_dict()
    key = next(name for name, w in weights.items() if "single_blocks.1" in name and w.ndim == 2)
    patches = {key: ("diff", (torch.randn(weights[key].shape, generator=torch.Generator().manual_seed(4)),))}
    for _ in range(2):
        late, early = lab.merged.clone(), models.flux()
        for model in (late, early):
            model.add_patches(patches, 0.1)
        outs = [lab.drawn(late), lab.drawn(balanced(early))]
        assert torch.equal(*outs)
        assert not torch.equal(outs[0], lab.first)
        assert torch.equal(lab.drawn(), lab.first)


@report("ClownsharkBatwing/RES4LYF#237", "xmarre/ComfyUI-Spectrum-MiniMax-H3#103")
def samplers_that_evaluate_several_times_a_step(lab: Lab) -> None:
    """All evaluations of a step have the mode of the step, unless new noise makes them full."""
    for sampler in ("res_multistep", "dpmpp_2s_ancestral", "seeds_3", "heunpp2"):
        lab.drawn(sampler=sampler, steps=8)
        stats = lab.stats_of(lab.merged)
        assert stats.steps == set(range(8)), sampler
        if sampler in ("res_multistep", "heunpp2"):
            assert sorted(stats.merged_steps) == [1, 2, 3, 5, 6], sampler
        else:
            assert any(reason.id.value == "new_noise" for reason in stats.full_reasons), sampler


@report("Comfy-Org/ComfyUI#12340", "H-EmbodVis/EasyCache#1")
def step_caches_of_comfyui(lab: Lab) -> None:
    nodes = pytest.importorskip("comfy_extras.nodes_easycache")
    for node in (nodes.EasyCacheNode, nodes.LazyCacheNode):
        options = {"reuse_threshold": 0.5, "start_percent": 0.1, "end_percent": 0.9, "verbose": False}
        cached = [node.execute(model=m, **options).result[0] for m in (lab.merged, balanced(models.flux()))]
        outs = [lab.drawn(model, steps=10) for model in cached]
        assert torch.equal(*outs)


@report("welltop-cn/ComfyUI-TeaCache#182")
def another_number_of_frames(lab: Lab) -> None:
    merged = balanced(models.wan())
    first = lab.drawn(merged, frames=3)
    assert torch.equal(lab.drawn(merged, frames=5), lab.drawn(balanced(models.wan()), frames=5))
    assert torch.equal(lab.drawn(merged, frames=3), first)


@report("welltop-cn/ComfyUI-TeaCache#159")
def a_picture_to_edit(lab: Lab) -> None:
    """With a reference, the error of merging is at most twice the error without a reference."""
    few = Trained("few")
    picture = few.drawn(few.model)
    plain = float((few.drawn(few.merged) - picture).norm() / picture.norm())
    positive = few.prompt(3, reference_latents=[picture])
    unmerged = few.drawn(few.model, positive=positive)
    for settings in ({}, {"merge_references": True}):
        merged = few.drawn(balanced(few.model, ratio=0.5, **settings), positive=positive)
        assert float((merged - unmerged).norm() / unmerged.norm()) < 2 * plain


@report("kijai/ComfyUI-KJNodes#210")
def a_range_in_which_nothing_happens(lab: Lab) -> None:
    merged = balanced(lab.model, start_percent=0.9)
    assert torch.equal(lab.drawn(merged), lab.plain)
    text = report_text.summary(lab.stats_of(merged))
    assert "start percent" in text
    assert not text.startswith("On")


@report("Comfy-Org/ComfyUI#14389", "FearL0rd/ComfyUI-ParallelAnything#1")
def a_batch_that_another_node_splits(lab: Lab) -> None:
    """The batch has two pictures with both prompts. Half of it has as many rows as one picture with both prompts."""

    def halves(executor: Any, x: Tensor, timestep: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def part(value: Any, half: slice) -> Any:
            return value[half] if isinstance(value, Tensor) and len(value) == len(x) else value

        outs = []
        for half in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
            named = {name: part(value, half) for name, value in kwargs.items()}
            outs.append(executor(*(part(value, half) for value in (x, timestep, *args)), **named))
        return torch.cat(outs)

    split = [model.clone() for model in (lab.merged, lab.model)]
    for model in split:
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "halves", halves)
    outs = [lab.drawn(model, batch=2) for model in split]
    torch.testing.assert_close(*outs)
    assert "changed the number of images" in report_text.summary(lab.stats_of(split[0]))


@report("chengzeyi/Comfy-WaveSpeed#15")
def a_cache_that_skips_blocks_of_full_steps(lab: Lab) -> None:
    """A block that was skipped in a full step has no cache, and runs unmerged until the next full step."""

    def stats(skips: set[int]) -> Any:
        step = 0

        def skipping(args: Any, extra: Any) -> Any:
            return {"img": args["img"]} if step in skips else extra["original_block"](args)

        def counted(done: int, *_: Any) -> None:
            nonlocal step
            step = done + 1

        model = lab.merged.clone()
        model.set_model_patch_replace(skipping, "dit", "single_block", 2)
        lab.drawn(model, steps=8, callback=counted)
        return lab.stats_of(model)

    assert stats(set()).unmerged == {}
    found = stats({4})
    assert sorted(found.merged_steps) == [1, 2, 3, 5, 6]
    assert [(str(why), blocks) for why, blocks in found.unmerged_names().items() if "cached" in str(why)] == [
        ("nothing cached yet for a prompt, size or part of the picture", {"single.2"})
    ]


@report("kijai/ComfyUI-WanVideoWrapper#160")
def context_windows(lab: Lab) -> None:
    """Fixed windows have separate caches. Moving windows have no valid cache, so they are not merged."""
    nodes = pytest.importorskip("comfy_extras.nodes_context_windows")
    inputs = nodes.ContextWindowsManualNode.define_schema().inputs
    options = {item.id: getattr(item, "default", None) for item in inputs}
    options |= {"context_length": 4, "context_overlap": 1, "dim": 2, "freenoise": False}
    kinds = importlib.import_module("comfy.context_windows").ContextSchedules
    for schedule in (kinds.STATIC_STANDARD, kinds.UNIFORM_STANDARD):
        outs = []
        for _ in range(2):
            options |= {"model": balanced(models.wan()), "context_schedule": schedule}
            windows = nodes.ContextWindowsManualNode.execute(**options).result[0]
            outs.append(lab.drawn(windows, frames=7))
            assert (lab.stats_of(windows).merged_in.total() > 0) is (schedule == kinds.STATIC_STANDARD)
        assert torch.equal(*outs)


@pytest.mark.parametrize("tried", dict.fromkeys(REPORTS.values()))
def test_report(lab: Lab, tried: Tried) -> None:
    """Reproduce a report. After that, the merged model's next latent must equal its first latent bit for bit."""
    tried(lab)
    assert torch.equal(lab.drawn(), lab.first)


def test_the_page_has_each() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    listed = re.findall(r"\[([\w-]+)#(\d+)\]\(https://github\.com/([\w-]+)/([\w.-]+)/(?:issues|pull)/(\d+)\)", page)
    assert {f"{owner}/{name}#{number}" for *_, owner, name, number in listed} == set(REPORTS)
    assert all(shown == number for _, shown, *_, number in listed)
