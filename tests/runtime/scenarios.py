"""What the workers of test jobs run: one model trained for some steps, with DeepSpeed's engine or the plugin's."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import hashlib
import itertools
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import numpy
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.iteration import pass_times
from deepspeed_bamboo.runtime.iteration.offload import HostOffload
from deepspeed_bamboo.runtime.iteration.pass_times import PassTimes
from deepspeed_bamboo.runtime.membership.reconfiguration import Reconfiguration
from deepspeed_bamboo.runtime.recovery.memory_parts import MemoryParts
from tests.runtime import late_arrivals, models, sets_by_hand
from tests.runtime.jobs import AWAITED

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}
BUSY_SECONDS = 0.3  # more than a quarter of an iteration of sleeping layers, on loaded cores too


@dataclass(frozen=True)
class Training:
    """One training run. ``layers`` names a function of :mod:`tests.runtime.models`, ``settings`` is DeepSpeed's JSON.

    ``faults`` None: with DeepSpeed's own engine; a list: with the plugin's. ``spikes`` are steps whose gradients
    overflow in half precision; ``loader_helpers`` is how many processes read ``training_data`` (None: DeepSpeed's
    default).
    """

    name: str
    stages: int
    layers: str = "plain"
    count: int = 6
    dropout: float = 0.0
    steps: int = 3
    micro_batches: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    bamboo: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    training_data: bool = False
    loader_helpers: int | None = 0
    batches: int | None = None
    evaluate_before: tuple[int, ...] = ()
    spikes: tuple[int, ...] = ()
    faults: list[dict[str, Any]] | None = None


class Samples(torch.utils.data.Dataset):
    """A small data set, for a few steps a pass: inputs and labels draw random numbers from everywhere."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = models.vectors(0, 0, k, size=1)
        drawn = torch.rand(()) + random.random()
        return x[0] * drawn, y[0] + float(numpy.random.rand())


def settings_of(training: Training) -> dict[str, Any]:
    """The DeepSpeed configuration of a run."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": training.micro_batches,
        "steps_per_print": 1000000,
        "gradient_clipping": 0.0,
        "optimizer": copy.deepcopy(ADAM),
        **copy.deepcopy(training.settings),
    }
    if training.faults is not None:
        coordinator = {"suspicion_seconds": 1.0}
        settings["bamboo"] = {"coordinator": coordinator, "seed": 5, **training.bamboo, "faults": training.faults}
    return settings


def build(training: Training, *, module_class: type[PipelineModule] = PipelineModule, **arguments: Any) -> Any:
    """The engine of a run; further ``arguments`` go to :func:`build_module`."""

    def make_module() -> PipelineModule:
        make = getattr(models, training.layers)
        layers = make(training.count, **({"dropout": training.dropout} if training.dropout else {}))
        loss = models.token_error if training.layers.startswith("tied") else models.squared_error
        options = {"loss_fn": loss, "num_stages": training.stages, "partition_method": "uniform", **training.module}
        return module_class(layers=layers, **options)

    return build_module(training, make_module, **arguments)


def build_module(
    training: Training,
    make_module: Callable[[], PipelineModule],
    fresh: bool = True,
    trained: Callable[[PipelineModule], Any] = lambda module: list(module.parameters()),
    **arguments: Any,
) -> Any:
    """As :func:`build`, for a module that ``make_module`` makes; further ``arguments`` go to ``deepspeed.initialize``.

    ``fresh``: with process groups as at the start of a process; False: :func:`fresh_process_group` was called before.
    ``trained``: returns the ``model_parameters``.
    """
    if fresh:
        fresh_process_group(training.name)
    torch.manual_seed(11)
    random.seed(12)
    numpy.random.seed(13)
    module = make_module()
    os.environ["BAMBOO_JOB"] = f"{os.environ['BAMBOO_JOB'].split('--')[0]}--{training.name}"
    name = Path(os.environ["TEST_DIRECTORY"], "job")
    partial = name.with_suffix(f".{os.environ['RANK']}")
    partial.write_text(os.environ["BAMBOO_JOB"], encoding="utf-8")
    partial.rename(name)
    if training.training_data:
        arguments["training_data"] = Samples()
    gc.freeze()  # DeepSpeed collects garbage up to eight times for each engine, through all that is imported
    with _loader_helpers(training.loader_helpers):
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=trained(module), config=settings_of(training), **arguments
        )
    return engine


@contextmanager
def _loader_helpers(count: int | None) -> Iterator[None]:
    """Engines built inside the block read their data with ``count`` processes; as DeepSpeed's own tests do."""
    stock = DeepSpeedEngine.deepspeed_io

    def deepspeed_io(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **{**kwargs, "num_local_io_workers": count})

    DeepSpeedEngine.deepspeed_io = deepspeed_io
    try:
        yield
    finally:
        DeepSpeedEngine.deepspeed_io = stock


