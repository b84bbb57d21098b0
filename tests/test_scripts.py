"""Test how scripts find ComfyUI, make the environment and report errors."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import cache, comfyui, environment
from scripts.console import SetupError, last_line, run_stage
from scripts.pip_progress import pip_status


@pytest.fixture(autouse=True)
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulate a machine on which nothing is set up."""
    for name in ("COMFYUI_PATH", "TOMA_PYTHON", "TOMA_CACHE", "XDG_CACHE_HOME", "MAKEFLAGS", "COMFYUI", "ARGS"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def fake_comfyui(folder: Path, version: str = "9.9.9") -> Path:
    (folder / "comfy").mkdir(parents=True)
    for name in ("main.py", "nodes.py", "requirements.txt", "comfy/cli_args.py"):
        (folder / name).touch()
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> comfyui.ComfyUI:
    """Return a ComfyUI whose environment needs no package."""
    monkeypatch.setattr(environment, "requirements", lambda _: "# nothing\n")
    return comfyui.ComfyUI(tmp_path, "test", tmp_path / "missing.txt")


def make(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environ = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *words], {**os.environ, **variables}
    return subprocess.run(command, cwd=comfyui.ROOT, env=environ, capture_output=True, text=True, check=False)


class TestFind:
    def test_first_match_wins(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_home: Path) -> None:
        """COMFYUI_PATH comes first, then the ComfyUI around the checkout, then the workspace of comfy-cli."""
        workspace = fake_comfyui(empty_home / "comfy" / "ComfyUI")
        monkeypatch.setattr(comfyui, "ROOT", tmp_path / "custom_nodes" / "ComfyUI-ToMA")
        assert comfyui.find().path == workspace, "a folder custom_nodes without ComfyUI does not count"
        around = fake_comfyui(tmp_path / "around")
        monkeypatch.setattr(comfyui, "ROOT", around / "custom_nodes" / "ComfyUI-ToMA")
        assert comfyui.find().path == around
        monkeypatch.setenv("COMFYUI_PATH", str(fake_comfyui(tmp_path / "mine", "1.2.3")))
        found, mine = comfyui.find(), tmp_path / "mine"
        assert (found.path, found.version, found.requirements) == (mine, "1.2.3", mine / "requirements.txt")
        monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "nowhere"))
        with pytest.raises(SetupError, match=r"nowhere holds no ComfyUI .* Point it at"):
            comfyui.find()

    def test_release_asked_for_wins_over_what_is_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("COMFYUI_PATH", str(fake_comfyui(tmp_path / "mine")))
        for release in comfyui.RELEASES:
            fake_comfyui(cache.cache_dir() / f"comfyui-{release}", release)
        found = [comfyui.find(release) for release in comfyui.RELEASES]
        assert [each.version for each in found] == list(comfyui.RELEASES)
        assert len(set(map(environment.requirements, found))) == 1
        with pytest.raises(SetupError, match=r"0\.1 cannot be downloaded, only 0\.30\.0, 0\.26\.0, 0\.20\.1, 0\.16\.3"):
            comfyui.find("0.1")
        line = next(line for line in (comfyui.ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("for "))
        assert set(re.findall(r"\d+\.\d+\.\d+", line)) == set(comfyui.RELEASES) - {comfyui.DEFAULT_RELEASE}

    def test_download_is_moved_atomically(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        broken = tmp_path / "empty.tar.gz"
        tarfile.open(broken, "w:gz").close()
        monkeypatch.setattr(comfyui, "_fetch", lambda *_: broken)
        with pytest.raises(SetupError, match="does not hold ComfyUI"):
            comfyui.find()
        assert [entry.name for entry in cache.cache_dir().iterdir()] == ["lock"]
        fake_comfyui(tmp_path / "pkg-1.0" / "vendor" / "ComfyUI")
        (tmp_path / "pkg-1.0" / "setup.py").touch()
        archive, fetched = tmp_path / "pkg-1.0.tar.gz", []
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(tmp_path / "pkg-1.0", "pkg-1.0")
        monkeypatch.setattr(comfyui, "_fetch", lambda release, _: fetched.append(release) or archive)
        for _ in range(2):
            found = comfyui.find()
            assert comfyui.is_comfyui(found.path)
            assert not (found.path / "setup.py").exists()
        assert fetched == [comfyui.DEFAULT_RELEASE]


class TestEnvironment:
    def test_dev_list_is_what_a_toml_reader_sees(self) -> None:
        tomllib = pytest.importorskip("tomllib", reason="in the standard library from Python 3.11 on")
        pyproject = comfyui.ROOT / "pyproject.toml"
        wanted = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]["dev"]
        assert environment.dev_requirements(pyproject) == wanted
        assert all("==" in line for line in wanted)

    def test_name_follows_the_requirements(self, tmp_path: Path) -> None:
        found = comfyui.ComfyUI(fake_comfyui(tmp_path / "c"), "test", tmp_path / "c" / "requirements.txt")
        names = [environment.environment_name(environment.requirements(found)) for _ in range(2)]
        found.requirements.write_text("numpy\n")
        assert names[0] == names[1] != environment.environment_name(environment.requirements(found))

    def test_given_python_is_used_as_it_is(self, monkeypatch: pytest.MonkeyPatch, nothing: comfyui.ComfyUI) -> None:
        monkeypatch.setenv("TOMA_PYTHON", sys.executable)
        assert environment.ensure(nothing) == Path(sys.executable)
        assert not cache.cache_dir().exists()
        monkeypatch.setenv("TOMA_PYTHON", "/no-python")
        with pytest.raises(SetupError, match=r"TOMA_PYTHON=.* is not a program"):
            environment.ensure(nothing)

    def test_interrupted_set_up_is_done_again(self, nothing: comfyui.ComfyUI) -> None:
        """The environment is real but has no packages, so that no network is needed."""
        python = environment.ensure(nothing)
        assert subprocess.run([python, "-c", ""], check=False).returncode == 0
        stray = python.parent.parent / "stray"
        stray.touch()
        assert environment.ensure(nothing) == python
        assert stray.exists()
        (python.parent.parent / environment.MARKER).unlink()
        assert environment.ensure(nothing) == python
        assert not stray.exists()
        assert environment.is_complete(python.parent.parent)

    def test_failures_say_what_helps_and_leave_nothing_complete(
        self, monkeypatch: pytest.MonkeyPatch, nothing: comfyui.ComfyUI, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(environment, "_free_gb", lambda _: 3.0)
            with pytest.raises(SetupError, match=r"needs 11 GB .* 3\.0 GB free.* set TOMA_CACHE"):
                environment.ensure(nothing)
        assert not list(cache.cache_dir().glob("env-*"))
        monkeypatch.setattr(environment, "requirements", lambda _: "/no-such-package\n")
        with pytest.raises(SetupError, match=r"Usual reasons: no network; too little disk"):
            environment.ensure(nothing)
        assert "no-such-package" in capfd.readouterr().err
        assert not [*cache.cache_dir().glob(f"env-*/{environment.MARKER}"), *cache.cache_dir().glob("tmp-*")]
        monkeypatch.setitem(sys.modules, "ensurepip", None)
        with pytest.raises(SetupError, match="sudo apt install python3-venv"):
            environment.make_venv(cache.cache_dir() / "env")


class TestCache:
    def test_follows_the_variables(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_home: Path) -> None:
        assert cache.cache_dir() == empty_home / ".cache" / "comfyui-toma"
        for name in ("XDG_CACHE_HOME", "TOMA_CACHE"):
            monkeypatch.setenv(name, str(tmp_path / name))
            assert cache.cache_dir().relative_to(tmp_path / name).as_posix() in (".", "comfyui-toma")
        (tmp_path / "TOMA_CACHE").touch()
        with pytest.raises(SetupError, match="set TOMA_CACHE"), cache.locked():
            pass

    def test_second_set_up_waits_for_the_first(self) -> None:
        program = "from scripts.cache import locked\nwith locked(): print('in', flush=True)"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with cache.locked():
            process = subprocess.Popen([sys.executable, "-c", program], cwd=comfyui.ROOT, **pipes)
            assert "waiting for it to finish" in process.stderr.readline()
            assert process.poll() is None
        assert process.communicate(timeout=30)[0] == "in\n"

    def test_purge_removes_everything(self) -> None:
        for name in ("env-py3.10-abc", "comfyui-0.30.0"):
            (cache.cache_dir() / name).mkdir(parents=True)
        cache.purge()
        assert [entry.name for entry in cache.cache_dir().iterdir()] == ["lock"]


def test_stage_shows_that_it_is_alive_and_why_it_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, one line shows the progress and is overwritten. Otherwise each state gets a new line."""
    monkeypatch.setattr("scripts.console.HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr("scripts.console.TERMINAL_SECONDS", 0.01)
    # The program ends when its status has been shown five times.
    program = "import os, time\nprint('halfway', flush=True)\nwhile not os.path.exists({!r}): time.sleep(0.01)\n{}"

    def staged(name: str, ending: str) -> tuple[bool, list[str]]:
        shown, end = list[str](), tmp_path / name

        def status(lines: Sequence[str]) -> str:
            shown.extend(lines[-1:])
            if len(shown) == 5:
                end.touch()
            return last_line(lines)

        command = [sys.executable, "-c", program.format(str(end), ending)]
        return run_stage(name, command, log=tmp_path / "log", status=status), capfd.readouterr().err.split("\n")[:-1]

    done, (title, *lines, why, last) = staged("A long stage", "raise SystemExit('no luck')")
    assert (done, title, why) == (False, "==> A long stage", "no luck")
    assert sum(line.endswith("halfway") for line in lines) >= 4
    assert last.startswith("    failed after ")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done, (title, line) = staged("A stage", "")
    assert (done, title) == (True, "==> A stage")
    assert line.count("\r") > 3
    assert "s  halfway" in line
    assert line.rpartition("\r")[2].startswith("    done after")


def test_pip_shows_what_it_writes_and_no_addresses(tmp_path: Path) -> None:
    with (tmp_path / "torch.whl").open("wb") as file:
        file.truncate(200_000_000)
    log = ["Collecting torch", "  Downloading https://mirror.example/torch-2.11.0.whl (530.6 MB)", "WARNING: no", ""]
    expected = "0.2 of about 3.3 GB written  Downloading torch-2.11.0.whl (530.6 MB)"
    assert pip_status((tmp_path / "none", tmp_path), 3.3)(log) == expected
    assert pip_status((tmp_path,), 0.1)([]) == "0.2 of about 0.2 GB written  ", "never more than all"


class TestMake:
    def test_setup_names_what_it_uses_and_errors_are_one_line(self, tmp_path: Path) -> None:
        fake = fake_comfyui(tmp_path / "mine", "1.2.3")
        done = make("setup", COMFYUI_PATH=str(fake), TOMA_PYTHON=sys.executable)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(f"ComfyUI 1.2.3 (COMFYUI_PATH) | Python {sys.version.split()[0]} | torch ")
        done = make("setup", COMFYUI_PATH=str(tmp_path))
        assert done.returncode != 0
        assert done.stderr.startswith("error: COMFYUI_PATH=")
        assert "Traceback" not in done.stderr

    def test_arguments_reach_the_command_in_the_environment(self, tmp_path: Path) -> None:
        fake = fake_comfyui(tmp_path / "mine")
        (tmp_path / "bad.py").write_text("import os, sys\n")
        done = make("lint", f"ARGS={tmp_path}/bad.py", COMFYUI_PATH=str(fake), TOMA_PYTHON=sys.executable)
        assert done.returncode != 0
        assert "F401" in done.stdout

    def test_lint_passes_in_a_folder_called_as_clones_are(self, tmp_path: Path) -> None:
        """ruff counts the folder of a checkout as a package, and `ComfyUI-ToMA` is not a valid name of a package."""
        clone = tmp_path / "ComfyUI-ToMA"
        clone.mkdir()
        for name in ("__init__.py", "pyproject.toml"):
            shutil.copyfile(comfyui.ROOT / name, clone / name)
        check = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "INP,N"]
        assert subprocess.run(check, cwd=clone, check=False).returncode == 0
