"""Fault-free throughput and memory of every redundancy mode against stock DeepSpeed, in one run on the same GPUs.

    python scripts/bench_gpu.py --model gpt2-medium --stages 4 --micro-batches 8 --output runs/bench_gpu.json
    python scripts/bench_gpu.py --share-gpu --variants off,lazy,eager-recompute   # on fewer GPUs: memory only

All variants live in the same processes and take turns, so clocks, temperature and neighbours hit them alike.
Ends within --limit-seconds whatever happens. Beside the JSON comes a picture, where matplotlib (the plot extra) is
there. In traces (--trace) each pass has its name, FRC are redundant forwards. Also runs on CPU (--model gpt2-tiny),
where it shows only the overhead of the protocol.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import shared_gpu

VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "off": {"mode": "off"},
    "lazy": {"mode": "lazy"},
    "eager-cpu": {"mode": "eager", "offload": "cpu"},
    "eager-none": {"mode": "eager", "offload": "none"},
    "eager-recompute": {"mode": "eager", "offload": "recompute"},
    "full": {"mode": "full", "offload": "none"},
    "lazy-2-copies": {"mode": "lazy", "copies": 2},
    "eager-2-copies": {"mode": "eager", "offload": "recompute", "copies": 2},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0 when every worker finished in time."""
    arguments = parse_arguments(argv)
    if arguments.share_gpu:
        os.environ[shared_gpu.TOLD] = "1"
    from deepspeed_bamboo.coordination.server import PrivateEtcd

    workers = arguments.stages * arguments.pipelines
    context = multiprocessing.get_context("spawn")
    with PrivateEtcd() as etcd, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        processes = [
            context.Process(target=worker, args=(rank, workers, port, str(etcd.endpoint), arguments))
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + arguments.limit_seconds
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [process for process in processes if process.exitcode is None]
        for process in late:
            # faulthandler prints where every thread is.
            os.kill(process.pid or 0, signal.SIGUSR1)
            time.sleep(0.5)
            process.kill()
            process.join()
    if late:
        print(f"{len(late)} of {workers} workers did not finish within {arguments.limit_seconds} s", file=sys.stderr)
    return 0 if all(process.exitcode == 0 for process in processes) else 1


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The script's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-medium")
    parser.add_argument("--blocks", type=int, help="of the model, instead of as many as it has")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--pipelines", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=8, help="samples")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="per variant and round")
    parser.add_argument("--warm-up", type=int, default=5, help="steps of each variant before the first round")
    parser.add_argument("--limit-seconds", type=float, default=500.0)
    parser.add_argument("--output", type=Path, default=Path("runs/bench_gpu.json"))
    parser.add_argument("--trace", type=Path, help="directory for a torch profiler trace of two steps per variant")
    parser.add_argument("--deterministic", action="store_true", help="torch's deterministic algorithms")
    parser.add_argument("--share-gpu", action="store_true", help="several workers on each GPU, without stock")
    arguments = parser.parse_args(argv)
    names = arguments.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"no variants {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    if arguments.blocks is not None and arguments.blocks < arguments.stages:
        parser.error(f"--blocks {arguments.blocks} for {arguments.stages} stages: a stage has at least one block")
    if arguments.share_gpu and "stock" in names:
        parser.error("stock DeepSpeed needs NCCL, so a GPU for each worker; leave it out of --variants")
    return arguments


def worker(rank: int, workers: int, port: int, endpoint: str, arguments: argparse.Namespace) -> None:
    """One process: builds all variants and times them in turn."""
    started = time.perf_counter()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(workers),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        BAMBOO_ENDPOINTS=endpoint,
        BAMBOO_SECRET="of this benchmark",
        NCCL_NVLS_ENABLE="0",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
    )
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    shared_gpu.share_gpu_if_told()
    import deepspeed
    import torch

    from deepspeed_bamboo.runtime.stock.patches.shared_memory_op import leave_out_shared_memory_op

    leave_out_shared_memory_op()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers // 2))
    if arguments.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
    deepspeed.init_distributed()
    engines = {}
    for name in arguments.variants.split(","):
        engines[name] = build(name, arguments, rank)
        data = endless_batches(arguments, engines)
        run_steps(engines[name]["engine"], data, arguments.warm_up)
        if rank == 0:
            print(f"{name} is ready after {time.perf_counter() - started:.1f} s", flush=True)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(arguments.rounds):
        for name, entry in engines.items():
            times[name].append(timed(entry, data, arguments.steps))
            if rank == 0:
                print(f"{name}: {1000.0 * times[name][-1]:.2f} ms", flush=True)
    if arguments.trace is not None:
        for name, entry in engines.items():
            trace(entry["engine"], data, arguments.trace / f"{name}-rank{rank}.json")
    report(arguments, engines, times, rank=rank)
    torch.distributed.barrier()
    os._exit(0)


