"""The pack inside a real server: it loads, its nodes are registered, and other prompts still run."""

from __future__ import annotations

import pytest

from scripts.comfy_client import PromptError
from scripts.comfy_server import PACK_FOLDER, ComfyServer
from tests.loop import loop

pytestmark = pytest.mark.compat


def image_prompt(width: int = 32, color: int = 0) -> dict:
    """Return a graph of ComfyUI's own nodes: one image, saved to the temporary folder."""
    image = {"class_type": "EmptyImage", "inputs": {"width": width, "height": 16, "batch_size": 1, "color": color}}
    return {"1": image, "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}


def test_pack_is_imported(server: ComfyServer) -> None:
    lines = [line for line in server.log().splitlines() if line.rstrip().endswith(f"custom_nodes/{PACK_FOLDER}")]
    assert lines, f"the server does not name the pack among its custom nodes:\n{server.log()}"
    assert not any("IMPORT FAILED" in line for line in lines), server.log()


@loop("node_id", ["ToMA", "ToMAAdvanced", "ToMAReport"])
def test_nodes_are_known(server: ComfyServer, node_id: str) -> None:
    definition = server.object_info(node_id)
    assert definition["name"] == node_id
    assert definition["python_module"] == f"custom_nodes.{PACK_FOLDER}"


def test_prompt_runs_and_its_image_can_be_fetched(server: ComfyServer) -> None:
    run = server.run(image_prompt())
    assert run.status == "success"
    assert run.error is None
    assert {"execution_start", "executed", "executing"} <= {kind for kind, _ in run.messages}
    assert server.view(run.outputs["2"]["images"][0]).startswith(b"\x89PNG")


def test_refused_prompt_names_the_input_and_the_queue_goes_on(server: ComfyServer) -> None:
    with pytest.raises(PromptError) as refused:
        server.run(image_prompt(width=-1))
    assert refused.value.node_errors["1"]["errors"][0]["extra_info"]["input_name"] == "width"
    prompt_id = server.queue(image_prompt(color=255))
    assert server.wait(prompt_id).status == "success"
