"""Type-check the checkout.

The root of the checkout is itself a package. Its folder may have any name. `nodes/` reaches `toma_core/` through this
root (`from ..toma_core import ...`), as ComfyUI requires. mypy needs a name for the root, so the pack is checked
through a link called `toma_pack`. All other folders are checked at their paths.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.comfyui import ROOT

PACK = ("toma_core", "nodes")
IN_PLACE = ("scripts", "demo", "benchmarks", "compatibility", "testbed")
LINK = "toma_pack"


def main() -> int:
    options = sys.argv[1:]
    in_place = [name for name in IN_PLACE if (ROOT / name).is_dir()]
    code = subprocess.run([sys.executable, "-m", "mypy", *options, *in_place], cwd=ROOT, check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / LINK).symlink_to(ROOT)
        config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
        packages = [word for name in PACK if (ROOT / name).is_dir() for word in ("-p", f"{LINK}.{name}")]
        if not packages:
            return code
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *config, *options, *packages],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    print(done.stdout.replace(f"{LINK}/", ""), end="")
    return code or done.returncode


if __name__ == "__main__":
    sys.exit(main())