def build(name: str, arguments: argparse.Namespace, rank: int) -> dict[str, Any]:
    """The engine of one variant and how much memory it took."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    from deepspeed_bamboo.models.transformer import token_loss, transformer_layers
    from deepspeed_bamboo.runtime.initialize import initialize_with
    from deepspeed_bamboo.runtime.recovery.world_entry import WorldEntry
    from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroups

    # Variants share the process, and stock needs its process groups to the end.
    WorldEntry.enter = lambda self, record: None  # type: ignore[method-assign]
    os.environ.update(BAMBOO_JOB=f"bench-{name}", BAMBOO_WORKER=f"{name}-{rank}")
    before = allocated()
    torch.manual_seed(1234)
    model = PipelineModule(
        layers=transformer_layers(size_of(arguments), tied=False, seed=1234),
        loss_fn=token_loss,
        num_stages=arguments.stages,
        partition_method="uniform",
    )
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch_size,
        "gradient_accumulation_steps": arguments.micro_batches,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    if VARIANTS[name] is not None:
        settings["bamboo"] = {"redundancy": VARIANTS[name]}
    engine, *_ = initialize_with(
        deepspeed.initialize, ScriptGroups(), model=model, model_parameters=list(model.parameters()), config=settings
    )
    return {"engine": engine, "static_bytes": allocated() - before, "peak_bytes": 0}


def size_of(arguments: argparse.Namespace) -> Any:
    """The model's shape."""
    from deepspeed_bamboo.models.transformer import model_size

    size = model_size(arguments.model)
    return size if arguments.blocks is None else dataclasses.replace(size, layers=arguments.blocks)


def endless_batches(arguments: argparse.Namespace, engines: dict[str, Any]) -> Any:
    """The same random micro-batch again and again: (inputs, labels) of the model's vocabulary, on the device."""
    import torch

    size = size_of(arguments)
    device = next(iter(engines.values()))["engine"].device
    generator = torch.Generator().manual_seed(7)
    shape = (arguments.micro_batch_size, size.sequence_length)
    tokens = torch.randint(0, 256, shape, generator=generator).to(device)
    while True:
        yield tokens, tokens


def run_steps(engine: Any, data: Any, steps: int) -> None:
    """Train; returns when the device has finished."""
    import torch

    for _ in range(steps):
        engine.train_batch(data)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()


def timed(entry: dict[str, Any], data: Any, steps: int) -> float:
    """Seconds per step; keeps the peak of device memory that this variant added."""
    import torch

    torch.distributed.barrier()
    idle = allocated()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    run_steps(entry["engine"], data, steps)
    seconds = (time.perf_counter() - start) / steps
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() - idle + entry["static_bytes"]
        entry["peak_bytes"] = max(entry["peak_bytes"], peak)
    return seconds


def allocated() -> int:
    """Device memory in use by this process, in bytes."""
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def trace(engine: Any, data: Any, path: Path) -> None:
    """Write a Chrome trace of two steps."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with named_passes(), torch.profiler.profile() as profiler:
        run_steps(engine, data, 2)
    profiler.export_chrome_trace(str(path))


@contextlib.contextmanager
def named_passes() -> Iterator[None]:
    """Inside the block each instruction of the plugin's workers is a range with its text, such as "FRC 0.1 3"."""
    import torch

    from deepspeed_bamboo.runtime.iteration.executor import Executor

    plain = Executor.execute

    def execute(self: Any, instruction: Any, context: Any) -> None:
        with torch.profiler.record_function(str(instruction)):
            plain(self, instruction, context)

    Executor.execute = execute  # type: ignore[method-assign]
    try:
        yield
    finally:
        Executor.execute = plain  # type: ignore[method-assign]


