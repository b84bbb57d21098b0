"""Test visit.sh, the script for a GPU machine, without a GPU. The script runs in a copy of the checkout without .git,
with an empty HOME and no network."""

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import variants
from scripts import gpu_kit
from scripts.comfyui import ROOT

ISOLATED = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
# Largest number of files that the script may write, and largest size of a file in bytes.
MOST_FILES, MOST_BYTES = 8, 1 << 20


def require_isolation() -> None:
    """If this system cannot cut a process off from the network, skip the test, or fail it in CI."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("the kit is for x86-64 Linux")
    try:
        done = subprocess.run([*ISOLATED, "true"], capture_output=True, text=True, check=False)
        why = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        message = f"no process can be cut off from the network here (unshare --net: {why})"
        if os.environ.get("CI"):
            pytest.fail(f"{message}; give CI's container --cap-add SYS_ADMIN", pytrace=False)
        pytest.skip(message)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return a folder with the checkout, the home folder and the temporary folder of a simulated GPU machine."""
    require_isolation()
    tree = tmp_path / "tree"
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("git tells which files travel, and it is not here")
    for file in gpu_kit.tree():
        if file.suffix != ".safetensors":
            copy = tree / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    # The kit is made for the Python that runs this test.
    gpu_kit.pack(tree / ".gpu", 90, "{}.{}".format(*sys.version_info))
    assert (tree / ".gpu" / gpu_kit.ARCHIVE).stat().st_size < 10 * 2**20
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    assert not (tree / ".git").exists()
    return tmp_path


def visit(machine: Path, out: Path) -> subprocess.Popen[str]:
    """Start visit.sh, which gets no other environment variables than these."""
    environ = {
        "PATH": os.defpath,
        "PYTHON": sys.executable,
        "HOME": str(machine / "home"),
        "TMPDIR": str(machine / "tmp"),
        "OUT": str(out),
        "DRY": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [*ISOLATED, "bash", "benchmarks/gpu/visit.sh", "--minutes", "60"], cwd=machine / "tree", env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill the process and its children, as the GPU machine does when the time is over."""
    first = psutil.Process(process.pid)
    for each in (first, *first.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()


def ended(process: subprocess.Popen[str], out: Path) -> set[str]:
    """Wait for the end of the script, and return the names of the sections with results."""
    output, _ = process.communicate(timeout=3600)
    assert process.returncode == 0, output[-6000:]
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) <= MOST_FILES
    assert max(path.stat().st_size for path in files) < MOST_BYTES
    assert {"log.txt", "results.json", "results.md"} <= {path.name for path in files}
    stored = json.loads((out / "results.json").read_text())
    assert "dry run" in stored["conditions"]["models"]
    assert not [note for note in stored["notes"] if "FAILED" in note or "left out" in note]
    sections = {row["section"].partition(":")[0].partition(",")[0] for row in stored["rows"]}
    return sections | {row["model"] for row in stored["rows"] if row["section"].startswith("sample")}


def test_all_sections_when_a_visit_was_killed_before(machine: Path) -> None:
    first, second = machine / "first", machine / "second"
    first.mkdir()
    killed, results = visit(machine, first), first / "results.json"
    deadline = time.monotonic() + 1800
    while not results.is_file() or not json.loads(results.read_text())["rows"]:
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    kill_all(killed)
    assert json.loads((first / "results.json").read_text())["conditions"]["device"]

    found = ended(visit(machine, second), second)
    models = {"flux", "z_image", "qwen_image", "sdxl"}
    assert found == {"kernels", "sample", "forward", "micro", "host", "torch.compile", "break-even", "place", *models}
    page = (second / "results.md").read_text()
    checks = re.search(r"Kernels against fp64: (\d+) of (\d+) checks are right\.", page)
    assert checks
    assert checks[1] == checks[2]
    assert int(checks[2]) >= 19
    for what in ("values", "keys"):
        assert f"- propagate {what}: 3 launches, 2 without the regression" in page
    rows = json.loads((second / "results.json").read_text())["rows"]
    parts = {row["section"] for row in rows if row["section"].startswith("micro")}
    assert parts == {f"micro: {part}" for part in ("selection", "weights", "merge", "unmerge")}
    assert {row["note"].partition("(")[0] for row in rows if row["section"] == "break-even"} == {
        "Auto does not merge it "
    }
    evaluated = {row["variant"]: row for row in rows if row["section"] == "forward"}
    assert "no-op" in evaluated["ComfyUI's ToMe node"]["note"]
    assert all(evaluated[rival.name]["error"] for rival in (variants.tome(0.5), variants.todo()))
    assert evaluated["ToMA stack, ratio 0.5"]["tokens"] == "16 -> 8, 4 -> 2"
    sampled = [row for row in rows if row["section"].startswith("sample") and row["shares"]]
    assert all("3/3 steps merged" in row["note"] for row in sampled)
    assert all(row["shares"].keys() == {"plan", "merge", "unmerge"} for row in sampled)
    assert all(0 < share < 1 for row in sampled for share in row["shares"].values())
    host = [row for row in rows if row["section"] == "host"]
    assert {row["batch"] for row in host} == {1, 2}
    assert all(row["host"] and row["gpu"] for row in host)
    place = [row for row in rows if row["section"] == "place"]
    assert {row["model"] for row in place} == {"flux", "ltx_av"}
    assert len(place) == 10, "unmerged, and keys and values of two forms in two places"
