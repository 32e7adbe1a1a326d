"""Modules of llama.cpp: the best one that this processor can run is loaded, and GPUs only if there may be one."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.errors import EngineError
from edge.llama import backends, library

MODULES = ("cpu-haswell", "cpu-x64", "cpu-zen4", "vulkan", "cuda", "base")
SCORES = {"x64": 1, "haswell": 64, "zen4": 0}  # no AVX-512 here


class FakeLibrary(SimpleNamespace):
    """Functions of libllama, which record what is loaded."""

    def __init__(self, *, linked: bool = False) -> None:
        self.loaded: list[str] = []
        self.logs: list[bool] = []
        super().__init__(
            ggml_backend_dev_by_type=self._function(lambda _: 1 if linked else None),
            ggml_backend_load=lambda path: self.loaded.append(Path(path.decode()).stem.removeprefix("libggml-")),
            ggml_log_set=self._function(lambda callback, _: self.logs.append(callback is not None)),
        )

    @staticmethod
    def _function(function: Callable[..., Any]) -> Any:
        """Return a function that takes attributes, as those of ctypes do."""
        return type("Function", (), {"__call__": lambda _, *arguments: function(*arguments)})()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in MODULES:
        (tmp_path / f"libggml-{name}.so").touch()
    for name in ("libggml.so", "libllama.so", "libmtmd.so"):
        (tmp_path / name).touch()
    monkeypatch.setattr(backends, "_score", lambda path: SCORES[path.stem.removeprefix("libggml-cpu-")])
    return tmp_path


def test_the_best_module_is_loaded_after_those_of_gpus(folder: Path) -> None:
    fake = FakeLibrary()
    assert backends.load(fake, folder, lambda: True) == "haswell"
    assert fake.loaded == ["cuda", "vulkan", "cpu-haswell"]
    assert fake.logs == [True, False]  # ggml's log is dropped while modules load, and only then


def test_vulkan_is_left_out_without_a_gpu(folder: Path) -> None:
    fake = FakeLibrary()
    backends.load(fake, folder, lambda: False)
    assert fake.loaded == ["cuda", "cpu-haswell"]


def test_nothing_is_loaded_if_the_kernels_are_linked(folder: Path) -> None:
    fake = FakeLibrary(linked=True)
    assert backends.load(fake, folder, lambda: True) is None
    assert fake.loaded == []


def test_a_folder_without_modules(tmp_path: Path) -> None:
    assert backends.load(FakeLibrary(), tmp_path, lambda: True) is None


def test_a_processor_that_can_run_no_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_score", lambda _: 0)
    fake = FakeLibrary()
    with pytest.raises(
        EngineError, match=rf"none .* in {re.escape(str(folder))} can run .*: haswell, x64, zen4; build"
    ):
        backends.load(fake, folder, lambda: True)
    assert fake.loaded == []


def test_the_log_comes_back_if_loading_fails(folder: Path) -> None:
    fake = FakeLibrary()
    fake.ggml_backend_load = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        backends.load(fake, folder, lambda: True)
    assert fake.logs == [True, False]


def test_scores(tmp_path: Path) -> None:
    (tmp_path / "libggml-cpu-x64.so").write_text("a text")
    assert backends._score(tmp_path / "libggml-cpu-x64.so") == 0
    assert backends._score(library.library_folder() / library._NAME) == 1  # a library without a score


def test_a_build_with_one_module_has_no_name_of_a_processor(tmp_path: Path) -> None:
    (tmp_path / "libggml-cpu.so").touch()
    assert list(backends.cpu_modules(tmp_path)) == ["cpu"]


def test_chosen_vulkan_devices_count_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_GPU_FILES", ("/no/such/file*",))
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES", raising=False)
    assert not backends.may_have_gpu()
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    assert backends.may_have_gpu()
    monkeypatch.setenv("GGML_DISABLE_VULKAN", "1")
    assert not backends.may_have_gpu()


def test_device_files_count_as_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(backends, "_GPU_FILES", (f"{tmp_path}/renderD*",))
    assert not backends.may_have_gpu()
    (tmp_path / "renderD128").touch()
    assert backends.may_have_gpu()
