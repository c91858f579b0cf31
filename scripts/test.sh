#!/usr/bin/env bash
# The test command: style, types, tests. Further arguments go to pytest.
#
#     scripts/test.sh
#
# Needs Python 3.10 or later and two CPU cores, no GPU; under 10 minutes. Two tests run at a time; add -n 0 for one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare "[dev]"
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} OMP_NUM_THREADS=1
unset BAMBOO_FAULTS
ruff check .
types=$(mktemp)
trap 'rm -f "$types"' EXIT
mypy >"$types" 2>&1 &
code=0
# One pytest worker for each of two cores; a file's tests stay together, since they share what they start.
python -m pytest --numprocesses 2 --dist loadfile "$@" || code=$?
wait $! || code=$?
cat "$types"
exit "$code"
