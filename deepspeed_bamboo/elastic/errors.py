"""What can go wrong between a launcher's slot and its worker.

LaunchError (ConfigError)    this slot cannot start; the message says what to change
├── NotYetError              nothing is wrong here: the same start may do a moment later
├── JobOverError             the job is complete, so nothing is started
└── ExchangeError            the slots of one job did not find each other
    ├── LateError            nor is anything wrong with that, as far as this slot knows (also a NotYetError)
    └── RefusedError         rank 0 cannot start the job, and has said why
"""

from __future__ import annotations

from deepspeed_bamboo.elastic.outcome import FINISHED, NOT_YET, REFUSED
from deepspeed_bamboo.errors import ConfigError


class LaunchError(ConfigError):
    """The command line, the environment or the machine does not allow this slot to start."""


class NotYetError(LaunchError):
    """What this slot needs is not there, and may be there soon."""


class JobOverError(LaunchError):
    """The job was completed, or stopped, since the command was first given."""


class ExchangeError(LaunchError):
    """The message of rank 0 about the coordinator did not reach this slot, or could not be sent."""


class LateError(ExchangeError, NotYetError):
    """Rank 0, or the launcher, was not there in time."""


class RefusedError(ExchangeError):
    """Rank 0 gave up before there was a job. It tells the user why; other slots stay silent.

    ``how``: how it ended, as in its note: refused, not_yet or finished.
    """

    def __init__(self, message: str, *, how: str = REFUSED) -> None:
        super().__init__(message)
        self.how = how if how in (NOT_YET, FINISHED) else REFUSED
