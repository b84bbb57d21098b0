"""Test the KV cache in the graphs of a compiled model, in every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.nodes.adapters import test_kv_cache as eager
from tests.nodes.adapters.cards import a_card, compared, sampled
from tests.nodes.adapters.compile import test_compile
from tests.nodes.adapters.compiling import Counting, compiled
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH
from tests.nodes.adapters.helpers import balanced
from tests.nodes.adapters.kv_helpers import KEYS

fresh_compiler = test_compile.fresh_compiler
without_overrides = eager.without_overrides


@pytest.mark.parametrize(("kind", "packed"), [*((kind, False) for kind in eager.SHOWN), ("flux", True), ("wan", True)])
def test_the_same_inside_the_graphs_of_a_compiled_model(
    kind: str, packed: bool, model_of: Any, attach: Any, stats_of: Any, fresh_compiler: None, monkeypatch: Any
) -> None:
    """The KV cache is in full precision or in 4 bits (`packed`). Most families need at most three graphs."""
    model_of(kind)  # skips models that this ComfyUI lacks
    if packed:
        monkeypatch.setattr(pack_module("nodes.adapters.kv_memory"), "memory_left", lambda *_: 0)
    model, backend = getattr(models, kind)(), Counting()
    plain, merged = attach(model, **KEYS), compiled(attach(model, **KEYS), backend, inside=True)
    wanted = models.sample(plain, HEIGHT, WIDTH, steps=6)
    assert torch.equal(models.sample(merged, HEIGHT, WIDTH, steps=6), wanted)
    assert stats_of(merged).cache_bytes == stats_of(plain).cache_bytes
    assert stats_of(merged).unmerged == {}
    warm = backend.graphs
    models.sample(merged, HEIGHT, WIDTH, steps=9)
    if kind not in ("ltx_av", "h3", "qwen_image21"):  # these models break their graph before the blocks
        assert backend.graphs == warm <= 3


def test_the_same_beside_the_prefix_cache_of_qwen_image_21(attach: Any, stats_of: Any, fresh_compiler: None) -> None:
    model, run = models.qwen_image21(layers=2), {"steps": 4, "cfg": 1.0}
    del model.model_options["transformer_options"]["qwen_image21_cache"]  # this option switches off the prefix cache
    plain, merged = attach(model, **KEYS), compiled(attach(model, **KEYS), Counting(), inside=True)
    wanted = models.sample(plain, HEIGHT, WIDTH, **run)
    for _ in range(2):
        assert torch.equal(models.sample(merged, HEIGHT, WIDTH, **run), wanted)
    assert stats_of(merged).cache_bytes == stats_of(plain).cache_bytes > 0
    assert stats_of(merged).unmerged == {}
    assert stats_of(merged).merged_steps == stats_of(plain).merged_steps != {}


def test_attention_without_overrides_is_noticed_inside_the_graphs(
    stats_of: Any, without_overrides: None, fresh_compiler: None
) -> None:
    model, asked = models.wan(layers=2), {"frames": 3, "steps": 6, "cfg": 1.0}
    plain, merged = balanced(model), compiled(balanced(model), Counting(), inside=True)
    assert torch.equal(*(models.sample(m, HEIGHT, WIDTH, **asked) for m in (merged, plain)))
    assert list(stats_of(merged).unmerged_calls) == list(stats_of(plain).unmerged_calls) == [eager.NOT_ASKED]


def test_keys_and_values_in_main_memory(fresh_compiler: None) -> None:
    """Custom operators copy keys and values to main memory and back, so that these copies need no additional graph."""
    model, backend = models.z_image(layers=2), Counting()
    card = compared("z_image", compiled(balanced(model), backend, inside=True), quantized=True, cfg=1.0)
    assert card.peak[1] > 0
    assert backend.graphs == 3, "those of a refresh, of merged and of full steps"
    with a_card(0.0, quantized=True):
        wanted = sampled("z_image", balanced(model), cfg=1.0)
    with a_card(0.0, quantized=True):
        found = sampled("z_image", compiled(balanced(model), backend, inside=True), cfg=1.0)
    assert all(map(torch.equal, found, wanted))


def test_other_compilers_receive_no_hints(attach: Any, stats_of: Any, fresh_compiler: None) -> None:
    model = models.flux(double=2, single=2)
    merged = compiled(attach(model, **KEYS), Counting())
    assert torch.equal(*(models.sample(m, HEIGHT, WIDTH, steps=5) for m in (merged, model)))
    assert list(stats_of(merged).unmerged_calls) == [eager.Reason.KV_COMPILE_BACKEND()]
