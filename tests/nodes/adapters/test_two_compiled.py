"""Test a UNet and a transformer under torch.compile. The folder `compile` has the other tests."""

from __future__ import annotations

from typing import Any

from tests.nodes.adapters.compile import test_compile
from tests.nodes.adapters.compiling import compiled

fresh_compiler = test_compile.fresh_compiler


def test_unet(attach: Any, stats_of: Any) -> None:
    model = test_compile.small_unet()

    def both(backend: Any, inside: bool, **settings: Any) -> Any:
        return compiled(attach(model, **settings), backend, inside)

    test_compile.test_compiled_run_is_the_uncompiled_one(model, attach, stats_of, both, "stack", True)


def test_transformer(attach: Any, stats_of: Any) -> None:
    test_compile.test_every_family_is_one_graph_a_merged_step("z_image", attach, stats_of)
