"""From a worker's environment to the coordinator of its job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from deepspeed_bamboo.coordination.endpoints import parse_endpoints
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.guard import EtcdGuard
from deepspeed_bamboo.coordination.job import DEFAULT_PREFIX, JobCoordinator
from deepspeed_bamboo.protocol import ENDPOINTS, GENERATION, JOB, PREFIX


def connect(environment: Mapping[str, str] | None = None) -> JobCoordinator:
    """The coordinator of this worker's job: BAMBOO_ENDPOINTS, BAMBOO_JOB, BAMBOO_PREFIX, BAMBOO_GENERATION.

    For an etcd that is not open to everybody: BAMBOO_ETCD_USERNAME, _PASSWORD_ENV, _CA_CERT, _CERT, _KEY.
    Nothing is connected before the first call. Reads ``os.environ`` unless another mapping is given.
    Raises KeyError naming a missing variable (the process was not started by an agent), EndpointError
    for a malformed one.
    """
    variables = os.environ if environment is None else environment
    generation = int(variables.get(GENERATION, "0"))
    endpoints = parse_endpoints(variables[ENDPOINTS].split(","))
    store = EtcdStore(endpoints, guard=EtcdGuard.from_environment(variables))
    prefix = variables.get(PREFIX, DEFAULT_PREFIX)
    return JobCoordinator(store, job=variables[JOB], prefix=prefix, generation=generation)
