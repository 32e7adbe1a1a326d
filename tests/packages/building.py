"""Build the wheel and the sdist of this tree, and list their expected contents."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.support import ROOT

PACKAGES = ("apps", "devices", "edge", "partition", "quant", "transport")
ABOUT = ("LICENSE", "README.md", "pyproject.toml")
_BUILD_S = 300.0  # each of the two takes seconds; a busy machine takes longer
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def copied(folder: Path) -> Path:
    """The files that packages are made of, in a folder: builds leave files beside what they build."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ABOUT:
        shutil.copy(ROOT / name, folder / name)
    return folder


def built(kind: str, source: Path, folder: Path) -> Path:
    """A "wheel" or an "sdist" of the files in `source`, made by the setuptools that is installed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, f"build_{kind}", str(folder)],
        cwd=source, capture_output=True, text=True, timeout=_BUILD_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


def in_wheel(wheel: Path) -> set[str]:
    """Its files, without those that describe it."""
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name}


def in_sdist(sdist: Path) -> set[str]:
    """Its files, without those that describe it."""
    with tarfile.open(sdist) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    return {name for name in names if ".egg-info/" not in name} - {"PKG-INFO", "setup.cfg"}


def of_packages(source: Path) -> set[str]:
    """The files of the packages."""
    paths = (path for name in PACKAGES for path in (source / name).rglob("*") if path.is_file())
    return {str(path.relative_to(source)) for path in paths}
