"""ComfyUI-ToMA: SDXL and Flux on fewer tokens, by Token Merge with Attention.

Nothing here needs ComfyUI until it asks for the nodes, so that tools and tests can import the folder without it.
"""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """Called by ComfyUI when it loads custom nodes."""
    from .nodes import ToMAExtension

    return ToMAExtension()
