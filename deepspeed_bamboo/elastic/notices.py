"""From the cloud's notices to the drain of this node. Never a reason for training to stop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepspeed_bamboo.cloud import Notice, NoticeSource, NoticeWatcher, Surroundings, detect
from deepspeed_bamboo.cloud.detection import CLOUD_VARIABLE, CLOUDS, NOTICES_VARIABLE, ZONE_VARIABLE
from deepspeed_bamboo.cloud.hints import likely_cloud
from deepspeed_bamboo.cloud.scripted import load_script
from deepspeed_bamboo.config.section import NoticesConfig
from deepspeed_bamboo.coordination import JobCoordinator


@dataclass(frozen=True)
class NoticePlan:
    """The source of notices, how often to ask it (None: as it recommends), and what a mere risk means."""

    source: NoticeSource
    poll_seconds: float | None = None
    drains_on_rebalance: bool = False


def look_around(notices: NoticesConfig, *, zones: str, environment: Mapping[str, str]) -> Surroundings:
    """Zone and source of notices of this machine. Asks a metadata service only where there seems to be one.

    Takes a second and a half at most. Raises ConfigError for settings that can't be used.
    """
    variables = dict(environment)
    if notices.source == "none" or notices.source in CLOUDS:
        variables.pop(NOTICES_VARIABLE, None)
    if notices.source in CLOUDS:
        variables[CLOUD_VARIABLE] = notices.source
        if notices.base_url is not None:
            variables[f"BAMBOO_{notices.source.upper()}_METADATA"] = notices.base_url
    elif notices.script is not None:
        script = notices.script
        if isinstance(script, str):
            load_script(script, where="notices.script")  # an error names the setting, which is what the user wrote
        variables[NOTICES_VARIABLE] = script if isinstance(script, str) else json.dumps(script)
    if variables.get(CLOUD_VARIABLE, "auto") in ("", "auto"):
        known = zones != "auto" or bool(variables.get(ZONE_VARIABLE))
        needless = known and notices.source == "none"
        variables[CLOUD_VARIABLE] = "none" if needless else likely_cloud(variables)
    found = detect(variables, zones=zones)
    return Surroundings(found.identity, None) if notices.source == "none" else found


def notice_plan(notices: NoticesConfig, surroundings: Surroundings) -> NoticePlan | None:
    """What to watch; None when there is no source."""
    if surroundings.source is None:
        return None
    return NoticePlan(surroundings.source, notices.poll_seconds, notices.rebalance == "drain")


class NodeNotices:
    """Asks for notices in a thread of its own, and asks the job to leave ``node`` when one comes.

    While the coordinator is out of reach, a notice is kept and passed on later. :meth:`stop` ends it.
    """

    def __init__(self, plan: NoticePlan, *, coordinator: JobCoordinator, node: str, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._coordinator = coordinator
        self._node = node
        self._say = say
        self._watcher = NoticeWatcher(plan.source, self._on_notice, interval_seconds=plan.poll_seconds).start()

    def stop(self) -> None:
        """Returns within a second."""
        self._watcher.stop()

    def _on_notice(self, notice: Notice) -> None:
        if notice.kind == "rebalance" and not self._plan.drains_on_rebalance:
            self._say(f"node {self._node} may be taken soon ({notice.reason}); it stays until that is certain")
            return
        self._coordinator.request_drain(
            self._node, deadline_seconds=notice.seconds_left(), reason=f"{notice.kind}: {notice.reason}"
        )
