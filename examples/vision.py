"""A convolutional network in stages, trained on made-up images; evaluated, and saved by DeepSpeed's own checkpoint.

The loop goes by the engine's step, so that a worker that joins late enters it where the others are.
"""

import argparse

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

CLASSES, SIZE = 4, 16


class Stage(nn.Module):
    """Halves the image, and looks at it again: x + f(x)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.shrink = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, outputs)
        self.look = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x):
        x = torch.relu(self.norm(self.shrink(x)))
        return x + torch.relu(self.look(x))


def images(first):
    """Micro-batches from number ``first`` on: noise with a bright quarter, which is the label."""
    number = first
    while True:
        generator = torch.Generator().manual_seed(number)
        labels = torch.randint(0, CLASSES, (2,), generator=generator)
        x = 0.3 * torch.randn(2, 3, SIZE, SIZE, generator=generator)
        for picture, label in zip(x, labels.tolist(), strict=True):
            top, left = (label // 2) * SIZE // 2, (label % 2) * SIZE // 2
            picture[:, top : top + SIZE // 2, left : left + SIZE // 2] += 1.0
        yield x, labels
        number += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [
        LayerSpec(Stage, 3, 8),
        LayerSpec(Stage, 8, 16),
        LayerSpec(Stage, 16, 16),
        LayerSpec(nn.Flatten),
        LayerSpec(nn.Linear, 16 * (SIZE // 8) ** 2, CLASSES),
    ]
    module = PipelineModule(
        layers, num_stages=arguments.stages, loss_fn=nn.functional.cross_entropy, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(args=arguments, model=module, model_parameters=list(module.parameters()))
    data = images(0)
    while engine.global_steps < arguments.steps:
        step, loss = engine.global_steps, engine.train_batch(data)
        print(f"step {step} loss {loss.item():.9f}", flush=True)
    print(f"evaluation {engine.eval_batch(images(10**6)).item():.9f}", flush=True)
    if arguments.save:
        engine.save_checkpoint(arguments.save)


if __name__ == "__main__":
    main()
