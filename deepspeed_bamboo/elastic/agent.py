"""The agent of one launcher slot: starts a worker, notices its death at once, outlives it, ends with the job."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from deepspeed_bamboo.coordination import (
    AgentRecord,
    Change,
    CoordinatorUnavailable,
    JobCoordinator,
    Member,
    Registration,
    SharedRegistration,
)
from deepspeed_bamboo.coordination.ended import ended_folder, note_end
from deepspeed_bamboo.coordination.machine_identity import own_machine
from deepspeed_bamboo.coordination.machine_token import MachineToken
from deepspeed_bamboo.coordination.process_state import is_running
from deepspeed_bamboo.coordination.server import free_ports
from deepspeed_bamboo.coordination.values import member_text
from deepspeed_bamboo.elastic import decisions
from deepspeed_bamboo.elastic.agent_settings import AgentHooks, AgentSettings
from deepspeed_bamboo.elastic.assembly import Offer
from deepspeed_bamboo.elastic.boot import Boot
from deepspeed_bamboo.elastic.error_report import ErrorReport
from deepspeed_bamboo.elastic.hang_watch import Hang, HangWatch
from deepspeed_bamboo.elastic.leftovers import WorkerSessions, remove_shared_memory
from deepspeed_bamboo.elastic.mailbox import Mailbox
from deepspeed_bamboo.elastic.messenger import Messenger, forget_past_drain
from deepspeed_bamboo.elastic.notices import NodeNotices
from deepspeed_bamboo.elastic.outage import OutageNews, once_it_answers
from deepspeed_bamboo.elastic.outcome import FINISHED, LEFT, NOT_YET, SlotNote
from deepspeed_bamboo.elastic.processes import DeathWatch
from deepspeed_bamboo.elastic.rendezvous import worker_spec
from deepspeed_bamboo.elastic.rules import Entry
from deepspeed_bamboo.elastic.slot import Slot, generation_of
from deepspeed_bamboo.elastic.starting import QuietLogs, WorkerStarter
from deepspeed_bamboo.elastic.supervisor import Supervisor
from deepspeed_bamboo.elastic.wording import of_etcd_leaving
from deepspeed_bamboo.elastic.worker_environment import meeting_port, own_address, worker_environment
from deepspeed_bamboo.elastic.worker_pulse import WorkerPulse
from deepspeed_bamboo.news import tell
from deepspeed_bamboo.protocol import EXIT_TRY_AGAIN

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_STOP_SECONDS = 3
_EXIT_NEWS_SECONDS = 2.0
_GOODBYE_SECONDS = 1.5
_OTHERS_SECONDS = 5.0
_COORDINATOR_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_REGISTER_SECONDS = 10.0
_LOOK = decisions.Woken("look after the coordinator")
_COMPACT = decisions.Woken("compact etcd's history")
_FEEL = decisions.Woken("read the worker's pulse")


class BambooElasticAgent(LocalElasticAgent):
    """torch's local agent for one worker, with membership in the job's coordinator instead of a rendezvous.

    It takes from its base: process contexts, their supervision and shutdown, and the events that
    are recorded about workers. It differs in this: it receives everything through one queue (``mailbox.py``),
    decides in one state machine (``supervisor.py``), and does not wait for the coordinator in its own
    thread (``messenger.py``). Call :meth:`run` in the main thread; it returns when the job is over.
    """

    def __init__(
        self,
        slot: Slot,
        boot: Boot,
        *,
        coordinator: JobCoordinator,
        starter: WorkerStarter,
        settings: AgentSettings,
        hooks: AgentHooks | None = None,
    ) -> None:
        """``boot`` says where the job is, ``starter`` how a worker is started; nothing happens before :meth:`run`."""
        # Its other arguments differ between the releases of torch that are supported.
        super().__init__(worker_spec(slot, boot), QuietLogs())
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
        self._slot = slot
        self._boot = boot
        self._settings = settings
        self._coordinator = coordinator
        self._starter = starter
        self._hooks = hooks or AgentHooks()
        self._supervisor = Supervisor(slot, lease_seconds=settings.lease_seconds, rules=settings.rules)
        self._mailbox = Mailbox()
        self._outage = OutageNews(
            boot.endpoints,
            lease_seconds=settings.lease_seconds,
            gives_up_after_seconds=_COORDINATOR_SECONDS if boot.host_pid else None,
        )
        self._keeps_etcd = settings.hosts_coordinator and not slot.one_machine
        self._first_word = MachineToken("first word", boot.job, *boot.endpoints)  # never given back
        self._agents: set[str] = set()
        # Those of the same command that have not been seen yet.
        self._expected = {str(rank) for rank in boot.ranks or range(slot.world_size)}
        self._start_action = decisions.StartWorker("", 0)
        self._report: ErrorReport | None = None
        self._pulse: WorkerPulse | None = None  # of the current worker
        self._hang_watch = HangWatch(settings.rules.hangs)
        self._step = -1  # as far as the own workers have come
        self._sessions = WorkerSessions()
        self._exit_code: int | None = None
        self._registration: Registration | None = None
        self._keeping: SharedRegistration | None = None  # of the current worker
        self._messenger: Messenger | None = None
        # A notice must not end this process, even where the shell that started it ignores that signal.
        self._notice_signals = settings.rules.notice_signals
        self._kept_signals = {number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}

    @property
    def exit_code(self) -> int:
        """The exit code for the slot's process, after :meth:`run`."""
        return 1 if self._exit_code is None else self._exit_code

    @property
    def note(self) -> SlotNote:
        """How the slot ended, for ``ds_bamboo run``, after :meth:`run`."""
        failure = self._supervisor.failure
        if failure is not None:
            return SlotNote(failure.kind, self.exit_code, self._step, failure.message)
        if self._supervisor.finished:
            return SlotNote(FINISHED, self.exit_code, self._step)
        if self.exit_code == EXIT_TRY_AGAIN:
            return SlotNote(NOT_YET, self.exit_code, self._step, "the job had ended before this machine could join it")
        return SlotNote(LEFT, self.exit_code, self._step)

    # -- what the base class calls -----------------------------------------------------------------

    def _invoke_run(self, role: str = "bamboo") -> RunResult:
        launcher = next(iter(self._settings.launchers), 0)
        record = AgentRecord(
            self._slot.rank, self._slot.node, os.getpid(), own_machine(), launcher, keeps_etcd=self._keeps_etcd
        )
        lease_seconds = self._settings.lease_seconds
        joins = self._settings.rules.entry is Entry.JOIN

        def register() -> Registration:
            if joins:
                forget_past_drain(self._coordinator, self._slot.node)
            return self._coordinator.register_agent(record, lease_seconds=lease_seconds)

        registration = once_it_answers(register, within_seconds=_REGISTER_SECONDS)
        self._registration = registration
        self._hooks.on_registered()
        self._messenger = Messenger(
            self._coordinator,
            self._slot,
            registration,
            self._mailbox,
            lease_seconds=self._settings.lease_seconds,
            say=self._say,
            make_offer=self._offer,
        )
        watch = self._coordinator.watch(self._on_change)
        others = DeathWatch(self._needed_processes(), self._on_death)
        self._take_signals()
        notices = self._watch_notices()
        try:
            self._work()
            self._say_goodbye()
        finally:
            if notices is not None:
                notices.stop()
            others.stop()
            watch.stop()
            registration.withdraw()
        state = WorkerState.SUCCEEDED if self.exit_code == 0 else WorkerState.FAILED
        return RunResult(state=state, return_values={self._slot.rank: self.exit_code})

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """The launcher's ranks; the base class would ask the other agents through ``store``."""
        rank, size = self._slot.rank, self._slot.world_size
        return [Worker(0, global_rank=rank, role_rank=rank, world_size=size, role_world_size=size)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._report, self._pulse = ErrorReport(), WorkerPulse()
        self._hang_watch = HangWatch(self._settings.rules.hangs)
        environment = worker_environment(
            self._slot,
            self._boot,
            self._start_action,
            settings=self._settings,
            error_file=self._report.path,
            notice_signals=self._notice_signals,
        )
        self._pcontext = self._starter.start({**environment, **self._pulse.environment})
        self._take_signals()  # starting has put handlers of torch's own in place
        pid = self._pcontext.pids()[0]
        worker = self._start_action.worker
        self._sessions.begin(worker, pid)
        self._keeping = self._coordinator.keep(
            worker,
            joining=self._start_action.joining,
            lease_seconds=self._settings.lease_seconds,
            in_charge=lambda: is_running(pid),
        )
        DeathWatch([pid], lambda _: self._mailbox.put_call(lambda: self._collect(worker)))
        return self._pcontext.pids()

    # -- the loop ----------------------------------------------------------------------------------

    def _work(self) -> None:
        self._mailbox.put(_LOOK)
        self._mailbox.put(_FEEL)
        self._compact_later()
        self._perform(self._supervisor.start())
        while self._exit_code is None:
            event = self._mailbox.get()
            if event == _FEEL:
                self._feel_pulse()
                continue
            if event == _COMPACT:
                self._compact()
                continue
            if event == _LOOK and self._registration is not None:
                self._look_after_coordinator(self._registration)
                continue
            self._perform(self._supervisor.handle(event))
            if isinstance(event, decisions.WorkerExited):
                self._sweep(event)

    def _stop_worker(self) -> None:
        """End the worker with SIGTERM, then SIGKILL; torch before 2.12 takes no time limit and uses its own."""
        limit = {"timeout": _STOP_SECONDS} if "timeout" in inspect.signature(self._shutdown).parameters else {}
        self._shutdown(signal.SIGTERM, **limit)

    def _perform(self, actions: Sequence[decisions.Action]) -> None:
        for action in actions:
            if isinstance(action, decisions.StartWorker):
                self._start(action)
            elif isinstance(action, decisions.KillWorker):
                self._kill(signal.SIGKILL)
            elif isinstance(action, decisions.EndWorker):
                self._stop_worker()
            elif isinstance(action, decisions.Say):
                if not action.once or self._first_word.take():
                    self._say(action.text)
            elif isinstance(action, decisions.WakeAfter):
                self._mailbox.put_later(decisions.Woken(action.reason), after_seconds=action.seconds)
            elif isinstance(action, decisions.Leave):
                self._exit_code = action.code
            elif self._messenger is not None:
                self._messenger.send(action)

    def _start(self, action: decisions.StartWorker) -> None:
        self._start_action = action
        try:
            self._initialize_workers(self._worker_group)
        except SignalException as interruption:
            # Between torch's handlers and this agent's own. What was started till then can't be heard of any more, but
            # dies with this process.
            self._take_signals()
            self._mailbox.put(decisions.Signalled(int(interruption.sigval)))
            if self._sessions.pid(action.worker) is None:
                self._mailbox.put(decisions.WorkerExited(action.worker, -int(interruption.sigval), ""))

    def _collect(self, worker: str) -> decisions.Event:
        """The worker's process has ended: what with, and what it wrote."""
        if self._keeping is not None:
            self._keeping.stop()
        result = None if self._pcontext is None else self._pcontext.wait(_EXIT_NEWS_SECONDS, period=0.002)
        failure = None if result is None else result.failures.get(0)
        code = failure.exitcode if failure is not None else (0 if result is not None else -int(signal.SIGKILL))
        text = "" if self._report is None else self._report.read()
        if self._report is not None:
            self._report.close()
            self._report = None
        if self._pulse is not None:
            last = self._pulse.read()
            self._step = self._step if last is None else max(self._step, last.step)
            self._pulse.close()
            self._pulse = None
        return decisions.WorkerExited(worker, code, text)

    def _sweep(self, event: decisions.WorkerExited) -> None:
        """Remove what the worker left; after everything that others wait for."""
        pid = self._sessions.pid(event.worker)
        if pid is None:
            return
        self._sessions.end(event.worker, signalled=event.code != 0)
        remove_shared_memory(
            worker_pid=pid,
            rank=self._slot.rank,
            master_addr=self._boot.master_addr,
            master_port=meeting_port(self._boot, generation_of(event.worker)),
        )

    def _kill(self, number: signal.Signals) -> None:
        pid = self._sessions.running(self._start_action.worker)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # -- what is heard, from other threads ---------------------------------------------------------

    def _on_change(self, change: Change) -> None:
        if change.kind == "agent":
            (self._agents.discard if change.value is None else self._agents.add)(change.worker)
            self._expected.discard(change.worker)
            if not self._expected:
                self._hooks.on_all_present()
        if change.kind == "member" and change.value is not None and change.worker == self._start_action.worker:
            self._note_own(change.value)
        if (
            self._keeps_etcd
            and change.kind == "drain"
            and change.value is not None
            and change.worker == self._slot.node
        ):
            self._say(of_etcd_leaving(change.worker))
        self._mailbox.put(decisions.Changed(change))

    def _note_own(self, member: Member) -> None:
        if self._keeping is not None:
            self._keeping.note(member_text(member, generation=generation_of(member.worker)))

    def _watch_notices(self) -> NodeNotices | None:
        plan = self._settings.notices
        if plan is None or self._slot.local_rank != 0:
            return None
        return NodeNotices(plan, coordinator=self._coordinator, node=self._slot.node, say=self._say)

    def _needed_processes(self) -> list[int]:
        """Those on this machine without which this agent has nothing to do."""
        host = self._boot.host_pid if self._slot.one_machine and self._boot.host_pid != os.getpid() else 0
        return [pid for pid in (*self._settings.launchers, host) if pid > 0]

    def _on_death(self, pid: int) -> None:
        if pid in self._settings.launchers:
            self._mailbox.put(decisions.LauncherGone(pid, command=pid != self._settings.launchers[0]))
        else:
            self._mailbox.put(decisions.CoordinatorGone("the agent of rank 0, which ran the job's etcd, was killed"))

    def _look_after_coordinator(self, registration: Registration) -> None:
        """Give up on the job's own etcd after a while; that of the user may come back at any time. One says so.

        And leave a job that has ended, or was started anew, while this machine was cut off.
        """
        if registration.displaced is not None:
            self._mailbox.put(decisions.CoordinatorGone(registration.displaced))
            return
        seconds = registration.cut_off_for_seconds()
        if self._boot.host_pid and seconds > _COORDINATOR_SECONDS:
            endpoints = ", ".join(self._boot.endpoints)
            reason = f"the job's own etcd at {endpoints} gave no answer for {_COORDINATOR_SECONDS:.0f} s"
            self._mailbox.put(decisions.CoordinatorGone(reason))
            return
        news = self._outage.hear(seconds) if self._slot.local_rank == 0 else None
        if news is not None:
            self._say(news)
        self._mailbox.put_later(_LOOK, after_seconds=_LOOK_SECONDS)

    def _compact_later(self) -> None:
        if self._settings.compact_seconds is not None:
            self._mailbox.put_later(_COMPACT, after_seconds=self._settings.compact_seconds)

    def _compact(self) -> None:
        """The first agent of the job does."""
        if self._messenger is not None and str(self._slot.rank) == min(self._agents, key=int, default=""):
            self._messenger.compact()
        self._compact_later()

    def _feel_pulse(self) -> None:
        """Find out whether the worker stands still, and where; again in a moment."""
        self._mailbox.put_later(_FEEL, after_seconds=_LOOK_SECONDS)
        worker = self._start_action.worker
        pulse, pid = None if self._pulse is None else self._pulse.read(), self._sessions.pid(worker) or 0
        if self._pulse is None or pulse is None or not is_running(pid):
            return
        self._step = max(self._step, pulse.step)
        news = self._hang_watch.look(pulse, now_seconds=time.monotonic())
        if isinstance(news, Hang):
            self._mailbox.put(decisions.Stuck(worker, news, self._pulse.stack(pid)))
        elif news is not None:
            self._mailbox.put(decisions.WentOn(worker, news.seconds))

    def _take_signals(self) -> None:
        """Hear the signals that end a program, except those that this process was started to ignore."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in {*_SIGNALS, *self._notice_signals}:
            heard = number in self._kept_signals or number in self._notice_signals
            signal.signal(number, self._on_signal if heard else signal.SIG_IGN)

    def _on_signal(self, number: int, frame: object) -> None:
        self._mailbox.put(decisions.Signalled(number))

    # -- the end -----------------------------------------------------------------------------------

    def _say_goodbye(self) -> None:
        """Nothing of the worker stays, the others are told, and whoever is last removes the job's keys."""
        if self.exit_code != 0:
            self._sessions.kill()
        if self._messenger is not None:
            self._messenger.stop(within_seconds=_GOODBYE_SECONDS)
        if self._registration is not None:
            self._registration.withdraw()
        if self._settings.hosts_coordinator:
            self._note_end()
            self._wait_for_others()
        if not self._expected:  # otherwise some slot may be about to come, and must find out how it ended
            Messenger.clean_up_if_last(self._coordinator)

    def _note_end(self) -> None:
        """Keep how the job ended where ``ds_bamboo status`` finds it when etcd has gone with this process."""
        with contextlib.suppress(CoordinatorUnavailable):
            end = self._coordinator.end()
            if end is not None:
                note_end(end, ended_folder(os.environ))

    def _wait_for_others(self) -> None:
        """They need the coordinator until they have left: for as long as they like if all went well."""
        all_well = self.exit_code == 0 and (self._supervisor.finished or self._supervisor.drained)
        patience = float("inf") if all_well else _OTHERS_SECONDS
        own = str(self._slot.rank)
        self._mailbox.wait_until(
            lambda event: not self._agents - {own} or isinstance(event, decisions.Signalled | decisions.LauncherGone),
            within_seconds=patience,
        )

    # -- inside ------------------------------------------------------------------------------------

    def _offer(self) -> Offer:
        """What workers that start anew have to know of this slot. For the messenger's thread."""
        port = free_ports("", count=1)[0]
        return Offer(self._slot.rank, own_address(self._boot), port, self._step)

    def _say(self, text: str) -> None:
        tell(text, who=f"rank {self._slot.rank}")
