"""Test the choice of the llama.cpp library: an existing build is used if it fits; else one line states the reason."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge.errors import EngineError
from edge.llama import library
from edge.llama.library import LIB_PATH, PINNED_LLAMA, PINNED_VERSION
from tests.support import ROOT
from tests.support.helpers import TIMEOUT_S

OWN = library.library_folder()
NAME = library._NAME


def linked(folder: Path, without: str = "") -> Path:
    """A folder with links to the libraries in use, but for one."""
    folder.mkdir()
    for file in OWN.iterdir():
        if file.name != without:
            (folder / file.name).symlink_to(file)
    return folder


def patched(folder: Path, old: bytes, new: bytes) -> Path:
    """A folder with the libraries in use, and other bytes of the same number in libllama."""
    linked(folder, without=NAME)
    assert len(old) == len(new)
    code = (OWN / NAME).read_bytes()
    assert old in code
    (folder / NAME).write_bytes(code.replace(old, new))
    return folder


def edge(*arguments: str, lib_path: Path) -> subprocess.CompletedProcess[str]:
    """The command, with a llama.cpp of this folder."""
    command = [sys.executable, "-m", "apps.cli", *arguments]
    env = {**os.environ, LIB_PATH: str(lib_path)}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=TIMEOUT_S, check=False)


def assert_refused(lib_path: Path, *words: str) -> None:
    """The command says in one line what is wrong, and what to do."""
    done = edge("chat", "-p", "hi", lib_path=lib_path)
    assert done.returncode not in (0, 1)
    assert done.returncode > 0
    assert len(done.stderr.strip().splitlines()) == 1
    for word in (*words, LIB_PATH):
        assert word in done.stderr


def test_one_of_the_same_version_answers(tmp_path: Path) -> None:
    done = edge("chat", "-p", "What is 27 plus 38?", "--temperature", "0", lib_path=linked(tmp_path / "lib"))
    assert done.stdout.strip() == "27 plus 38 is 65."


def test_one_of_another_version(tmp_path: Path) -> None:
    other = patched(tmp_path / "lib", b"\0" + PINNED_LLAMA.encode(), b"\x000.4.9")
    assert_refused(other, "llama.cpp 0.4.9", f"expected {PINNED_LLAMA}", f"llama-cpp-python {PINNED_VERSION}")


def test_one_with_another_ggml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PINNED_GGML", "0.0.1")
    with pytest.raises(EngineError, match=f"expected {PINNED_LLAMA} with 0.0.1"):
        library.check_library(OWN)


def test_another_llama_cpp_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PINNED_VERSION", "0.0.1")
    with pytest.raises(EngineError, match=f"llama-cpp-python {PINNED_VERSION} is installed, and 0.0.1 is needed"):
        library._open()


def test_one_that_lacks_a_function(tmp_path: Path) -> None:
    assert_refused(
        patched(tmp_path / "lib", b"llama_model_n_params\0", b"llama_model_m_params\0"), "llama_model_n_params"
    )


def test_a_folder_without_one(tmp_path: Path) -> None:
    assert_refused(tmp_path, f"there is no {NAME}")


def test_what_is_no_library(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("a text")
    assert_refused(tmp_path, "cannot be loaded")


def test_one_without_its_ggml(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes((OWN / NAME).read_bytes())
    assert_refused(tmp_path, "cannot be loaded", "libggml")


def test_missing_openmp_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError("libgomp.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    with pytest.raises(EngineError, match=r"cannot be loaded: libgomp.*; install OpenMP; on Debian: .* libgomp1$"):
        library.check_library(OWN)


@pytest.mark.parametrize("name", library._DEFAULTS)
def test_parameters_that_lie_otherwise(name: str) -> None:
    library.check_parameters(library.llama_cpp, OWN)
    declared = {each: getattr(library.llama_cpp, f"llama_{each}_params") for each in library._DEFAULTS}
    fields = [("new_at_the_front", library.C.c_int32), *declared[name]._fields_]  # type: ignore[attr-defined]
    declared[name] = type("Moved", (library.C.Structure,), {"_fields_": fields})  # type: ignore[attr-defined]
    package = SimpleNamespace(**{f"llama_{each}_params": struct for each, struct in declared.items()})
    with pytest.raises(EngineError, match=f"lays its {name} parameters out differently .* {PINNED_VERSION}"):
        library.check_parameters(package, OWN)


def test_one_of_the_system_is_used_where_llama_cpp_python_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LIB_PATH, raising=False)
    package = tmp_path / "site" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "llama_cpp")
    monkeypatch.syspath_prepend(package.parent)
    nothing, system = tmp_path / "nothing", linked(tmp_path / "system")
    with pytest.raises(EngineError, match=f"without llama.cpp, and there is no {NAME} in {nothing}; set {LIB_PATH}"):
        library.library_folder([nothing])
    assert library.library_folder([nothing, system]) == system
    linked(package / "lib")
    assert library.library_folder([nothing, system]) == package / "lib"
