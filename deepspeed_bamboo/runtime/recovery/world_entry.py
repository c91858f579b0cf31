"""Makes the members of an epoch torch's default process group."""

from __future__ import annotations

from collections.abc import Callable

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.script_ranks import own_rank
from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.recovery.script_server import ScriptServer
from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroups
from deepspeed_bamboo.runtime.stock.world import WorldGroup, replace_default_group


class WorldEntry:
    """Makes the process group of each epoch.

    Args:
        worker: whose rank it is.
        groups: those that the script has made.
        server: serves what the script calls of them.
        on_rank: called with the rank that this process has from then on.
    """

    def __init__(
        self, worker: Worker, *, groups: ScriptGroups, server: ScriptServer, on_rank: Callable[[int], None]
    ) -> None:
        self._worker = worker
        self._groups = groups
        self._server = server
        self._on_rank = on_rank

    def enter(self, record: EpochRecord) -> None:
        """Make the members of ``record`` the default process group, with the ranks of what they host."""
        worker = self._worker
        own = own_rank(record.placement, worker.me, members=record.members)
        self._groups.server = self._server
        self._server.note(record)
        replace_default_group(
            WorldGroup(own, len(record.members), all_ranks=len(worker.grid), server=self._server, groups=self._groups)
        )
        self._on_rank(c10d.get_rank())
        worker.host.name_ranks(own)
