"""Build wheels that need no compiler, and a simple index of them: `make wheels`.

llama-cpp-python of the pinned version is built for Linux on x86-64 and arm64 with zig, which brings its own C library
headers: the wheels run on glibc 2.28 and newer (`manylinux_2_28`). The kernels of each processor generation are
modules, and edge loads the best one (edge/llama/backends.py). So is Vulkan. `--native` builds for this machine with its
own compiler instead, as on macOS. edge's own wheel is built, too.

The output folder works with `pip install --find-links FOLDER`, and as static files with `--extra-index-url ADDRESS`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = (2, 28)
TARGETS = ("x86_64", "aarch64")
_PROJECT = "llama-cpp-python"
_VARIANT = re.compile(r"ggml_add_cpu_backend_variant\(([\w.]+)[^)]*\)")
# Vulkan's headers as Debian 13 has them, with their digests. Those of Debian 12 are too old for this llama.cpp.
_MIRROR = os.environ.get("MIRROR", "http://deb.debian.org/debian")
_HEADERS = {
    "pool/main/v/vulkan-loader/libvulkan-dev_1.4.309.0-1_amd64.deb": (
        "8d329d465e16168afff58b1bd0dd6db46aac2cc3f56054a481b25a04e90b345a"
    ),
    "pool/main/s/spirv-headers/spirv-headers_1.6.1+1.4.309.0-1_all.deb": (
        "dc18db866d63680351c40ac6b6bece34cb52da64a7799ce1cc4f16f6bff4d064"
    ),
}
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=OFF",
    # A wheel cannot have links, so each library has one name.
    "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    # edge has threads of its own (edge/llama/thread_pool.py), and minimal systems have no OpenMP.
    "-DGGML_OPENMP=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DSKBUILD_PLATLIB_DIR=unused",
)  # fmt: skip
_MODULES = ("-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN")
# zig names features of arm64 in a way of its own: -march=armv8.2-a+fp16 is -mcpu=generic+v8_2a+fullfp16.
_COMPILER = r"""#!/bin/sh
for argument do
    shift
    case $argument in -march=armv*)
        argument=$(echo "$argument" |
            sed -E 's/[.]/_/; s/-march=arm(v[0-9_]+)-a/-mcpu=generic+\1a/; s/[+]fp16/+fullfp16/')
    esac
    set -- "$@" "$argument"
