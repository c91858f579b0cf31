"""The cloud's side: notices before it takes a machine, this machine's name and zone, and fleets.

Imports neither torch nor deepspeed. Nothing here ever harms a job: a metadata service that is absent,
slow or wrong costs a bounded wait once and a line in the log.
"""

from deepspeed_bamboo.cloud.detection import Detection, Surroundings, detect
from deepspeed_bamboo.cloud.errors import FleetError, MetadataError
from deepspeed_bamboo.cloud.notice import Identity, Notice, NoticeKind, NoticeSource
from deepspeed_bamboo.cloud.scripted import ScriptedNotice, ScriptedSource, parse_script
from deepspeed_bamboo.cloud.signals import SignalSource, grace_seconds_from
from deepspeed_bamboo.cloud.watcher import NoticeWatcher

__all__ = [
    "Detection",
    "FleetError",
    "Identity",
    "MetadataError",
    "Notice",
    "NoticeKind",
    "NoticeSource",
    "NoticeWatcher",
    "ScriptedNotice",
    "ScriptedSource",
    "SignalSource",
    "Surroundings",
    "detect",
    "grace_seconds_from",
    "parse_script",
]
