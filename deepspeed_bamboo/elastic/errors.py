"""What can go wrong between a launcher's slot and its worker.

LaunchError (ConfigError)    this slot cannot start; the message says what to change
└── ExchangeError            the slots of one job did not find each other
    └── RefusedError         rank 0 cannot start the job, and has said why
"""

from __future__ import annotations

from deepspeed_bamboo.errors import ConfigError


class LaunchError(ConfigError):
    """The command line, the environment or the machine does not allow this slot to start."""


class ExchangeError(LaunchError):
    """The message of rank 0 about the coordinator did not reach this slot, or could not be sent."""


class RefusedError(ExchangeError):
    """Rank 0 gave up before there was a job. It tells the user why; other slots stay silent."""
