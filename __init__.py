"""ComfyUI-ToMA: speeds up SDXL, Flux and other models by Token Merge with Attention.

Only `comfy_entrypoint` imports ComfyUI's modules, so tools and tests can import this folder without ComfyUI.
"""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """Return the extension object; ComfyUI calls this function when it loads custom nodes."""
    from .nodes import ToMAExtension

    return ToMAExtension()