def report(arguments: argparse.Namespace, engines: dict[str, Any], times: dict[str, list[float]], *, rank: int) -> None:
    """Collect the workers' figures; the first one prints a table and writes the JSON."""
    import torch

    own = {
        name: (entry["static_bytes"], entry["peak_bytes"], offloaded(entry), digest(entry))
        for name, entry in engines.items()
    }
    everybody: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybody, own)
    if rank != 0:
        return
    samples = arguments.micro_batch_size * arguments.micro_batches * arguments.pipelines
    stock = statistics.median(times["stock"]) if "stock" in times else None
    rows = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rows[name] = {
            "milliseconds": [round(value * 1000, 2) for value in seconds],
            "median_milliseconds": round(median * 1000, 2),
            "samples_per_second": round(samples / median, 1),
            "throughput_against_stock": None if stock is None else round(stock / median, 4),
            "peak_device_bytes": max(part[name][1] for part in everybody),
            "offloaded_bytes": max(part[name][2] for part in everybody),
            "digest": everybody[0][name][3],
            "static_bytes_by_worker": [part[name][0] for part in everybody],
            "peak_device_bytes_by_worker": [part[name][1] for part in everybody],
        }
        print(
            f"{name:12} {rows[name]['median_milliseconds']:9.2f} ms  (from {min(seconds) * 1000:.2f} to "
            f"{max(seconds) * 1000:.2f})  {rows[name]['samples_per_second']:9.1f} samples/s  against stock "
            f"{rows[name]['throughput_against_stock']}  peak {rows[name]['peak_device_bytes'] / 2**30:.2f} GiB  "
            f"offloaded {rows[name]['offloaded_bytes'] / 2**30:.2f} GiB",
            flush=True,
        )
    add_memory_limits(rows)
    print("\n".join(memory_lines(rows)), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: str(value) for name, value in vars(arguments).items()}
    arguments.output.write_text(json.dumps({"device": device, "settings": settings, "variants": rows}, indent=2) + "\n")
    title = f"{arguments.model}, {arguments.pipelines} x {arguments.stages}, {arguments.micro_batches} micro-batches"
    draw(rows, arguments.output.with_suffix(".png"), title=f"{title}, {device}")


def add_memory_limits(rows: dict[str, Any]) -> None:
    """Give the eager variants, by worker, what they are held against: off's peak and the successor's state."""
    if "off" not in rows or "lazy" not in rows:
        return
    peaks, (off, lazy) = (
        rows["off"]["peak_device_bytes_by_worker"],
        (rows[name]["static_bytes_by_worker"] for name in ("off", "lazy")),
    )
    limits = [peak + with_shadow - without for peak, with_shadow, without in zip(peaks, lazy, off, strict=True)]
    for name in (name for name in rows if name.startswith("eager") and "copies" not in name):
        rows[name]["memory_limit_bytes_by_worker"] = limits


def memory_lines(rows: dict[str, Any]) -> list[str]:
    """Peak memory of the eager variants by worker, against their limits."""
    lines = []
    for name, row in rows.items():
        limits = row.get("memory_limit_bytes_by_worker", ())
        shares = [
            f"{peak / 2**30:.2f} of {limit / 2**30:.2f} GiB ({peak / limit:.3f})" if limit else "0"
            for peak, limit in zip(row["peak_device_bytes_by_worker"], limits, strict=False)
        ]
        if shares:
            lines.append(f"{name}: peak by worker, of off's peak and the successor's state: {', '.join(shares)}")
    return lines


def draw(rows: dict[str, Any], path: Path, *, title: str) -> None:
    """A picture of the rounds and the peaks of memory; without matplotlib one line that says so."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (the plot extra)")
        return
    matplotlib.use("agg")
    import matplotlib.pyplot as pyplot

    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    names = list(rows)
    times.boxplot([rows[name]["milliseconds"] for name in names], tick_labels=names)
    times.set_ylabel("ms per iteration")
    memory.bar(names, [rows[name]["peak_device_bytes"] / 2**30 for name in names])
    memory.set_ylabel("peak device memory, GiB")
    for axes in (times, memory):
        axes.tick_params(axis="x", rotation=30)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)


def digest(entry: dict[str, Any]) -> str | None:
    """sha256 over all weights and optimizer state; collective; None for stock."""
    engine = entry["engine"]
    return str(engine.state_digest()) if hasattr(engine, "state_digest") else None


def offloaded(entry: dict[str, Any]) -> int:
    """Most bytes that redundant forwards kept on the host."""
    offload = getattr(entry["engine"], "host_offload", None)
    return 0 if offload is None else int(offload.peak_bytes)


if __name__ == "__main__":
    sys.exit(main())
