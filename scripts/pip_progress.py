"""What pip is doing, in a few words and figures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_INSTALLING = "Installing collected packages:"


@dataclass(frozen=True)
class PipProgress:
    """Describe a running `pip install` by its log and by what lies on the disk.

    Attributes:
        environment: folder of the virtual environment that is filled.
        downloads: pip's TMPDIR, where wheels lie until they are installed.
        download_gb: GB that will be downloaded, about.
        installed_gb: GB that the environment will have, about.
    """

    environment: Path
    downloads: Path
    download_gb: float
    installed_gb: float

    def __call__(self, lines: Sequence[str]) -> str:
        """Return how far it is. lines: of pip's log."""
        packages = next((line for line in reversed(lines) if line.startswith(_INSTALLING)), "")
        if not packages:
            return f"{_gb(self.downloads, '.whl'):.1f} of {self.download_gb} GB downloaded  {latest(lines)}"
        names = packages.removeprefix(_INSTALLING).split(",")
        # The file that pip writes into a package last but one.
        done = {_normal(path.parent.name.split("-")[0]) for path in self._installed("*.dist-info/INSTALLER")}
        left = [name.strip() for name in names if _normal(name.strip()) not in done]
        now = f"unpacking {left[0]}" if left else "the last one is unpacked"
        text = f"{len(names) - len(left)} of {len(names)} packages installed, {now}"
        return f"{_gb(self.environment):.1f} of {self.installed_gb} GB  {text}"

    def _installed(self, pattern: str) -> Iterable[Path]:
        return self.environment.glob(f"lib/python*/site-packages/{pattern}")


def latest(lines: Sequence[str]) -> str:
    """Return the last line that says what is being done, without addresses and folders; empty if there is none."""
    shown = (line.strip() for line in reversed(lines) if line.strip() and not line.lstrip().startswith(_NOT_PROGRESS))
    return re.sub(r"\S*/", "", next(shown, ""))


_NOT_PROGRESS = ("WARNING:", "DEPRECATION:", "[notice]", "Looking in ")


def _gb(folder: Path, ending: str = "") -> float:
    """Return the size of the files below a folder whose names end so, in GB; files may vanish meanwhile."""
    return sum(_sizes(folder, ending)) / 1e9


def _sizes(folder: Path | str, ending: str) -> Iterator[int]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(entry.path, ending)
                elif entry.name.endswith(ending):
                    yield entry.stat(follow_symlinks=False).st_size


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
