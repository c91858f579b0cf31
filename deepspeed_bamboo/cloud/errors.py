"""Errors between this machine and its cloud. None of them ever ends a job.

BambooError
├── MetadataError   the metadata service said nothing, or something that can't be used
└── FleetError      the cloud refused to list or resize a fleet
    └── NoSuchFleetError    there is none of that name
"""

from __future__ import annotations

from deepspeed_bamboo.errors import BambooError


class MetadataError(BambooError):
    """The metadata service gave no usable answer.

    The text of one and the same problem is always the same, so that it is logged once.
    ``answered`` tells a service that answers wrongly from one that isn't there.
    """

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class FleetError(BambooError):
    """A fleet can't be listed or resized. Says which, why, and what to do."""


class NoSuchFleetError(FleetError):
    """No fleet of that name lives in this region."""
