"""Checks of the installation: Python, packages, and whether llama.cpp was built for this processor."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from edge.profiling.doctor.findings import NOTE, OK, PROBLEM, Verdict
from edge.profiling.doctor.native import ANSWER, QUESTION
from quant.text import counted

RUNTIME = "edge-runtime"
EXTRAS = {"onnx": "models in ONNX", "quantize": "edge quantize --size and pictures"}
REBUILD = "build it on this device: pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python"
# llama.cpp's names of instruction sets, with the names of devices.machine_cores.
_BUILT = {
    "AVX": "avx", "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "BMI2": "bmi2", "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f", "AVX512_VBMI": "avx512_vbmi", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "NEON": "neon", "FP16_VA": "fp16", "DOTPROD": "dotprod", "MATMUL_INT8": "i8mm", "SVE": "sve", "SME": "sme",
}  # fmt: skip
_AMX = "amx_int8"
# Modules of a wheel for the CPU in the order of ggml's scores, with the instruction sets of each. Modules for older
# processors need none of these sets.
_MODULES = {
    "sandybridge": "avx", "ivybridge": "avx f16c", "piledriver": "avx f16c fma", "haswell": "avx f16c fma avx2 bmi2",
    "alderlake": "avx f16c fma avx2 bmi2 avx_vnni", "skylakex": "avx f16c fma avx2 bmi2 avx512f",
    "cannonlake": "avx f16c fma avx2 bmi2 avx512f avx512_vbmi",
    "cascadelake": "avx f16c fma avx2 bmi2 avx512f avx512_vnni",
    "icelake": "avx f16c fma avx2 bmi2 avx512f avx512_vbmi avx512_vnni",
    "cooperlake": "avx f16c fma avx2 bmi2 avx512f avx512_vnni avx512_bf16",
    "zen4": "avx f16c fma avx2 bmi2 avx512f avx512_vbmi avx512_vnni avx512_bf16",
    "sapphirerapids": "avx f16c fma avx2 bmi2 avx512f avx512_vbmi avx512_vnni avx512_bf16 amx_int8",
    "armv8.0_1": "neon", "armv8.2_1": "neon dotprod", "armv8.2_2": "neon dotprod fp16",
    "armv8.2_3": "neon dotprod fp16 sve", "armv8.6_1": "neon dotprod fp16 sve i8mm",
    "armv8.6_2": "neon dotprod fp16 sve i8mm sve2", "armv9.2_1": "neon dotprod fp16 sve i8mm sme",
    "armv9.2_2": "neon dotprod fp16 sve i8mm sve2 sme",
}  # fmt: skip
# Device files of drivers for discrete GPUs, and the build option that uses the GPU.
_GPU_FILES = {"/dev/nvidia0": "-DGGML_CUDA=on", "/dev/kfd": "-DGGML_HIP=on"}


@dataclass(frozen=True)
class Installed:
    """Requirements of the runtime's package, and the installed versions."""

    requires_python: str  # such as ">=3.10"
    requirements: Sequence[str]  # entries of pyproject.toml; requirements of extras with their markers
    versions: Mapping[str, str | None]  # installed version of each required package; None: not installed


@dataclass(frozen=True)
class Build:
    """llama.cpp's description of its build, and this processor's instruction sets."""

    library: str  # "llama.cpp 0.5.0 with ggml 0.25.3 of /usr/local/lib"
    system_info: str  # "CPU : AVX2 = 1 | CUDA : ARCHS = 890 | "
    gpu: str | None  # backends with a GPU; None: no backend has one
    cpu_sets: frozenset[str]  # names as in devices.machine_cores; empty: the system does not report them
    knowable: frozenset[str]  # instruction sets that this system would report if present
    gpu_files: tuple[str, ...] = ()  # existing files of _GPU_FILES
    module: str | None = None  # module with the kernels in use; None: they are linked
    modules: tuple[str, ...] = ()  # modules that this llama.cpp has

    @property
    def built_sets(self) -> frozenset[str]:
        """Instruction sets that llama.cpp was built with."""
        names = re.findall(r"(\w+) = 1", self.system_info)
        return frozenset(_BUILT[name] for name in names if name in _BUILT)


def read_installed() -> Installed:
    """Return the requirements and installed versions. Raises PackageNotFoundError if the runtime is not installed."""
    runtime = distribution(RUNTIME)
    requirements = runtime.requires or []
    names = {Requirement(text).name for text in requirements}
    return Installed(
        runtime.metadata["Requires-Python"] or "", requirements, {name: _version(name) for name in sorted(names)}
    )


def gpu_files() -> tuple[str, ...]:
    """Return the driver files that indicate a GPU."""
    return tuple(name for name in _GPU_FILES if Path(name).exists())


