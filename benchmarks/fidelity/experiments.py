"""Changes of the pack during a sampling run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scripts.comfy_pack import pack_module
from testbed.selectors import replaced

Patch = Callable[[Any], Any]


def during(patch: Patch, owner: Callable[[], Any], values: Callable[[Any], dict[str, Any]]) -> Patch:
    """Wrap `patch`: while its model samples, attributes of an object of the pack are replaced.

    values: maps the original object to its new attributes.
    """

    def patched(model: Any) -> Any:
        from comfy.patcher_extension import WrappersMP

        def run(executor: Any, *args: Any, **kwargs: Any) -> Any:
            changed = owner()
            with replaced(changed, values(changed)):
                return executor(*args, **kwargs)

        # Added first, so that it is the outermost wrapper: the pack's own run begins inside.
        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "experiment", run)
        return patch(model)

    return patched


def packed(patch: Patch) -> Patch:
    """Cache keys and values in four bits, as for larger models and videos."""
    return during(patch, lambda: pack_module("nodes.adapters.kv_memory"), lambda _: {"memory_left": lambda *_: 0})
