"""Whether a start that was refused may do a moment later: what ``ds_bamboo run`` does about it depends on that."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobNameTaken, LeaseExpired
from deepspeed_bamboo.elastic.errors import JobOverError, NotYetError, RefusedError
from deepspeed_bamboo.elastic.outcome import FINISHED, NOT_YET, REFUSED
from deepspeed_bamboo.protocol import EXIT_TRY_AGAIN

EXIT_CANNOT_START = 2
# None is 0, so that launchers end the slots that still wait for rank 0; `ds_bamboo run` goes by the notes.
EXIT_CODES = {REFUSED: EXIT_CANNOT_START, NOT_YET: EXIT_TRY_AGAIN, FINISHED: EXIT_CANNOT_START}


def how_refused(error: BaseException) -> str:
    """What a slot that ends with ``error`` notes: NOT_YET where time mends it, FINISHED, or REFUSED."""
    if isinstance(error, RefusedError):
        return error.how
    if isinstance(error, JobOverError):
        return FINISHED
    return NOT_YET if any(_time_mends(one) for one in _with_causes(error)) else REFUSED


def _time_mends(error: BaseException) -> bool:
    """A job that is about to begin or to end, or an etcd that is not there yet; not one that refuses this user."""
    if isinstance(error, CoordinatorUnavailable):
        return not error.answered
    return isinstance(error, JobNameTaken | LeaseExpired | NotYetError)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
