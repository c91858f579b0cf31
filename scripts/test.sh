#!/usr/bin/env bash
# The test command: style, types, tests. Further arguments go to pytest.
#
#     scripts/test.sh
#
# Needs Python 3.10 or later and two CPU cores, no GPU; about 7 minutes with installing. Four tests run at a time; add
# -n 0 for one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare "[dev]"
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} OMP_NUM_THREADS=1
unset BAMBOO_FAULTS
# Hundreds of processes import this package; without bytecode each compiles it, and each pytest worker all tests.
unset PYTHONDONTWRITEBYTECODE
ruff check .
types=$(mktemp)
trap 'rm -f "$types"' EXIT
mypy >"$types" 2>&1 &
compile_once -m pytest --collect-only -qq -p deepspeed_bamboo.runtime.preloaded  # beside mypy
code=0
# Four pytest workers on two cores, since tests of processes wait for half of their time. Each begins with a quarter of the
# tests, in their order, since those of a folder share what they start. Who has done its part takes some of another's.
python -m pytest --numprocesses 4 --dist worksteal "$@" || code=$?
wait $! || code=$?
cat "$types"
exit "$code"
