"""Checks of what is installed: Python, packages, and whether llama.cpp was built for this processor."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from edge.doctor.findings import NOTE, OK, PROBLEM, Verdict
from edge.doctor.native import ANSWER, QUESTION
from quant.text import counted

RUNTIME = "edge-runtime"
EXTRAS = {"onnx": "models in ONNX", "quantize": "edge quantize --size and pictures"}
REBUILD = "build it on this device: pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python"
# What llama.cpp calls the instruction sets it was built with, and what devices.machine_cores calls them.
_BUILT = {
    "AVX": "avx", "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "BMI2": "bmi2", "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f", "AVX512_VBMI": "avx512_vbmi", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "NEON": "neon", "FP16_VA": "fp16", "DOTPROD": "dotprod", "MATMUL_INT8": "i8mm", "SVE": "sve", "SME": "sme",
}  # fmt: skip
_AMX = "amx_int8"
# Files that a driver makes for a GPU of its own memory, and the option of a build that uses it.
_GPU_FILES = {"/dev/nvidia0": "-DGGML_CUDA=on", "/dev/kfd": "-DGGML_HIP=on"}


@dataclass(frozen=True)
class Installed:
    """What the runtime needs, as its package says, and what is there."""

    requires_python: str  # such as ">=3.10"
    requirements: Sequence[str]  # as in pyproject.toml, those of extras with their markers
    versions: Mapping[str, str | None]  # of each package named; None: not installed


@dataclass(frozen=True)
class Build:
    """What llama.cpp says of its build, and what this processor has."""

    library: str  # "llama.cpp 0.5.0 with ggml 0.25.3 of /usr/local/lib"
    system_info: str  # "CPU : AVX2 = 1 | CUDA : ARCHS = 890 | "
    gpu: str | None  # the backends that reach one; None: none does
    cpu_sets: frozenset[str]  # by the names of devices.machine_cores; none: the system does not say
    knowable: frozenset[str]  # the sets that this system tells about
    gpu_files: tuple[str, ...] = ()  # of _GPU_FILES, those that are there

    @property
    def built_sets(self) -> frozenset[str]:
        """The sets it was built with."""
        names = re.findall(r"(\w+) = 1", self.system_info)
        return frozenset(_BUILT[name] for name in names if name in _BUILT)


def read_installed() -> Installed:
    """What is installed now. PackageNotFoundError where the runtime itself is not."""
    runtime = distribution(RUNTIME)
    requirements = runtime.requires or []
    names = {Requirement(text).name for text in requirements}
    return Installed(
        runtime.metadata["Requires-Python"] or "", requirements, {name: _version(name) for name in sorted(names)}
    )


def gpu_files() -> tuple[str, ...]:
    """Files of drivers that tell of a GPU."""
    return tuple(name for name in _GPU_FILES if Path(name).exists())


def python(installed: Installed, here: str | None = None) -> Verdict:
    """Whether this Python is one that the runtime runs on. here: its version."""
    here = here or platform.python_version()
    if SpecifierSet(installed.requires_python).contains(here, prereleases=True):
        return Verdict(OK, f"Python {here}, {installed.requires_python} is needed")
    return Verdict(
        PROBLEM,
        f"Python {here}, {installed.requires_python} is needed",
        f"install Python {installed.requires_python}, and edge with it",
    )


def packages(installed: Installed) -> Verdict:
    """Whether every package that edge cannot be without has a version in its range."""
    needed = [each for each in map(Requirement, installed.requirements) if not each.marker or each.marker.evaluate()]
    wrong = _wrong(needed, installed.versions)
    if wrong:
        return Verdict(PROBLEM, "; ".join(wrong.values()), f"pip install {' '.join(map(_quoted, wrong))}")
    return Verdict(OK, f"{counted(len(needed), 'package')}, all in their ranges")


def extra(name: str, installed: Installed) -> Verdict:
    """Whether the packages of an extra are there, all of them in their ranges."""
    needed = [
        each
        for each in map(Requirement, installed.requirements)
        if each.marker and each.marker.evaluate({"extra": name}) and not each.marker.evaluate({"extra": ""})
    ]
    wrong = _wrong(needed, installed.versions)
    if not wrong:
        return Verdict(OK, f"installed, for {EXTRAS[name]}")
    return Verdict(
        NOTE, f"{'; '.join(wrong.values())}: for {EXTRAS[name]}", f'if you want that: pip install "{RUNTIME}[{name}]"'
    )


def llama_cpp(build: Build) -> Verdict:
    """Of a llama.cpp that loads: which one it is."""
    return Verdict(OK, f"llama-cpp-python {_version('llama-cpp-python')} loads {build.library}")


def instructions(build: Build) -> Verdict:
    """Whether the build uses what this processor has, and nothing that it lacks."""
    if not build.cpu_sets:
        return Verdict(NOTE, "this system does not say what its processor can do", "trust the check `answer`")
    lacking = sorted((build.built_sets - build.cpu_sets) & build.knowable)
    if lacking:
        what = f"llama.cpp was built with {', '.join(lacking)}, which this processor lacks: it ends at such a kernel"
        return Verdict(PROBLEM, what, REBUILD)
    unused = sorted((build.cpu_sets & set(_BUILT.values())) - build.built_sets - {_AMX})
    if unused:
        what = f"llama.cpp was built without {', '.join(unused)}, which this processor has: it is slower than it could"
        return Verdict(NOTE, what, REBUILD)
    return Verdict(OK, f"built with all that this processor has: {', '.join(sorted(build.built_sets)) or 'none'}")


def amx(build: Build) -> Verdict:
    """Whether there are kernels for Intel's AMX, which edge leaves out (edge/llama/buffers.py)."""
    if _AMX in build.built_sets:
        return Verdict(NOTE, "llama.cpp has kernels for AMX; edge uses its next best ones", "nothing: it is deliberate")
    return Verdict(OK, "llama.cpp has no kernels for AMX")


def gpu(build: Build) -> Verdict:
    """Whether a GPU that is there is used."""
    if build.gpu is not None:
        return Verdict(OK, f"llama.cpp uses one: {build.gpu}")
    for name in build.gpu_files:
        return Verdict(
            NOTE,
            f"there is a GPU ({name}), and llama.cpp was built without it",
            f'CMAKE_ARGS="{_GPU_FILES[name]}" pip install --force-reinstall --no-cache-dir llama-cpp-python',
        )
    return Verdict(OK, "none that llama.cpp could use")


def answer(text: str) -> Verdict:
    """Whether the bundled model answers as it does everywhere. text: its greedy answer to QUESTION."""
    if text == ANSWER:
        return Verdict(OK, f"{QUESTION} {text}")
    return Verdict(PROBLEM, f"the bundled model answers {text!r:.80} to {QUESTION!r}, not {ANSWER!r}", REBUILD)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _wrong(needed: Sequence[Requirement], versions: Mapping[str, str | None]) -> dict[Requirement, str]:
    """Of each requirement that is not met: what is there instead."""
    wrong: dict[Requirement, str] = {}
    for each in needed:
        there = versions.get(each.name)
        if there is None:
            wrong[each] = f"{each.name} is not installed"
        elif not each.specifier.contains(there, prereleases=True):
            wrong[each] = f"{each.name} {there} is installed, {each.specifier} is needed"
    return wrong


def _quoted(requirement: Requirement) -> str:
    return f'"{requirement.name}{requirement.specifier}"'
