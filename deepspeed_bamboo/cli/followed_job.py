"""A job that is followed from before its start to its end, also over machines that all go and come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed_bamboo.cli.job import NoSuchJobError, NoUserError, SeveralJobsError
from deepspeed_bamboo.cli.job_view import JobView
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable
from deepspeed_bamboo.coordination.records import FINAL_FAILURES, EndedJob
from deepspeed_bamboo.errors import BambooError, ConfigError

__all__ = ["FollowedJob", "JobLook", "lasts"]


@dataclass(frozen=True)
class JobLook:
    """What a look found: the job, where somebody runs it; how it is, in words; whether it is over for good."""

    view: JobView | None
    line: str
    over: bool = False


class FollowedJob:
    """The job of one name: the given one, or the only one that there is when it is first seen.

    It is over when it is complete, or has failed so that nobody repeats its command. What was over before it was first
    looked for is an earlier job's. A job whose machines have all gone is not over: ``ds_bamboo run`` starts it again.
    Nor is one of which etcd knows nobody, as machines train on that don't reach it.

    Args:
        view: reads the job of that name; None: the only one. Raises NoSuchJobError where there is none.
        last_end: how the last job of a name ended, if it no longer exists.
        name: the job's, if it is known.
    """

    def __init__(
        self,
        view: Callable[[str | None], JobView],
        last_end: Callable[[str], EndedJob | None],
        *,
        name: str | None = None,
    ) -> None:
        self._view = view
        self._last_end = last_end
        self._name = name
        self._earlier: EndedJob | None = None
        self._looked = False
        self.lived = False
        """Whether somebody was seen to run it."""

    def look(self) -> JobLook:
        """Look once. Raises what ``view`` raises, but for NoSuchJobError."""
        try:
            seen = self._view(self._name)
        except NoSuchJobError as error:
            self._note_earlier()
            return self._of_no_job(error)
        self._note_earlier()
        if not seen.over:
            self._name, self.lived = seen.job, True
            return JobLook(seen, f"job {seen.job} is {seen.state}{_because(seen.detail)}")
        how = f"{seen.job} is {seen.state}{_because(seen.detail)}"
        if seen.agents:
            return JobLook(None, f"job {how}; its machines are about to leave it")
        if not self.lived:
            return JobLook(None, f"there is no job yet: an earlier job {how}")
        if seen.state == "finished" or seen.failure in FINAL_FAILURES:
            return JobLook(None, f"job {how}", over=True)
        return JobLook(None, _away(seen.job, seen.detail))

    def _note_earlier(self) -> None:
        """At the first look: how the job of that name before this one ended."""
        if not self._looked and self._name is not None:
            self._earlier = self._last_end(self._name)
        self._looked = True

    def _of_no_job(self, error: NoSuchJobError) -> JobLook:
        end = None if self._name is None else self._last_end(self._name)
        if self._name is None or (end == self._earlier and not self.lived):
            earlier = "" if end is None else f" (an earlier one is {end.state}{_because(end.detail)})"
            return JobLook(None, f"there is no job yet: {error}{earlier}")
        if end is None or end == self._earlier:  # an etcd that was restored may have old ends
            return JobLook(None, _away(self._name, "how it ended is not known"))
        if not end.final:
            return JobLook(None, _away(self._name, end.detail))
        return JobLook(None, f"job {self._name} is {end.state}{_because(end.detail)}", over=True)


def lasts(error: BambooError) -> bool:
    """Whether to look again is of no use: an option, the configuration or a right is wrong."""
    if isinstance(error, CoordinatorUnavailable):
        return error.answered
    return isinstance(error, ConfigError | NoUserError | SeveralJobsError)


def _because(detail: str) -> str:
    return f": {detail}" if detail else ""


def _away(job: str, detail: str) -> str:
    return f"job {job} is run by nobody that etcd knows of{_because(detail)}; it is not over, so its fleet stays"
