"""scripts/train.py for bench_failover.py: what one does without the plugin, with DeepSpeed's own checkpoints.

It saves one each ``--checkpoint-steps`` steps and begins with the newest there is. Other options are those of
train.py; the configuration has no "bamboo" section.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import deepspeed
import train

from deepspeed_bamboo.models.catalog import model_named


def main() -> int:
    """Train as the process's arguments say. Returns the exit code."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--checkpoints", type=Path, required=True)
    own.add_argument("--checkpoint-steps", type=int, required=True)
    options, rest = own.parse_known_args()
    arguments = train.parse_arguments(rest)
    train.prepare_torch(arguments)
    deepspeed.init_distributed()
    model = model_named(arguments.model)
    engine = train.build_engine(arguments, model)
    if (options.checkpoints / "latest").exists():
        engine.load_checkpoint(str(options.checkpoints))

    first = int(engine.global_steps)

    def save_if_due() -> None:
        step = int(engine.global_steps)
        if step > first and step % options.checkpoint_steps == 0:
            engine.save_checkpoint(str(options.checkpoints))

    batches = train.build_batches(arguments, model, engine)
    train.train(engine, batches=batches, arguments=arguments, between_steps=save_if_due)
    return 0


if __name__ == "__main__":
    sys.exit(main())
