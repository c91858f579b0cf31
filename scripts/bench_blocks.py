"""What a finer grid costs: the same model in 1, 2, 4 and 8 stages, all on one worker.

    python scripts/bench_blocks.py                          # gpt2-tiny, a minute or two
    python scripts/bench_blocks.py --stages 1 4 --rounds 5
    python scripts/bench_blocks.py --accelerator cuda --model gpt2-medium --micro-batches 8 --micro-batch-size 16
    python scripts/bench_blocks.py --workers 2 --stages 2 4 8     # stages of several workers

With one worker there are no messages, so all that a stage costs is switching to it, handing activations over, and its
calls of autograd and of the optimizer. Reported is the time of an iteration (of several jobs the least median) and its
multiple of the smallest number of stages: on a CPU the processor time of the first worker, which other load disturbs
little; on a GPU the time until the device has done all, in bf16. ``--calls FILE`` keeps a profile of the largest number
of stages for ``python -m pstats``.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

CONFIGURATION = "--deepspeed_config"
WARM_UP = 4
_GIB = 1 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs, or with --inside be the worker of one. Returns 1 if a job failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-tiny", help="of scripts/train.py (default: gpt2-tiny)")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8], help="default: 1 2 4 8")
    parser.add_argument("--workers", type=int, default=1, help="that share the stages (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="jobs for each number of stages (default: 3)")
    parser.add_argument("--steps", type=int, default=16, help="of a job (default: 16)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="samples (default: 2)")
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    parser.add_argument("--calls", type=Path, metavar="FILE", help="keep a profile of the calls")
    parser.add_argument(CONFIGURATION, help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.inside is not None:
        return work(arguments)
    from deepspeed_bamboo.sweep.forked import ForkedJobs
    from deepspeed_bamboo.sweep.job import job_environment

    # Forked processes can use a GPU only if the one they are forked from has not touched the driver.
    os.environ.update(job_environment(accelerator=arguments.accelerator), PYTORCH_NVML_BASED_CUDA_CHECK="1")
    seconds: dict[int, list[float]] = {stages: [] for stages in arguments.stages}
    with ForkedJobs(lease_seconds=10.0, limit_seconds=300.0) as jobs, tempfile.TemporaryDirectory() as name:
        for number in range(arguments.rounds):
            for stages in arguments.stages:
                folder = Path(name) / f"{stages}-{number}"
                folder.mkdir()
                (folder / "deepspeed.json").write_text(json.dumps(settings(arguments)), encoding="utf-8")
                script = [__file__, CONFIGURATION, str(folder / "deepspeed.json"), "--inside", str(folder / "result")]
                script += ["--accelerator", arguments.accelerator]
                script += ["--model", arguments.model, "--stages", str(stages), "--steps", str(arguments.steps)]
                if arguments.calls is not None and stages == max(arguments.stages):
                    script += ["--calls", str(arguments.calls)]
                job = jobs(script, workers=arguments.workers, folder=folder / "job")
                if job.exit_code:
                    print((folder / "job" / "output.txt").read_text(encoding="utf-8")[-2000:])
                    return 1
                _print_memory(folder / "job" / "output.txt")
                seconds[stages].append(median(json.loads((folder / "result").read_text(encoding="utf-8"))))
    one = min(seconds[min(seconds)])
    for stages, its in seconds.items():
        shown = ", ".join(f"{1000.0 * value:.1f}" for value in its)
        kind = "of processor time" if arguments.accelerator == "cpu" else "an iteration"
        print(f"{stages} stages: {1000.0 * min(its):.1f} ms {kind}, {min(its) / one:.3f} ({shown})")
    return 0


def _print_memory(output: Path) -> None:
    for line in output.read_text(encoding="utf-8").splitlines():
        if " GiB; " in line:
            print(line)


def settings(arguments: argparse.Namespace) -> dict[str, object]:
    """DeepSpeed's configuration of a job."""
    precision = {} if arguments.accelerator == "cpu" else {"bf16": {"enabled": True}}
    return {
        **precision,
        "train_micro_batch_size_per_gpu": arguments.micro_batch_size,
        "gradient_accumulation_steps": arguments.micro_batches,
        "steps_per_print": 1000000,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
        "bamboo": {},
    }


def work(arguments: argparse.Namespace) -> int:
    """In the worker: train, and write the seconds of each step after the first ones."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    from deepspeed_bamboo.models.batches import BatchShape, StepBatches
    from deepspeed_bamboo.models.catalog import DataPaths, model_named

    torch.set_num_threads(1)
    torch.manual_seed(1)
    deepspeed.init_distributed()
    model = model_named(arguments.model)
    module = PipelineModule(
        model.layers(dropout=0.0, tied=None, seed=1),
        num_stages=arguments.stages[0],
        partition_method="uniform",
        loss_fn=model.loss,
    )
    configuration = json.loads(Path(arguments.deepspeed_config).read_text(encoding="utf-8"))
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=configuration)
    shape = BatchShape(engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(), pipelines=1)
    dataset = model.open_data(DataPaths(None, target=None, vocabulary=None), 1)
    batches = StepBatches(dataset, shape=shape, current_step=lambda: int(engine.global_steps), pipeline=0)
    now = _clock(arguments.accelerator)
    seconds, calls = [], cProfile.Profile()
    while engine.global_steps < arguments.steps:
        measured = engine.global_steps >= WARM_UP
        if measured and arguments.calls is not None:
            calls.enable()
        started = now()
        engine.train_batch(batches)
        if measured:
            seconds.append(now() - started)
        calls.disable()
    if arguments.calls is not None:
        calls.dump_stats(arguments.calls)
    if arguments.accelerator == "cuda":
        print(memory_line(engine, peak_bytes=torch.cuda.max_memory_allocated()), flush=True)
    if deepspeed.comm.get_rank() == 0:
        arguments.inside.write_text(json.dumps(seconds), encoding="utf-8")
    return 0


def memory_line(engine: Any, *, peak_bytes: int) -> str:
    """What this worker's device held at most, and what the engine takes it for when it places stages."""
    memory, worker = engine.reconfiguration.balancing.memory, engine.worker
    if memory is None:
        return f"{worker.me}: peak {peak_bytes / _GIB:.2f} GiB; the engine knows of no limit"
    held = memory.held(worker.placement, micro_batches=worker.micro_batches)[worker.me]
    room = memory.room[worker.me]
    return (
        f"{worker.me}: peak {peak_bytes / _GIB:.2f} GiB; held {held / _GIB:.2f} GiB of {room / _GIB:.1f}, as measured"
    )


def _clock(accelerator: str) -> Callable[[], float]:
    """Returns the seconds that count: on a CPU the processor's, on a GPU those until the device has done all."""
    if accelerator == "cpu":
        return time.process_time
    import torch

    def device_seconds() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return device_seconds


if __name__ == "__main__":
    sys.exit(main())
