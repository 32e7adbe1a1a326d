"""Wheels that `make wheels` writes, and their index, as pip reads them."""

import hashlib
import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urldefrag

import pytest

from edge.llama import library
from tests.support.helpers import TIMEOUT_S
from tools import build_wheels

LISTING = """\
function(ggml_add_cpu_backend_variant tag_name)
    ggml_add_cpu_backend_variant(x64)
    ggml_add_cpu_backend_variant(haswell            SSE42 AVX F16C FMA AVX2 BMI2)
        ggml_add_cpu_backend_variant(armv8.2_1    DOTPROD)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source of llama-cpp-python, of the files that a wheel has."""
    root = tmp_path / "source"
    about = f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {build_wheels.pinned_version()}\n"
    files = {
        "llama_cpp/__init__.py": "", "llama_cpp/py.typed": "",
        "llama_cpp/server/app.py": "", "llama_cpp/lib/old.so": "left by another build", "LICENSE.md": "MIT",
        "vendor/llama.cpp/LICENSE": "MIT", "PKG-INFO": about,
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def wheels(source: Path, tmp_path: Path) -> Path:
    """A folder with one wheel for any platform, and its index."""
    modules = [tmp_path / "libllama.so", tmp_path / "libggml-cpu-x64.so"]
    for path in modules:
        path.write_text(path.name)
    folder = tmp_path / "wheels"
    folder.mkdir()
    build_wheels.write_wheel(source, modules, "any", folder)
    build_wheels.write_index(folder)
    return folder


def pip_install(target: Path, *options: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--target",
        str(target),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [*command, *options, "llama-cpp-python"],
        capture_output=True,
        text=True,
        env=env,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def installed_files(target: Path) -> set[str]:
    names = {path.relative_to(target).as_posix() for path in (target / "llama_cpp").rglob("*") if path.is_file()}
    return {name for name in names if not name.endswith(".pyc")}


EXPECTED = {
    "llama_cpp/__init__.py", "llama_cpp/py.typed", "llama_cpp/server/app.py", "llama_cpp/lib/libllama.so",
    "llama_cpp/lib/libggml-cpu-x64.so",
}  # fmt: skip


def test_pip_installs_a_wheel_of_a_folder(wheels: Path, tmp_path: Path) -> None:
    pip_install(tmp_path / "target", "--no-index", "--find-links", str(wheels))
    assert installed_files(tmp_path / "target") == EXPECTED


def test_pip_installs_a_wheel_of_the_index(wheels: Path, tmp_path: Path) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(wheels))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            pip_install(tmp_path / "target", "--index-url", f"http://127.0.0.1:{server.server_address[1]}/")
        finally:
            server.shutdown()
            thread.join()
    assert installed_files(tmp_path / "target") == EXPECTED


def test_pages_of_the_index_link_to_files_with_their_digests(wheels: Path) -> None:
    (wheels / "Edge_Runtime-1.0-py3-none-any.whl").write_text("another project")
    build_wheels.write_index(wheels)
    links = re.findall('href="(.*?)"', (wheels / "index.html").read_text())
    assert links == ["edge-runtime/", "llama-cpp-python/"]
    for project in links:
        [link] = re.findall('href="(.*?)"', (wheels / project / "index.html").read_text())
        name, digest = urldefrag(link)
        assert digest == f"sha256={hashlib.sha256((wheels / project / name).read_bytes()).hexdigest()}"


def test_equal_contents_make_equal_wheels(source: Path, wheels: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in wheels.glob("*.whl")}
    os.utime(source / "LICENSE.md", (0, 0))
    build_wheels.write_wheel(source, [tmp_path / "libggml-cpu-x64.so", tmp_path / "libllama.so"], "any", wheels)
    assert {path.name: path.read_bytes() for path in wheels.glob("*.whl")} == before


def test_chosen_modules_are_left_in_the_listing() -> None:
    assert build_wheels.with_variants(LISTING, []) == LISTING
    chosen = build_wheels.with_variants(LISTING, ["haswell"])
    assert re.findall(r"variant\((\S+)", chosen) == ["haswell"]
    assert "variant tag_name)" in chosen
    with pytest.raises(SystemExit, match=r"no CPU module zen9; ggml has x64, haswell, armv8\.2_1"):
        build_wheels.with_variants(LISTING, ["haswell", "zen9"])


@pytest.mark.parametrize(
    ("argument", "passed"),
    [
        ("-march=armv8-a", "-mcpu=generic+v8a"),
        ("-march=armv8.2-a+dotprod+fp16", "-mcpu=generic+v8_2a+dotprod+fullfp16"),
        ("-march=armv8.6-a+sve+i8mm", "-mcpu=generic+v8_6a+sve+i8mm"),
        ("-DTEXT=\"two words\"", "-DTEXT=\"two words\""),
    ],
)  # fmt: skip
def test_arguments_for_zig(argument: str, passed: str, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(build_wheels._COMPILER.replace("ZIG", "printf '%s\\n'").replace("TOOL", "cc"))
    done = subprocess.run(["sh", compiler, "-O3", argument, "a.c"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["cc", "-O3", passed, "a.c"]


def test_a_library_that_an_older_linux_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libllama.so"
    path.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.28\0libm.so.6\0libvulkan.so.1\0")
    build_wheels.check_library(path)
    path.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.34\0")
    with pytest.raises(SystemExit, match=r"libllama\.so needs glibc 2\.34, newer than 2\.28"):
        build_wheels.check_library(path)
    path.write_bytes(b"\0GLIBC_2.2.5\0libstdc++.so.6\0")
    with pytest.raises(SystemExit, match=r"needs libstdc\+\+\.so\.6, which not every Linux has"):
        build_wheels.check_library(path)
    path.write_bytes(os.fsencode(f"\0$ORIGIN:{tmp_path}:\0"))
    with pytest.raises(SystemExit, match=rf"libllama\.so names {re.escape(str(tmp_path))}, which no other machine has"):
        build_wheels.check_library(path)


def test_the_pinned_version_is_the_one_that_edge_checks() -> None:
    assert build_wheels.pinned_version() == library.PINNED_VERSION
