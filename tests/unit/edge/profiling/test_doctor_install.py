"""Test the verdicts of `edge doctor` on the installation: Python, packages, and the build of llama.cpp."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from devices.machine_cores import knowable_sets
from edge.errors import EngineError
from edge.profiling.doctor import examine, install, native
from edge.profiling.doctor.findings import NOTE, OK, PROBLEM
from edge.profiling.doctor.install import Build, Installed
from edge.version import version
from tests.support.helpers import assert_verdict

# --- what is installed ---

INSTALLED = Installed(
    ">=3.10",
    ("numpy>=1.26,<3", "tomli>=2; python_version < '3'", "onnx>=1.17; extra == 'onnx'"),
    {"numpy": "2.1.0", "tomli": None, "onnx": "1.17.0"},
)


def test_python() -> None:
    assert_verdict(install.python(INSTALLED, "3.10.0"), OK, "Python 3.10.0", ">=3.10")
    assert_verdict(install.python(INSTALLED, "3.9.18"), PROBLEM, "Python 3.9.18, >=3.10 is needed", "install Python")


@pytest.mark.parametrize(
    ("numpy", "level", "words"),
    [
        ("1.26.0", OK, "1 package, all"),
        ("3.0.0", PROBLEM, "numpy 3.0.0 is installed, <3,>=1.26 is needed"),
        (None, PROBLEM, "numpy is not installed"),
    ],
)
def test_packages(numpy: str | None, level: str, words: str) -> None:
    there = replace(INSTALLED, versions={**INSTALLED.versions, "numpy": numpy})
    assert_verdict(install.packages(there), level, words, *(['pip install "numpy<3,>=1.26"'] if level != OK else []))


@pytest.mark.parametrize(("onnx", "level"), [("1.18.0", OK), ("1.16.0", NOTE), (None, NOTE)])
def test_extras(onnx: str | None, level: str) -> None:
    there = replace(INSTALLED, versions={**INSTALLED.versions, "onnx": onnx})
    words = ['pip install "edge-runtime[onnx]"'] if level != OK else []
    assert_verdict(install.extra("onnx", there), level, "models in ONNX", *words)


def test_this_installation_is_read() -> None:
    there = install.read_installed()
    assert there.requires_python == ">=3.10"
    assert there.versions["numpy"] == version("numpy")
    assert there.versions["llama-cpp-python"] == version("llama-cpp-python")


# --- what llama.cpp was built for ---

INTEL = frozenset({"avx", "avx2", "fma", "f16c", "bmi2"})
LIBRARY = "llama.cpp 0.5.0 with ggml 0.25.3 of /usr/local/lib"
OF_INTEL = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | "
BUILD = Build(LIBRARY, OF_INTEL, None, INTEL, knowable_sets())
PI = Build(LIBRARY, "CPU : NEON = 1 | ARM_FMA = 1 | ", None, frozenset({"neon", "fp16", "dotprod"}), knowable_sets())


def test_a_build_with_all_that_the_processor_has() -> None:
    assert_verdict(install.instructions(BUILD), OK, "avx, avx2, bmi2, f16c, fma")


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (replace(BUILD, cpu_sets=INTEL | {"avx512f", "avx512_vnni"}), "without avx512_vnni, avx512f, which"),
        (replace(BUILD, cpu_sets=INTEL | {"avx_vnni"}), "without avx_vnni, which"),
        (PI, "without dotprod, fp16, which"),
    ],
)
def test_a_build_that_leaves_out_what_the_processor_has_is_slower(build: Build, named: str) -> None:
    assert_verdict(install.instructions(build), NOTE, named, "slower", "--no-binary llama-cpp-python")


def test_a_build_with_what_the_processor_lacks_would_crash_and_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    build = replace(BUILD, cpu_sets=INTEL - {"avx2", "fma"})
    assert_verdict(install.instructions(build), PROBLEM, "built with avx2, fma, which this processor lacks")
    requests: list[str] = []
    monkeypatch.setattr(native, "ask", requests.append)
    assert_verdict(examine.answer_of(build), NOTE, "not tried")
    assert requests == []


def test_what_the_system_does_not_tell_is_not_lacking() -> None:
    assert_verdict(install.instructions(replace(BUILD, cpu_sets=INTEL - {"bmi2"}, knowable=INTEL - {"bmi2"})), OK)
    assert_verdict(install.instructions(replace(BUILD, cpu_sets=frozenset())), NOTE, "does not report")


def test_amx_is_left_out_and_neither_missed_nor_lacking() -> None:
    assert_verdict(install.amx(BUILD), OK)
    with_it = replace(BUILD, system_info=BUILD.system_info + "AMX_INT8 = 1 | ", cpu_sets=INTEL | {"amx_int8"})
    assert_verdict(install.amx(with_it), NOTE, "AMX", "next best")
    assert_verdict(install.instructions(replace(BUILD, cpu_sets=INTEL | {"amx_int8"})), OK)


def test_gpu() -> None:
    assert_verdict(install.gpu(BUILD), OK, "none")
    assert_verdict(install.gpu(replace(BUILD, gpu="CUDA")), OK, "llama.cpp uses one: CUDA")
    unused = replace(BUILD, gpu_files=("/dev/nvidia0",))
    assert_verdict(install.gpu(unused), NOTE, "/dev/nvidia0", 'CMAKE_ARGS="-DGGML_CUDA=on"')


def test_an_answer_that_is_not_the_known_one() -> None:
    assert_verdict(install.answer(native.ANSWER), OK, "65")
    assert_verdict(install.answer("27 plus 38 is 56."), PROBLEM, "27 plus 38 is 56.", native.ANSWER)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
        ("import sys; sys.exit('no libllama.so')", "no libllama.so"),
    ],
)
def test_a_llama_cpp_that_ends_its_process_is_a_problem(
    program: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "module_command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(EngineError, match=words):
        native.ask("describe")
    checks = examine.LocalChecks().checks()
    assert_verdict(checks["llama.cpp"](), PROBLEM, words, install.REBUILD)
    for name in ("instructions", "amx", "gpu", "answer"):
        assert_verdict(checks[name](), NOTE, "not checked: llama.cpp cannot be used")


def test_a_llama_cpp_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "module_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(native, "NATIVE_TIMEOUT_S", 0.2)
    with pytest.raises(EngineError, match=r"no answer within 0\.2 s"):
        native.ask("describe")


# --- modules of a wheel ---

WHEEL = replace(BUILD, module="haswell", modules=("haswell", "x64", "zen4"))
ZEN4 = INTEL | {"avx512f", "avx512_vbmi", "avx512_vnni", "avx512_bf16"}


def test_the_module_in_use_is_named() -> None:
    assert_verdict(install.instructions(WHEEL), OK, "uses its module haswell, of 3 modules")


def test_a_better_module_that_is_missing_is_named() -> None:
    few = replace(WHEEL, cpu_sets=ZEN4, modules=("haswell", "x64"))
    assert_verdict(install.instructions(few), NOTE, "module haswell", "module zen4 for this processor is missing")


def test_instruction_sets_that_no_module_has_are_not_missed() -> None:
    """A Zen 5 has AVX-VNNI, and the module zen4 has AVX-512's kernels instead."""
    best = replace(WHEEL, cpu_sets=ZEN4 | {"avx_vnni"}, module="zen4", system_info="CPU : AVX = 1 | ")
    assert_verdict(install.instructions(best), OK, "zen4")


def test_a_module_that_the_system_cannot_run_is_not_missing() -> None:
    """ggml's score of zen4 was lower, although the processor has its instructions."""
    assert_verdict(install.instructions(replace(WHEEL, cpu_sets=ZEN4)), OK, "haswell")


def test_a_single_module_is_judged_by_its_instructions() -> None:
    single = replace(BUILD, module="cpu", modules=("cpu",), cpu_sets=INTEL | {"avx_vnni"})
    assert_verdict(install.instructions(single), NOTE, "without avx_vnni")


def test_an_old_processor_needs_no_better_module() -> None:
    old = replace(BUILD, module="sse42", modules=("sse42", "x64"), system_info="CPU : ", cpu_sets=frozenset({"fma"}))
    assert_verdict(install.instructions(old), OK, "sse42")
