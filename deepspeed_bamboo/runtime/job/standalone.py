"""A job without launcher and agents: its workers were started by something else, and rank 0 brings an etcd.

For test suites and notebooks that start their own processes (``BAMBOO_STANDALONE=1``). Only its
peers notice a lost worker, and torch's default process group stays what it is until the first loss.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import distributed as c10d

from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.protocol import ENDPOINTS, JOB, SECRET, STANDALONE, WORKER
from deepspeed_bamboo.trust.secret import new_secret


def is_standalone(environment: Mapping[str, str]) -> bool:
    """True when the environment asks for it and no agent has started this process."""
    return environment.get(STANDALONE) == "1" and ENDPOINTS not in environment


def standalone_job(environment: Mapping[str, str]) -> tuple[dict[str, str], PrivateEtcd | None]:
    """``environment`` as an agent would have made it, and, on rank 0, the etcd that lives as long as its object.

    Collective over torch's default process group, which must exist.
    """
    rank = c10d.get_rank()
    etcd = PrivateEtcd() if rank == 0 else None
    told = _from_rank_0("" if etcd is None else f"{etcd.endpoint} {new_secret()}")
    endpoint, secret = told.rsplit(" ", 1)
    name = f"standalone-{os.getppid()}"
    return {**environment, ENDPOINTS: endpoint, SECRET: secret, JOB: name, WORKER: f"w{rank}"}, etcd


def _from_rank_0(text: str) -> str:
    """The ``text`` of rank 0, on all ranks; collective. As bytes: an object would be unpickled."""
    device = "cuda" if c10d.get_backend() == "nccl" else "cpu"
    own = text.encode()
    size = torch.tensor([len(own)], device=device)
    c10d.broadcast(size, src=0)
    content = torch.zeros(int(size), dtype=torch.uint8)
    content[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
    content = content.to(device)
    c10d.broadcast(content, src=0)
    return bytes(content.tolist()).decode()
