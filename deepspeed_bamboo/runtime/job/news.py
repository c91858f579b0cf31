"""What a worker tells the person who watches, see :mod:`deepspeed_bamboo.news`."""

from __future__ import annotations

from typing import Protocol

from deepspeed_bamboo import news
from deepspeed_bamboo.runtime.job.session import WorkerSession


class Speaker(Protocol):
    """Who has something to say: a worker."""

    @property
    def session(self) -> WorkerSession:
        """Its connection to the job."""

    @property
    def is_reporter(self) -> bool:
        """True on the one worker that speaks for all."""


def tell(speaker: Speaker, text: str) -> None:
    """Print ``text`` to stderr, under the name of this worker."""
    news.tell(text, who=speaker.session.worker)


def tell_once(speaker: Speaker, text: str) -> None:
    """As :func:`tell`, on the one worker that reports for all."""
    if speaker.is_reporter:
        tell(speaker, text)