done
exec ZIG TOOL "$@"
"""


def pinned_version() -> str:
    """Return the version of llama-cpp-python that pyproject.toml requires."""
    [version] = re.findall(rf'"{_PROJECT}==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return str(version)


def unpacked_source(folder: Path, variants: Sequence[str]) -> Path:
    """Return llama-cpp-python's source in `folder`, downloaded if it is not there yet.

    variants: names of the CPU modules to build; empty: all.
    """
    name = f"llama_cpp_python-{pinned_version()}"
    if not list(folder.glob(f"{name}.tar.gz")):
        _run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--dest", folder,
             "--no-binary", _PROJECT, f"{_PROJECT}=={pinned_version()}")  # fmt: skip
    source = folder / name
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(folder / f"{name}.tar.gz") as file:
        file.extractall(folder, filter="data")
    listing = source / "vendor/llama.cpp/ggml/src/CMakeLists.txt"
    listing.write_text(with_variants(listing.read_text(), variants))
    # llama-cpp-python's own settings would leave the build's folders in the modules.
    top = source / "CMakeLists.txt"
    folders = r"set\(CMAKE_(BUILD_WITH_INSTALL_RPATH|INSTALL_RPATH_USE_LINK_PATH) .*?\)"
    top.write_text(re.sub(folders, "", top.read_text()))
    return source


def with_variants(listing: str, variants: Sequence[str]) -> str:
    """Return ggml's CMakeLists.txt with only these CPU modules; with all if `variants` is empty.

    Raises SystemExit if ggml does not know one of them.
    """
    known = [name for name in _VARIANT.findall(listing) if name != "tag_name"]
    if unknown := [name for name in variants if name not in known]:
        raise SystemExit(f"no CPU module {', '.join(unknown)}; ggml has {', '.join(known)}")
    keep = {"tag_name", *(variants or known)}
    return _VARIANT.sub(lambda match: match[0] if match[1] in keep else "", listing)


def zig_tools(target: str, folder: Path) -> list[str]:
    """Write compilers for a target to `folder`, and return the options of CMake that select them."""
    import ziglang

    zig = str(Path(ziglang.__file__).with_name("zig"))
    folder.mkdir(parents=True, exist_ok=True)
    triple = f"{target}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    # Without -s, zig adds debug information. It compiles its C++ library once for each kind of optimization.
    # Names of sources in error messages must not depend on the folder.
    options = f"-s -O3 -target {triple} -ffile-prefix-map={folder.parent}/="
    tools = {"cc": f"cc {options}", "c++": f"c++ {options}", "ar": "ar", "ranlib": "ranlib"}
    for name, tool in tools.items():
        (folder / name).write_text(_COMPILER.replace("ZIG", zig).replace("TOOL", tool))
        (folder / name).chmod(0o755)
    names = {"C_COMPILER": "cc", "CXX_COMPILER": "c++", "AR": "ar", "RANLIB": "ranlib"}
    chosen = [f"-DCMAKE_{name}={folder / tool}" for name, tool in names.items()]
    return [*chosen, "-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={target}"]


def vulkan_options(compilers: Path, folder: Path) -> list[str]:
    """Return the options of CMake for the Vulkan module, with its headers and a stand-in for its loader in `folder`.

    Raises SystemExit if the compiler for shaders is missing.
    """
    glslc = shutil.which("glslc")
    if glslc is None:
        raise SystemExit("Vulkan's shaders need glslc; on Debian: apt-get install glslc. --no-vulkan leaves Vulkan out")
    headers = folder / "vulkan-headers"
    if not headers.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            for path, digest in _HEADERS.items():
                with urllib.request.urlopen(f"{_MIRROR}/{path}", timeout=60) as response:
                    package = response.read()
                if hashlib.sha256(package).hexdigest() != digest:
                    raise SystemExit(f"{_MIRROR}/{path} has another digest than the expected one")
                (Path(work) / "headers.deb").write_bytes(package)
                _run("dpkg-deb", "--extract", Path(work) / "headers.deb", Path(work) / "headers")
            os.rename(Path(work) / "headers", headers)
    # ggml asks the loader for all functions but this one by name.
    loader = compilers / "libvulkan.so"
    (compilers / "loader.c").write_text("void vkGetInstanceProcAddr(void) {}\n")
    _run(compilers / "cc", "-shared", "-fPIC", "-Wl,-soname,libvulkan.so.1", "-o", loader, compilers / "loader.c")
    return [
        "-DGGML_VULKAN=ON", f"-DVulkan_INCLUDE_DIR={headers}/usr/include", f"-DVulkan_LIBRARY={loader}",
        f"-DVulkan_GLSLC_EXECUTABLE={glslc}", f"-DSPIRV-Headers_DIR={headers}/usr/share/cmake/SPIRV-Headers",
    ]  # fmt: skip


def build_targets(source: Path, build: Path, options: Sequence[str], targets: Sequence[str]) -> None:
    """Build targets of llama.cpp in the folder `build`."""
    _run("cmake", "-S", source, "-B", build, "-G", "Ninja", *_OPTIONS, *options)
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count()))
    _run("cmake", "--build", build, "--target", *targets, "--parallel", jobs)


def built_libraries(source: Path, build: Path, options: Sequence[str]) -> list[Path]:
    """Build llama.cpp's libraries in the folder `build`, and return their files."""
    build_targets(source, build, options, ["llama", "mtmd"])
    files = [path for path in build.rglob("lib*.*") if path.suffix in (".so", ".dylib") and not path.is_symlink()]
    return sorted(path for path in files if path.name.startswith(("libllama.", "libmtmd.", "libggml")))


def quick_libraries(source: Path, build: Path, compiled: Path) -> list[Path]:
    """Build only ggml's modules, with this machine's compiler, and return their files with libllama and libmtmd.

    compiled: folder of a llama.cpp of the same version, which pip has compiled. Its other libraries do not depend on
    whether ggml has modules.
    """
    build_targets(source, build, [*_MODULES, "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=OFF", "-DLLAVA_BUILD=OFF"], ["ggml"])
    built = build / "bin"
    ggml = [built / "libggml.so", *built.glob("libggml*.so.0"), *built.glob("libggml-cpu-*.so")]
    return [*ggml, compiled / "libllama.so", compiled / "libmtmd.so"]


def check_library(path: Path) -> None:
    """Raise SystemExit if a Linux library needs a newer glibc than GLIBC, a compiler's library, or its build folder."""
    data = path.read_bytes()  # the names of versions and libraries stand in a table of texts
    versions = {tuple(map(int, match.split(b"."))) for match in re.findall(rb"\0GLIBC_([\d.]+)(?=\0)", data)}
    if max(versions, default=GLIBC) > GLIBC:
        raise SystemExit(f"{path.name} needs glibc {'.'.join(map(str, max(versions)))}, newer than 2.28")
    if foreign := re.search(rb"\0(lib(stdc\+\+|gcc_s|gomp|omp|c\+\+|c\+\+abi|unwind)\.so[.\d]*)\0", data):
        raise SystemExit(f"{path.name} needs {foreign[1].decode()}, which not every Linux has")
    if os.fsencode(path.parent) in data:
        raise SystemExit(f"{path.name} names {path.parent}, which no other machine has")


