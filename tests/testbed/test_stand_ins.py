import importlib
import sys

import pytest

from testbed import stand_ins


def test_stand_ins_replace_missing_packages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the name of a package that is not installed. `av`, which ComfyUI imports for video, may be
    missing likewise."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(stand_ins._StandIns, "names", ("json",))
    before = list(sys.meta_path)
    stand_ins.use_stand_ins()
    assert sys.meta_path == before, "nothing stands in for an installed package"

    lacking = "no_such_video_package"
    monkeypatch.setattr(stand_ins._StandIns, "names", (lacking,))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(lacking)
    stand_ins.use_stand_ins()
    inner = importlib.import_module(f"{lacking}.video.stream")
    assert isinstance(inner.VideoStream, type), "what is imported from it can be named in annotations"
    assert not hasattr(inner, "__file__")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("another_missing_package")
