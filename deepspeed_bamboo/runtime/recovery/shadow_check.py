"""``debug_check_shadows``: every so many steps owners and shadows compare hashes of all their state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from deepspeed_bamboo.errors import ShadowError
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.stock.gradients import master_weights, scale_state
from deepspeed_bamboo.runtime.stock.replica import StageReplica

Hashes = dict[str, str]


def check_shadows_if_due(worker: Worker) -> None:
    """After each iteration: :func:`check_shadows` as often as the job's settings say."""
    every = worker.session.config.debug_check_shadows
    if every and worker.step % every == 0:
        check_shadows(worker)


def check_shadows(worker: Worker) -> None:
    """Compare every shadow with its owner; collective. Raises ShadowError, on every worker, for any difference."""

    def hashes_here() -> dict[str, dict[str, Hashes]]:
        worker.host.save()
        return {
            "owned": {str(r.coordinate): state_hashes(r) for r in worker.host.owners()},
            "shadows": {str(c): state_hashes(r) for c, r in worker.host.shadows.items()},
        }

    seen = worker.agree_on("check shadows", hashes_here)
    owned = {c: (holder, hashes) for holder, value in seen.items() for c, hashes in value["owned"].items()}
    differences = [
        f"{coordinate} {name}: worker {owned[coordinate][0]} has {owned[coordinate][1].get(name, 'nothing')[:12]}, "
        f"its shadow on {holder} {hashes.get(name, 'nothing')[:12]}"
        for holder, value in seen.items()
        for coordinate, hashes in value["shadows"].items()
        for name in _differing(owned[coordinate][1], hashes)
    ]
    if differences:
        raise ShadowError(
            f"after step {worker.step - 1} shadows differ from their owners, though both apply the same "
            "gradients with the same optimizer: " + "; ".join(differences) + ". Look for computing that depends on "
            "more than its inputs (nondeterministic kernels, another number of threads, state outside the module)."
        )


def state_hashes(replica: StageReplica) -> Hashes:
    """sha256 of each parameter, buffer, master weight, piece of optimizer state and loss scaling, by name."""
    return {name: _hash(value) for name, value in _named_state(replica)}


def _named_state(replica: StageReplica) -> Iterator[tuple[str, Any]]:
    replica.finish_step()
    attributes = replica.attributes
    module, masters = attributes["module"], master_weights(attributes["optimizer"])
    yield from ((f"parameter {name}", value) for name, value in module.named_parameters())
    yield from ((f"buffer {name}", value) for name, value in module.named_buffers())
    yield from ((f"master weights {index}", value) for index, value in enumerate(masters))
    yield from ((f"loss scaling {name}", value) for name, value in scale_state(attributes["optimizer"]).items())
    yield "skipped steps", attributes["skipped_steps"]
    for key, values in attributes["basic_optimizer"].state_dict()["state"].items():
        yield from ((f"optimizer state {key} {name}", value) for name, value in values.items())


def _hash(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        data = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        data = repr(value).encode()
    return hashlib.sha256(data).hexdigest()


def _differing(owner: Hashes, shadow: Hashes) -> list[str]:
    return [name for name in {**owner, **shadow} if owner.get(name) != shadow.get(name)]
