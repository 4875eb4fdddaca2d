#!/usr/bin/env bash
# Make the virtual environment $1 with what running needs ($2 = run), or development, too ($2 = dev). Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
stage=$2

fail() {
    echo "make: $1" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# PYTHON=... chooses the interpreter.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || fail "no Python 3.11 or newer: install one, or name it with PYTHON=..."
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        fail "$python has no venv module: install it (Debian, Ubuntu: apt-get install python$version-venv)"
    fi
    rm -rf "$venv"
    "$python" -m venv "$venv" || { rm -rf "$venv"; fail "$python -m venv failed"; }
fi

install() {
    # Python compiles what it imports, once: a small part of what pip would compile here.
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile "$@"
}

# TORCH_INDEX_URL=... names the index that torch comes from, where it is not pip's own: on Linux, that of PyPI brings gigabytes
# of CUDA along, and torch's own index has builds for CPUs.
torch_index() {
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        echo "--index-url=$TORCH_INDEX_URL"
    fi
}

# The native CPU kernels of this machine take a compiler as long as the rest takes pip: at the same time, so that the first
# start finds them. Where they cannot be built, that start says why.
build_kernels() {
    PYTHONPATH=kernels "$venv/bin/python" -c 'from baton_kernels.cpu.library import library; library()' 2>/dev/null || true
}

echo "make: installing into $venv what $stage needs (some minutes the first time)"
case $stage in
    run) extras=gateway,worker ;;
    dev) extras=dev ;;
    *) fail "no stage $stage: run or dev" ;;
esac
build_kernels &
if ! "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    # Alone: nothing else may come from that index.
    install $(torch_index) "torch>=2.11,<=2.13.0"
fi
# What builds this project's two distributions, here and not in an environment that pip makes for each.
install "hatchling>=1.27" editables
install --no-build-isolation -e ./client -e ".[$extras]"
wait
