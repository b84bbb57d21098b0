from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

from testbed import stand_ins


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of a package that is not installed, such as ComfyUI's video package on a bare machine."""
    name = "no_such_video_package"
    monkeypatch.setattr(stand_ins._StandIns, "names", (name,))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield name
    for loaded in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[loaded]


def test_stand_ins_replace_missing_packages(lacking: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(lacking)
    stand_ins.use_stand_ins()
    inner = importlib.import_module(f"{lacking}.video.stream")
    assert isinstance(inner.VideoStream, type), "what is imported from it can be named in annotations"
    assert not hasattr(inner, "__file__")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("another_missing_package")


def test_nothing_stands_in_for_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins._StandIns, "names", ("json",))
    before = list(sys.meta_path)
    stand_ins.use_stand_ins()
    assert sys.meta_path == before
