"""The nodes, and the extension object through which ComfyUI gets them."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .benchmark import ToMABenchmark
from .calibrate import ToMACalibrate
from .report import ToMAReport
from .toma import ToMA, ToMAAdvanced


class ToMAExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [ToMA, ToMAAdvanced, ToMAReport, ToMABenchmark, ToMACalibrate]
