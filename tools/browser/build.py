"""Build the WebAssembly modules of the page that computes in a browser: `make browser`.

llama.cpp of the pinned llama-cpp-python version is compiled with emscripten 3.1.6 (on Debian 12: apt-get install
emscripten node-acorn node-acorn-jsx), together with shim.cpp. There are two variants: with threads, for pages that are
cross-origin isolated, and without threads. Both use 128-bit SIMD. The results are package data in edge/browser/static,
with their SHA-256 digests in checksums.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tools.build_wheels import ROOT, unpacked_source

EMSCRIPTEN = "3.1.6"  # other versions generate other code
STATIC = ROOT / "edge/browser/static"
MOST_BYTES = 5_000_000  # of a file
_EMSCRIPTEN = "/usr/share/emscripten"
_SHIM = Path(__file__).with_name("shim.cpp")
_VARIANTS = {"threads": ("-pthread",), "single": ()}  # name: flags of the compiler and the linker
_COMPILE = ("-O3", "-msimd128", "-fexceptions")
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_TOOLCHAIN_FILE={_EMSCRIPTEN}/cmake/Modules/Platform/Emscripten.cmake",
    # This processor name selects the SIMD kernels. LLVM 14 has no SIMD for 64-bit memory.
    "-DEMSCRIPTEN_SYSTEM_PROCESSOR=wasm", "-DLLAMA_WASM_MEM64=OFF",
    "-DBUILD_SHARED_LIBS=OFF", "-DGGML_OPENMP=OFF", "-DGGML_NATIVE=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_HTML=OFF",
)  # fmt: skip
_LINK = (
    "--no-entry", "-sMODULARIZE", "-sEXPORT_ES6", "-sENVIRONMENT=worker", "-sFORCE_FILESYSTEM",
    # The page creates the memory, because some devices refuse a maximum of 4 GB.
    "-sIMPORTED_MEMORY", "-sALLOW_MEMORY_GROWTH", "-sINITIAL_MEMORY=67108864", "-sMAXIMUM_MEMORY=4294967296",
    "-sEXPORTED_RUNTIME_METHODS=FS", "-sEXPORTED_FUNCTIONS=_malloc,_free", "-Wno-pthreads-mem-growth",
)  # fmt: skip


def emscripten() -> dict[str, str]:
    """Return the environment for emscripten. Raises SystemExit if its version is another."""
    try:
        first = subprocess.run(["emcc", "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        first = "none"
    if f" {EMSCRIPTEN} " not in first:
        raise SystemExit(f"the modules need emscripten {EMSCRIPTEN}, found: {first}; on Debian 12: apt-get install"
                         " emscripten node-acorn node-acorn-jsx")  # fmt: skip
    return {**os.environ, "NODE_PATH": "/usr/share/nodejs"}


def round_activations(llama: Path) -> None:
    """Round activations to the nearest value in the kernels for WebAssembly, as those of other processors do.

    llama.cpp cuts them off there, which biases each product. Raises SystemExit if the source is another one.
    """
    kernels = llama / "ggml/src/ggml-cpu/arch/wasm/quants.c"
    text, cut = kernels.read_text(), "wasm_i32x4_trunc_sat_f32x4(v)"
    if text.count(cut) != 2:
        raise SystemExit(f"{kernels} is another source than the expected one: look for {cut}")
    kernels.write_text(text.replace(cut, "wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_nearest(v))"))


def build_variant(source: Path, build: Path, variant: str, environment: dict[str, str]) -> None:
    """Build one variant in the folder `build`, and copy its files to STATIC."""
    flags = (*_COMPILE, *_VARIANTS[variant])
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count()))
    llama = source / "vendor/llama.cpp"
    _run(environment, "cmake", "-S", llama, "-B", build, "-G", "Ninja", *_OPTIONS, *(
        f"-DCMAKE_{language}_FLAGS={' '.join(flags)}" for language in ("C", "CXX")
    ))  # fmt: skip
    _run(environment, "cmake", "--build", build, "--target", "llama", "--parallel", jobs)
    libraries = [build / "src/libllama.a", *(build / f"ggml/src/libggml{part}.a" for part in ("", "-cpu", "-base"))]
    includes = [f"-I{llama / folder}" for folder in ("include", "ggml/include", "ggml/src")]
    name = f"llama-{variant}.js"
    out = build / "out"
    out.mkdir(exist_ok=True)
    pool = ["-sPTHREAD_POOL_SIZE=Module.threads"] if variant == "threads" else []
    _run(environment, "emcc", "-std=c++17", *flags, *includes, "-c", _SHIM, "-o", build / "shim.o")
    _run(environment, "emcc", *flags, "-O1", build / "shim.o", *libraries, *_LINK, *pool, "-o", out / name)
    for path in sorted(out.iterdir()):
        if path.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{path.name} has {path.stat().st_size} bytes, more than {MOST_BYTES}")
        shutil.copy(path, STATIC / path.name)


def write_checksums() -> None:
    """Write the digests of the built files to checksums.txt, in the form that `sha256sum --check` reads."""
    files = sorted(path for path in STATIC.glob("llama-*") if path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (STATIC / "checksums.txt").write_text("".join(lines))


def _run(environment: dict[str, str], *command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build/browser", help="folder of the builds")
    parser.add_argument("--variants", nargs="*", default=_VARIANTS, choices=_VARIANTS, help="default: both")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    environment = emscripten()
    STATIC.mkdir(parents=True, exist_ok=True)
    source = unpacked_source(build, ())
    round_activations(source / "vendor/llama.cpp")
    for variant in arguments.variants:
        build_variant(source, build / variant, variant, environment)
    write_checksums()


if __name__ == "__main__":
    main()