def fresh_process_group(name: str) -> None:
    """Process groups as at the start of a process: the plugin's engine has replaced them if one ran before."""
    torch.set_num_threads(1)
    if os.environ.get("BAMBOO_JOINING") == "1":
        deepspeed.init_distributed(dist_backend="gloo")
        return
    if deepspeed.comm.is_initialized():
        torch.distributed.destroy_process_group()
        deepspeed.utils.groups._WORLD_GROUP = None
    store = torch.distributed.FileStore(f"{os.environ['TEST_DIRECTORY']}/store-{name}")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    deepspeed.init_distributed(dist_backend="gloo")


def train(training: Training) -> dict[str, Any]:
    """Run it: losses by step, evaluations, hashes of this worker's parameters and buffers, digest."""
    engine = build(training)
    make = models.tokens if training.layers.startswith("tied") else functools.partial(models.spiked, training.spikes)
    pipeline = engine.grid.get_data_parallel_id()

    def source(pipeline: int, step: int) -> Any:
        return models.micro_batches(make, pipeline=pipeline, first_step=step, count=training.micro_batches)

    iterator = None if training.training_data else source(pipeline, 0)
    if training.batches is not None:
        iterator = itertools.islice(iterator, training.batches)
    if training.faults is not None and not training.training_data and hasattr(engine, "set_data_source"):
        engine.set_data_source(source, evaluation=lambda pipeline, step: source(pipeline + 100, step))
    losses, evaluations = [], []
    for step in range(training.steps):
        if step in training.evaluate_before:
            evaluations.append(float(engine.eval_batch(source(pipeline + 100, step))))
        losses.append(float(engine.train_batch(iterator)))
    result = {"losses": losses, "evaluations": evaluations, "hashes": hashes(engine), "steps": engine.global_steps}
    if training.faults is not None:
        result["digest"] = engine.state_digest()
        result["norm"] = str(engine.get_global_grad_norm())
        result["scale"] = float(getattr(engine.optimizer, "loss_scale", 1.0))
        result["skipped"] = engine.skipped_steps
        events = engine.event_log.recent()[1]
        result["modes"] = [[e["step"], e["before"], e["mode"], e["reason"]] for e in events if e["event"] == "mode"]
        result["mode"] = engine.modes.mode.value
        engine.close()
    return result


