"""Puts together the parts by which a worker survives the losses of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError, PeerLostError
from deepspeed_bamboo.runtime.iteration.mode_choice import ModeChoice
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.recovery.memory_rounds import MemoryRounds
from deepspeed_bamboo.runtime.recovery.redundancy_repair import RedundancyRepair
from deepspeed_bamboo.runtime.recovery.restore import Restoring, WayBack
from deepspeed_bamboo.runtime.recovery.script_server import ScriptServer
from deepspeed_bamboo.runtime.recovery.shadow_rebuild import ShadowRebuild
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer
from deepspeed_bamboo.runtime.recovery.take_over import Failover
from deepspeed_bamboo.runtime.recovery.world_entry import WorldEntry
from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroups


@dataclass(frozen=True)
class Hooks:
    """What the parts call of the engine.

    ``recover`` brings the worker into the newest epoch, for what the script calls between iterations. ``alone``
    is true where a collective that the script calls now is one that the others have done. ``abandon`` undoes the end of
    an iteration. ``evaluated`` returns how many micro-batches the evaluation in progress has. ``on_rank`` takes the
    process's rank. ``way_back`` is what it takes to do steps again.
    """

    recover: Callable[[EpochChangedError | PeerLostError], None]
    alone: Callable[[], bool]
    abandon: Callable[[], None]
    evaluated: Callable[[], int]
    on_rank: Callable[[int], None]
    way_back: WayBack


class Survival:
    """One worker's parts; each is described where it is defined."""

    def __init__(
        self,
        worker: Worker,
        *,
        transfer: StateTransfer,
        memory: MemoryRounds | None,
        groups: ScriptGroups,
        hooks: Hooks,
    ) -> None:
        self.modes = ModeChoice(worker)
        self.shadow_rebuild = ShadowRebuild(worker, transfer=transfer)
        self.script_server = ScriptServer(worker, recover=hooks.recover, alone=hooks.alone)
        self.world = WorldEntry(worker, groups=groups, server=self.script_server, on_rank=hooks.on_rank)
        restoring = Restoring(worker, memory=memory, transfer=transfer, world=self.world, way_back=hooks.way_back)
        self.failover = Failover(
            worker,
            transfer=transfer,
            shadow_rebuild=self.shadow_rebuild,
            modes=self.modes,
            world=self.world,
            abandon=hooks.abandon,
            evaluated_micro_batches=hooks.evaluated,
            restoring=restoring,
        )
        self.redundancy_repair = RedundancyRepair(
            worker,
            shadow_rebuild=self.shadow_rebuild,
            transfer=transfer,
            last_loss=lambda: self.failover.conclusion,
        )
