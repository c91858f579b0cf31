"""What the tests run as workers: each is ``worker_main(argv)`` in a process of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from deepspeed_bamboo.coordination import Change, EpochRecord, JobCoordinator, Member, connect
from deepspeed_bamboo.coordination.process_state import is_left_alone
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.protocol import EXIT_DRAINED
from deepspeed_bamboo.pulse import Pulse
from tests.coordination.helpers import pause_after

WORKER = "BAMBOO_WORKER"


class FakeTraining:
    """Takes part in a job as the engine would, without training anything.

    Every epoch that it hears of is published as progress, with the time (monotonic, the same clock in
    all processes of a machine). Its lease is that of TEST_LEASE_SECONDS.
    """

    def __init__(self) -> None:
        lease_seconds = float(os.environ.get("TEST_LEASE_SECONDS", "3"))
        self.job: JobCoordinator = connect()
        self.worker = os.environ[WORKER]
        self.rank = int(os.environ["RANK"])
        self.joining = os.environ.get("BAMBOO_JOINING") == "1"
        self.over = threading.Event()
        self._was_member = False
        self._known: set[str] = set()  # all that ever were members: a dead one's key may be there for a moment
        self._news = threading.Event()
        self._epoch_seen = threading.Event()
        self.job.watch(self._on_change)
        self.registration = self.job.register(
            self._member(), lease_seconds=lease_seconds, in_charge=is_left_alone(os.environ)
        )

    def begin(self) -> None:
        """Return in the job's first epoch, which rank 0 makes when all are there; a joiner at once."""
        if self.joining:
            return
        world_size = int(os.environ["WORLD_SIZE"])
        if self.rank == 0:
            start = time.monotonic()
            while len(members := self.job.members()) < world_size:
                pause_after(start)
            workers = sorted(members, key=lambda worker: members[worker].rank)
            before = self.job.epoch()
            self.job.propose(
                EpochRecord(
                    number=0 if before is None else before.number + 1,
                    members=tuple(workers),
                    placement=Placement.initial(Grid(1, world_size), workers),
                    reason="start",
                    lost=(),
                    proposer=self.worker,
                    time_seconds=time.time(),
                    waits_seconds=float(os.environ.get("TEST_WAITS_SECONDS", "0")),
                    generation=self.job.own_generation,
                ),
                expected=None if before is None else before.number,
            )
        self._epoch_seen.wait()
        self._was_member = True

    def wait(self) -> None:
        """Return when the job is finished or has failed."""
        self.over.wait()

    def _member(self) -> Member:
        return Member(
            worker=self.worker,
            node=os.environ["BAMBOO_NODE"],
            zone=os.environ["BAMBOO_ZONE"],
            address="127.0.0.1",
            store_port=_listening_port(),
            pid=os.getpid(),
            rank=self.rank,
            joining=self.joining,
        )

    def come_and_go(self) -> int:
        """Take in whoever joins, leave when the own node drains; returns the exit code when the job is over.

        As the engine would, but for its iterations: the first member makes the epochs.
        """
        while not self.over.is_set():
            if not self.take_in(within_seconds=0.5):
                return EXIT_DRAINED
        return 0

    def take_in(self, *, within_seconds: float) -> bool:
        """Wait for news so long, then make the epoch that they ask for. False once this worker was left out."""
        self._news.wait(within_seconds)
        self._news.clear()
        epoch = self.job.epoch()
        if epoch is None:
            return True
        self._known.update(epoch.members)
        members, drains = self.job.members(), self.job.draining()
        leaving = [w for w in epoch.members if w in members and members[w].node in drains]
        coming = [w for w, member in members.items() if member.joining and w not in self._known]
        coming = [w for w in coming if members[w].node not in drains]
        stay = [w for w in epoch.members if w not in leaving]
        if self.worker not in epoch.members and self._was_member:
            return False
        if self.joining and not self._was_member and self.worker in epoch.members:
            self._was_member = True
            print("taken in", flush=True)
        if (leaving or coming) and stay and stay[0] == self.worker:
            there, grid = [*stay, *coming], epoch.placement.grid
            following = replace(
                epoch,
                number=epoch.number + 1,
                members=tuple(there),
                placement=Placement.initial(grid, there * len(grid), protected=len(there) >= len(grid)),
                reason="coming and going",
                lost=(),
                proposer=self.worker,
            )
            self.job.propose(following, expected=epoch.number)
        return True

    def _on_change(self, change: Change) -> None:
        if change.kind == "epoch" and change.value is not None and change.value.trains:
            self._epoch_seen.set()
            self.job.publish_progress(change.epoch, self.worker, {"seen": time.monotonic()})
        if change.kind in ("finished", "failure") and change.value is not None:
            self.over.set()
        self._news.set()


