"""Statements of CONTRIBUTING.md hold: targets of make, paths, versions of Python, tools of the hooks."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "README.md", ROOT / "docs" / "architecture.md"]


@pytest.mark.parametrize("page", [*PAGES, *WORKFLOWS], ids=lambda page: page.name)
def test_targets_of_make_that_are_named_are_there(page: Path) -> None:
    named = set(re.findall(r"(?:`|^|true |run: )make ([a-z]+)", page.read_text(), re.MULTILINE))
    assert named <= TARGETS


def test_paths_that_contributors_are_sent_to_are_there() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    paths = {path for path in re.findall(r"`([\w.-]+(?:/[\w.-]+)+)`", text) if "ROOM" not in path}
    assert len(paths) > 5
    assert not {path for path in paths if not path.startswith(".venv") and not (ROOT / path).exists()}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_scripts_that_workflows_run_are_there(workflow: Path) -> None:
    scripts = re.findall(r"(?<![\w/])\.ci/\w+", workflow.read_text())
    assert all((ROOT / script).stat().st_mode & 0o111 for script in scripts)


def test_the_oldest_and_the_newest_python_are_those_of_the_package() -> None:
    versions = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    oldest, newest = (re.search(rf"^{name}_PYTHON := (.+)$", MAKEFILE, re.MULTILINE) for name in ("OLDEST", "NEWEST"))
    assert oldest is not None
    assert newest is not None
    assert [oldest[1], newest[1]] == [versions[0], versions[-1]]
    assert PROJECT["requires-python"] == f">={oldest[1]}"
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert {oldest[1], newest[1]} <= set(re.findall(r"^ +(3\.\d+)$", nightly, re.MULTILINE))


def test_hooks_are_the_checks_of_make_test() -> None:
    hooks = re.findall(r"entry: \.venv/bin/(\w+(?: \w+)?)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == ["ruff check", "ruff format", "mypy"]
    assert all(f"$(BIN)/{hook}" in MAKEFILE for hook in hooks)


def test_a_thorough_run_has_all_parts_and_says_which_python_is_left_out(tmp_path: Path) -> None:
    for name in ("bash", "sh", "echo"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    (tmp_path / "python3.10").symlink_to(sys.executable)
    done = subprocess.run(
        [shutil.which("make") or "make", "thorough", 'MAKE=echo "EDGE_THOROUGH=$$EDGE_THOROUGH"'],
        cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = [line.replace("EDGE_THOROUGH=1 --no-print-directory ", "make ") for line in done.stdout.splitlines()]
    assert lines[:3] == ["make test", "make real", "make smoke"]
    assert lines[3:5] == ["==> Python 3.10", "make test PYTHON=python3.10 VENV=.venv-3.10"]
    assert lines[5:] == ["==> Python 3.14: left out, as no python3.14 is installed"]
