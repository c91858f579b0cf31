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
# One pytest worker for each of two cores: each begins with half of the tests, in their order, since those of a folder
# share what they start. Who has done its half takes some of the other's.
python -m pytest --numprocesses 2 --dist worksteal "$@" || code=$?
wait $! || code=$?
cat "$types"
exit "$code"
