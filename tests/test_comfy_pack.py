"""Test `scripts.comfy_pack`, which loads the pack with the module names that it has inside ComfyUI."""

import os
from pathlib import Path
from types import ModuleType

import pytest

from scripts.comfy_pack import load_pack, pack_module, use_comfyui
from scripts.comfyui import ROOT

pytestmark = pytest.mark.compat


def test_pack_is_loaded_once_and_nodes_means_comfyui_and_not_our_folder(pack: ModuleType) -> None:
    import nodes

    assert Path(nodes.__file__) == Path(os.environ["COMFYUI_PATH"]) / "nodes.py"
    assert Path(pack_module("nodes").__file__ or "") == ROOT / "nodes" / "__init__.py"
    assert load_pack() is pack
    assert pack_module("toma_core.config").__name__ == f"{pack.__name__}.toma_core.config"


def test_another_device_or_a_folder_without_comfyui_is_refused(pack: ModuleType, tmp_path: Path) -> None:
    from comfy.cli_args import args

    use_comfyui(cpu=args.cpu)
    with pytest.raises(RuntimeError, match="has chosen its device already"):
        use_comfyui(cpu=not args.cpu)
    with pytest.raises(RuntimeError, match="holds no ComfyUI: run this through make"):
        use_comfyui(tmp_path)
