"""Tiny trained models on which ToMA's picture quality can be seen and measured, and the nodes that load them.

This folder is not part of the node pack: the demo links it into ComfyUI's custom_nodes as a separate pack.
"""

from __future__ import annotations

from typing import Any


async def comfy_entrypoint() -> Any:
    """Return the extension. ComfyUI calls this function when it loads this folder as a custom node pack."""
    from comfy_api.latest import ComfyExtension

    from .nodes import NODES

    class ToMADemoExtension(ComfyExtension):
        async def get_node_list(self) -> list[Any]:
            return NODES

    return ToMADemoExtension()
