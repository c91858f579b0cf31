"""What the processes of a job agree on, in etcd or in memory. Imports neither torch nor deepspeed."""

from deepspeed_bamboo.coordination.connect import connect
from deepspeed_bamboo.coordination.endpoints import Endpoint, parse_endpoints
from deepspeed_bamboo.coordination.errors import (
    AnotherRun,
    CoordinationError,
    CoordinatorUnavailable,
    EndpointError,
    JobNameTaken,
    LeaseExpired,
    NoEpoch,
    ServerStartError,
)
from deepspeed_bamboo.coordination.guard import EtcdGuard
from deepspeed_bamboo.coordination.job import DEFAULT_PREFIX, JobCoordinator, running_jobs
from deepspeed_bamboo.coordination.losing import fatal_loss, lost_data
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.coordination.records import AgentRecord, Change, Drain, EpochRecord, JobFailure, Member, Roster
from deepspeed_bamboo.coordination.registration import Registration
from deepspeed_bamboo.coordination.shared_registration import SharedRegistration
from deepspeed_bamboo.coordination.store import Entry, KeyValueStore, Snapshot, StoreEvent, WatchHandle

__all__ = [
    "DEFAULT_PREFIX",
    "AgentRecord",
    "AnotherRun",
    "Change",
    "CoordinationError",
    "CoordinatorUnavailable",
    "Drain",
    "Endpoint",
    "EndpointError",
    "Entry",
    "EpochRecord",
    "EtcdGuard",
    "JobCoordinator",
    "JobFailure",
    "JobNameTaken",
    "KeyValueStore",
    "LeaseExpired",
    "Member",
    "MemoryStore",
    "NoEpoch",
    "Registration",
    "Roster",
    "ServerStartError",
    "SharedRegistration",
    "Snapshot",
    "StoreEvent",
    "WatchHandle",
    "connect",
    "fatal_loss",
    "lost_data",
    "parse_endpoints",
    "running_jobs",
]
