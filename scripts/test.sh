#!/usr/bin/env bash
# The test command: style, types, tests. Further arguments go to pytest.
#
#     scripts/test.sh
#
# Needs Python 3.10 or later and two CPU cores, no GPU; under 15 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare "[dev]"
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} OMP_NUM_THREADS=1
unset BAMBOO_FAULTS
ruff check .
mypy
python -m pytest "$@"