def _listening_port() -> int:
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    _KEPT.append(listener)
    return int(listener.getsockname()[1])


_KEPT: list[object] = []


def trivial(argv: list[str]) -> None:
    print("hello", *argv)


def train(argv: list[str]) -> None:
    """Take part until the job is over."""
    training = FakeTraining()
    training.begin()
    training.wait()


def hold_the_gil(argv: list[str]) -> None:
    """Register, then hold the GIL for ``argv[0]`` seconds before the first epoch and again after it.

    ``argv[1]``: the rank that does, or ``all``. As one call into C that does not let go of it.
    """
    seconds, who = float(argv[0]), argv[1]
    training = FakeTraining()
    holds = who in ("all", str(training.rank))
    for begin in (training.begin, lambda: None):
        if holds:
            sleep_with_the_gil(seconds)
            print("held the GIL", flush=True)
        begin()
    if training.rank == 0:
        time.sleep(0 if holds else seconds)
        training.job.finish({"by": "rank 0"})
    training.wait()


def stand_still(argv: list[str]) -> None:
    """On rank 1 a hook never returns: ``argv[0]`` seconds, or for ever. It does not let go of the GIL either."""
    training = FakeTraining()
    training.begin()
    if training.rank == 1 and not training.joining:
        pulse = Pulse.of_worker(os.environ)
        pulse.stepped(7)
        pulse.at("FNC 0.1 2")
        endless_hook(float(argv[0]))
        pulse.at("BNC 0.1 2")
    training.come_and_go()


def endless_hook(seconds: float) -> None:
    sleep_with_the_gil(seconds)


def sleep_with_the_gil(seconds: float) -> None:
    """No thread of this process runs Python meanwhile."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1_000_000)))


def train_elastically(argv: list[str]) -> int:
    """Take part until the job is over or this node is left, and take in others meanwhile."""
    training = FakeTraining()
    print("joining" if training.joining else "starting", training.worker, flush=True)
    training.begin()
    return training.come_and_go()


def cannot_join(argv: list[str]) -> None:
    if os.environ["BAMBOO_JOINING"] == "1":
        raise ImportError("no module of that name on this machine")
    train(argv)


def expelled_on_rank_1(argv: list[str]) -> int:
    """Rank 1's first worker is cut off: the others have gone on when it finds out."""
    training = FakeTraining()
    training.begin()
    if training.rank == 1 and not training.joining:
        training.job.propose_loss([training.worker], reason="cut off", proposer="test")
        return 4
    return training.come_and_go()


