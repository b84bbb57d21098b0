"""Measure merged against unmerged pictures of a real checkpoint, through the HTTP API of a running ComfyUI.

Nothing here imports ComfyUI, and pictures are queued with the standard library alone; numpy and Pillow compare them.
"""

from __future__ import annotations


class BenchmarkError(RuntimeError):
    """The measurement cannot go on; the message says why and what to do. What is done so far is kept."""
