"""ToMA Report: describe what ToMA did in a model's last run, as text and as a picture."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..toma_core.reasons import Message
from ..toma_core.stats import RunStats
from . import validate_inputs, widgets
from .adapters.attachment import attachment_of, last_stats
from .adapters.report_text import Line, report
from .node_status import said, status_of
from .report_charts import Caption, blocks_chart, draw, steps_chart


class ToMAReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return widgets.schema(
            "ToMAReport",
            [io.Model.Input("model"), io.Latent.Input("latent"), io.Image.Input("image", optional=True)],
            io.String.Output("report"),
            io.Image.Output("map"),
            io.Latent.Output("latent_out"),
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: Any, latent: Any, image: Any = None) -> io.NodeOutput:
        with status_of(cls.hidden):
            none = Line.NO_RUN() if attachment_of(validate_inputs.model(model)) else Line.NO_NODE()
            image = None if image is None else validate_inputs.image(image)
        last = last_stats(model)
        lines, stats = ([none], RunStats()) if last is None else (report(last), last)
        text = "\n".join(map(str, lines))
        sheet = draw(stats.maps, image, [steps_chart(stats), blocks_chart(stats)] if stats.steps else [])
        shown = {**ui.PreviewImage(sheet, cls=cls).as_dict(), "text": (text,), **said([*lines, *_captions(stats)])}
        return io.NodeOutput(text, sheet, latent, ui=shown)


def _captions(stats: RunStats) -> list[Message | str]:
    if not stats.steps:
        return []
    shown = [*([Caption.MAP()] if stats.maps else []), Caption.STEPS(), Caption.BLOCKS()]
    return ["", Caption.PICTURE(), *(Line.INDENTED(line=caption) for caption in shown)]
