"""ToMA Report: describe what ToMA did in a model's last run, as text and as a picture."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..toma_core.reasons import Message, MessageId
from ..toma_core.stats import RunStats
from . import validate_inputs
from .adapters.attachment import attachment_of, last_stats
from .adapters.report_text import Line, report
from .merge_map_image import draw
from .node_status import said, status_of
from .report_charts import Caption, blocks_chart, steps_chart
from .widgets import CATEGORY, SEARCH_ALIASES


class NoReport(MessageId):
    """Why there is no report."""

    NO_NODE = "no_toma_node"
    NO_RUN = "no_run_of_model"


class ToMAReport(io.ComfyNode):
    """Report what was merged, where and when, in the last run of a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMAReport",
            display_name="ToMA Report",
            category=CATEGORY,
            description="Says what ToMA did in the last sampling run: what was merged, where and when, and what stayed "
            "unmerged and why. Draws a map of the merged tokens, over the picture if you connect it.",
            search_aliases=SEARCH_ALIASES,
            inputs=[
                io.Model.Input("model", tooltip="The model as it goes into the sampler, after the ToMA node."),
                io.Latent.Input("latent", tooltip="The sampler's result. It is passed through unchanged."),
                io.Image.Input(
                    "image",
                    optional=True,
                    tooltip="The decoded picture, to draw the map over it: VAE Decode's output.",
                ),
            ],
            outputs=[
                io.String.Output(
                    "report",
                    display_name="report",
                    tooltip="As text: what was merged, where and when, and what stayed unmerged and why.",
                ),
                io.Image.Output(
                    "map",
                    display_name="map",
                    tooltip="As a picture: windows, the tokens that stayed and what merged into them, with charts by "
                    "step and by block.",
                ),
                io.Latent.Output("latent_out", display_name="latent", tooltip="The sampler's result, unchanged."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: Any, latent: Any, image: Any = None) -> io.NodeOutput:
        with status_of(cls.hidden):
            none = NoReport.NO_RUN() if attachment_of(validate_inputs.model(model)) else NoReport.NO_NODE()
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
