"""Store the results of a measurement: rows and pictures. Each row is stored when it is measured, so that a stopped run
can resume."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .judge import Conditions


def fingerprint(paths: list[Path]) -> str:
    """Return a short digest of the content of files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Store:
    """The result file of one model under one set of conditions, and a local folder of pictures."""

    def __init__(self, conditions: Conditions, results: Path, cache: Path) -> None:
        self.conditions = conditions
        c = conditions
        self.name = f"{c.model}-{c.steps}steps-{c.size}px-{c.images}x{c.seeds}"
        results.mkdir(parents=True, exist_ok=True)
        self.file = results / f"{self.name}.json"
        digest = hashlib.sha256(json.dumps(asdict(conditions), sort_keys=True).encode()).hexdigest()[:12]
        self.folder = cache / "fidelity" / f"{self.name}-{digest}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, Any]:
        """Return the content of the file, or content without rows if the file is missing or has other conditions."""
        stored = json.loads(self.file.read_text()) if self.file.exists() else {}
        if stored.get("conditions") != asdict(self.conditions):
            return {"conditions": asdict(self.conditions), "rows": {}}
        return dict(stored)

    def add(self, name: str, row: dict[str, Any], **more: Any) -> None:
        """Add one row to the file. more: values to store beside the rows."""
        stored = {**self.read(), **more}
        stored["rows"][name] = row
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(stored, indent=1) + "\n")
        partial.replace(self.file)

    def keep_pictures(self, name: str, pictures: Tensor) -> None:
        """Store a strip of pictures, (n, 3, H, W) in -1..1."""
        strip = ((torch.cat(list(pictures.clamp(-1, 1)), -1) + 1) * 127.5).round().byte().permute(1, 2, 0)
        Image.fromarray(strip.numpy()).save(self._strip(name))

    def pictures(self, name: str) -> Image.Image | None:
        """Return the stored strip of pictures of a setting, None if it is not on this machine."""
        file = self._strip(name)
        return Image.open(file) if file.exists() else None

    def _strip(self, name: str) -> Path:
        return self.folder / f"{re.sub('[^a-z0-9.]+', '-', name.lower())}.png"
