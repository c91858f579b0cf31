"""From what a worker finds in its environment to the coordinator of its job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from deepspeed_bamboo.coordination.endpoints import parse_endpoints
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.job import DEFAULT_PREFIX, JobCoordinator


def connect(environment: Mapping[str, str] | None = None) -> JobCoordinator:
    """The coordinator named by ``BAMBOO_ENDPOINTS``, ``BAMBOO_JOB`` and ``BAMBOO_PREFIX``; connects at the first call.

    Reads ``os.environ`` unless another mapping is given. Raises KeyError naming the variable that is
    missing (the process was not started by an agent), EndpointError for a malformed one.
    """
    variables = os.environ if environment is None else environment
    store = EtcdStore(parse_endpoints(variables["BAMBOO_ENDPOINTS"].split(",")))
    return JobCoordinator(store, job=variables["BAMBOO_JOB"], prefix=variables.get("BAMBOO_PREFIX", DEFAULT_PREFIX))