def train_remembering(
    training: Training,
    waits: dict[str, int] | None = None,
    shared_iterator: bool = False,
    writes: bool = False,
    anneals: bool = False,
    sets: str | None = None,
    damages: tuple[int, str] | None = None,
    stored: str | None = None,
    modes: bool = False,
) -> dict[str, Any]:
    """As :func:`train`, with memory checkpoints as often as can be: each is complete, for all to know, a step later.

    ``stored``: with checkpoints in that folder in their place, as often as can be: all know of each three steps later.

    ``waits``: as in :func:`train_with_joiners`; the script then goes by the engine's step. ``shared_iterator``: it has
    no other source of data. ``writes``: it sets its learning rate itself before each step. ``anneals``: it sets
    attributes of its layers before each step. ``sets``: what it does before each, see :mod:`sets_by_hand`.
    ``damages``: before which step each worker damages its newest copy of stage 1, if it has one, and how. ``modes``: it
    trains under autocast, and evaluates in inference mode without it.
    """
    how_often = {"memory_interval_seconds": 1e-9} if stored is None else {"dir": stored, "interval_minutes": 1e-9}
    checkpoint = {**how_often, **training.bamboo.get("checkpoint", {})}
    training = dataclasses.replace(training, bamboo={**training.bamboo, "checkpoint": checkpoint})
    engine = build(training, module_class=PipelineModule if sets is None else sets_by_hand.Scaled)
    make = models.tokens if training.layers.startswith("tied") else functools.partial(models.spiked, training.spikes)

    def source(pipeline: int, step: int) -> Any:
        return models.micro_batches(make, pipeline=pipeline, first_step=step, count=training.micro_batches)

    if not shared_iterator and not training.training_data:
        engine.set_data_source(source, evaluation=lambda pipeline, step: source(pipeline + 100, step))
    iterator = None if training.training_data else source(engine.home, 0)
    if engine.memory is not None:
        engine.memory.share_of_time = math.inf  # on a loaded machine copying takes long
    losses: dict[str, float] = {}
    evaluations: dict[str, float] = {}
    members = []
    damaged: list[int] = []
    longest_seconds = 0.0
    steps = iter(lambda: engine.global_steps, training.steps) if waits is not None else range(training.steps)
    for step in steps:
        wait_for_joiners(engine, (waits or {}).get(str(step), 0))
        if engine.memory is not None:
            engine.memory.wait()
        if engine.checkpoints is not None:
            engine.checkpoints.wait()
        if damages is not None and step == damages[0]:
            newest = (
                damage_newest(engine.memory.parts, damages[1])
                if stored is None
                else damage_stored(Path(stored), damages[1])
            )
            damaged.append(newest)
        if step in training.evaluate_before:
            with torch.inference_mode(mode=modes):
                evaluations[str(step)] = float(engine.eval_batch(source(engine.home + 100, step)))
        if writes:
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step)
        for layer in engine.module.modules() if anneals else ():
            if isinstance(layer, models.AnnealedLayer):
                layer.strength, layer.shifts = 1 / (1 + 0.1 * step), [torch.full((), 0.1 * step)]
        if sets is not None:
            sets_by_hand.SETS[sets](engine, step)
        started = time.monotonic()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=modes):
            losses[str(step)] = float(engine.train_batch(iterator))
        longest_seconds = max(longest_seconds, time.monotonic() - started)
        members.append(len(engine.session.interruption.active.members))
    result = {"losses": losses, "evaluations": evaluations, "digest": engine.state_digest()}
    result["longest_seconds"] = longest_seconds
    result.update(steps=engine.global_steps, members=members, norm=str(engine.get_global_grad_norm()))
    result["scale"] = float(getattr(engine.optimizer, "loss_scale", 1.0))
    result["skipped"] = engine.skipped_steps
    engine.close()
    events = engine.event_log.recent()[1]
    result["redone"] = [[e["step"], e["loss"]] for e in events if e["event"] == "redone"]
    restored = [e for e in events if e["event"] == "restored"]
    result["restored"] = [[e["from_step"], e["step"], e["seconds"]] for e in restored]
    result["sources"] = [e["source"] for e in restored]
    result["damaged"] = damaged
    result["pid"] = os.getpid()
    return result


