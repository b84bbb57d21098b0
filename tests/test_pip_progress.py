"""The progress messages of pip during the set-up."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from scripts.pip_progress import PipProgress, latest


def test_downloads_are_counted_once_and_warnings_are_no_progress(tmp_path: Path) -> None:
    """Other files beside the wheels do not count, and messages do not contain addresses."""
    unpacked = tmp_path / "temporary" / "pip-unpack-1"
    unpacked.mkdir(parents=True)
    sparse(unpacked / "torch-2.11.0-cp311.whl", 200_000_000)
    sparse(unpacked.parent / "copy", 100_000_000)
    progress = PipProgress(tmp_path / "env", tmp_path / "temporary", 3.3, 7.4)
    log = [
        "Collecting torch",
        "  Downloading https://mirror.example/files/torch-2.11.0.whl (530.6 MB)",
        "WARNING: no",
        "",
    ]
    assert progress(log) == "0.2 of about 3.3 GB downloaded  Downloading torch-2.11.0.whl (530.6 MB)"
    sparse(unpacked / "cuda-13.0-py3.whl", 3_500_000_000)
    assert progress(log).startswith("3.7 of about 3.7 GB downloaded"), "never more than all"
    assert latest(["WARNING: one", "  WARNING: two", "Looking in indexes: here"]) == ""


def test_a_real_pip_is_followed_package_by_package(tmp_path: Path) -> None:
    """Names and order are pip's; some names differ from those of their folders."""
    wheels, environment = tmp_path / "wheels", tmp_path / "env"
    wheels.mkdir()
    make_wheel(wheels, "first_one", needs="Second.Two")
    make_wheel(wheels, "Second.Two")
    command = [sys.executable, "-m", "pip", "install", "--prefix", str(environment), "--ignore-installed"]
    command += map(str, sorted(wheels.iterdir(), reverse=True))
    log = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    progress = PipProgress(environment, tmp_path / "none", 3.3, 7.4)
    assert progress(log) == "0.0 of 7.4 GB  2 of 2 packages installed, the last one is unpacked"
    (last,) = environment.glob("lib/python*/site-packages/first_one*/INSTALLER")
    last.unlink()
    sparse(environment / "lib" / "big", 300_000_000)
    assert progress(log) == "0.3 of 7.4 GB  1 of 2 packages installed, unpacking first-one"


def sparse(path: Path, size: int) -> None:
    """Make a sparse file of this size."""
    with path.open("wb") as file:
        file.truncate(size)


def make_wheel(folder: Path, name: str, needs: str = "") -> None:
    """Make an empty package."""
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
    metadata += f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
