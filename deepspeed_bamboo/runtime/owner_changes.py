"""What a script does to its engine between ``initialize`` and its first steps reaches the shadows, too.

Shadows are made in ``initialize``. Some scripts do more after that: they make their optimizer, put a scheduler on the
engine, register hooks, load weights. So before the first steps all workers look whether what they own is still what
their shadows were made from, and rebuild those that have changed.

If a script changes weights itself after each step, workers see that before its second one. From then on shadows get the
changed weights before each step. It may also be seen later: a worker that finds weights changed since the last step
reports that in the agreement of the iteration. Looking costs no message. The same goes for changes of structure, hooks,
``requires_grad`` and parameter groups (a script that unfreezes layers one after the other): shadows of stages that have
changed are rebuilt before the next step.

Numbers and words in attributes of layers are followed likewise (``stock/plain_values.py``), and what hooks keep in
closures and objects (``stock/hook_values.py``). And after each of the first steps shadows are compared with their
owners: what took the same step with the same gradients and is different will not be the same after a loss either, so
the job is refused. So it is where hooks change what can't be sent; where they do so later, a line says it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.membership.starting import refuse_unlike
from deepspeed_bamboo.runtime.owner_looks import (
    buffers_checksum,
    count_gradients,
    described,
    has_gradients,
    held_now,
    look_at,
    refuse_strayed,
    states_after_step,
    tell_of_hooked_steps,
)
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer
from deepspeed_bamboo.runtime.stock.held_attributes import global_values
from deepspeed_bamboo.runtime.stock.hook_values import (
    HookReading,
    read_hooks,
    separate_hooks,
    unsendable_changes,
)
from deepspeed_bamboo.runtime.stock.noted_values import Held, NotedValues
from deepspeed_bamboo.runtime.stock.outline import Outline, outline_of
from deepspeed_bamboo.runtime.stock.plain_values import PlainValues
from deepspeed_bamboo.runtime.stock.root_hooks import RootHooks
from deepspeed_bamboo.runtime.stock.state_versions import touched, versions_of

if TYPE_CHECKING:
    from deepspeed_bamboo.coordination import EpochRecord

CHANGED = "changed by hand"
"""The name under which a worker reports that its script has changed weights between two steps."""
RESHAPED = "changed layers"
"""The name under which a worker reports that its script has changed what a stage consists of."""
VALUES = "changed values"
"""The name under which a worker reports that its script has changed attributes of layers between two steps."""
_BY_HAND = "the script changes weights, buffers or the scheduler itself between two steps"
HOOKS = "changed in hooks"
"""The name under which a worker reports what hooks of its stages have changed that can't be sent."""
_VALUES = "the script changes attributes of layers, or what hooks keep, between two steps"
_UNSENDABLE = (
    "layers, hooks or the loss function change what other workers can't be sent ({}); keep it in a buffer, or as "
    "numbers, lists, dictionaries or tensors in an attribute, closure or object that nobody else has"
)
_LOOKS = 3  # before the first steps; a script that changes weights after each step does so after the first one


class PastSteps(Protocol):
    """Those that may have to be done again."""

    def note_values(self, values: Iterable[NotedValues]) -> None:
        """These were set before the next step."""

    def forget(self) -> None:
        """The state has become another one otherwise than by a step that can be done again."""


