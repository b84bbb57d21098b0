"""Compare merged with unmerged pictures of a real checkpoint, through the HTTP API of a running ComfyUI.

This folder does not import ComfyUI: the standard library queues pictures, and numpy and Pillow compare them.
"""

from __future__ import annotations


class BenchmarkError(RuntimeError):
    """The measurement cannot continue. The message has the reason and the remedy. Finished pictures stay in the
    folder."""
