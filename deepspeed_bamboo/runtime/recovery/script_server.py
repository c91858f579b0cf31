"""Serves what a script calls of ``torch.distributed`` between iterations, through losses.

A call of all workers is an activity like others, and the agreement at its end settles it. A group's collective concerns
only the group's holders: each lays out its tensor and its result for the others until the next activity has ended,
which shows that everybody has finished the call. The job recovers at once from a loss in between. A worker that has
finished by then had finished before it reported, so one that begins again finds that result, and takes the same.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.script_ranks import own_rank, parties, ranks_of
from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.runtime.comm.board import Board
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError, PeerLostError
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.mismatched_calls import MESSAGE, Where
from deepspeed_bamboo.runtime.stock.collectives import combine
from deepspeed_bamboo.runtime.stock.logical import GATHER, GroupKey
from deepspeed_bamboo.runtime.stock.script_call import refuse_inside
from deepspeed_bamboo.runtime.stock.served_group import Part, alone, alone_as

if TYPE_CHECKING:
    from deepspeed_bamboo.coordination import EpochRecord

T = TypeVar("T")
_RECENT_EPOCHS = 8


class ScriptServer:
    """One worker's side of it; see :class:`deepspeed_bamboo.runtime.stock.script_groups.Server`.

    Args:
        worker: whose activities and placement count.
        recover: brings this worker into the newest epoch.
        alone: True where a collective that the script calls now is one that the others have done.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        recover: Callable[[EpochChangedError | PeerLostError], None],
        alone: Callable[[], bool],
    ) -> None:
        self._worker = worker
        self._recover = recover
        self._alone = alone
        session = worker.session
        self._me = session.worker
        self._board = Board(session.store, links=worker.links, me=self._me, interruption=session.interruption)
        self._calls: Counter[tuple[int, str]] = Counter()
        self._laid_out: list[tuple[int, str]] = []
        self._messages: Counter[tuple[str, WorkerId, WorkerId, int]] = Counter()
        self._to_itself: defaultdict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
        self._records: deque[EpochRecord] = deque(maxlen=_RECENT_EPOCHS)
        self._first_homes: dict[WorkerId, int] = {}  # of those, too, that have gone

    @property
    def exchanges(self) -> bool:
        """Whether the script has sent or received messages between ranks here."""
        return bool(self._messages or self._to_itself)

    def ranks_here(self) -> Sequence[int]:
        """See the protocol; one that stands by has a rank behind those of the grid."""
        record = self._record()
        return ranks_of(record.placement, self._me) or (own_rank(record.placement, self._me, members=record.members),)

    def holders(self, ranks: Sequence[int]) -> frozenset[WorkerId] | None:
        """Those whose own rank is among ``ranks``; None while everybody still has the rank that it began with."""
        record = self._record()
        own = {worker: own_rank(record.placement, worker, members=record.members) for worker in record.members}
        if own == self._homes():
            return None
        return frozenset(worker for worker, rank in own.items() if rank in ranks)

    def gather_world(self, tensor: torch.Tensor) -> list[Part]:
        """Everybody's tensor, with the ranks that each stood for when it handed in."""
        if len(self._worker.grid) == 1:
            return alone(tensor, 1)
        self._require_between_iterations()
        if self._alone():
            return alone(tensor, len(self._worker.grid))  # the others did this before it came

        def value() -> tuple[tuple[int, ...], torch.Tensor]:
            return tuple(self.ranks_here()), tensor.detach().to("cpu", copy=True)

        agreed = self._worker.agree_on("user collective", value)
        parts = [Part(ranks, part.to(tensor.device)) for ranks, part in agreed.values()]
        return sorted(parts, key=lambda part: part.ranks)

    def parties(self, ranks: Sequence[int], holders: frozenset[str] | None) -> dict[int, WorkerId]:
        """See the protocol."""
        return parties(self._record().placement, ranks, homes=self._homes(), holders=holders)

    def note(self, record: EpochRecord) -> None:
        """This worker enters an epoch: who is in it."""
        self._records.append(record)
        self._first_homes.update(self._homes())

    def former(
        self, count: int, *, ranks: Sequence[int] | None = None, holders: frozenset[str] | None = None
    ) -> Sequence[int]:
        """See the protocol; in the order in which parts are gathered."""
        for record in reversed(self._records):
            placement, members = record.placement, record.members
            if ranks is None:
                own = sorted(own_rank(placement, worker, members=members) for worker in members)
            else:
                found = parties(placement, ranks, homes=self._first_homes, holders=holders)
                first: dict[WorkerId, int] = {}
                for rank, worker in found.items():
                    first.setdefault(worker, rank)
                own = list(first.values())
            if len(own) == count:
                return own
        return ()

    def gather(
        self, name: str, ranks: Sequence[int], holders: frozenset[str] | None, tensor: torch.Tensor
    ) -> list[Part]:
        """See the protocol. Raises what ends the job."""
        if len(ranks) == 1:
            return alone_as(ranks, tensor)  # what a layer that can be cut in parts calls where it is whole
        self._require_between_iterations()
        if self._alone():
            return alone_as(ranks, tensor)
        index = self._worker.activity.seen
        key = f"script/{index}/{name}/{self._calls[index, name]}"
        self._calls[index, name] += 1
        parts = self._through_losses(lambda again: self._gather_once(key, ranks, holders, tensor, again=again))
        return [Part(part.ranks, part.tensor.to(tensor.device)) for part in parts]

    def exchange(self, group: GroupKey, operation: str, tensor: torch.Tensor) -> torch.Tensor:
        """Serve a collective that the script calls on a group of the engine's grid, see :class:`Exchange`."""
        ranks = [self._worker.grid.rank(member) for member in group.members]
        parts = self.gather(f"{group.kind}:{','.join(map(str, ranks))}", ranks, None, tensor)
        name, _, root = operation.partition(":")
        if name not in ("broadcast", GATHER):
            return combine(operation, [part.tensor for part in parts])
        wanted = [ranks[int(root)]] if root else ranks
        found = {rank: part.tensor for part in parts for rank in part.ranks}
        missing = [rank for rank in wanted if rank not in found]
        if missing:
            raise BambooError(
                f"ranks {missing} of the group {group.kind} have been lost, and those who have their stages now call "
                "other groups; use the default group of torch.distributed"
            )
        return torch.cat([found[rank].reshape(-1) for rank in wanted]) if name == GATHER else found[wanted[0]].clone()

    def _gather_once(
        self, key: str, ranks: Sequence[int], holders: frozenset[str] | None, tensor: torch.Tensor, *, again: bool
    ) -> list[Part]:
        found = self.parties(ranks, holders)
        stands_for = {worker: tuple(r for r in found if found[r] == worker) for worker in found.values()}
        others = stands_for.keys() - {self._me}
        if len(stands_for) < 2:  # who is alone lays nothing out for one that stands for none of them any more
            return [Part(tuple(found) or tuple(ranks[:1]), tensor.detach().clone())]
        self._lay_out(f"{key}/value", [tensor])
        if again:
            members = [worker for worker in self._record().members if worker != self._me]
            for through in self._board.look(dict.fromkeys(members, f"{key}/all")).values():
                return self._keep(key, [Part(tuple(r.tolist()), t) for r, t in _pairs(through)])
        values = {w: tensors[0] for w, tensors in self._board.fetch(dict.fromkeys(others, f"{key}/value")).items()}
        values[self._me] = tensor.detach().to("cpu", copy=True)
        return self._keep(key, [Part(stands_for[worker], values[worker]) for worker in stands_for])

    def _keep(self, key: str, parts: list[Part]) -> list[Part]:
        """Lay ``parts`` out, too, for those who have to begin again."""
        self._lay_out(f"{key}/all", [tensor for part in parts for tensor in (torch.tensor(part.ranks), part.tensor)])
        return parts

    def leave_for(self, name: str, rank: int, tensor: torch.Tensor, tag: int) -> None:
        """See the protocol."""
        self._require_between_iterations()
        if self._alone():
            return
        receiver = self._owner(rank)
        if receiver == self._me:
            self._to_itself[name, tag].append(tensor.detach().to("cpu", copy=True))
        else:
            self._board.lay_out(self._message_key(name, self._me, receiver, tag), [tensor])

    def take_from(self, name: str, rank: int, tag: int) -> torch.Tensor:
        """See the protocol. Raises BambooError when the worker that would have sent was lost, or is this one itself."""
        self._require_between_iterations()
        if self._alone():
            raise BambooError("a message between ranks can't be received for a step that was done before this worker")
        keys: dict[WorkerId, str] = {}

        def take(again: bool) -> torch.Tensor:
            sender = self._owner(rank)
            self._check_sends(sender, rank)
            if sender == self._me:
                return self._from_itself(name, rank, tag)
            if sender not in keys:
                keys[sender] = self._message_key(name, sender, self._me, tag)
            return self._board.fetch({sender: keys[sender]}, remove=True)[sender][0]

        return self._through_losses(take)

    def _from_itself(self, name: str, rank: int, tag: int) -> torch.Tensor:
        """What a worker that stands for both ranks has sent to itself; there is nobody else to wait for."""
        if not self._to_itself[name, tag]:
            raise BambooError(
                f"a message from rank {rank} was to be received, but this worker now stands for that rank, too, and "
                "has sent itself none since the last step. Send before you receive, where a worker can be both ranks"
            )
        return self._to_itself[name, tag].pop(0)

    def where(self) -> Where | None:
        """Where this worker is, for those who look for workers that wait for each other; None where it waits for none.

        Another thread may ask.
        """
        worker, activity, awaited = self._worker, self._worker.activity, self._board.awaited
        kind = activity.kind
        if worker.epoch < 0 or (kind is None and not awaited):
            return None
        if kind is not None:
            return Where(worker.epoch, activity.index, kind)
        return Where(worker.epoch, activity.index, MESSAGE, tuple(sorted(awaited.items())))

    def tidy(self) -> None:
        """An activity has ended, which took everybody: what was laid out before it is of no more use.

        Nor is what a worker has sent to itself: one that stands for both ends after a loss often only sends.
        """
        self._to_itself.clear()
        index = self._worker.activity.seen
        if self._laid_out:
            self._board.take_in([key for at, key in self._laid_out if at < index])
            self._laid_out = [(at, key) for at, key in self._laid_out if at >= index]
            self._calls = Counter({call: count for call, count in self._calls.items() if call[0] >= index})

    def _require_between_iterations(self) -> None:
        """Raise what says where the script's call belongs, and what to do."""
        refuse_inside(self._worker.activity.kind)
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("collectives of torch.distributed belong to the main thread, which also trains")

    def _through_losses(self, attempt: Callable[[bool], T]) -> T:
        """What ``attempt`` returns, made again after every loss; told whether it is made again."""
        again = False
        while True:
            try:
                self._worker.session.interruption.check()
                return attempt(again)
            except (EpochChangedError, PeerLostError) as cause:
                self._recover(cause)
                again = True

    def _lay_out(self, key: str, tensors: Sequence[torch.Tensor]) -> None:
        self._board.lay_out(key, tensors)
        self._laid_out.append((self._worker.activity.seen, key))

    def _message_key(self, name: str, sender: WorkerId, receiver: WorkerId, tag: int) -> str:
        number = self._messages[name, sender, receiver, tag]
        self._messages[name, sender, receiver, tag] += 1
        return f"script/message/{name}/{sender}/{receiver}/{tag}/{number}"

    def _owner(self, rank: int) -> WorkerId:
        grid = self._worker.grid
        if not 0 <= rank < len(grid):
            raise BambooError(f"rank {rank} is outside the job's {len(grid)} ranks; pass one from 0 to {len(grid) - 1}")
        return self._record().placement.owner(grid.coordinate(rank))

    def _check_sends(self, sender: WorkerId, rank: int) -> None:
        """Raise BambooError if nobody's script takes itself for ``rank`` any more."""
        record = self._record()
        if rank not in (self._homes().get(sender), own_rank(record.placement, sender, members=record.members)):
            raise BambooError(
                f"a message from rank {rank} was to be received, but the worker that would have sent it was lost, and "
                f"{sender}, which has its stage now, runs its own part of the script. Use a broadcast or an all_gather "
                "of the default group in place of send and recv: those go on after a loss"
            )

    def _record(self) -> EpochRecord:
        return self._worker.record

    def _homes(self) -> Mapping[WorkerId, int]:
        """The rank that each member's script had when it began."""
        return {worker: member.home for worker, member in self._worker.links.members.items()}


def _pairs(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``tensors`` two by two."""
    return zip(tensors[::2], tensors[1::2], strict=True)
