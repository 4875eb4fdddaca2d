#!/usr/bin/env bash
# Make the virtual environment $1 with everything that development needs. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1

fail() {
    echo "make venv: $1" >&2
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

# torch first: it is the largest, and what it needs must not be changed by what comes after.
echo "make venv: installing torch and the rest into $venv (some minutes the first time)"
"$venv/bin/python" -m pip install --quiet "torch>=2.11,<=2.13.0"
"$venv/bin/python" -m pip install --quiet -e ".[dev]"
