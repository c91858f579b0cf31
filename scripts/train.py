"""Trains a model of the published evaluation with DeepSpeed's pipelines; survives lost workers with "bamboo".

On one machine without a GPU, 4 workers, one of which may be killed at any moment:

    deepspeed --num_accelerators 4 --module deepspeed_bamboo.launch scripts/train.py \\
        --deepspeed_config configs/cpu-demo.json --steps 20 --event-log runs/first

It is an ordinary DeepSpeed script: ``deepspeed --num_accelerators 4 scripts/train.py ...`` trains the
same without the plugin. Each model has a variant with "tiny" in its name that trains on a CPU in seconds.

--data, by model (without it: Python's own sources for gpt2-* and bert-*, made-up data for the others):
    gpt2-*, bert-*           a file or folder of text, read as bytes; or tokens of the model's own vocabulary, in a .npy
                             (one dimension of integers) or a .bin (16-bit unsigned integers)
    resnet*, vgg*, alexnet*  a folder with a folder of images for each class, as ImageNet comes
    gnmt*                    a text file, with its translation line by line in --target-data; read as bytes, or with
                             --vocabulary as the words of that file
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule

from deepspeed_bamboo.config.section import SECTION, load_deepspeed_settings
from deepspeed_bamboo.eventlog.files import merge_event_files
from deepspeed_bamboo.eventlog.run_log import RunLog
from deepspeed_bamboo.eventlog.runs import run_name
from deepspeed_bamboo.models import half_precision
from deepspeed_bamboo.models.batches import BatchShape, StepBatches
from deepspeed_bamboo.models.catalog import MODELS, DataPaths, Model, model_named
from deepspeed_bamboo.models.costs import layer_costs
from deepspeed_bamboo.models.partition import BalancedPipeline
from deepspeed_bamboo.progress import Progress


def main(argv: Sequence[str] | None = None) -> int:
    """Train as ``argv`` says (default: the process's own arguments). Returns the exit code."""
    arguments = parse_arguments(argv)
    prepare_torch(arguments)
    deepspeed.init_distributed()
    model = model_named(arguments.model)
    engine = build_engine(arguments, model)
    train(engine, batches=build_batches(arguments, model, engine), arguments=arguments)
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The script's arguments. Exits with a usage message when they are wrong, as argparse does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-tiny", choices=tuple(MODELS))
    parser.add_argument("--data", type=Path, help="what to train on, see above")
    parser.add_argument("--target-data", type=Path, help="the translation of --data, line by line")
    parser.add_argument("--vocabulary", type=Path, help="the words of parallel text, one a line (default: bytes)")
    parser.add_argument("--loader-threads", type=int, default=0, help="that read samples beforehand (default: none)")
    parser.add_argument("--steps", type=int, default=20, help="train until this global step (default: 20)")
    parser.add_argument("--deepspeed_config", required=True, help="DeepSpeed JSON, with or without a bamboo section")
    parser.add_argument("--event-log", type=Path, help="directory for the event log (default: none is written)")
    parser.add_argument("--seed", type=int, default=1234, help="of weights, sample order and dropout (default: 1234)")
    parser.add_argument("--stages", type=int, help="pipeline stages (default: as many as there are workers)")
    parser.add_argument("--dropout", type=float, help="probability, 0 for none (default: the model's, as published)")
    parser.add_argument(
        "--tied", action=argparse.BooleanOptionalAction, help="the head uses the embedding's weights (gpt2-* only)"
    )
    parser.add_argument(
        "--partition",
        default="cost",
        help='stages by "cost" (default) or a partition_method of DeepSpeed',
    )
    parser.add_argument("--seed-layers", action="store_true", help="PipelineModule's seed_layers")
    parser.add_argument("--activation-checkpoint-interval", type=int, default=0, help="in layers, 0 for none (default)")
    parser.add_argument("--deterministic", action="store_true", help="bitwise equal runs on a GPU too, at some speed")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per worker (default: 1); bits depend on it")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser.parse_args(argv)


def prepare_torch(arguments: argparse.Namespace) -> None:
    """Everything that must be set before the first tensor: threads, determinism, the seed."""
    torch.set_num_threads(arguments.threads)
    if arguments.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(arguments.seed)
    half_precision.allow_on_cpus()
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile a shared-memory op here that pipelines never use: 30 s at the first start, and
        # a process killed in that time leaves a lock behind on which every later start waits for ever.
        deepspeed.ops.__compatible_ops__[get_accelerator().create_op_builder("ShareMemCommBuilder").NAME] = False


def build_engine(arguments: argparse.Namespace, model: Model) -> Any:
    """The model in stages, and DeepSpeed's engine for it."""
    settings = load_deepspeed_settings(arguments.deepspeed_config)
    if arguments.event_log is not None and SECTION in settings:
        settings[SECTION] = {**settings[SECTION], "event_log": str(arguments.event_log)}
    module = build_module(arguments, model)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=settings)
    return engine