def damage_stored(folder: Path, how: str) -> int:
    """On one worker: change the file of stage 1 in the newest complete checkpoint; returns its step."""
    tag = (folder / "latest").read_text()
    if os.environ["RANK"] == "3":
        path = folder / tag / "mp_rank_01_model_states.pt"
        data = path.read_bytes()
        middle = len(data) // 2
        if how == "flipped":
            path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
        elif how == "truncated":
            path.write_bytes(data[:-7])
        elif how == "missing":
            path.unlink()
        elif how == "foreign":
            path.write_bytes(path.with_name("mp_rank_02_model_states.pt").read_bytes())
    return int(tag.removeprefix("bamboo_step"))


def damage_newest(parts: MemoryParts, how: str) -> int:
    """Change the newest copies among ``parts`` of the second stage in place, and return their step."""
    held = parts.held()
    newest, other, coordinate = max(held), min(held), Coordinate(0, 1)
    sealed = parts.get(newest, coordinate)
    if sealed is None:
        return newest
    part = sealed.part
    if how == "flipped":
        part.tensors[0].view(torch.uint8).reshape(-1)[3] ^= 4
    elif how == "truncated":
        del part.tensors[-1]
    elif how == "missing":
        parts.remove(newest, coordinate)
    elif how == "foreign":
        foreign = parts.get(other, coordinate)
        assert foreign is not None and other < newest
        parts.put(dataclasses.replace(foreign, part=dataclasses.replace(foreign.part, step=newest)))
    return newest


