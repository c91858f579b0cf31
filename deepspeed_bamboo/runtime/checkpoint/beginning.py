"""Where a job's script began, and what its ``load_checkpoint`` returned since.

The script of a job that continues, and that of a late worker, run from the top again. They load nothing, but must do
what the first run did. What they need for that is in the plugin's own checkpoints, and in etcd.

Calls of ``train_batch`` have numbers, which only grow: a script may load a checkpoint of its own in the middle, and go
back by that, while its data go on. Until it does the number of a call is the step that it trains.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

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

SAVES = "saves"
"""Under which key it has how often the script had saved a checkpoint of its own after the last step."""

WROTE = "wrote"
"""Under which key it has whether the script had written to its optimizer after the last step."""

BATCH = "batch"
"""Under which key it has the size of the job's batch."""

MICRO_OFFSET = "micro_offset"
"""Under which key it has how many micro-batches were trained or evaluated, by which stock seeds layers."""

SAVED_CALL = "bamboo_call"
"""Under which key a checkpoint of the script's own has the number of the call before which it was saved."""

# It travels through etcd, which takes 1.5 MB at a time.
_MOST_BYTES = 256 * 1024
# DeepSpeed's and the plugin's, and large; they are in the client state only where the script did not have them loaded.
LEFT_OUT = frozenset(
    {"bamboo", "buffer_names", "frozen_param_fragments", "frozen_param_shapes", "lr_scheduler", "module", "optimizer"}
    | {"param_shapes", "shared_params", BESIDE_TIED, SAVED_CALL}
)


class Load(NamedTuple):
    """One: before which call it was, what it returned, and of what it was (see ``Asked.wanted``), "" if unknown."""

    call: int
    returned: str
    wanted: str = ""


class Beginning:
    """One worker's knowledge of it.

    ``first``: the number of the script's first call of ``train_batch``, to which its iterator's first micro-batch
    belongs. It is 0, or the step that the script's own load brought the job to before. ``loads``: in order. ``turns``:
    from which call on there was which step, by a load after others had been trained, and the how many-th load before
    that call it was.
    """

    def __init__(self) -> None:
        self.first = 0
        self.loads: tuple[Load, ...] = ()
        self.turns: tuple[tuple[int, int, int], ...] = ()

    def call_of(self, step: int) -> int:
        """The number of the call that trains ``step``; the last one, of a step that was trained several times."""
        return next((call + step - its for call, its, _ in reversed(self.turns) if step >= its), step)

    def call_before(self, step: int, *, saved: int | None) -> int:
        """The number of the call before which the script saved the state of ``step``.

        That is ``saved``, if this job was at that step then, or as :meth:`call_of` for what was saved otherwise.
        """
        if saved is None:
            return self.call_of(step)
        loads = sum(load.call == saved for load in self.loads)
        was_there = any(self.step_at(saved, loads=count) == step for count in range(loads + 1))
        return saved if was_there else self.call_of(step)

    def step_at(self, call: int, *, loads: int) -> int:
        """Inverse of :meth:`call_of`: the global step before call number ``call``, after so many loads there."""
        passed = (turn for turn in reversed(self.turns) if (call, loads) >= (turn[0], turn[2]))
        return next((step + call - its for its, step, _ in passed), call)

    def note(self, loaded: Loaded, *, before: int, after: int, wanted: str = "", call: int | None = None) -> str:
        """The script's load, of ``wanted``, has brought the job from step ``before`` to ``after``, returned ``loaded``.

        ``call``: before which call that was, if it is not the newest one of step ``before``. Returns a warning if a
        part of the client state can't be given again, else "".
        """
        call = self.call_of(before) if call is None else call
        if call == self.first:
            self.first += after - before  # the iterator is where it was
            self.loads = tuple(its._replace(call=self.first) if its.call == call else its for its in self.loads)
            call = self.first
        elif before != after:
            count = 1 + sum(its.call == call for its in self.loads)
            self.turns = (*(turn for turn in self.turns if turn[0] < call), (call, after, count))
        path, state = loaded
        kept, lost = _plain(state) if isinstance(state, dict) else (state, [])
        text = _text((path, kept))
        if len(text) + sum(len(its.returned) for its in self.loads) > _MOST_BYTES:
            lost = [f"{name!r} (together larger than 256 KB)" for name in kept or ()]
            text = _text((path, None if kept is None else {}))
        self.loads = (*self.loads, Load(call, text, wanted))
        if not lost:
            return ""
        return (
            f"client_state of {path}: a worker that joins late, and a job that continues from checkpoint.dir, "
            f"get all but {', '.join(lost)} from load_checkpoint again; save numbers, texts, lists, dicts and tensors"
        )

    def resume(self, call: int, *, keep: int) -> None:
        """The script begins with ``call`` this time, with a load of its own after the first ``keep`` ones."""
        kept = [load._replace(call=call) for load in self.loads if load.call == self.first][:keep]
        later = [load for load in self.loads if load.call > call]
        self.first, self.loads = call, (*kept, *later)

    def returned(self, number: int, *, at: int, wanted: str = "") -> Loaded | None:
        """What load ``number`` of those before call ``at`` of ``train_batch`` returned; None where there was none.

        ``wanted``: also where it is known to have been of something else.
        """
        loads = [load for load in self.loads if load.call == at]
        if number >= len(loads) or (wanted and loads[number].wanted not in ("", wanted)):
            return None
        path, state = decode(base64.b64decode(loads[number].returned))
        return path, state

    def to_json(self) -> dict[str, Any]:
        """As values that can be sent and saved."""
        return {
            "step": self.first,
            "loads": [list(load) for load in self.loads],
            "turns": [list(t) for t in self.turns],
        }

    def take(self, value: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`; an empty one is that of a script that loads nothing."""
        self.first = int(value.get("step", 0))
        loads = ((self.first, load) if isinstance(load, str) else load for load in value.get("loads", ()))  # or older
        self.loads = tuple(Load(int(call), *map(str, rest)) for call, *rest in loads)
        self.turns = tuple((int(call), int(step), int(count)) for call, step, count in value.get("turns", ()))

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
