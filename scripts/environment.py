"""Make the Python environment that ComfyUI and the tests run in."""

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
from scripts.pip_progress import PipProgress
from scripts.venv import make_venv

# Known to work together and to import on Linux; a newer torch beside this torchaudio fails on its CUDA version.
TORCH = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0")
TORCH_PYTHONS = "3.10 to 3.14"
MARKER = ".complete"
# Measured: 10.0 GB at the peak, 7.4 GB afterwards; and 3.5 GB in pip's own cache, if there is room for it.
DOWNLOAD_GB = 3.3
INSTALLED_GB = 7.4
NEEDED_GB = 11
NEEDED_GB_WITH_PIP_CACHE = 15


def ensure(comfyui: ComfyUI) -> Path:
    """The Python of the environment for this ComfyUI; made at first use.

    `TOMA_PYTHON` names an interpreter that is used as it is. Else the environment lies in the cache under a name
    made from its requirements and the Python version; it counts only once its marker file is there, which is
    written last, so that an interrupted set-up is done again from the start.
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
    """Everything the environment holds, in the format of a requirements file."""
    lines = [*TORCH, *dev_requirements(ROOT / "pyproject.toml")]
    return "\n".join([*lines, comfyui.requirements.read_text(encoding="utf-8")])


def dev_requirements(pyproject: Path) -> list[str]:
    """The `dev` extra of pyproject.toml. Python 3.10 has no TOML reader, and this list is also valid Python."""
    found = re.search(r"^dev = (\[.*?^\])", pyproject.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if found is None:
        raise SetupError(f"{pyproject} has no dev extra")
    return [str(line) for line in ast.literal_eval(found[1])]


def environment_name(text: str) -> str:
    """Folder name: another text, Python or machine type gives another environment."""
    version = "{}.{}".format(*sys.version_info)
    key = hashlib.sha256(f"{version}\n{platform.machine()}\n{text}".encode()).hexdigest()[:12]
    return f"env-py{version}-{key}"


def is_complete(folder: Path) -> bool:
    """Whether the set-up of this environment reached its end and its Python is still there."""
    return (folder / MARKER).is_file() and (folder / "bin" / "python").exists()


def build(folder: Path, text: str, temporary: Path) -> None:
    """Make the environment anew; the caller holds the lock."""
    options = _pip_options(folder.parent)
    if folder.exists():
        say("==> The last set-up was interrupted; starting again")
        shutil.rmtree(folder)
    say(f"==> Making the environment. This happens once and takes 2 to 10 minutes, mostly downloading {DOWNLOAD_GB} GB")
    python = make_venv(folder)
    wanted = temporary / "requirements.txt"
    wanted.write_text(text, encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *options]
    if not run_stage(
        "Installing PyTorch, ComfyUI's requirements and the tools",
        [*install, "--requirement", str(wanted)],
        log=temporary / "pip.log",
        env={**os.environ, "TMPDIR": str(temporary)},
        status=PipProgress(folder, temporary, DOWNLOAD_GB, INSTALLED_GB),
    ):
        raise SetupError(
            f"The environment could not be made; what pip said is above. Usual reasons: no network; too little disk "
            f"({_free_gb(folder.parent):.0f} GB free in {folder.parent}); a Python without ready packages (this is "
            f"{platform.python_version()}, PyTorch has them for {TORCH_PYTHONS}; choose one with PYTHON=python3.12). "
            "Run the same command again afterwards, it repairs what is there."
        )
    (folder / MARKER).write_text(text, encoding="utf-8")


def describe(python: Path) -> str:
    """Python, torch and the device that this torch will use, e.g. `Python 3.12.3 | torch 2.11.0 | CPU, 2 threads`."""
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
    """Refuse early where the disk is too small, and go without pip's cache where it is only just large enough."""
    free = _free_gb(folder)
    if free < NEEDED_GB:
        raise SetupError(
            f"The environment needs {NEEDED_GB} GB while it is made and {folder} has {free:.1f} GB free. Free some "
            "space, or set TOMA_CACHE to a folder on a larger disk."
        )
    return [] if free >= NEEDED_GB_WITH_PIP_CACHE else ["--no-cache-dir"]


def _free_gb(folder: Path) -> float:
    return shutil.disk_usage(folder).free / 1e9
