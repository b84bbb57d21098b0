"""ComfyUI-ToMA: SDXL and Flux on fewer tokens, by Token Merge with Attention.

ComfyUI's modules are imported only with the nodes, so that tools and tests can import this folder without ComfyUI.
"""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """Return the extension object; ComfyUI calls this function when it loads custom nodes."""
    from .nodes import ToMAExtension

    return ToMAExtension()
