#!/bin/sh
# The commands of this project. Needs sh and a Python from 3.11 to 3.13; everything else is installed
# into .venv beside this file, once, at the versions of constraints.txt.
#
#   sh run.sh train [flags]   the GPT example       (--help lists the flags)
#   sh run.sh test [args]     the tests             (--wide adds the rows that CI runs too, and installs
#                                                    ONNX for them; --long adds all, and installs
#                                                    KerasHub too; --part 2/3 runs the second third
#                                                    of what is selected; --within 30 leaves wide
#                                                    ones out after half an hour; other args go to
#                                                    pytest)
#   sh run.sh lint            ruff and mypy
#   sh run.sh bench [flags]   step times against plain Keras, MirroredStrategy, JAX
#   sh run.sh python [args]   Python inside the environment
#
# PYTHON names the interpreter to build the environment with; KDIST_WORKERS the number of test processes.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
venv="$here/.venv"
python="$venv/bin/python"
stamp="$venv/kdist-stamp"
log="$venv/install.log"
installer=

fail() {
    printf 'kdist: %s\n' "$*" >&2
    exit 1
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
            >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "needs Python 3.11, 3.12 or 3.13 on PATH, or named: PYTHON=/path/to/python3 sh run.sh." \
        "Received: PYTHON=${PYTHON:-}, python3=$(python3 --version 2>&1 || echo none)"
}

# What the environment depends on: the pinned versions, the package's own metadata, where it lies.
fingerprint() {
    (cd "$here" && cat constraints.txt pyproject.toml setup.cfg run.sh && printf '%s' "$here") | cksum
}

# Runs a command into the log; shows the seconds and the log's last step while it works.
with_progress() {
    "$@" >>"$log" 2>&1 &
    installer=$!
    seconds=0
    while kill -0 "$installer" 2>/dev/null; do
        sleep 1
        seconds=$((seconds + 1))
        if [ -t 2 ]; then
            doing=$(grep -E '^ *(Collecting|Downloading|Installing|Building)' "$log" |
                tail -n 1 | cut -c 1-60) || doing=
            printf '\r\033[Kkdist: %3s s  %s' "$seconds" "$doing" >&2
        elif [ $((seconds % 15)) -eq 0 ]; then
            printf 'kdist: still installing, %s s\n' "$seconds" >&2
        fi
    done
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
    if ! wait "$installer"; then
        installer=
        tail -n 20 "$log" >&2
        fail "the installation failed; its whole log is in $log"
    fi
    installer=
}

stop_installer() {
    if [ -n "$installer" ]; then kill "$installer" 2>/dev/null || true; fi
    exit 130
}

install_environment() {
    base=$(find_python)
    printf 'kdist: installing into %s, once; about a minute, more where wheels are downloaded\n' \
        "$venv" >&2
    trap stop_installer INT TERM HUP
    # The stamp comes last: an interrupted installation has none, and starts again from nothing.
    rm -rf "$venv"
    "$base" -m venv "$venv" || fail "cannot make a virtual environment with $base (on Debian and" \
        "Ubuntu the module is in the package python3-venv)"
    : >"$log"
    with_progress "$python" -m pip install --disable-pip-version-check --progress-bar off \
        --constraint "$here/constraints.txt" --upgrade setuptools
    with_progress "$python" -m pip install --disable-pip-version-check --progress-bar off \
        --constraint "$here/constraints.txt" --no-build-isolation \
        --editable "$here[cpu,test,lint,examples]"
    trap - INT TERM HUP
    fingerprint >"$stamp"
    printf 'kdist: installed\n' >&2
}

ensure_environment() {
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$(fingerprint)" ] ||
        ! "$python" -c '' 2>/dev/null; then
        install_environment
    fi
}

# KerasHub without its dependencies: it asks for tensorflow-text, which brings the full `tensorflow`
# wheel over `tensorflow-cpu` and which no test needs. What it does import is named here.
ensure_hub() {
    if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("keras_hub") is None)'; then
        printf 'kdist: installing KerasHub into %s, once\n' "$venv" >&2
        trap stop_installer INT TERM HUP
        with_progress "$python" -m pip install --disable-pip-version-check --progress-bar off \
            --constraint "$here/constraints.txt" --no-deps regex tokenizers keras-hub
        trap - INT TERM HUP
    fi
}

# What exports to ONNX; where no package index has it, its tests are skipped.
ensure_onnx() {
    if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("onnxruntime") is None)'; then
        printf 'kdist: installing ONNX into %s, once\n' "$venv" >&2
        "$python" -m pip install --disable-pip-version-check --progress-bar off \
            --constraint "$here/constraints.txt" tf2onnx onnx onnxruntime >>"$log" 2>&1 ||
            printf 'kdist: cannot install ONNX; its tests are skipped. The log is in %s\n' "$log" >&2
    fi
}

run_tests() {
    cd "$here"
    for argument in "$@"; do
        if [ "$argument" = --long ]; then ensure_hub; fi
        case $argument in --wide | --long) ensure_onnx ;; esac
    done
    # Tracing holds the interpreter lock, so processes help and threads do not; above four, memory
    # (about 2 GB each) becomes the limit.
    workers=${KDIST_WORKERS:-$("$python" -c 'import os; print(min(4, len(os.sched_getaffinity(0))))')}
    exec "$python" -m pytest -n "$workers" --dist worksteal "$@"
}

command=${1:-help}
[ $# -eq 0 ] || shift
case $command in
train | test | lint | bench | python) ensure_environment ;;
esac
case $command in
train) exec "$python" "$here/examples/train_gpt.py" "$@" ;;
test) run_tests "$@" ;;
lint)
    cd "$here"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" -m mypy
    ;;
bench) exec "$python" "$here/benchmarks/step_time.py" "$@" ;;
python) exec "$python" "$@" ;;
help | -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$here/run.sh" | sed '/^set -eu/d' ;;
*) fail "no command '$command'. Use train, test, lint, bench or python: see 'sh run.sh help'" ;;
esac
