#!/bin/bash
# Runs edge on arm64 beside this x86 machine: run.sh [FOLDER]. README.md beside it says what is done, and what is needed.
# Each step leaves its result in FOLDER; what is there is not made again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$(dirname "$here")")
python=${PYTHON:-$root/.venv/bin/python}
folder=$(mkdir -p "${1:-$HOME/.cache/edge-arm64}" && cd "${1:-$HOME/.cache/edge-arm64}" && pwd)
userland=$folder/userland wheels=$folder/wheels
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}

step() { # NAME FUNCTION: run it, unless it was done before, and say how long it took
    if [ -e "$folder/done-$1" ]; then
        echo "$1: done before"
        return
    fi
    local began=$SECONDS
    if ! "$2" >"$folder/$1.log" 2>&1; then
        tail -n 20 "$folder/$1.log" >&2
        echo "$0: the step '$1' failed; all it said is in $folder/$1.log" >&2
        exit 1
    fi
    touch "$folder/done-$1"
    echo "$1: $((SECONDS - began)) s"
}

emulation() { # the kernel starts programs of arm64 through qemu; the package of qemu says how
    local binfmt=/proc/sys/fs/binfmt_misc
    [ -e "$binfmt/status" ] || mount -t binfmt_misc binfmt_misc "$binfmt"
    [ -e "$binfmt/qemu-aarch64" ] || update-binfmts --enable qemu-aarch64
    grep --quiet ^enabled "$binfmt/qemu-aarch64"
}

make_userland() { # Debian's packages, unpacked and configured by themselves
    rm -rf "$userland"
    mmdebstrap --architectures=arm64 --variant=minbase --include=python3,libgomp1,libstdc++6 \
        "${SUITE:-$(. /etc/os-release && echo "$VERSION_CODENAME")}" "$userland"
    chroot "$userland" true
}

build_llama() { # a wheel of EDGE_WHEELS, or the wheel that pip would build on arm64, built here
    local version
    if [ -n "${EDGE_WHEELS:-}" ]; then
        mkdir -p "$wheels"
        rm -f "$wheels"/llama_cpp_python-*
        cp "$EDGE_WHEELS"/llama_cpp_python-*_aarch64.whl "$wheels"
        return
    fi
    version=$("$python" -c 'from edge.llama.ggml import PINNED_VERSION as version; print(version)')
    CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
        -DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod -DLLAVA_BUILD=OFF" \
        _PYTHON_HOST_PLATFORM=linux-aarch64 "$python" -m pip wheel --no-deps --no-cache-dir --wheel-dir "$wheels" \
        --no-binary llama-cpp-python "llama-cpp-python==$version"
}

install_edge() { # its own wheel, and what it needs as wheels of arm64
    local release packages
    release=$(basename "$(realpath "$userland/usr/bin/python3")")
    packages=$userland/usr/local/lib/$release/dist-packages
    rm -rf "$wheels"/edge_runtime-* "$packages"
    git -C "$root" archive --prefix=source/ HEAD | tar -x -C "$folder"
    "$python" -m pip wheel --no-deps --wheel-dir "$wheels" "$folder/source"
    rm -rf "$folder/source"
    "$python" -m pip install --no-compile --target "$packages" --only-binary=:all: --find-links "$wheels" \
        --python-version "${release#python}" --implementation cp \
        --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --platform linux_aarch64 \
        "$wheels"/edge_runtime-*.whl
}

export PYTHONPATH=$root
compilers=aarch64-linux-gnu-g++
[ -z "${EDGE_WHEELS:-}" ] || compilers=
lacking=$(for tool in mmdebstrap update-binfmts qemu-aarch64-static cmake $compilers; do
    command -v "$tool" >/dev/null || echo "$tool"
done)
if [ "$(id -u)" != 0 ] || [ -n "$lacking" ]; then
    echo "$0 needs root, and these tools:" $lacking >&2
    echo "apt-get install mmdebstrap binfmt-support qemu-user-static g++-aarch64-linux-gnu cmake ninja-build" >&2
    exit 1
fi
emulation
step userland make_userland
step "llama${EDGE_WHEELS:+-wheel}" build_llama
step "edge-$(git -C "$root" rev-parse --short HEAD)" install_edge
exec "$python" "$here/compare.py" "$folder" "$here/in_userland.sh"
