"""Pack the files that a GPU machine without network needs in addition to the checkout and PyTorch: `make gpu-kit`.

    python -m scripts.gpu_kit [--arch 90] [--python 3.12] [--into .gpu]

The kit (8 MB, ignored by git) holds ComfyUI without its tokenizers, templates and API nodes, and the packages that a
machine with PyTorch rarely has: comfy-kitchen with the machine code of one architecture, comfy-aimdo, torchsde and
trampoline. Packing needs the network and no GPU. The command prints the size of checkout and kit.
`benchmarks/gpu/visit.sh` unpacks and uses the kit.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from scripts import comfyui
from scripts.comfyui import ROOT
from scripts.console import SetupError, run_stage, say
from scripts.fatbin import one_architecture

ARCHIVE = "kit.tar.gz"
# The kit has ComfyUI's sources, and its data files of less than LARGEST bytes. Tokenizers are larger.
FOLDERS = (
    "comfy", "comfy_extras", "comfy_api", "comfy_execution", "comfy_config", "app", "utils", "middleware", "api_server",
)  # fmt: skip
FILES = ("*.py", "requirements.txt", "LICENSE")
EMPTY = ("models", "input", "output", "custom_nodes")
LARGEST = 60_000
# Packages have the versions that ComfyUI's requirements name. A version below is used only if they name none.
PACKAGES = {"comfy-kitchen": "", "comfy-aimdo": "", "torchsde": "==0.2.6", "trampoline": "==0.1.2"}
GLIBC = ("2_28", "2_27", "2_24", "2_17")


def main() -> int:
    """Parse the command line, pack, and print the size. Return 1 after an error."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_kit", description=about)
    parser.add_argument("--arch", type=int, default=90, help="compute capability of the card (90: H100, H200)")
    parser.add_argument("--python", default="3.12", help="version of the Python on the GPU machine")
    parser.add_argument("--into", type=Path, default=ROOT / ".gpu", help="folder for the kit (.gpu/)")
    arguments = parser.parse_args()
    try:
        archive = pack(arguments.into, arguments.arch, arguments.python)
        say(f"{archive} is made")
        tree, kit = tree_size(), archive.stat().st_size
    except SetupError as error:
        say(f"error: {error}")
        return 1
    say(f"tree {_mib(tree)} + kit {_mib(kit)} = {_mib(tree + kit)}")
    return 0


def pack(folder: Path, arch: int, python: str) -> Path:
    """Make the archive in `folder` for cards of this architecture and this version of Python, and return its path."""
    comfy = comfyui.find().path
    with tempfile.TemporaryDirectory() as temporary:
        stage = Path(temporary) / "stage"
        prune(comfy, stage / "ComfyUI")
        wheels = _download(comfy, Path(temporary) / "wheels", python)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(stage / "site")  # noqa: S202 - into a temporary folder
        kitchen = stage / "site" / "comfy_kitchen" / "backends"
        for library in kitchen.glob("cuda/*.so"):
            library.write_bytes(one_architecture(library.read_bytes(), arch))
        for library in kitchen.glob("hip/*.so"):
            library.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        # Write to another file first. So an interrupted run leaves the previous kit unchanged.
        archive, part = folder / ARCHIVE, folder / f"{ARCHIVE}.part"
        with tarfile.open(part, "w:gz") as tar:
            for name in ("ComfyUI", "site"):
                tar.add(stage / name, name)
        part.replace(archive)
    return archive


def prune(comfy: Path, target: Path) -> None:
    """Copy the files of a ComfyUI that benchmarks and kernel tests need."""
    wanted = [file for pattern in FILES for file in comfy.glob(pattern)]
    for name in FOLDERS:
        files = (f for f in (comfy / name).rglob("*") if f.is_file() and "__pycache__" not in f.parts)
        wanted += [file for file in files if file.suffix == ".py" or file.stat().st_size < LARGEST]
    for file in wanted:
        copy = target / file.relative_to(comfy)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    for name in EMPTY:
        (target / name).mkdir(exist_ok=True)


def _download(comfy: Path, folder: Path, python: str) -> list[Path]:
    asked = (comfy / "requirements.txt").read_text(encoding="utf-8")
    folder.mkdir()
    names = []
    for name, version in PACKAGES.items():
        found = re.search(rf"^{name}==(\S+)", asked, re.MULTILINE | re.IGNORECASE)
        names.append(f"{name}=={found[1]}" if found else name + version)
    platforms = [f"manylinux_{version}_x86_64" for version in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
        "--python-version", python, "--implementation", "cp", "--dest", str(folder),
        *(word for name in platforms for word in ("--platform", name)), *names,
    ]  # fmt: skip
    if not run_stage("Downloading four packages (60 MB)", command, log=folder / "pip.log"):
        raise SetupError("they could not be downloaded; what pip said is above")
    return sorted(folder.glob("*.whl"))


def tree() -> list[Path]:
    """Return the files of the checkout that are transferred: tracked files, and new files that git does not ignore.
    Raises SetupError if git fails."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"{ROOT} is no checkout of git, which knows what travels: {error}") from error
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def tree_size() -> int:
    """Return the size of `tree` in bytes."""
    return sum(path.stat().st_size for path in tree())


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