class OwnerChanges:
    """One worker's part of it; see the module.

    Args:
        worker: whose shadows follow.
        transfer: brings state to them.
        past: returns what hears, on every worker, of what the script has done before a step.
    """

    def __init__(self, worker: Worker, *, transfer: StateTransfer, past: Callable[[], PastSteps]) -> None:
        self._worker = worker
        self._past = past
        self._transfer = transfer
        self._looks, self._first_epoch = 0, -1
        self._stale: set[Coordinate] = set()  # changed here in a step before which their shadows did not get it
        self.by_hand = False
        self._root_hooks = RootHooks(worker.host)
        self._values_by_hand = False  # somewhere
        self._values: dict[Coordinate, PlainValues] = {}  # changed here, and not yet with the shadows
        self._known: dict[Coordinate, tuple[str, int, int, str]] = {}
        self._versions: dict[Coordinate, tuple[int, str]] = {}
        self._gradients: dict[Coordinate, int] = {}
        self._with_gradients: set[Coordinate] = set()  # there before the step
        self._outlines: dict[Coordinate, Outline] = {}
        self._reshaped: set[Coordinate] = set()  # here, since the shadows were made
        self._anew = False  # somewhere
        self._held: dict[Coordinate, Held] = {}  # what hooks and attributes keep, likewise
        self._separated = False
        self._hooks: dict[Coordinate, HookReading | None] = {}  # before one of the first steps, with global variables
        self._globals: dict[Coordinate, dict[str, list[Any]]] = {}  # likewise
        self._odd: Counter[tuple[Coordinate, str]] = Counter()  # how often global variables have changed in a step
        self._unsendable: list[str] = []  # changed by layers and hooks anywhere
        self._script_has_it = False  # what a stage is now is what the script has left
        self._pending_since: int | None = None  # before which step it has changed what nobody could do again
        self._alike: dict[Coordinate, tuple[int, str]] | None = None  # with their shadows, before an evaluation
        self._noted: EpochRecord | None = None  # who owned what when owners and shadows were alike

    def note(self) -> None:
        """Owners and shadows are alike now. Without shadows there is nothing to do, and a look takes milliseconds."""
        worker = self._worker
        if not worker.protects:
            return
        self._noted, self._alike = worker.record, None
        if self._looks < _LOOKS or self.by_hand:
            self._known = {c: look_at(self._worker, r) for c, r in worker.host.owned.items()}
        self._versions = {c: versions_of(r) for c, r in worker.host.owned.items()}
        self._gradients = {c: count_gradients(r) for c, r in worker.host.owned.items()}
        self._outlines = {c: self._outlines.get(c) or outline_of(r) for c, r in worker.host.owned.items()}
        if not self._looks:
            for replica in worker.host.owned.values():
                replica.moving.look(replica.module)
                replica.moving_hooks.look(replica.module)
                replica.moving_attributes.look(replica.module, by_script=True)

    def follow(self) -> None:
        """Before a step, on every worker: bring shadows to what their owners have become; collective at first."""
        worker = self._worker
        self._separate_hooks()
        if not worker.protects:
            return
        self._refuse_unsendable()
        changed = self._look()
        if self._looks >= _LOOKS:
            self._look_at_outlines()
            if not self.by_hand:  # later a forward may have changed buffers
                self._stale.update(changed)
            if not (self.by_hand or self._anew or self._values_by_hand):
                return
        first = self._looks == 0
        if first:
            self._first_epoch = worker.epoch
            tell_of_hooked_steps(worker)
        self._looks += 1
        weights: set[Coordinate] = set()
        structure: set[Coordinate] = set()
        epoch, agreed = worker.epoch, worker.agree_on("settle", self._changes)
        for value in agreed.values():
            weights.update(value["weights"])
            structure.update(value["structure"])
        refuse_strayed(worker, [value["state"] for value in agreed.values()])
        if self.by_hand or self._values_by_hand:
            self._tell_what_was_lost("since its last step")
        self._values.clear()
        self._held.clear()
        self._anew = self._anew or (bool(structure) and not first)  # a script that does it once may do it again
        self._reshaped.clear()
        self._outlines.clear()
        if weights and not first and not self.by_hand:
            self.by_hand = True
            tell_once(worker, f"{_BY_HAND}: before each step shadows get what has changed")
        self._stale.clear()
        if weights or structure:
            self._bring(structure, untouched=first)
            self._past().forget()
        self._accept_all(agreed.values(), first=first, restored=worker.epoch != epoch)
        self._pending_since = None
        self.note()
        if self._looks <= _LOOKS:
            self._hooks = {c: read_hooks(r.module, globals_too=True) for c, r in worker.host.owned.items()}
            self._globals = {c: global_values(r.module) for c, r in worker.host.owned.items()}

    def make_alike(self) -> None:
        """Before shadows get the state of their owners: those whose owner is made otherwise by now are made anew.

        A script that makes its optimizer after ``initialize`` and then loads has a shadow without any. Collective.
        """
        worker = self._worker
        self._separate_hooks()
        if not worker.protects:
            return
        first = self._looks == 0
        agreed = worker.agree_on("structure", self._changed_structure)
        structure = {coordinate for value in agreed.values() for coordinate in value}
        if structure:
            self._bring(structure, untouched=first)
            self._past().forget()
            self._outlines.clear()
            self._reshaped.clear()
            self.note()

    def _separate_hooks(self) -> None:
        self._root_hooks.carry()
        if not self._separated:
            self._separated = True
            separate_hooks(replica.module for replica in self._worker.host.owners())

    def _changed_structure(self) -> list[Coordinate]:
        """What this worker owns that is not made as it was when its shadow was."""
        if self._looks >= _LOOKS:
            self._look_at_outlines()
            return sorted(self._reshaped)
        owned = self._worker.host.owned
        return [c for c, known in self._known.items() if c in owned and described(self._worker, owned[c]) != known[0]]

    def _accept_all(self, agreed: Iterable[Mapping[str, Any]], *, first: bool, restored: bool) -> None:
        """``restored``: owners may have the state of before the script has set these."""
        host = self._worker.host
        noted = [values for value in agreed for values in NotedValues.of(value["values"], value["held"])]
        if noted and not first and self._looks <= _LOOKS and not self._values_by_hand:
            self._values_by_hand = True
            tell_once(self._worker, f"{_VALUES}: before each step shadows get them")
        for values in noted:
            for shadow in host.shadows.values():
                values.put_into(shadow, shadow=True)
            for owned in host.owned.values() if restored else ():
                values.put_into(owned, shadow=False)
        self._past().note_values(noted)

    def follow_evaluation(self) -> None:
        """Before an evaluation: a script may have put averaged weights in its place, and may do so each time."""
        self._alike = None
        self._root_hooks.carry()
        if self._looks >= _LOOKS:
            self.follow()
        elif self._worker.protects:
            self._look()

    def begin_evaluation(self) -> None:
        """Before its forwards, also where it begins again after a loss: which stages their shadows have as they are."""
        if self._alike is None:
            owned, changed = self._worker.host.owned, {*self._changed_since(), *self._stale}
            self._alike = {c: touched(r) for c, r in owned.items() if c in self._versions and c not in changed}
            if self._looks < _LOOKS:
                buffers = {c: buffers_checksum(owned[c]) for c in self._alike}
                self._alike = {c: its for c, its in self._alike.items() if buffers[c] == self._known[c][2]}

    def rest(self) -> None:
        """The script has its engine again."""
        self._script_has_it = True

    def redoes_from(self) -> int:
        """The first step whose state has all that the script has changed by hand here; 0 where it has changed nothing.

        It can't be done again, unless all workers have noted it (:meth:`follow`).
        """
        if self._script_has_it and self._worker.protects:
            self._look()
            self._script_has_it = True
        return 0 if self._pending_since is None else self._pending_since + 1

    def _look(self) -> list[Coordinate]:
        """At stages as the script has left them, after which others change them: the weights that it has changed."""
        self._script_has_it = False
        changed = self._changed_since()
        self._look_at_values()
        # What is set on the PipelineModule itself (no path) every worker's script has set.
        if changed or self._held or any(path for values in self._values.values() for path in values):
            self._pending_since = self._worker.step
        return changed

    def evaluated(self, moved: Sequence[NotedValues]) -> None:
        """An evaluation has moved these buffers: shadows get them, and steps that are done again begin with them."""
        self._script_has_it = True
        if not moved:
            return
        host = self._worker.host
        for values in moved:
            for replica in host.replicas():
                values.put_into(replica, shadow=replica.coordinate in host.shadows)
        alike, self._alike = self._alike or {}, None
        for coordinate, before in alike.items():
            owned = host.owned.get(coordinate)
            if owned is not None and touched(owned) == before:
                self._versions[coordinate] = versions_of(owned)
                if self._looks < _LOOKS:
                    self._known[coordinate] = look_at(self._worker, owned)
        self._past().note_values(moved)

    def contribution(self) -> dict[str, Any]:
        """What this worker contributes to the agreement of an iteration."""
        by_hand = bool(self._stale) and not self.by_hand
        reshaped = {RESHAPED: sorted(map(str, self._reshaped))} if self._reshaped else {}
        values = {VALUES: True} if self._values or self._held else {}
        return {**({CHANGED: True} if by_hand else {}), **reshaped, **values, **self._moved_hooks()}

    def learn(self, agreed: Mapping[str, Mapping[str, Any]]) -> None:
        """What others have handed in with the agreement of an iteration: from then on all copy weights."""
        if not self.by_hand and any(value.get(CHANGED) for value in agreed.values()):
            self.by_hand = True
            tell_once(
                self._worker,
                f"{_BY_HAND}: from now on shadows get what has changed before each step (they had not yet before the "
                "last one)",
            )

        if not self._values_by_hand and any(value.get(VALUES) for value in agreed.values()):
            self._values_by_hand = True
            tell_once(
                self._worker, f"{_VALUES}: from now on shadows get them before each step (not before the last one)"
            )
            self._past().forget()  # not all know what was set before the last one
        if any(value.keys() & {CHANGED, VALUES, RESHAPED} for value in agreed.values()):
            self._tell_what_was_lost("before the last step")
        hooks = sorted({what for value in agreed.values() for what in value.get(HOOKS, ())})
        if hooks and self._looks <= _LOOKS:
            self._unsendable = hooks
        elif hooks:
            tell_once(
                self._worker, f"{_UNSENDABLE.format('; '.join(hooks))}: after a loss of that stage it is not there"
            )
        reshaped = sorted({stage for value in agreed.values() for stage in value.get(RESHAPED, ())})
        if reshaped:
            self._anew = True
            tell_once(
                self._worker,
                "the script has changed layers, hooks, requires_grad or parameter groups between two steps (of "
                f"{' '.join(reshaped)}): shadows are made anew before the next step (a loss in the last one would have "
                "brought back what was before; engine.refresh_shadows() on every rank excludes that)",
            )

    def _tell_what_was_lost(self, when: str) -> None:
        """Where a stage was taken over whose shadow had not got yet what the script had changed."""
        record, noted = self._worker.record, self._noted
        if noted is None or record.number == noted.number or not record.lost:
            return
        lost = [str(c) for c in noted.placement.grid if noted.placement.owner(c) in record.lost]
        if lost:
            tell_once(
                self._worker,
                f"{', '.join(record.lost)} was lost before a shadow had what its script may have changed {when} "
                f"(weights, optimizer state, attributes): {' '.join(lost)} goes on with what was there before, "
                "and results may differ from those without a loss",
            )

    def _moved_hooks(self) -> dict[str, Any]:
        """What hooks have changed that can't be sent; in the first iterations global variables, too."""
        before, self._hooks = self._hooks, {}
        global_before, self._globals = self._globals, {}
        owned, moved = self._worker.host.owned, []
        for coordinate, replica in owned.items():
            found = [*replica.moving_hooks.take_unsendable(), *replica.moving_attributes.take_unsendable()]
            if coordinate in before:
                found += unsendable_changes(before[coordinate], read_hooks(replica.module, globals_too=True))
            if coordinate in self._with_gradients:
                found.append("gradients, by a backward of the script's own between two steps")
            if coordinate in global_before:
                known, now = global_before[coordinate], global_values(replica.module)
                self._odd.update((coordinate, name) for name, its in now.items() if known.get(name, its) != its)
                found += [f"the global variable {name}" for name in now if self._odd[coordinate, name] > 1]
            moved += [f"{coordinate}: {what}" for what in dict.fromkeys(found)]
        for coordinate, shadow in self._worker.host.shadows.items():
            moved += [f"{coordinate}: {what}" for what in shadow.moving_attributes.take_unsendable()]
        return {HOOKS: moved} if moved else {}

    def _refuse_unsendable(self) -> None:
        """Raise ConfigError, on all workers alike, where one of the first steps has changed what shadows can't get."""
        found, self._unsendable = self._unsendable, []
        refuse_unlike(self._worker, [_UNSENDABLE.format("; ".join(found))] if found else [])

    def to_json(self) -> dict[str, Any]:
        """What a worker that joins has to know."""
        return {
            "looks": self._looks,
            "by_hand": self.by_hand,
            "anew": self._anew,
            "values_by_hand": self._values_by_hand,
        }

    def take(self, value: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`."""
        self._looks, self.by_hand = int(value["looks"]), bool(value["by_hand"])
        self._anew, self._values_by_hand = bool(value["anew"]), bool(value["values_by_hand"])

    def _changes(self) -> dict[str, Any]:
        owned = self._worker.host.owned
        values = {str(c): its for c, its in self._values.items() if c in owned}
        held = {str(c): its for c, its in self._held.items() if c in owned}
        if self._looks > _LOOKS:
            weights = sorted({*self._changed_since(), *(self._stale & owned.keys())})
            return {
                "structure": sorted(self._reshaped),
                "weights": weights,
                "values": values,
                "held": held,
                "state": {},
            }
        now = {c: look_at(self._worker, r) for c, r in owned.items()}
        known = {c: self._known.get(c, now[c]) for c in now}
        compared = self._looks > 1 and self._worker.epoch == self._first_epoch  # after a loss others have the stages
        return {
            "structure": [c for c in now if now[c][0] != known[c][0]],
            "weights": [c for c in now if now[c][1:] != known[c][1:]],
            "values": values,
            "held": held,
            "state": states_after_step(self._worker, self._known) if compared else {},
        }

    def _look_at_values(self) -> None:
        owned = self._worker.host.owned
        grown = {c for c, its in self._gradients.items() if c in owned and count_gradients(owned[c]) > its}
        self._with_gradients = {c for c in grown if has_gradients(owned[c])}
        for coordinate, replica in self._worker.host.owned.items():
            changed = replica.moving.look(replica.module)
            for path, values in changed.items():
                self._values.setdefault(coordinate, {}).setdefault(path, {}).update(values)
            hooks = replica.moving_hooks.look(replica.module)
            if replica.moving_attributes.look(replica.module, by_script=True) or hooks or coordinate in self._held:
                self._held[coordinate] = held_now(replica)

    def _changed_since(self) -> list[Coordinate]:
        owned = self._worker.host.owned
        return [c for c, version in self._versions.items() if c in owned and versions_of(owned[c]) != version]

    def _look_at_outlines(self) -> None:
        before, self._outlines = self._outlines, {c: outline_of(r) for c, r in self._worker.host.owned.items()}
        self._reshaped |= {c for c, outline in self._outlines.items() if before.get(c, outline) != outline}
        if self._reshaped:
            self._pending_since = self._worker.step

    def _bring(self, rebuilt: set[Coordinate], *, untouched: bool) -> None:
        """``untouched``: no forward has changed attributes of layers yet."""
        worker = self._worker
        problems: list[str] = []

        def copy() -> tuple[str, ...]:
            label = f"{worker.activity.index}/settle"
            shadows = [(c, holder) for c, holder in worker.placement.all_shadows if c in rebuilt]
            for coordinate in {c for c, _ in shadows} & worker.host.shadows.keys():
                worker.host.shadows[coordinate].finish_step()
            unlike = self._transfer.copy_shadows(worker.placement, shadows=shadows, label=label, attributes=untouched)
            # On all workers alike, whoever of them could not make a shadow: others wait for what they send.
            self._transfer.refresh_shadows(label=f"{label}/all", leaving_out=rebuilt)
            return unlike

        for value in worker.agree_on("refresh", copy).values():
            problems += value
        refuse_unlike(worker, problems)
