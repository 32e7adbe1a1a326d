#!/bin/bash
# Runs tests as on an older processor: run.sh avx2|sse42 [what pytest takes]. README.md beside it says how.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$(dirname "$here")")
python=${PYTHON:-$root/.venv/bin/python}
level=${1:-}
if [ "$level" != avx2 ] && [ "$level" != sse42 ]; then
    echo "usage: $0 avx2|sse42 [what pytest takes]" >&2
    exit 2
fi
shift
if ! grep -qw cpuid_fault /proc/cpuinfo; then
    echo "$0 needs a processor that can hide instructions (cpuid_fault in /proc/cpuinfo: Intel, Linux)." >&2
    echo "Emulate one instead: $here/README.md" >&2
    exit 1
fi

version=$("$python" -c 'import importlib.metadata as m; print(m.version("llama-cpp-python"))')
installed=$("$python" -c 'import importlib.util as u, pathlib as p; print(p.Path(u.find_spec("llama_cpp").origin).parent / "lib")')
cache=${XDG_CACHE_HOME:-$HOME/.cache}/edge-processors
library=$cache/llama.cpp-$version-$level
mkdir -p "$cache"
gcc -O2 -shared -fPIC "$here/hide_instructions.c" -o "$cache/hide_instructions.so" -ldl

if [ ! -d "$library" ]; then # once: minutes
    echo "building llama.cpp's kernels of llama-cpp-python $version for $level" >&2
    work=$(mktemp -d "$cache/build.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$work" "llama-cpp-python==$version"
    tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
    newer=$([ "$level" = avx2 ] && echo ON || echo OFF)
    cmake -S "$work"/llama_cpp_python-*/vendor/llama.cpp -B "$work/build" -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON -DCMAKE_INSTALL_RPATH='$ORIGIN' \
        -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF \
        -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF -DGGML_NATIVE=OFF -DGGML_SSE42=ON \
        -DGGML_AVX512=OFF -DGGML_AVX_VNNI=OFF -DGGML_AVX=$newer -DGGML_AVX2=$newer -DGGML_FMA=$newer \
        -DGGML_F16C=$newer -DGGML_BMI2=$newer >"$work/cmake.log"
    cmake --build "$work/build" --target ggml-cpu --parallel "$(nproc)" >"$work/build.log"
    cp -a "$installed" "$work/lib" # the other libraries hold no kernels
    made=$(find "$work/build" -name 'libggml-cpu.so*' -type f | head -n 1)
    for name in "$work"/lib/libggml-cpu.so*; do cp --remove-destination "$made" "$name"; done
    mv "$work/lib" "$library"
fi

above='avx512\w*|avx_\w+|avx10\w*|amx_\w+|gfni|vaes|vpclmulqdq'
if [ "$level" = avx2 ]; then
    export OPENBLAS_CORETYPE=Haswell GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ
else
    above="$above|avx|avx2|fma|f16c|movbe|bmi1|bmi2"
    export OPENBLAS_CORETYPE=Nehalem
    export GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX2,-AVX,-FMA
fi
shown=$cache/cpuinfo-$level
sed -E "/^(vmx )?flags/ s/\b($above)\b//g" /proc/cpuinfo >"$shown"

# A mount namespace of its own: only these processes see the shortened /proc/cpuinfo.
export HIDE_ABOVE=$level LLAMA_CPP_LIB_PATH=$library PYTHONPATH=$root
cd "$root"
exec unshare $([ "$(id -u)" = 0 ] || echo --map-root-user) --mount bash -c '
    mount --bind "$1" /proc/cpuinfo
    export LD_PRELOAD=$2
    shift 2
    exec "$@"' - "$shown" "$cache/hide_instructions.so" "$python" -m pytest -p no:faulthandler "$@"
