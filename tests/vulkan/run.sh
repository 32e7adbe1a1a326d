#!/bin/bash
# Runs edge on a Vulkan device without a GPU: run.sh [FOLDER] [what pytest takes]. README.md beside it says what is needed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$(dirname "$here")")
python=${PYTHON:-$root/.venv/bin/python}
folder=$(mkdir -p "${1:-$HOME/.cache/edge-vulkan}" && cd "${1:-$HOME/.cache/edge-vulkan}" && pwd)
shift || true
mirror=${MIRROR:-http://deb.debian.org/debian}
driver=$(find /usr/share/vulkan/icd.d -name "lvp_icd*.json" | head -1)
# Headers of Debian 13: those of Debian 12 are too old for this llama.cpp. They are unpacked, not installed.
headers="
8d329d465e16168afff58b1bd0dd6db46aac2cc3f56054a481b25a04e90b345a pool/main/v/vulkan-loader/libvulkan-dev_1.4.309.0-1_amd64.deb
dc18db866d63680351c40ac6b6bece34cb52da64a7799ce1cc4f16f6bff4d064 pool/main/s/spirv-headers/spirv-headers_1.6.1+1.4.309.0-1_all.deb"

if ! command -v glslc >/dev/null || ! command -v cmake >/dev/null || [ -z "$driver" ]; then
    echo "apt-get install glslc libvulkan1 mesa-vulkan-drivers cmake ninja-build g++" >&2
    exit 1
fi
version=$(PYTHONPATH=$root "$python" -c 'from edge.llama.ggml import PINNED_VERSION as version; print(version)')
library=${LLAMA_CPP_LIB_PATH:-$folder/llama.cpp-$version}
include=$folder/headers-1.4.309
if [ ! -d "$include" ]; then
    work=$(mktemp -d "$folder/headers.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    echo "$headers" | while read -r digest path; do
        [ -n "$digest" ] || continue
        curl --silent --show-error --fail --output "$work/headers.deb" "$mirror/$path"
        echo "$digest  $work/headers.deb" | sha256sum --check --quiet
        dpkg-deb --extract "$work/headers.deb" "$work/headers"
    done
    mv "$work/headers" "$include"
    rm -rf "$work"
fi
if [ ! -d "$library" ]; then # once: half an hour, most of it shaders
    echo "building llama.cpp of llama-cpp-python $version with Vulkan" >&2
    work=$(mktemp -d "$folder/build.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$work" "llama-cpp-python==$version"
    tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
    loader=$(/sbin/ldconfig -p | awk '/libvulkan\.so\.1/ { print $NF; exit }')
    cmake -S "$work"/llama_cpp_python-*/vendor/llama.cpp -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON -DCMAKE_INSTALL_RPATH='$ORIGIN' \
        -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF \
        -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF -DGGML_VULKAN=ON \
        -DVulkan_INCLUDE_DIR="$include/usr/include" -DVulkan_LIBRARY="$loader" \
        -DVulkan_GLSLC_EXECUTABLE="$(command -v glslc)" \
        -DSPIRV-Headers_DIR="$include/usr/share/cmake/SPIRV-Headers" >"$folder/cmake.log"
    cmake --build "$work/build" --target llama --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}" >"$folder/build.log"
    mkdir "$work/lib"
    cp -a "$work"/build/bin/lib*.so* "$work/lib"
    mv "$work/lib" "$library"
    rm -rf "$work"
fi
cc -shared -fPIC -O1 -Wall -I "$include/usr/include" -o "$folder/discrete.so" "$here/discrete.c" -ldl
# llama.cpp leaves devices out that are processors, unless one is named.
export EDGE_VK_DISCRETE=$folder/discrete.so LLAMA_CPP_LIB_PATH=$library VK_DRIVER_FILES=$driver GGML_VK_VISIBLE_DEVICES=0 PYTHONPATH=$root
cd "$root"
exec "$python" -m pytest -n 0 "$here/gpu_paths.py" "$@"
