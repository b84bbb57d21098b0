"""Test the pack inside a real server: it loads, its nodes are registered, and other prompts still run."""

import pytest

from scripts.comfy_client import PromptError
from scripts.comfy_server import PACK_FOLDER, ComfyServer


def image_prompt(width: int = 32) -> dict:
    """Return a graph of ComfyUI's own nodes that makes and previews an image."""
    image = {"class_type": "EmptyImage", "inputs": {"width": width, "height": 16, "batch_size": 1, "color": 0}}
    return {"1": image, "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}


@pytest.mark.compat
def test_pack_is_loaded_and_other_prompts_run(server: ComfyServer) -> None:
    lines = [line for line in server.log().splitlines() if line.rstrip().endswith(f"custom_nodes/{PACK_FOLDER}")]
    assert lines, f"the server does not name the pack among its custom nodes:\n{server.log()}"
    assert not any("IMPORT FAILED" in line for line in lines), server.log()
    for node_id in ("ToMA", "ToMAAdvanced", "ToMAReport"):
        definition = server.object_info(node_id)
        assert (definition["name"], definition["python_module"]) == (node_id, f"custom_nodes.{PACK_FOLDER}")
    with pytest.raises(PromptError) as refused:
        server.run(image_prompt(width=-1))
    assert refused.value.node_errors["1"]["errors"][0]["extra_info"]["input_name"] == "width"
    run = server.run(image_prompt())
    assert (run.status, run.error) == ("success", None)
    assert {"execution_start", "executed", "executing"} <= {kind for kind, _ in run.messages}
    assert server.view(run.outputs["2"]["images"][0]).startswith(b"\x89PNG")