def train_with_joiners(
    training: Training,
    waits: dict[str, int],
    own_iterator: bool = False,
    dies: tuple[int, str] | None = None,
    mute: tuple[int, str] | None = None,
    saves: tuple[int, str] | None = None,
    kept: str | None = None,
    seconds: list[float] | None = None,
) -> dict[str, Any]:
    """As :func:`train`, by the engine's own step, so that a worker that joins enters where the others are.

    Before each step in ``waits`` the reporter waits until so many workers are there that have yet to be taken in.
    ``dies``: the worker of that rank is killed when it comes to that method of its reconfiguration. ``mute``: what the
    worker of that rank passes on to that other one of the result of a change's agreement never arrives.
    ``saves``: before which step a checkpoint is saved, and where. ``kept``: where checkpoints are kept, taken as often
    as can be. ``seconds``: of each stage's forward, in place of what is measured.
    """
    if seconds is not None:
        fix_times(seconds)
    if dies is not None and dies[0] == int(os.environ["RANK"]):
        setattr(Reconfiguration, dies[1], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if mute is not None and mute[0] == int(os.environ["RANK"]):
        lose_last_words(to=mute[1])
    if kept is not None:
        checkpoint = {"dir": kept, "interval_minutes": 1e-9}
        training = dataclasses.replace(training, bamboo={**training.bamboo, "checkpoint": checkpoint})
    engine = build(training)
    first = engine.global_steps

    def source(pipeline: int, step: int) -> Any:
        return models.micro_batches(models.vectors, pipeline=pipeline, first_step=step, count=training.micro_batches)

    if not own_iterator:
        engine.set_data_source(source)
    iterator = source(engine.home, 0)
    losses: dict[str, float] = {}
    members, pauses, first_hosts = [], {}, []
    while engine.global_steps < training.steps:
        step = engine.global_steps
        wait_for_joiners(engine, waits.get(str(step), 0))
        if saves is not None and step == saves[0]:
            engine.save_checkpoint(saves[1], client_state={"seen": step})
        if kept is not None:
            engine.checkpoints.wait()
        started = time.perf_counter()
        losses[str(step)] = float(engine.train_batch(iterator))
        pauses[str(step)] = time.perf_counter() - started
        record = engine.session.interruption.active
        members.append(sorted(record.members))
        first_hosts.append(len(engine.placement.hosted_by(record.members[0])))
    result = {
        "losses": losses,
        "digest": engine.state_digest(),
        "steps": engine.global_steps,
        "first": first,
        "members": members,
        "placement": engine.placement.to_json(),
        "hosted": [str(c) for c in engine.placement.hosted_by(engine.session.worker)],
        "pauses": pauses,
        "pid": os.getpid(),
        "first_hosts": first_hosts,
        "reporter": engine.is_reporter,
    }
    engine.close()
    events = engine.event_log.recent()[1]
    result["saved"] = [e["step"] for e in events if e["event"] == "checkpoint" and e["action"] == "saved"]
    result["received"] = [e["received"] for e in events if e["event"] == "joined"]
    result["decisions"] = [(e["step"], e["action"], e["reason"]) for e in events if e["event"] == "decision"]
    return result


def lose_last_words(to: str) -> None:
    """As where this worker dies before its last message is on its way: others hear a result, and ``to`` does not."""
    send = Links.send

    def lossy(links: Links, worker: str, message: Message) -> None:
        if worker != to or not message.key.endswith("reconfigure/out"):
            send(links, worker, message)

    Links.send = lossy


def fix_times(seconds: list[float]) -> None:
    """Say that a forward of a stage takes so long, and a backward twice that, in place of what is measured."""
    measured = PassTimes.sample

    def fixed(times: PassTimes) -> Any:
        sample = measured(times)
        return sample and (tuple((stage, seconds[stage], 2.0 * seconds[stage]) for stage, *_ in sample[0]), 0.0)

    PassTimes.sample = fixed


def train_by_count(
    training: Training, waits: dict[str, int], by_engine: bool = False, one_iterator: bool = False
) -> dict[str, Any]:
    """As a script that knows nothing of the plugin: counts its steps, one iterator to train and one to evaluate.

    ``by_engine``: it goes by the engine's step. ``one_iterator``: the same one for both.
    """
    engine = build(training)
    make = models.tokens if training.layers.startswith("tied") else models.vectors
    iterator = models.micro_batches(make, pipeline=0, first_step=0, count=training.micro_batches)
    evaluated = models.micro_batches(make, pipeline=100, first_step=0, count=training.micro_batches)
    evaluated = iterator if one_iterator else evaluated
    losses, evaluations = [], []
    for step in iter(lambda: engine.global_steps, training.steps) if by_engine else range(training.steps):
        wait_for_joiners(engine, waits.get(str(step), 0))
        losses.append(float(engine.train_batch(iterator)))
        if step in training.evaluate_before:
            evaluations.append(float(engine.eval_batch(evaluated)))
    result = {
        "losses": losses,
        "evaluations": evaluations,
        "digest": engine.state_digest(),
        "steps": engine.global_steps,
        "hosted": [str(c) for c in engine.placement.hosted_by(engine.session.worker)],
    }
    engine.close()
    return result


def train_until_stopped(training: Training, stop_at: int) -> dict[str, Any]:
    """A loop that looks whether the job is to end, and something to do after it."""
    engine = build(training)
    iterator = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    while engine.global_steps < training.steps and not engine.finished:
        if engine.global_steps == stop_at and engine.is_reporter:
            engine.session.coordinator.request_stop("asked to by a test")
        engine.train_batch(iterator)
    result = {"steps": engine.global_steps, "digest": engine.state_digest()}
    engine.close()
    return result


def wait_for_joiners(engine: Any, count: int) -> None:
    """On the reporter: return when ``count`` workers are there that have yet to be taken in."""
    deadline = time.monotonic() + 60.0
    if count and engine.is_reporter:
        Path(os.environ["TEST_DIRECTORY"], AWAITED).touch()
    while count and engine.is_reporter:
        present, members = engine.session.present, engine.session.interruption.active.members
        if len([w for w, member in present.items() if member.joining and w not in members]) >= count:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} workers did not come within 60 s")
        time.sleep(0.01)


def train_all(trainings: list[Training]) -> dict[str, Any]:
    """Several runs, one after the other; results by name."""
    results = {}
    for training in trainings:
        print(f"training {training.name}", flush=True)
        results[training.name] = train(training)
    return results


