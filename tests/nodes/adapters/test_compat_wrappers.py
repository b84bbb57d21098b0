"""Test wrappers, model patchers and packages that a later ComfyUI has changed: the model runs unmerged."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfy.patcher_extension import WrapperExecutor

from scripts import comfy_pack
from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import every_kind

compat = pack_module("nodes.adapters.compat")
run = pack_module("nodes.adapters.patch_model")
report_text = pack_module("nodes.adapters.report_text")


def sample(model: Any) -> torch.Tensor:
    return models.sample(model, 16, 16, steps=2)


# By kind of wrapper: the function that it wraps.
TARGETS = {"OUTER_SAMPLE": "outer_sample", "CALC_COND_BATCH": "_calc_cond_batch", "APPLY_MODEL": "_apply_model"}


@every_kind
@loop("hook", TARGETS)
def test_wrapper_that_is_called_in_another_way(
    monkeypatch: Any, attach: Any, warnings: Any, model: Any, hook: str, no_state_left: None
) -> None:
    """Simulate a later ComfyUI that passes wrappers a single object with all arguments."""
    before = WrapperExecutor.execute

    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.original.__name__ != TARGETS[hook]:
            return before(self, *args, **kwargs)
        if len(args) == 1 and isinstance(args[0], SimpleNamespace):
            args, kwargs = args[0].args, args[0].kwargs
        if self.is_last:
            return self.original(*args, **kwargs)
        return self.wrappers[self.idx](self, SimpleNamespace(args=args, kwargs=kwargs))

    plain = sample(model)
    monkeypatch.setattr(WrapperExecutor, "execute", execute)
    assert torch.equal(sample(model), plain)
    patched = attach(model)
    for _ in range(2):
        assert torch.equal(sample(patched), plain)
    (warning,) = warnings()
    assert f"WrappersMP.{hook}" in warning


METHODS = ("next", "observe", "evaluation", "predicted", "close")
OWN_CODE = {"run_config": run, **dict.fromkeys(METHODS, run.SamplingRun)}


def fail_from(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
    """Make a function of the pack raise a TypeError from its call number `call` on, counted from 0."""
    original, calls = getattr(OWN_CODE[name], name), list[int]()

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > call:
            raise TypeError("of our own")
        return original(*args, **kwargs)

    monkeypatch.setattr(OWN_CODE[name], name, failing)


@loop("name", OWN_CODE)
def test_own_errors_do_not_end_a_run(
    name: str, monkeypatch: Any, attach: Any, warnings: Any, flux: Any, stats_of: Any
) -> None:
    """If an error of the pack prevents the choice of an evaluation's mode, the evaluation is full."""
    merged, plain = attach(flux), sample(flux)
    fail_from(monkeypatch, name, 0)
    with pytest.raises(TypeError, match="of our own"):
        sample(merged)  # tests raise the error
    monkeypatch.setattr(compat, "RAISES_OWN_ERRORS", False)
    images = [sample(merged) for _ in range(2)]
    (warning,) = warnings()
    assert "TypeError: of our own" in warning
    assert "please report it" in warning
    if name in ("run_config", "observe", "evaluation"):
        assert all(torch.equal(image, plain) for image in images)
    if name in ("observe", "evaluation"):
        assert "ComfyUI-ToMA itself failed" in report_text.summary(stats_of(merged))


@loop("name", ["observe", "evaluation"])
def test_steps_after_an_own_error_are_full(
    name: str, monkeypatch: Any, attach: Any, warnings: Any, flux: Any, stats_of: Any
) -> None:
    monkeypatch.setattr(compat, "RAISES_OWN_ERRORS", False)
    merged, modes, call = attach(flux), list[Any](), run.merged_call

    def noted(full: Any, select: Any, sampling: Any, evaluation: Any, *rest: Any) -> Any:
        modes.append(evaluation.step_plan.mode)
        return call(full, select, sampling, evaluation, *rest)

    monkeypatch.setattr(run, "merged_call", noted)
    fail_from(monkeypatch, name, 3)
    models.sample(merged, 16, 16, steps=8, cfg=1.0)
    assert len(modes) == 3
    stats = stats_of(merged)
    assert (stats.evaluations, stats.merged_in.total()) == (8, sum(mode.merges for mode in modes[:3]))
    assert len(warnings()) == 1


GONE = (*TARGETS, "add_wrapper_with_key", "remove_wrappers_with_key", "clone")


@every_kind
@loop("name", GONE)
def test_what_is_gone_leaves_the_model_as_it_was(
    monkeypatch: Any, attach: Any, warnings: Any, model: Any, name: str
) -> None:
    """A later ComfyUI lacks a kind of wrapper, or a method of the model."""
    plain = sample(model)
    left = {key: value for key, value in vars(run.WrappersMP).items() if key.isupper() and key != name}
    with monkeypatch.context() as later:
        later.setattr(run, "WrappersMP", SimpleNamespace(**left))
        if not name.isupper():
            later.delattr(next(cls for cls in type(model).__mro__ if name in vars(cls)), name)
        assert attach(model) is model
    (warning,) = warnings()
    assert name in warning
    assert torch.equal(sample(model), plain)


def test_family_whose_class_has_moved(flux: Any, unet: Any, monkeypatch: Any, caplog: Any) -> None:
    """A second copy of the pack is loaded by a ComfyUI that has no Flux model."""
    monkeypatch.setitem(sys.modules, "comfy.ldm.flux.model", SimpleNamespace())
    monkeypatch.setattr(comfy_pack, "PACK_NAME", "pack_without_flux")
    caplog.set_level(logging.WARNING)
    try:
        other = pack_module("nodes.adapters.patch_model")
        settings = pack_module("toma_core.config").ToMAConfig(min_tokens=4)
        assert [r.getMessage() for r in caplog.records if "the classes of Flux" in r.getMessage()]
        assert torch.equal(sample(other.apply_toma(flux, settings)), sample(flux))
        assert not torch.equal(sample(other.apply_toma(unet, settings)), sample(unet))
    finally:
        for loaded in [name for name in sys.modules if name.startswith("pack_without_flux")]:
            del sys.modules[loaded]
