"""What a script writes into the optimizer and scheduler that it holds reaches every stage that its worker owns.

A script has one optimizer object, the one that ``initialize`` returned (or that it made later), which belongs to the
stage that its worker began with. It may also write through ``engine.optimizer``, which is that of the stage that
the engine shows. The rule:

- what the script changes in a parameter group of either is changed in the corresponding group of every stage that the
  worker owns, before the next step. Corresponding is the group of the same name, else the one that was made with the
  same values, else the one at the same position (``hyperparameters.corresponding``);
- what a stage's own scheduler changes (one from the configuration, or a function given to ``initialize``) is no change
  by the script: every stage has such a scheduler. Nor is what an optimizer changes in its own step (an estimated rate);
- a scheduler object of the script, given to ``initialize`` or set on the engine later, is stepped once an iteration,
  with the stage that its optimizer belongs to, and what it writes counts as written by the script;
- where the worker doesn't own its first stage any more, the script's optimizer and scheduler stand for those of the
  first stage that it owns now (``held_objects.py``). Where that one has another number of groups, the script's
  optimizer gets the values of the corresponding ones after each step, and what the script writes there shows
  elsewhere at the next step.

A shadow gets its owner's values with the mirrored gradients of each step. After a take-over it continues with those,
and with what the script of its new worker has written since that step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.stock.clipping import ClippingByHand
from deepspeed_bamboo.runtime.stock.description import basic_optimizer
from deepspeed_bamboo.runtime.stock.held_objects import HeldObjects
from deepspeed_bamboo.runtime.stock.hosting import StageHost
from deepspeed_bamboo.runtime.stock.hyperparameters import (
    Values,
    accept_values,
    carry,
    corresponding,
    same,
    same_values,
    values_of,
)
from deepspeed_bamboo.runtime.stock.one_stage_only import OneStageOnly
from deepspeed_bamboo.runtime.stock.optimizer_values import unfollowed_hooks
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.root_values import RootByHand, module_of_script
from deepspeed_bamboo.runtime.stock.scale_by_hand import ScaleByHand
from deepspeed_bamboo.runtime.stock.schedule_by_hand import ScheduleByHand
from deepspeed_bamboo.runtime.stock.scheduler_state import set_scheduler_state
from deepspeed_bamboo.runtime.stock.written import NOTHING, Written


class ScriptWrites:
    """Carries what the script writes to all stages of one worker.

    Args:
        host: the worker's stages.
        optimizer: what the script is given, DeepSpeed's wrapper or a plain one; see :meth:`hold`.
        tell: called with a sentence for the user where a stage's value can't just be the script's; says each once.
    """

    def __init__(self, host: StageHost, optimizer: Any, *, tell: Callable[[str], None]) -> None:
        self._host = host
        self._tell = tell
        self._said: set[str] = set()
        self._wrapper: Any = None  # what the script was given
        self._optimizer: Any = None  # the script's, or the one for which that stands
        self._held: HeldObjects | None = None
        self._scheduler: Any = None  # an object of the script's
        # By source and target, both by id: the source's values that the target has followed.
        self._followed: dict[tuple[int, int], Values] = {}
        self._used: dict[int, Values] = {}
        self._made: weakref.WeakKeyDictionary[Any, Values] = weakref.WeakKeyDictionary()
        self._of_the_job: list[tuple[StageReplica, Values]] = []
        self._on_roots: list[tuple[Any, dict[str, Any]]] = []  # of the job's, by module
        self._shows: int | None = None  # the optimizer, by id, whose values the script's shows
        self._left: dict[int, Values] = {}  # by source, by id: what it held when nobody but the script could change it
        self._written = NOTHING  # since the last step
        self._clipping = ClippingByHand()
        self._scale = ScaleByHand()
        self._roots = RootByHand(self._say)
        self._alone = OneStageOnly()
        self._schedule = ScheduleByHand()
        self.hold(optimizer)
        for replica in host.owners():
            self.note(replica)
        self._leave_root()

    def hold(self, optimizer: Any) -> None:
        """``optimizer``, DeepSpeed's wrapper or a plain one, is what the script has in its hands from now on."""
        self._wrapper, self._optimizer = optimizer, basic_optimizer(optimizer)
        self._note_made(self._optimizer)
        self._host.save()
        built = self._host.built()
        its = next((own for own in built if own.attributes["basic_optimizer"] is self._optimizer), None)
        self._held = None if its is None or self._optimizer is None else HeldObjects(its)
        self._leave_wrappers()

    def note(self, replica: StageReplica) -> None:
        """``replica`` has got its owner's values just now."""
        self._alone.forget()
        target = replica.attributes["basic_optimizer"]
        if target is None:
            return
        self._made[target] = replica.made
        self._clipping.note(replica.attributes["optimizer"])
        self._scale.note(replica.attributes["optimizer"])
        for source in self._sources():
            self._followed[id(source), id(target)] = values_of(source)
        state, replica.scheduler_state = replica.scheduler_state, None
        self._find_scheduler()
        if state is not None and self._scheduler is not None:
            set_scheduler_state(self._scheduler, state)

    def written(self) -> Values:
        """What the script's optimizer holds."""
        return () if self._optimizer is None else values_of(self._optimizer)

    def go_back(self, values: Values) -> None:
        """The script comes from where its optimizer had ``values``, and the job's state is here already."""
        if self._optimizer is not None and values and not self._of_the_job:
            replicas = [replica for replica in self._host.built() if replica.attributes["basic_optimizer"] is not None]
            self._of_the_job = [(replica, values_of(replica.attributes["basic_optimizer"])) for replica in replicas]
            self._schedule.leave(self._shown())
            self._on_roots = [(one.module, one.moving.values(one.module).get("", {})) for one in self._host.built()]
            accept_values(self._optimizer, values)

    def come_back(self) -> None:
        """The script has come to the job's step: what it wrote on its way there is in the job's state."""
        waiting, self._of_the_job = self._of_the_job, []
        loaded = list(self._host.replicas())
        for replica, values in waiting:
            if any(replica is its for its in loaded):  # of a worker that stands by the script's values are the newest
                accept_values(replica.attributes["basic_optimizer"], values)
                self.note(replica)
        if waiting:
            self._schedule.come_back(self._shown(), self._host.replicas())
            root, modules = self._root(), [replica.module for replica in self._host.replicas()]
            of_the_job, self._on_roots = self._on_roots, []
            if root is not None:
                self._roots.come_back(root, modules, of_the_job)
            self._leave()

    def come_back_beyond(self, before: Values, *, sure: bool) -> list[str]:
        """As :meth:`come_back`, where the job's state has what a script did before it ended, and this one goes on.

        ``before``: what the script's optimizer held after the last step that the job did. What the script has written
        since, and the job's state does not have, counts if that is ``sure``; otherwise its names are returned.
        """
        now, waiting = self.written(), bool(self._of_the_job)
        self.come_back()
        of_the_job = self.written()
        if not waiting or not len(before) == len(now) == len(of_the_job):
            return []
        new = [
            {key: value for key, value in its.items() if not same(was.get(key), value) and not same(at.get(key), value)}
            for its, was, at in zip(now, before, of_the_job, strict=True)
        ]
        if not sure:
            return sorted({key for its in new for key in its})
        accept_values(self._optimizer, tuple(new))
        return []

    @property
    def has_written(self) -> bool:
        """Whether the script has written to an optimizer since the last step."""
        sources = [source for source in self._sources() if id(source) in self._left]
        changed = any(not same_values(self._left[id(source)], values_of(source)) for source in sources)
        return changed or bool(self._written.groups)

    @property
    def by_script_alone(self) -> bool:
        """Whether nothing but the script changes its groups: no scheduler is stepped in ``train_batch``."""
        return self._scheduler is None and all(replica.built_scheduler is None for replica in self._host.built())

    def follow(self, *, modules: bool = False) -> None:
        """Carry what the script has written since the last call to every stage that this worker owns.

        ``modules``: also what it has set on its PipelineModule; not where forwards have run since, which may set
        something, too. Nothing while the script is on its way to the job's step: that is in the job's state.
        """
        self._refuse_replaced_scheduler()
        if self._of_the_job:
            return
        if modules:
            self._written += Written(schedule=self._schedule.follow(self._shown(), self._host.replicas()))
            if alone := self._alone.follow(self._shown(), self._host.owners()):
                self._say(alone)
        self._find_scheduler()
        self._place_scheduler()
        self._follow_optimizers()
        if self._detached() and self._shows != id(self._sources()[-1]):
            # Not before: what the script has written to an optimizer is gone once that stands for another stage.
            self._show()
            self._follow_optimizers()
        replicas, root_module = self._host.replicas(), self._root()
        if root_module is not None and modules:
            self._written += Written(root=self._roots.follow(root_module, [replica.module for replica in replicas]))

    def _follow_optimizers(self) -> None:
        for source in self._sources():
            self._note_written(source)
            self._used[id(source)] = self._carry_from(source)
        clip = self._clipping.follow(self._wrappers(), self._host.owners())
        optimizers = [replica.attributes["optimizer"] for replica in self._host.replicas()]
        self._written += Written(clip=clip, scale=self._scale.follow(self._wrappers(), optimizers))

    def take_written(self) -> Written:
        """What the script has written since the last call, for :meth:`write_again`."""
        written, self._written = self._written, NOTHING
        return written

    def write_again(self, written: Written) -> None:
        """As the script did before a step that is done again."""
        for noted, values in written.groups:
            source = self._optimizer if noted is None else noted
            accept_values(source, values)
            self._left[id(source)] = values_of(source)
        self._clipping.write_again(self._wrappers(), written.clip)
        self._scale.write_again(self._wrappers(), written.scale)
        self._schedule.write_again(self._host.replicas(), written.schedule)
        self._schedule.leave(self._shown())
        root, modules = self._root(), [replica.module for replica in self._host.replicas()]
        if root is not None and written.root:
            self._roots.write_again(root, modules, written.root)

    def restored(self, past: Sequence[Written]) -> None:
        """The stages have a state of before: what their optimizers hold now is nothing that the script has written.

        ``past``: what the script has written since that state, in order.
        """
        self._shows = None
        for replica in self._host.replicas():
            self.note(replica)
        if self._detached():
            self._show()
        self._clipping.restored(self._wrappers(), self._host.replicas())
        self._schedule.restored(self._host.replicas(), [change for written in past for change in written.schedule])
        root, modules = self._root(), [replica.module for replica in self._host.replicas()]
        if root is not None:
            self._roots.restored(root, modules, [change for written in past for change in written.root])
        self._leave()

    def stepped(self) -> None:
        """After a step: what optimizers, and schedulers of the stages, have changed in it is not the script's doing."""
        followed: dict[tuple[int, int], Values] = {}
        for source in self._sources():
            now = values_of(source)
            # Hooks on the step, and a scheduler object of the script's, write what the script wants.
            by_itself = self._scheduler is None and not unfollowed_hooks(source)
            for replica in self._host.replicas():
                target = replica.attributes["basic_optimizer"]
                if target is None:
                    continue
                key = (id(source), id(target))
                if self._has_own_scheduler(replica) or by_itself:
                    followed[key] = now
                elif replica.coordinate in self._host.shadows:
                    followed[key] = self._used.get(id(source), now)
                else:
                    followed[key] = self._followed.get(key, now)
        self._followed = followed
        self._clipping.stepped(self._wrappers(), list(self._host.replicas()), shadows=self._host.shadows)
        if self._scheduler is not None and not self._host.owned:
            self._scheduler.step()  # nobody else does, on a worker that stands by
        if self._detached():
            self._show()
        self._leave()
        self._alone.leave(self._host.owners())

    # ---- who is who -----------------------------------------------------------------------------------

    def _shown(self) -> StageReplica | None:
        """The stage whose objects the script has; None on a worker that stands by."""
        return self._host.shown() if self._host.owned else None

    def _sources(self) -> list[Any]:
        """The optimizers that the script may write to, its own one first."""
        first = self._shown()
        shown = None if first is None else first.attributes["basic_optimizer"]
        return [optimizer for optimizer in dict.fromkeys((self._optimizer, shown)) if optimizer is not None]

    def _wrappers(self) -> list[Any]:
        """DeepSpeed's, of the optimizers that the script may write to."""
        sources = self._sources()
        ours = [one for one in self._host.built() if any(one.attributes["basic_optimizer"] is s for s in sources)]
        held = [] if any(one.attributes["optimizer"] is self._wrapper for one in ours) else [self._wrapper]
        return [wrapper for wrapper in (*held, *(one.attributes["optimizer"] for one in ours)) if wrapper is not None]

    def _detached(self) -> bool:
        """True where the script's optimizer is none of the stages that this worker owns."""
        owned = [replica.attributes["basic_optimizer"] for replica in self._host.owners()]
        return self._optimizer is not None and bool(owned) and all(self._optimizer is not own for own in owned)

    def _has_own_scheduler(self, replica: StageReplica) -> bool:
        scheduler = replica.attributes["lr_scheduler"]
        return scheduler is not None and scheduler is not self._scheduler

    def _leave(self) -> None:
        self._left = {id(source): values_of(source) for source in self._sources()}
        self._leave_wrappers()
        self._leave_root()

    def _leave_wrappers(self) -> None:
        self._clipping.leave(self._wrappers())
        self._schedule.leave(self._shown())
        self._scale.leave(self._wrappers())

    def _leave_root(self) -> None:
        root = self._root()
        if root is not None:
            self._roots.leave(root)

    def _root(self) -> Any:
        """The PipelineModule that the script has, also on a worker that stands by."""
        return module_of_script(self._host)

    def _note_written(self, source: Any) -> None:
        now, left = values_of(source), self._left.get(id(source))
        if left is not None and not same_values(left, now):
            # The one that it holds may stand for another one when this is written again.
            self._written += Written(groups=((None if source is self._optimizer else source, now),))
            self._left[id(source)] = now

    def _note_made(self, optimizer: Any) -> None:
        if optimizer is None:
            return
        if len(self._made.get(optimizer, ())) != len(optimizer.param_groups):  # new, or the script has added groups
            self._made[optimizer] = values_of(optimizer)

    # ---- carrying -------------------------------------------------------------------------------------

    def _carry_from(self, source: Any) -> Values:
        now = values_of(source)
        self._note_made(source)
        for replica in self._host.owners():
            target = replica.attributes["basic_optimizer"]
            if target is None or target is source:
                continue
            self._made[target] = replica.made
            self._note_made(target)
            before = self._followed.get((id(source), id(target)), now)
            if not same_values(before, now):
                pairs = corresponding(self._made[target], self._made[source])
                if len(pairs) == len(target.param_groups):
                    carry(before, now, target, pairs, self._say)
            self._followed[id(source), id(target)] = now
        return now

    def _show(self) -> None:
        """The script's optimizer, of a stage that is elsewhere now, stands for the first stage here."""
        replica = self._host.shown()
        shown = self._sources()[-1]
        self._shows = id(shown)
        free = not any(one.held_by_script for one in self._host.built())
        if free and replica is not None and self._held is not None and self._held.can_stand_for(replica):
            self._held.stand_for(replica)
            self._host.keep_showing(replica)
            self._optimizer = shown
            self._left[id(shown)] = values_of(shown)
            self._made[shown] = replica.made
        else:
            self._show_corresponding(shown)
            self._left.pop(id(self._optimizer), None)
        for owner in self._host.owners():
            self._followed[id(self._optimizer), id(owner.attributes["basic_optimizer"])] = values_of(self._optimizer)

    def _show_corresponding(self, shown: Any) -> None:
        self._note_made(shown)
        now = values_of(shown)
        pairs = corresponding(self._made[self._optimizer], self._made[shown])
        if len(pairs) == len(self._optimizer.param_groups) and len(now) == len(self._made[shown]):
            accept_values(self._optimizer, tuple({} if index is None else now[index] for index in pairs))

    def _find_scheduler(self) -> None:
        self._host.save()
        for replica in self._host.built():
            scheduler = replica.attributes["lr_scheduler"]
            if scheduler is not None and scheduler is not replica.built_scheduler:
                self._scheduler = scheduler

    def _refuse_replaced_scheduler(self) -> None:
        """Raise ConfigError, on all workers alike, where the script's scheduler stands for one that each stage has."""
        self._host.save()
        for replica in self._host.built():
            scheduler, built = replica.attributes["lr_scheduler"], replica.built_scheduler
            if built is not None and (scheduler is None or vars(scheduler) is not vars(built)):  # see HeldObjects
                its = "None" if scheduler is None else f"a {type(scheduler).__name__}"
                raise ConfigError(
                    f"the script has put {its} on the engine as its lr_scheduler, in place of the "
                    f"{type(built).__name__} that the configuration (or a function given to initialize) has made for "
                    "each stage: other stages and shadows keep theirs, and would train at other rates after a loss. "
                    "Leave the scheduler out of the configuration and put your own on the engine before the first "
                    "step (torch's SequentialLR changes from one to the next)"
                )

    def _place_scheduler(self) -> None:
        """The script's scheduler is stepped with the stage whose values it changes; not before that one's optimizer."""
        owners = self._host.owners()
        if self._scheduler is None or not owners:
            return
        optimizer = basic_optimizer(getattr(self._scheduler, "optimizer", None))
        if self._held is not None and self._held.includes(optimizer):
            optimizer = self._optimizer
        its = next((own for own in owners if own.attributes["basic_optimizer"] is optimizer), owners[0])
        for replica in self._host.replicas():
            replica.script_scheduler = self._scheduler
            placed = replica.attributes["lr_scheduler"] is self._scheduler
            if placed != (replica is its):
                self._host.set_scheduler(replica, replica.built_scheduler if placed else self._scheduler)

    def _say(self, sentence: str) -> None:
        key = sentence.split(" from ")[0]
        if key not in self._said:
            self._said.add(key)
            self._tell(sentence)