def write_wheel(source: Path, libraries: Sequence[Path], tag: str, folder: Path) -> Path:
    """Write the wheel of llama-cpp-python with these libraries, and return its path.

    tag: platform tag, such as "manylinux_2_28_x86_64".
    """
    version = pinned_version()
    about = f"llama_cpp_python-{version}.dist-info"
    modules = [
        path for path in (source / "llama_cpp").rglob("*") if path.is_file() and path.suffix in (".py", ".typed")
    ]
    contents = {path.relative_to(source).as_posix(): path.read_bytes() for path in modules}
    contents |= {f"llama_cpp/lib/{path.name}": path.read_bytes() for path in libraries}
    contents |= {
        f"{about}/METADATA": (source / "PKG-INFO").read_bytes(),
        f"{about}/licenses/LICENSE.md": (source / "LICENSE.md").read_bytes(),
        f"{about}/licenses/llama.cpp/LICENSE": (source / "vendor/llama.cpp/LICENSE").read_bytes(),
        f"{about}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: edge-runtime\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n"
        ).encode(),
    }
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in sorted(contents.items())]
    contents[f"{about}/RECORD"] = "\n".join([*record, f"{about}/RECORD,,", ""]).encode()
    wheel = folder / f"llama_cpp_python-{version}-py3-none-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in sorted(contents.items()):
            # A fixed time makes wheels with equal contents equal.
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            file.writestr(entry, data)
    return wheel


def edge_wheel(folder: Path) -> None:
    """Build edge's own wheel from a copy of the tree, because setuptools leaves old files in the tree."""
    packages = ("apps", "devices", "edge", "partition", "quant", "transport")
    with tempfile.TemporaryDirectory() as copy:
        for name in packages:
            shutil.copytree(ROOT / name, Path(copy) / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("LICENSE", "README.md", "pyproject.toml"):
            shutil.copy(ROOT / name, copy)
        _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy)


def write_index(folder: Path) -> None:
    """Write a simple index (PEP 503) of the wheels in `folder`: `index.html`, and one page per project."""
    projects: dict[str, list[Path]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        projects.setdefault(re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower(), []).append(wheel)
    _write_page(folder / "index.html", {f"{name}/": name for name in projects})
    for name, wheels in projects.items():
        (folder / name).mkdir(exist_ok=True)
        links = {
            f"../{wheel.name}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}": wheel.name for wheel in wheels
        }
        _write_page(folder / name / "index.html", links)


def _write_page(path: Path, links: dict[str, str]) -> None:
    lines = [f'<a href="{html.escape(address)}">{html.escape(text)}</a><br>' for address, text in links.items()]
    path.write_text("<!DOCTYPE html>\n<title>Wheels of edge</title>\n" + "\n".join(lines) + "\n")


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist/wheels", help="folder of the wheels (default: dist/wheels)"
    )
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build/wheels", help="folder of the builds (default: build/wheels)"
    )
    parser.add_argument("--targets", nargs="*", default=TARGETS, choices=TARGETS, metavar="TARGET",
                        help="x86_64 or aarch64 (default: both); none: edge's own wheel only")  # fmt: skip
    parser.add_argument("--variants", nargs="*", default=(), metavar="NAME",
                        help="only these CPU modules, such as haswell (default: all; needs one target)")  # fmt: skip
    parser.add_argument("--no-vulkan", action="store_true", help="leave out the module for Vulkan")
    parser.add_argument("--native", metavar="PLATFORM", help="build with this machine's compiler for this platform tag,"
                        " such as macosx_14_0_arm64, with linked backends")  # fmt: skip
    parser.add_argument("--quick", type=Path, metavar="FOLDER", help="build only ggml's modules, for a test on this"
                        " machine; the other libraries come from this folder of a compiled llama.cpp")  # fmt: skip
    arguments = parser.parse_args()
    out, build = arguments.out.resolve(), arguments.build.resolve()
    for folder in (out, build):
        folder.mkdir(parents=True, exist_ok=True)
    targets = [] if arguments.native or arguments.quick else arguments.targets
    if arguments.native or arguments.quick or targets:
        source = unpacked_source(build, arguments.variants)
    if arguments.quick:
        libraries = quick_libraries(source, build / "quick", arguments.quick.resolve())
        print(write_wheel(source, libraries, f"linux_{platform.machine()}", out), flush=True)
    if arguments.native:
        rpath = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
        libraries = built_libraries(source, build / "native", [f"-DCMAKE_INSTALL_RPATH={rpath}"])
        print(write_wheel(source, libraries, arguments.native, out), flush=True)
    for target in targets:
        compilers = build / f"zig-{target}"
        options = [*zig_tools(target, compilers), *_MODULES]
        if arguments.no_vulkan:
            print(f"{target}: without Vulkan, as --no-vulkan says", flush=True)
        else:
            options += vulkan_options(compilers, build)
        libraries = built_libraries(source, build / target, options)
        for library in libraries:
            check_library(library)
        tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{target}"
        wheel = write_wheel(source, libraries, tag, out)
        modules = [path.stem.removeprefix("libggml-") for path in libraries if "libggml-" in path.name]
        print(f"{wheel}: {', '.join(modules)}", flush=True)
    edge_wheel(out)
    write_index(out)


if __name__ == "__main__":
    main()