def build_module(arguments: argparse.Namespace, model: Model) -> PipelineModule:
    """The model in stages."""
    layers = model.layers(dropout=arguments.dropout, tied=arguments.tied, seed=arguments.seed)
    settings = {
        "loss_fn": model.loss,
        "num_stages": arguments.stages or dist.get_world_size(),
        "seed_layers": arguments.seed_layers,
        "activation_checkpoint_interval": arguments.activation_checkpoint_interval,
        # Reentrant checkpoints lose the gradients of layers whose input has none, as the embedding's tokens.
        "checkpointable_layers": list(model.repeated) if arguments.activation_checkpoint_interval else None,
    }
    if arguments.partition == "cost":
        costs = layer_costs(layers, model.sample)
        return BalancedPipeline(layers, costs=costs, partition_method="parameters", **settings)
    return PipelineModule(layers, partition_method=arguments.partition, **settings)


def build_batches(arguments: argparse.Namespace, model: Model, engine: Any) -> StepBatches:
    """The micro-batches of this worker's pipeline, positioned by the engine's global step."""
    paths = DataPaths(arguments.data, target=arguments.target_data, vocabulary=arguments.vocabulary)
    dataset = model.open_data(paths, arguments.seed)
    shape = BatchShape(
        micro_batch_size=engine.train_micro_batch_size_per_gpu(),
        micro_batches=engine.gradient_accumulation_steps(),
        pipelines=engine.grid.get_data_parallel_world_size(),
    )

    def of_pipeline(pipeline: int) -> StepBatches:
        return StepBatches(
            dataset,
            shape=shape,
            current_step=lambda: int(engine.global_steps),
            pipeline=pipeline,
            threads=arguments.loader_threads,
        )

    if hasattr(engine, "set_data_source"):
        # A worker that takes over stages of another pipeline feeds that pipeline.
        engine.set_data_source(lambda pipeline, step: of_pipeline(pipeline))
    return of_pipeline(engine.grid.get_data_parallel_id())


def _run_of_stock() -> str:
    """A name for a run of DeepSpeed's own engine, the same on all ranks; collective."""
    names: list[Any] = [run_name("stock", time_seconds=time.time())]
    torch.distributed.broadcast_object_list(names, src=0)
    return str(names[0])


def train(
    engine: Any,
    *,
    batches: StepBatches,
    arguments: argparse.Namespace,
    between_steps: Callable[[], None] = lambda: None,
) -> None:
    """Train up to the wanted step and say what happened, here and in the event log.

    ``between_steps`` is called before each step.
    """
    log = RunLog(engine, directory=arguments.event_log, barrier=dist.barrier, run=_run_of_stock)
    loss: float | None = None
    with Progress(total=arguments.steps, first=engine.global_steps) as progress:
        while engine.global_steps < arguments.steps and not getattr(engine, "finished", False):
            between_steps()
            step, start = int(engine.global_steps), time.perf_counter()
            loss = float(engine.train_batch(batches))
            seconds = time.perf_counter() - start
            log.step(step, loss=loss, samples=engine.train_batch_size(), seconds=seconds)
            news, rate = log.news(), engine.train_batch_size() / seconds
            if log.is_reporter:
                progress.show(done=step + 1, loss=loss, samples_per_second=rate, epoch=log.epoch, news=news)
    digest = log.finish(loss)
    if log.is_reporter:
        if arguments.event_log is not None:
            print(f"events: {merge_event_files(arguments.event_log, run=log.run)}")
        print(f"finished {engine.global_steps} steps, loss {loss}, digest {digest or 'not computed'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