def train_asleep(
    training: Training,
    slow_rank: int = -1,
    slow_from: int = 0,
    times: float = 1.0,
    stopped_seconds: float = 0.0,
    busy: dict[str, int] | None = None,
    seeming: bool = False,
    sets: str | None = None,
) -> dict[str, Any]:
    """Run it; seconds of each step, who hosts what at its end, and who was found slow.

    ``seeming``: layers take no time, but a pass seems to take what they would sleep, on loaded cores too.
    ``sets``: what the script does before each step, see :mod:`sets_by_hand`.

    From step ``slow_from`` on ``slow_rank``'s layers take ``times`` as long, or its process is stopped for so many
    seconds again and again, and runs for as many. ``busy``: the ranks whose "script" or whose "data" take so long in
    each step from then on.
    """
    if seeming:
        models.time = pass_times.time = SeemingTime()  # type: ignore[assignment]
    engine = build(training, module_class=sets_by_hand.Scaled if sets == "own" else PipelineModule)
    rank, busy = int(os.environ["RANK"]), busy or {}

    def data() -> Iterator[Any]:
        batches = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
        for number, batch in enumerate(batches):
            first = number % training.micro_batches == 0
            if rank == busy.get("data") and first and number // training.micro_batches >= slow_from:
                time.sleep(BUSY_SECONDS)
            yield batch

    iterator, seconds = data(), []
    with ExitStack() as stack:
        while engine.global_steps < training.steps:
            if rank == slow_rank and engine.global_steps == slow_from:
                models.SLOWNESS[0] = times
                if stopped_seconds:
                    stack.enter_context(stopped_half_the_time(stopped_seconds))
            if rank == busy.get("script") and engine.global_steps >= slow_from:
                time.sleep(BUSY_SECONDS)
            if sets is not None:
                sets_by_hand.SETS[sets](engine, engine.global_steps)
            started = time.perf_counter()
            engine.train_batch(iterator)
            seconds.append(time.perf_counter() - started)
    result = {"digest": engine.state_digest(), "placement": engine.placement.to_json(), "seconds": seconds}
    events = engine.event_log.recent()[1]
    result["slow"] = [
        [e["step"], e["worker"], e["cause"]] for e in events if e["event"] == "slow_worker" and "over" not in e
    ]
    engine.close()
    return result


class SeemingTime:
    """Stands for the module ``time``: sleeping takes none, and moves the clock."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self._seconds += seconds

    def perf_counter(self) -> float:
        return self._seconds


@contextmanager
def stopped_half_the_time(seconds: float) -> Iterator[None]:
    """Inside, this process is stopped for ``seconds``, runs for as long, and so on: it has half its speed."""
    me, helper = os.getpid(), os.fork()
    while helper == 0:
        try:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(me, number)
                time.sleep(seconds)
        except ProcessLookupError:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)
        os.kill(me, signal.SIGCONT)


class Changed(PipelineModule):
    """As in a script that sets first weights by name before ``initialize``, with tensors of the module's own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("calls", torch.zeros(()))
        self.gain = torch.nn.Parameter(torch.ones(1))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=models.generator(name)) - 0.5)

    def forward(self, inputs: Any) -> Any:
        self.calls += 1
        return super().forward(inputs * (self.gain + 0.01 * self.calls))


def grouped(module: PipelineModule) -> list[dict[str, Any]]:
    """Two groups with values of their own; biases of even layers are in none, though they are trainable."""
    named = [(name, its) for name, its in module.named_parameters() if its.dim() > 1 or name[0] not in "0246"]
    weights = [its for _, its in named if its.dim() > 1]
    return [
        {"params": weights, "weight_decay": 0.5},
        {"params": [its for _, its in named if its.dim() < 2], "weight_decay": 0.0, "lr": 0.003},
    ]


def train_changed(training: Training) -> dict[str, Any]:
    """Run it with a model that the script has changed, and groups of parameters; losses and digest."""
    engine = build(training, module_class=Changed, trained=grouped)
    iterator = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    losses = [float(engine.train_batch(iterator)) for _ in range(training.steps)]
    result = {"losses": losses, "digest": engine.state_digest()}
    engine.close()
    return result