def python(installed: Installed, here: str | None = None) -> Verdict:
    """Check that the runtime supports this Python. here: version of this Python."""
    here = here or platform.python_version()
    if SpecifierSet(installed.requires_python).contains(here, prereleases=True):
        return Verdict(OK, f"Python {here}, {installed.requires_python} is needed")
    return Verdict(
        PROBLEM,
        f"Python {here}, {installed.requires_python} is needed",
        f"install Python {installed.requires_python}, and edge with it",
    )


def packages(installed: Installed) -> Verdict:
    """Check that every required package has a version in its range."""
    needed = [r for r in map(Requirement, installed.requirements) if not r.marker or r.marker.evaluate()]
    wrong = _wrong(needed, installed.versions)
    if wrong:
        names = " ".join(f'"{requirement.name}{requirement.specifier}"' for requirement in wrong)
        return Verdict(PROBLEM, "; ".join(wrong.values()), f"pip install {names}")
    return Verdict(OK, f"{counted(len(needed), 'package')}, all in their ranges")


def extra(name: str, installed: Installed) -> Verdict:
    """Check that the packages of an extra are installed in their ranges."""
    needed = [
        requirement
        for requirement in map(Requirement, installed.requirements)
        if (marker := requirement.marker) and marker.evaluate({"extra": name}) and not marker.evaluate({"extra": ""})
    ]
    wrong = _wrong(needed, installed.versions)
    if not wrong:
        return Verdict(OK, f"installed, for {EXTRAS[name]}")
    return Verdict(
        NOTE, f"{'; '.join(wrong.values())}: for {EXTRAS[name]}", f'if you want that: pip install "{RUNTIME}[{name}]"'
    )


def llama_cpp(build: Build) -> Verdict:
    """Report the loaded llama.cpp."""
    return Verdict(OK, f"llama-cpp-python {_version('llama-cpp-python')} loads {build.library}")


def instructions(build: Build) -> Verdict:
    """Check that the build uses exactly this processor's instruction sets."""
    if not build.cpu_sets:
        return Verdict(NOTE, "this system does not report its processor's instruction sets", "trust the check `answer`")
    lacking = sorted((build.built_sets - build.cpu_sets) & build.knowable)
    if lacking:
        what = f"llama.cpp was built with {', '.join(lacking)}, which this processor lacks: such kernels crash"
        return Verdict(PROBLEM, what, REBUILD)
    if build.module not in (None, "cpu"):
        return _best_module(build, build.module)
    unused = sorted((build.cpu_sets & set(_BUILT.values())) - build.built_sets - {_AMX})
    if unused:
        what = (
            f"llama.cpp was built without {', '.join(unused)}, which this processor has: it is slower than it could be"
        )
        return Verdict(NOTE, what, REBUILD)
    return Verdict(OK, f"built with all that this processor has: {', '.join(sorted(build.built_sets)) or 'none'}")


def _best_module(build: Build, module: str) -> Verdict:
    """Check that the module in use is the best one for this processor."""
    best = next((name for name, sets in reversed(_MODULES.items()) if build.cpu_sets.issuperset(sets.split())), module)
    if best not in (module, *build.modules):
        return Verdict(
            NOTE,
            f"llama.cpp uses its module {module}; the better module {best} for this processor is missing",
            f"install a wheel that has it, or {REBUILD}",
        )
    return Verdict(OK, f"llama.cpp uses its module {module}, of {counted(len(build.modules), 'module')}")


def amx(build: Build) -> Verdict:
    """Report whether the build has kernels for Intel AMX, which edge does not use (edge/llama/buffers.py)."""
    if _AMX in build.built_sets:
        return Verdict(NOTE, "llama.cpp has kernels for AMX; edge uses its next best ones", "nothing: it is deliberate")
    return Verdict(OK, "llama.cpp has no kernels for AMX")


def gpu(build: Build) -> Verdict:
    """Check that llama.cpp uses a GPU if the machine has one."""
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
    """Check the bundled model's answer. text: the model's greedy answer to QUESTION."""
    if text == ANSWER:
        return Verdict(OK, f"{QUESTION} {text}")
    return Verdict(PROBLEM, f"the bundled model answers {text!r:.80} to {QUESTION!r}, not {ANSWER!r}", REBUILD)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _wrong(needed: Sequence[Requirement], versions: Mapping[str, str | None]) -> dict[Requirement, str]:
    """Return the unmet requirements, each with a description of the installed version."""
    wrong: dict[Requirement, str] = {}
    for requirement in needed:
        installed_version = versions.get(requirement.name)
        if installed_version is None:
            wrong[requirement] = f"{requirement.name} is not installed"
        elif not requirement.specifier.contains(installed_version, prereleases=True):
            wrong[requirement] = (
                f"{requirement.name} {installed_version} is installed, {requirement.specifier} is needed"
            )
    return wrong
