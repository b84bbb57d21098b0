"""Test that the nodes match schema.json, which records everything that saved workflows depend on. Add an input only at
the end of a node, then write the file again:

    TOMA_WRITE_SCHEMA=1 make test ARGS=tests/nodes/test_schema.py
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from scripts.comfy_pack import load_pack
from tests.loop import loop

# Inputs whose options schema.json omits, because every ComfyUI release adds samplers and schedulers.
COMFYUIS = ("sampler_name", "scheduler")
FROZEN = Path(__file__).with_name("schema.json")


def schemas() -> list[Any]:
    async def listed() -> list[Any]:
        extension = await load_pack().comfy_entrypoint()
        return [node.GET_SCHEMA() for node in await extension.get_node_list()]

    return asyncio.run(listed())


def input_facts(widget: Any) -> dict[str, Any]:
    facts = {"id": widget.id, "type": widget.io_type, "optional": widget.optional}
    theirs = widget.id in COMFYUIS and widget.io_type == "COMBO"
    for name in ("default", "min", "max", "options"):
        if getattr(widget, name, None) is not None and not (theirs and name == "options"):
            facts[name] = getattr(widget, name)
    return facts


def facts() -> dict[str, Any]:
    return {
        schema.node_id: {
            "inputs": [input_facts(i) for i in schema.inputs],
            "outputs": [{"type": o.io_type, "name": o.display_name or o.io_type} for o in schema.outputs],
        }
        for schema in schemas()
    }


@pytest.mark.compat
def test_saved_workflows_go_on_working() -> None:
    if os.environ.get("TOMA_WRITE_SCHEMA"):
        FROZEN.write_text(json.dumps(facts(), indent=1) + "\n")
    assert facts() == json.loads(FROZEN.read_text())


@loop("node_id", ["ToMA", "ToMAAdvanced", "ToMAReport", "ToMABenchmark", "ToMACalibrate"])
def test_everything_is_explained(node_id: str) -> None:
    schema = next(s for s in schemas() if s.node_id == node_id)
    assert schema.display_name
    assert len(schema.description) > 60
    assert {"toma", "token merging"} <= set(schema.search_aliases)
    for item in schema.inputs:
        assert len(item.tooltip) > 20, item.id
        assert item.tooltip.endswith(".")
    labels = [item.display_name or item.id for item in schema.inputs]
    assert len(set(labels)) == len(labels)
