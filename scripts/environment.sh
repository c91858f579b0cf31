# Sourced by demo.sh and test.sh in the repository's root: `prepare ""` or `prepare "[dev]"` gives them an environment.
#
# Uses the active virtual environment, or else makes one in .venv. Installs this package (with the extras named) and,
# where there is none yet, torch. A second run finds everything in place and takes no time. An environment in which the
# package is installed from another place, or from here by `pip install .`, stays as it is: this checkout is then found by
# PYTHONPATH. With extras a plain install from here becomes an editable one.

TORCH_VERSION=2.13.0

prepare() {
  local extras=$1 stamp elsewhere
  activate_environment
  stamp="$VIRTUAL_ENV/.deepspeed_bamboo-installed$extras"
  if [[ -f $stamp && $(<"$stamp") == "$PWD" && ! setup.py -nt $stamp ]]; then
    return
  fi
  elsewhere=$(installed_elsewhere)
  if [[ -n $elsewhere && $elsewhere -ef $PWD ]]; then
    if [[ -z $extras ]]; then
      echo "$VIRTUAL_ENV has this package by \`pip install .\`, and keeps it; this run uses $PWD by PYTHONPATH"
      export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
      return
    fi
    echo "The plain install of this package in $VIRTUAL_ENV becomes an editable one: it needs $PWD from now on"
  elif [[ -n $elsewhere ]]; then
    echo "$VIRTUAL_ENV has this package from $elsewhere, and keeps it; this run uses $PWD by PYTHONPATH." \
      "For an environment of its own: deactivate, and run this again"
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    return
  fi
  echo "Installing into $VIRTUAL_ENV (a minute or some the first time)"
  local packages=(--editable ".$extras")
  python -c 'import torch' 2>/dev/null || packages+=("$(torch_to_install)")
  install_by_uv "${packages[@]}" || python -m pip install --quiet --no-compile "${packages[@]}"
  echo "$PWD" >"$stamp"
}

# As pip does, in a third of the time. uv itself comes from the index that pip is configured for, into a folder that is
# removed again. Fails where it can't be had, or where pip is configured in a way that has no word in uv.
# Neither compiles all modules, of which most are never imported.
install_by_uv() {
  local lines settings tools code=0
  lines=$(settings_for_uv) || return 1
  mapfile -t settings <<<"$lines"
  tools=$(mktemp -d)
  if python -m pip install --quiet --no-compile --target "$tools" "uv>=0.8,<1" 2>/dev/null; then
    env "${settings[@]}" "$tools/bin/uv" pip install --quiet --python "$VIRTUAL_ENV/bin/python" "$@" || code=$?
  else
    code=1
  fi
  rm -rf "$tools"
  return "$code"
}

# Prints pip's settings, those of the environment and of its files, as variables for uv, a line each. Fails if one of
# them has no counterpart.
settings_for_uv() {
  python -I - <<'CODE'
import ast
import subprocess
import sys

LISTS = {
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
VALUES = {
    "index-url": "UV_DEFAULT_INDEX",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}
WITHOUT_EFFECT = {
    *("cache-dir", "config-file", "disable-pip-version-check", "no-cache-dir", "no-color", "no-compile", "no-input"),
    *("no-warn-script-location", "prefer-binary", "progress-bar", "quiet", "require-virtualenv", "retries"),
    *("root-user-action", "verbose"),
}
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
settings = {}
for section in ("global", "install", ":env:"):  # what comes later counts more
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        if name.startswith(f"{section}."):
            settings[name.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: the best version of all indexes
for name, value in settings.items():
    if name in LISTS:
        variable, separator = LISTS[name]
        variables[variable] = separator.join(value.split())
    elif name in VALUES:
        variables[VALUES[name]] = value
    elif name not in WITHOUT_EFFECT:
        sys.exit(f"pip's setting {name} has no counterpart in uv")
for name, value in variables.items():
    print(f"{name}={value}")
CODE
}

# compile_once ARGUMENTS...: in a new environment, run python with these once, before many processes import the same
# for the first time and each of them compiles it.
compile_once() {
  local stamp="$VIRTUAL_ENV/.deepspeed_bamboo-compiled-${0##*/}"
  if [[ ! -e $stamp ]]; then
    python "$@" >/dev/null 2>&1 || true
    touch "$stamp" 2>/dev/null || true
  fi
}

# Prints where the package in the active environment is from, if there is one; nothing if it is this checkout itself,
# editable.
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
described = json.loads(origin) if origin else {}
url = described.get("url", "")
editable = described.get("dir_info", {}).get("editable", False)
place = unquote(urlsplit(url).path) if url.startswith("file:") else url or "a package index"
gone = url.startswith("file:") and not Path(place).exists()
if not gone and not (editable and Path(place).resolve() == Path(sys.argv[1]).resolve()):
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

# torch's default wheel brings gigabytes of CUDA. Asked for an exact version, pip and uv prefer a build without it where
# the configured index has one (2.13.0+cpu sorts above 2.13.0).
torch_to_install() {
  if [[ -e /dev/nvidiactl ]]; then
    echo "torch>=2.11,<2.15"
  else
    echo "torch==$TORCH_VERSION"
  fi
}
