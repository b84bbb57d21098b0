"""Test that tag, version and changelog agree, and that publishing uses the tool versions that the tests use."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts import release
from scripts.comfyui import ROOT
from scripts.console import SetupError

CHANGELOG = (
    "## [Unreleased]\n\n## [1.2.3] - 2026-01-31\n\n### Fixed\n\n- A thing.\n\n## [1.2.2] - 2026-01-01\n\n- Older.\n"
)


def test_notes_are_the_section_of_the_version(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    assert release.notes("v1.2.3", tmp_path) == "### Fixed\n\n- A thing."
    for tag in ("1.2.3", "v1.2.4", "v1.2"):
        with pytest.raises(SetupError, match=r"tag v1\.2\.3"):
            release.notes(tag, tmp_path)
    for text in ("## [Unreleased]\n\n- New.\n", "## [1.2.3] - 2026-01-31\n\n## [1.2.2]\n\n- Old.\n"):
        (tmp_path / "CHANGELOG.md").write_text(text)
        with pytest.raises(SetupError, match=r"no text for 1\.2\.3"):
            release.notes("v1.2.3", tmp_path)


def test_publishing_installs_the_pins_of_the_tests() -> None:
    """The workflow runs `scripts.release` before it installs any package."""
    workflow = (ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    asked = re.findall(r"--pin ([\w-]+)", workflow)
    assert "comfy-cli" in asked
    command = [sys.executable, "-S", "-m", "scripts.release", "--pin"]
    for name in asked:
        answer = subprocess.run([*command, name], cwd=ROOT, capture_output=True, text=True, check=False)
        assert answer.stdout.startswith(f"{name}=="), answer.stderr
    with pytest.raises(SetupError, match="pins no abacus"):
        release.pin("abacus")


def test_files_of_github_have_what_it_asks_for() -> None:
    """Workflows run modules and files that exist. Forms for bug reports require the text of ToMA's report."""
    for path in sorted((ROOT / ".github").rglob("*.yml")):
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        if path.parent.name == "workflows":
            assert content[True]  # YAML 1.1 reads the key "on" as True
            assert content["permissions"], path.name
            for module in re.findall(r"-m (scripts\.\w+)", text):
                assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), (path.name, module)
        elif path.name != "config.yml":
            ids = [field["id"] for field in content["body"] if field["type"] != "markdown"]
            assert len(ids) == len(set(ids)) > 0
        if path.stem in ("bug", "slow"):
            (field,) = [field for field in content["body"] if field.get("id") == "report"]
            assert field["validations"]["required"]
    assert "run: .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