def train_briefly(trainings: list[Training]) -> dict[str, Any]:
    """As :func:`train_all`, with what does not depend on who hosts what: losses, evaluations and digests."""
    results = train_all(trainings)
    return {name: {key: of[key] for key in ("losses", "evaluations", "digest")} for name, of in results.items()}


def hashes(engine: Any) -> dict[str, str]:
    """sha256 of each parameter and buffer that this worker hosts, by pipeline and layer name."""
    if hasattr(engine, "host"):
        engine.host.save()
        modules = {r.coordinate.pipeline: [] for r in engine.host.owners()}
        for replica in engine.host.owners():
            modules[replica.coordinate.pipeline].append(replica.module)
    else:
        modules = {engine.grid.get_data_parallel_id(): [engine.module]}
    result = {}
    for pipeline, hosted in modules.items():
        for module in hosted:
            first = module._local_start
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                result[f"{pipeline}/from{first}/{name}"] = hashlib.sha256(data).hexdigest()
    return result


def train_and_train_late(undisturbed: Training, killed: Training) -> dict[str, Any]:
    """Two runs, the second with messages used before they were seen; adds how many, and how many of them never came."""
    expected = train(undisturbed)
    counts = late_arrivals.install()
    return {undisturbed.name: expected, killed.name: {**train(killed), **counts}}


def train_late_with_joiners(**arguments: Any) -> dict[str, Any]:
    """As :func:`train_with_joiners`, as on a GPU; adds what is counted."""
    counts = late_arrivals.install()
    return {**train_with_joiners(**arguments), **counts}


def train_and_train_leaving_out(undisturbed: Training, killed: Training) -> dict[str, Any]:
    """Two runs, the second as if copies to the host were slow; adds how many redundant forwards were put off or done.

    On a CPU nothing is copied to the host, so which ones wait is a fixed pattern, another one on each worker.
    """
    expected = train(undisturbed)
    counts: Counter[str] = Counter()
    own = sum(os.environ["BAMBOO_WORKER"].encode())

    def busy(_: HostOffload) -> bool:
        counts["asked"] += 1
        put_off = (counts["asked"] + own) % 3 != 0
        counts["put_off" if put_off else "done"] += 1
        return put_off

    HostOffload.copies = True  # type: ignore[assignment, method-assign]
    HostOffload.busy = property(busy)  # type: ignore[assignment, method-assign]
    return {undisturbed.name: expected, killed.name: {**train(killed), **counts}}


def train_and_save(training: Training, folder: str, save_at: int) -> dict[str, Any]:
    """Run it as a script that saves a checkpoint before step ``save_at``."""
    engine = build(training)
    iterator = _from_step(engine, training, 0)
    losses = []
    for step in range(training.steps):
        if step == save_at:
            engine.save_checkpoint(folder, client_state={"seen": step})
        losses.append(float(engine.train_batch(iterator)))
    return _ended(engine, training, losses)


def load_and_train(training: Training, folder: str, twice: bool = False) -> dict[str, Any]:
    """Read the newest checkpoint of ``folder`` and train from there.

    ``twice``: and then read it once more, with all workers that the job has by then, and train again.
    """
    engine = build(training)
    _from_step(engine, training, 0)  # a worker that is to have a shadow of another pipeline needs data for it
    before = engine.load_checkpoint(folder)
    if twice:
        while engine.global_steps < training.steps:
            engine.train_batch(_from_step(engine, training, engine.global_steps))
        before = engine.load_checkpoint(folder)
    iterator = _from_step(engine, training, engine.global_steps)
    losses = [float(engine.train_batch(iterator)) for _ in range(training.steps - engine.global_steps)]
    found = None if before[0] is None else before[1]["seen"]
    return {**_ended(engine, training, losses), "found": found}


