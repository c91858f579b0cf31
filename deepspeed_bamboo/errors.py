"""Every exception that deepspeed_bamboo raises on purpose.

    BambooError
    ├── ConfigError         a setting, a fault script or an argument that can't be used (also a ValueError)
    └── EventLogError       event files that contradict each other or can't be read

Messages for users carry three things: the value, the rule it breaks, and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence


class BambooError(Exception):
    """Root of the tree; catch it to catch whatever deepspeed_bamboo raises on purpose."""


class ConfigError(BambooError, ValueError):
    """The user's settings can't be used. Raised before anything starts, with every problem listed."""

    def __init__(self, *problems: str, where: str = "") -> None:
        """``problems``: one sentence each (at least one). ``where``: the file or section they are in."""
        self.problems: tuple[str, ...] = problems
        self.where = where
        super().__init__(_list_problems(problems, where=where))


class EventLogError(BambooError):
    """Workers wrote different things about the same step, or a line in an event file is broken."""


def _list_problems(problems: Sequence[str], *, where: str) -> str:
    if len(problems) == 1:
        return f"{where}: {problems[0]}" if where else problems[0]
    head = f"{len(problems)} problems in {where}:" if where else f"{len(problems)} problems:"
    return "\n".join([head, *(f"  - {problem}" for problem in problems)])
