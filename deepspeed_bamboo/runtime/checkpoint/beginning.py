"""Where a job's script began: at which step its data start, and what its first ``load_checkpoint`` returned.

The script of a job that continues, and that of a late worker, run from the top again. They load nothing, but must do
what the first run did. What they need for that is in the plugin's own checkpoints, and in etcd.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobCoordinator
from deepspeed_bamboo.errors import UnsendableError
from deepspeed_bamboo.runtime.comm.encoding import decode, encode
from deepspeed_bamboo.runtime.stock.beside_tied import BESIDE_TIED

Loaded = tuple[str | None, Any]
"""What ``load_checkpoint`` returns: a path and the client state."""

BEGAN = "began"
"""Under which key it is in a checkpoint's own state, and in what is published of the job."""

SEVERAL = "several iterators"
"""Under which key a checkpoint's own state has whether the script had passed one data iterator after another."""

ENDED = "ended"
"""Under which key it has whether the script had ended; otherwise the state is that at the end of a ``train_batch``."""

BATCH = "batch"
"""Under which key it has the size of the job's batch."""

# It travels through etcd, which takes 1.5 MB at a time.
_MOST_BYTES = 256 * 1024
# DeepSpeed's and the plugin's, and large; they are in the client state only where the script did not have them loaded.
LEFT_OUT = frozenset(
    {"bamboo", "buffer_names", "frozen_param_fragments", "frozen_param_shapes", "lr_scheduler", "module", "optimizer"}
    | {"param_shapes", "shared_params", BESIDE_TIED}
)


class Beginning:
    """One worker's knowledge of it.

    ``step``: the global step whose first micro-batch the script's iterator yields first. It is 0, or the step that the
    script's own load brought the job to. ``loads``: by order of the calls, what those before the first step returned.
    """

    def __init__(self) -> None:
        self.step = 0
        self.loads: tuple[str, ...] = ()

    def note(self, loaded: Loaded, *, before: int, after: int) -> str:
        """The script's load has brought the job from step ``before`` to ``after`` and returned ``loaded``.

        Returns a warning if a part of the client state can't be given again, else "".
        """
        trained = before != self.step
        self.step += after - before  # the iterator is where it was
        if trained:
            return ""
        path, state = loaded
        kept, lost = _plain(state) if isinstance(state, dict) else (state, [])
        text = _text((path, kept))
        if len(text) + sum(map(len, self.loads)) > _MOST_BYTES:
            lost = [f"{name!r} (together larger than 256 KB)" for name in kept or ()]
            text = _text((path, None if kept is None else {}))
        self.loads = (*self.loads, text)
        if not lost:
            return ""
        return (
            f"client_state of {path}: a worker that joins late, and a job that continues from checkpoint.dir, "
            f"get all but {', '.join(lost)} from load_checkpoint again; save numbers, texts, lists, dicts and tensors"
        )

    def resume(self, step: int, *, keep: int) -> None:
        """The script begins at ``step`` this time, with a load of its own after the first ``keep`` ones."""
        self.step, self.loads = step, self.loads[:keep]

    def returned(self, call: int) -> Loaded | None:
        """What call number ``call`` of ``load_checkpoint`` returned; None where there was no such call."""
        if call >= len(self.loads):
            return None
        path, state = decode(base64.b64decode(self.loads[call]))
        return path, state

    def to_json(self) -> dict[str, Any]:
        """As values that can be sent and saved."""
        return {"step": self.step, "loads": list(self.loads)}

    def take(self, value: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`; an empty one is that of a script that loads nothing."""
        self.step = int(value.get("step", 0))
        self.loads = tuple(str(text) for text in value.get("loads", ()))

    def publish(self, coordinator: JobCoordinator) -> None:
        """Tell workers that are not in the job yet. Without etcd they learn it when they are taken in."""
        try:
            facts = coordinator.facts()
            if facts is not None:
                coordinator.publish_facts({**facts, BEGAN: self.to_json()})
        except CoordinatorUnavailable:
            return

    def look(self, coordinator: JobCoordinator) -> bool:
        """On a worker that is not in the job: take what is published. Returns whether something is."""
        facts = coordinator.facts() or {}
        self.take(facts.get(BEGAN, {}))
        return BEGAN in facts


def _plain(state: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
    """The parts of ``state`` that can be sent; and the names of the others."""
    kept, lost = {}, []
    for name, value in state.items():
        if name in LEFT_OUT:
            continue
        try:
            encode({name: value})
        except UnsendableError:
            lost.append(f"{name!r} (a {type(value).__name__})")
        else:
            kept[name] = value
    return kept, lost


def _text(loaded: Loaded) -> str:
    try:
        return base64.b64encode(encode(loaded)).decode("ascii")
    except UnsendableError:  # a client state that is no dict
        return base64.b64encode(encode((loaded[0], {}))).decode("ascii")
