"""Settings that are paths, or addresses of storage: what they mean on this machine."""

from __future__ import annotations

import os
import re

from deepspeed_bamboo.protocol import START_DIRECTORY

VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([^}]*)\})", re.ASCII)  # as os.path.expandvars


def located(value: object) -> object:
    """A path without ``~``, variables and dots, as it is where the job was started; an address without variables.

    Anything else than a text is returned as it is. Raises ValueError for what can't be a path on this machine.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text == "":
        raise ValueError("'' names nothing; write a path, or leave the key out (or null) for none")
    if isinstance(text, str) and text and (not text.strip() or any(ord(letter) < 32 for letter in text)):
        raise ValueError(f"{text!r} is blank or has control characters in it, which no path should; write another path")
    if not isinstance(text, str) or not text:
        return text
    expanded = _without_variables(text)
    if "://" in text or text.startswith("s3:"):
        return expanded
    expanded = os.path.expanduser(expanded)  # noqa: PTH111 (a Path would drop a leading //)
    if expanded.startswith("~"):
        raise ValueError(
            f"{text!r} begins with the home directory of a user who is not known here, {expanded.split('/')[0]!r}; "
            "write the whole path (or ./~ for a file whose name begins so)"
        )
    start = os.environ.get(START_DIRECTORY) or os.getcwd()  # noqa: PTH109
    return os.path.abspath(os.path.join(start, expanded))  # noqa: PTH100, PTH118


def endpoint_problem(endpoint: str) -> str | None:
    """What is wrong with ``endpoint`` as host:port, in words that follow it; None when nothing is."""
    if endpoint.startswith("unix:/"):
        variable = VARIABLE.search(endpoint)
        return variable and f"has the variable {variable[0]} in it, which endpoints can't have; write its value"
    if "://" in endpoint:
        return f"has a scheme; write {endpoint.split('://', 1)[1].rstrip('/')!r}"
    host, separator, port = endpoint.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit():
        return "has no port; write host:port, as in 10.0.0.5:2379"
    if len(port) > 5 or not 1 <= int(port) <= 65535:
        return f"has port {port}; ports are 1 to 65535"
    if ":" in host and not re.fullmatch(r"\[[0-9A-Fa-f:.%\w]+\]", host):
        return "has several colons; write an IPv6 address as [address]:port"
    if not re.fullmatch(r"[\w.-]+|\[.+\]", host):
        return "has no usable host name; write host:port, as in 10.0.0.5:2379"
    return None


def _without_variables(text: str) -> str:
    """``text`` with the values of its variables. Raises ValueError for one that is unset or empty in this process."""
    names = dict.fromkeys(short or long for short, long in VARIABLE.findall(text))
    unset = [name for name in names if not os.environ.get(name)]
    if unset:
        which = ", ".join(f"${name}" for name in unset)
        raise ValueError(
            f"{text!r} has {which} in it, which is unset or empty on this machine, and a path needs the value of each "
            "of its variables; set it on every machine (DeepSpeed's launcher passes on what .deepspeed_env lists), or "
            "write the path without it"
        )
    return os.path.expandvars(text)
