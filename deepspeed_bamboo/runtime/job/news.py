"""What a worker tells the person who watches, see :mod:`deepspeed_bamboo.news`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed_bamboo import news

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine


def tell(engine: BambooPipelineEngine, text: str) -> None:
    """Print ``text`` to stderr, under the name of this worker."""
    news.tell(text, who=engine.session.worker)


def tell_once(engine: BambooPipelineEngine, text: str) -> None:
    """As :func:`tell`, on the one worker that reports for all."""
    if engine.is_reporter:
        tell(engine, text)