def multiply(parameters: Iterable[torch.nn.Parameter], *, by: float) -> None:
    """As scripts do that load weights, or decay them."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(by)


def train_with_checkpoints(
    training: Training,
    folder: str,
    by_count: bool = False,
    environment: dict[str, str] | None = None,
    decays: bool = False,
    penalised: bool = False,
) -> dict[str, Any]:
    """Run it with checkpoints in ``folder`` as often as can be: each is there, for all to know, three steps later.

    ``by_count``: as a script that counts by itself. ``decays``: it changes weights itself, after ``initialize`` and
    after each step. ``penalised``: its module has additional losses. The iterator begins at step 0, as in the first run
    of a script.
    """
    os.environ.update(environment or {})
    checkpoint = {"dir": folder.format(rank=os.environ["RANK"]), "interval_minutes": 1e-9}
    kept = dataclasses.replace(training, bamboo={**training.bamboo, "checkpoint": checkpoint})
    engine = build(kept, module_class=models.Penalised if penalised else PipelineModule)
    make = models.tokens if training.layers.startswith("tied") else models.vectors
    iterator = models.micro_batches(make, pipeline=0, first_step=0, count=training.micro_batches)
    evaluated = models.micro_batches(make, pipeline=100, first_step=0, count=training.micro_batches)
    steps = range(training.steps) if by_count else iter(lambda: engine.global_steps, training.steps)
    losses: dict[str, float] = {}
    evaluations: dict[str, float] = {}
    metrics: list[float] = []
    norms: list[bool] = []
    additional: list[dict[str, float]] = []
    if decays:
        multiply(engine.module.parameters(), by=0.5)
    for step in steps:
        engine.checkpoints.wait()
        losses[str(step)] = float(engine.train_batch(iterator))
        if penalised:
            additional.append({name: float(loss) for name, loss in engine.get_additional_losses().items()})
        if decays:
            multiply(engine.module.parameters(), by=0.99)
        if training.evaluate_before:
            metric = torch.tensor([losses[str(step)] if engine.is_last_stage() else 0.0])
            torch.distributed.all_reduce(metric)
            metrics.append(float(metric))
            norms.append(math.isnan(engine.get_global_grad_norm() or 0.0))
        if step in training.evaluate_before:
            evaluations[str(step)] = float(engine.eval_batch(evaluated))
            engine.save_checkpoint(f"{os.environ['TEST_DIRECTORY']}/own", tag=f"after{step}")
    result = {"losses": losses, "digest": engine.state_digest(), "steps": engine.global_steps}
    result["evaluations"] = {step: None if math.isnan(loss) else loss for step, loss in evaluations.items()}
    result["metrics"], result["unknown norms"], result["additional"] = metrics, norms, additional
    result["own"] = sorted(path.name for path in Path(os.environ["TEST_DIRECTORY"], "own").glob("after*"))
    engine.close()
    events = engine.event_log.recent()[1]
    result["saved"] = [e["step"] for e in events if e["event"] == "checkpoint" and e["action"] == "saved"]
    result["told"] = [e["reason"] for e in events if e["event"] == "checkpoint" and e["action"] == "failed"]
    return result


def _from_step(engine: Any, training: Training, step: int) -> Iterator[Any]:
    make = models.tokens if training.layers.startswith("tied") else models.vectors

    def source(pipeline: int, first_step: int) -> Any:
        return models.micro_batches(make, pipeline=pipeline, first_step=first_step, count=training.micro_batches)

    if hasattr(engine, "set_data_source"):
        engine.set_data_source(source)
    return source(engine.grid.get_data_parallel_id(), step)


def _ended(engine: Any, training: Training, losses: list[float]) -> dict[str, Any]:
    result = {"losses": losses, "hashes": hashes(engine), "steps": engine.global_steps}
    if training.faults is not None:
        result["digest"] = engine.state_digest()
        engine.close()
    return result