def train_ignoring_sigterm(argv: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    train(argv)
    time.sleep(60)


def raise_on_rank_2(argv: list[str]) -> None:
    training = FakeTraining()
    training.begin()
    if training.rank == 2:
        raise ValueError("the user's mistake")
    training.wait()
    time.sleep(60)  # stands for a collective that never returns


def raise_and_hang_at_exit(argv: list[str]) -> None:
    training = FakeTraining()
    training.begin()
    if training.rank == 1:
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise RuntimeError("an exit handler will hang")
    training.wait()


def leave_with_code_7_on_rank_1(argv: list[str]) -> None:
    training = FakeTraining()
    training.begin()
    if training.rank == 1:
        os._exit(7)
    training.wait()


def leave_early_on_rank_1(argv: list[str]) -> None:
    """Rank 1's script is over too soon; rank 0 finds that out when it wants to talk to it."""
    training = FakeTraining()
    training.begin()
    if training.rank == 1:
        return
    if training.rank == 0:
        while not (ended := training.job.ended()):
            time.sleep(0.01)
        training.job.report_suspicion(0, reporter=training.worker, suspect=next(iter(ended)), reason="reset")
    training.wait()


def train_with_children(argv: list[str]) -> None:
    """Like data loaders: processes and a shared-memory file that a killed worker cannot remove."""
    if os.fork() == 0:
        time.sleep(120)
        os._exit(0)
    Path(f"/dev/shm/torch_{os.getpid()}_1_0").write_bytes(b"x")
    training = FakeTraining()
    training.begin()
    training.wait()


def die_before_the_first_epoch(argv: list[str]) -> None:
    """Rank 1 is killed during the start of the first ``argv[0]`` attempts; the others fail as a consequence."""
    generation = int(os.environ["BAMBOO_GENERATION"])
    training = FakeTraining()
    print("attempt", generation)
    if generation < int(argv[0]):
        if training.rank == 1:
            while len(training.job.members()) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        while training.job.generation() == generation:
            time.sleep(0.01)
        raise RuntimeError("rank 1 hung up on me")
    training.begin()
    training.wait()


def die_while_all_start_anew(argv: list[str]) -> None:
    """In generation 1 the last one is killed, with its agent if ``argv`` says so, and the first one fails of it."""
    training = FakeTraining()
    if int(os.environ["BAMBOO_GENERATION"]) == 1 and not training.joining:
        last = training.rank == int(os.environ["WORLD_SIZE"]) - 1
        while last and len(training.job.members()) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.005)
        if last:
            if argv:
                os.kill(int(os.environ["BAMBOO_AGENT_PID"]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        while len(training.job.members()) < 2 or not _is_gone(training, int(os.environ["WORLD_SIZE"]) - 1):
            time.sleep(0.01)
        raise RuntimeError("the last one hung up on me")
    training.begin()
    training.wait()


def _is_gone(training: FakeTraining, rank: int) -> bool:
    pids = [member.pid for member in training.job.members().values() if member.rank == rank]
    return not all(Path(f"/proc/{pid}").exists() for pid in pids) or not pids


def suspect_rank_1(argv: list[str]) -> None:
    """When rank 1 does not answer any more, the others say so. ``argv``: with which code it ends itself."""
    training = FakeTraining()
    training.begin()
    if argv and training.rank == 1:
        os._exit(int(argv[0]))
    suspect = next(worker for worker, member in training.job.members().items() if member.rank == 1)
    pid = training.job.members()[suspect].pid
    while training.rank != 1 and not training.over.is_set():
        if not Path(f"/proc/{pid}").exists():
            training.job.report_suspicion(0, reporter=training.worker, suspect=suspect, reason="connection reset")
            break
        time.sleep(0.005)
    training.wait()


def suspect_a_live_worker(argv: list[str]) -> None:
    training = FakeTraining()
    training.begin()
    if training.rank == 0:
        for worker in training.job.members():
            if worker != training.worker:
                training.job.report_suspicion(0, reporter=training.worker, suspect=worker, reason="slow")
    training.wait()


def print_environment(argv: list[str]) -> None:
    for name in sorted(os.environ):
        if name.startswith("BAMBOO_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            print(f"{name}={os.environ[name]}")
    sys.stdout.flush()


def prepare_for_ever(argv: list[str]) -> None:
    """A script that never comes to its first epoch."""
    signal.pause()
