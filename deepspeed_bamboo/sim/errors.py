"""What can go wrong in a simulation, for a caller to catch.

ValueError
└── SimulationError          the base: message = value, rule, remedy
    ├── TraceError           a trace file breaks a rule; knows file and line
    ├── ScenarioError        a scenario, preset or option is not valid
    ├── MissingStepTimeError the model has no step time for a grid
    └── MissingExtraError    an optional dependency is not installed; names the extra
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "MissingExtraError",
    "MissingStepTimeError",
    "ScenarioError",
    "SimulationError",
    "TraceError",
]


class SimulationError(ValueError):
    """Something the user gave the simulator does not hold; the message says what, why and what to do."""


class TraceError(SimulationError):
    """A line of a trace or price file breaks a rule.

    Args:
        path: the file.
        line: its line, counted from 1; 0 when the whole file is meant.
        rule: what the line must be, what it was, and what to do.
    """

    def __init__(self, path: Path | str, *, line: int, rule: str) -> None:
        where = f"{path}:{line}" if line else f"{path}"
        super().__init__(f"{where}: {rule}")
        self.path = Path(path)
        self.line = line
        self.rule = rule


class ScenarioError(SimulationError):
    """A scenario, a preset or a command-line option has a value that breaks a rule."""


class MissingStepTimeError(SimulationError):
    """The model has neither a table row nor a profile for the grid that a policy asked for."""


class MissingExtraError(SimulationError):
    """An optional dependency is missing.

    Args:
        module: the module that could not be imported.
        extra: the extra of deepspeed_bamboo that brings it.
    """

    def __init__(self, module: str, *, extra: str) -> None:
        super().__init__(
            # Not by the package's name: it is on no index, where anybody could register it.
            f"{module} is not installed, and this needs it; in the directory of this project's source, "
            f'pip install ".[{extra}]" installs it'
        )
        self.extra = extra
