# Sourced by demo.sh and test.sh, from the repository's root: `prepare EXTRAS` gives them an environment.
#
# Uses the active virtual environment, or else makes one in .venv. Installs this package with EXTRAS ("" or "[dev]"),
# and torch where there is none. A second run finds everything in place and takes a second.

TORCH_VERSION=2.13.0

prepare() {
  local extras=$1 stamp
  activate_environment
  stamp="$VIRTUAL_ENV/.deepspeed_bamboo$extras"
  if [[ -f $stamp && ! setup.py -nt $stamp ]] && python -c 'import torch, deepspeed, deepspeed_bamboo' 2>/dev/null; then
    return
  fi
  echo "Installing into $VIRTUAL_ENV (a few minutes the first time)"
  python -c 'import torch' 2>/dev/null || install_torch
  python -m pip install --quiet --editable ".$extras"
  touch "$stamp"
}

activate_environment() {
  if [[ -z ${VIRTUAL_ENV:-} ]]; then
    local python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
      echo "This needs Python 3.10 or later; name one with PYTHON=/path/to/python3 $0" >&2
      exit 1
    fi
    [[ -f .venv/bin/activate ]] || "$python" -m venv .venv
    source .venv/bin/activate
  fi
}

# torch's default wheel carries gigabytes of CUDA; a build without it, where the configured index has one, is preferred
# by pip as soon as the exact version is asked for (2.13.0+cpu sorts above 2.13.0).
install_torch() {
  if [[ -e /dev/nvidiactl ]]; then
    python -m pip install --quiet "torch>=2.11"
  else
    python -m pip install --quiet "torch==$TORCH_VERSION"
  fi
}
