# Sourced by demo.sh and test.sh in the repository's root: `prepare ""` or `prepare "[dev]"` gives them an environment.
#
# Uses the active virtual environment, or else makes one in .venv. Installs this package (with the extras named) and,
# where there is none yet, torch. A second run finds everything in place and takes no time. An environment in which the
# package is installed from another place stays as it is: this checkout is then found by PYTHONPATH.

TORCH_VERSION=2.13.0

prepare() {
  local extras=$1 stamp elsewhere
  activate_environment
  stamp="$VIRTUAL_ENV/.deepspeed_bamboo-installed$extras"
  if [[ -f $stamp && $(<"$stamp") == "$PWD" && ! setup.py -nt $stamp ]]; then
    return
  fi
  elsewhere=$(installed_elsewhere)
  if [[ -n $elsewhere ]]; then
    echo "$VIRTUAL_ENV has this package from $elsewhere, and keeps it; this run uses $PWD by PYTHONPATH." \
      "For an environment of its own: deactivate, and run this again"
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    return
  fi
  echo "Installing into $VIRTUAL_ENV (some minutes the first time)"
  python -c 'import torch' 2>/dev/null || install_torch
  python -m pip install --quiet --editable ".$extras"
  echo "$PWD" >"$stamp"
}

# Prints where the package in the active environment is from, if there is one and it is not this checkout.
installed_elsewhere() {
  python -I - "$PWD" <<'CODE'
import importlib.metadata
import json
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

try:
    origin = importlib.metadata.distribution("deepspeed_bamboo").read_text("direct_url.json")
except importlib.metadata.PackageNotFoundError:
    sys.exit()
url = json.loads(origin).get("url", "") if origin else ""
place = unquote(urlsplit(url).path) if url.startswith("file:") else url or "a package index"
gone = url.startswith("file:") and not Path(place).exists()
if not gone and Path(place).resolve() != Path(sys.argv[1]).resolve():
    print(place)
CODE
}

activate_environment() {
  if [[ -n ${VIRTUAL_ENV:-} ]]; then
    return
  fi
  local python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "$python is too old or missing; Python 3.10 or later is needed. Name one: PYTHON=/path/to/python3 $0" >&2
    exit 1
  fi
  if [[ ! -x .venv/bin/python ]] && ! "$python" -m venv .venv; then
    echo "$python can't make a virtual environment; install its venv module, or activate an environment" >&2
    exit 1
  fi
  source .venv/bin/activate
}

# torch's default wheel brings gigabytes of CUDA. Asked for an exact version, pip prefers a build without it where the
# configured index has one (2.13.0+cpu sorts above 2.13.0).
install_torch() {
  if [[ -e /dev/nvidiactl ]]; then
    python -m pip install --quiet "torch>=2.11,<2.15"
  else
    python -m pip install --quiet "torch==$TORCH_VERSION"
  fi
}
