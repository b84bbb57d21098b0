"""Make the Python environment in which ComfyUI and the tests run."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.cache import cache_dir, locked
from scripts.comfyui import ROOT, ComfyUI
from scripts.console import SetupError, run_stage, say
from scripts.pip_progress import pip_status
from scripts.venv import make_venv

# Versions that work together on Linux. On import, this torchaudio compares its CUDA version with torch's, and fails
# with a newer torch.
TORCH = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0")
TORCH_PYTHONS = "3.10 to 3.14"
MARKER = ".complete"
# Measured disk use: 10.0 GB at the peak, 7.4 GB afterwards, 3.5 GB in pip's own cache.
DOWNLOAD_GB = 3.3
INSTALLED_GB = 7.4
NEEDED_GB = 11
NEEDED_GB_WITH_PIP_CACHE = 15


def ensure(comfyui: ComfyUI) -> Path:
    """Return the Python of the environment for this ComfyUI. The environment is made at first use.

    `TOMA_PYTHON` names an interpreter that is used unchanged. Otherwise the environment lies in the cache, named by a
    hash of its requirements and the Python version. The environment's marker file is written last. If the marker is
    missing, the set-up starts again.
    """
    chosen = os.environ.get("TOMA_PYTHON")
    if chosen:
        found = shutil.which(chosen)
        if not found:
            raise SetupError(f"TOMA_PYTHON={chosen} is not a program; give the path of a Python, or unset it")
        return Path(found).absolute()
    text = requirements(comfyui)
    folder = cache_dir() / environment_name(text)
    if not is_complete(folder):
        with locked() as temporary:
            if not is_complete(folder):
                build(folder, text, temporary)
    return folder / "bin" / "python"


def requirements(comfyui: ComfyUI) -> str:
    """Return the packages of the environment, in the format of a requirements file."""
    lines = [*TORCH, *dev_requirements(ROOT / "pyproject.toml")]
    return "\n".join([*lines, comfyui.requirements.read_text(encoding="utf-8")])


def dev_requirements(pyproject: Path) -> list[str]:
    """Return the `dev` extra of pyproject.toml. Python 3.10 has no TOML reader, but this list is also valid Python."""
    found = re.search(r"^dev = (\[.*?^\])", pyproject.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if found is None:
        raise SetupError(f"{pyproject} has no dev extra")
    return [str(line) for line in ast.literal_eval(found[1])]


def environment_name(text: str) -> str:
    """Return the name of the environment's folder. Other requirements, another Python or another machine type give
    another name."""
    version = "{}.{}".format(*sys.version_info)
    key = hashlib.sha256(f"{version}\n{platform.machine()}\n{text}".encode()).hexdigest()[:12]
    return f"env-py{version}-{key}"


def is_complete(folder: Path) -> bool:
    """Return whether the set-up of this environment finished and its Python still exists."""
    return (folder / MARKER).is_file() and (folder / "bin" / "python").exists()


def build(folder: Path, text: str, temporary: Path) -> None:
    """Make the environment from scratch. The caller must hold the lock."""
    options = _pip_options(folder.parent)
    if folder.exists():
        say("==> The last set-up was interrupted; starting again")
        shutil.rmtree(folder)
    say(f"==> Making the environment. This happens once and takes 2 to 10 minutes, mostly downloading {DOWNLOAD_GB} GB")
    if not shutil.which("nvidia-smi") and not os.environ.get("PIP_EXTRA_INDEX_URL"):
        say("    No NVIDIA card: PIP_EXTRA_INDEX_URL can spare 3 GB of CUDA (CONTRIBUTING.md)")
    python = make_venv(folder)
    wanted = temporary / "requirements.txt"
    wanted.write_text(text, encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *options]
    if not run_stage(
        "Installing PyTorch, ComfyUI's requirements and the tools",
        [*install, "--requirement", str(wanted)],
        log=temporary / "pip.log",
        env={**os.environ, "TMPDIR": str(temporary)},
        status=pip_status((folder, temporary), DOWNLOAD_GB + INSTALLED_GB),
    ):
        raise SetupError(
            f"The environment could not be made; what pip said is above. Usual reasons: no network; too little disk "
            f"({_free_gb(folder.parent):.0f} GB free in {folder.parent}); a Python without ready packages (this is "
            f"{platform.python_version()}, PyTorch has them for {TORCH_PYTHONS}; choose one with PYTHON=python3.12). "
            "Run the same command again afterwards, it repairs what is there."
        )
    (folder / MARKER).write_text(text, encoding="utf-8")


def describe(python: Path) -> str:
    """Describe Python, torch and the device that torch will use, e.g. `Python 3.12.3 | torch 2.11.0 | CPU, 2
    threads`."""
    done = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        advice = "Unset TOMA_PYTHON, or install PyTorch there" if os.environ.get("TOMA_PYTHON") else "Run make purge"
        raise SetupError(f"{python} cannot import torch ({reason}). {advice}, then run the same command again.")
    text = done.stdout.strip()
    if text.endswith("threads") and shutil.which("nvidia-smi"):
        text += " (there is an NVIDIA GPU, but this torch cannot use it: is the driver too old?)"
    return text


PROBE = """
import platform, torch
if torch.cuda.is_available():
    device = "CUDA, " + torch.cuda.get_device_name()
else:
    device = "CPU, %d threads" % torch.get_num_threads()
print("Python %s | torch %s | %s" % (platform.python_version(), torch.__version__, device))
"""


def _pip_options(folder: Path) -> list[str]:
    """Return options for pip. If the disk has no room for pip's cache, these options switch the cache off. Raises an
    error if the disk is too small."""
    free = _free_gb(folder)
    if free < NEEDED_GB:
        raise SetupError(
            f"The environment needs {NEEDED_GB} GB while it is made and {folder} has {free:.1f} GB free. Free some "
            "space, or set TOMA_CACHE to a folder on a larger disk."
        )
    return [] if free >= NEEDED_GB_WITH_PIP_CACHE else ["--no-cache-dir"]


def _free_gb(folder: Path) -> float:
    return shutil.disk_usage(folder).free / 1e9
