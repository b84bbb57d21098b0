"""Provide fixtures: a shared model by name, the pack's warnings, and models that two devices run together."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module


@pytest.fixture
def model(request: pytest.FixtureRequest, kind: str) -> Any:
    """Return the shared model that the test's parameter `kind` names."""
    return request.getfixturevalue(kind)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the bytes that each run requests from ComfyUI for its caches."""
    reserve, found = pack_module("nodes.adapters.kv_memory").reserved, list[int]()
    run = pack_module("nodes.adapters.patch_model")
    monkeypatch.setattr(run, "reserved", lambda model, more: found.append(more) or reserve(model, more))
    return found


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """warnings(): return the warnings of the pack since the test began."""
    monkeypatch.setattr(pack_module("nodes.adapters.compat"), "_warned", set())
    caplog.set_level(logging.WARNING)
    return lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith("ToMA")]


@pytest.fixture
def on_two_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], Any]:
    """on_two_devices(model, other): return a model whose conditions are evaluated by `model` and by `other` in two
    threads, as in ComfyUI's MultiGPU CFG Split. The CPU stands in for both devices."""
    multigpu = pytest.importorskip("comfy.multigpu")
    if not hasattr(multigpu, "MultiGPUThreadPool"):
        pytest.skip("this ComfyUI shares no run")
    import comfy.model_management
    from comfy.patcher_extension import WrappersMP

    monkeypatch.setattr(comfy.model_management, "set_torch_device", lambda *_: None, raising=False)
    devices = torch.device("cpu"), torch.device("cpu", 0)

    def split(model: Any, other: Any) -> Any:
        def shared(executor: Any, *args: Any, **kwargs: Any) -> Any:
            guider, clone = executor.class_obj, other.clone()
            clone.model.current_patcher = clone
            pool = multigpu.MultiGPUThreadPool(list(devices))
            guider.model_options["multigpu_clones"] = dict(zip(devices, (guider.model_patcher, clone), strict=True))
            guider.model_options["multigpu_thread_pool"] = pool
            try:
                return executor(*args, **kwargs)
            finally:
                for name in ("multigpu_clones", "multigpu_thread_pool"):
                    guider.model_options.pop(name, None)
                pool.shutdown()

        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "shared", shared)
        return model

    return split
