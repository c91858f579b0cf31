"""A pipeline in plain DeepSpeed, as in its tutorials. Nothing in it knows the plugin."""

import argparse

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

WIDTH, SAMPLES = 32, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [*(LayerSpec(Block) for _ in range(6)), LayerSpec(nn.Linear, WIDTH, 10)]
    module = PipelineModule(layers, num_stages=arguments.stages, loss_fn=nn.functional.cross_entropy)
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x[:, :10].argmax(dim=1))
    engine, *_ = deepspeed.initialize(
        args=arguments, model=module, model_parameters=list(module.parameters()), training_data=data
    )
    for step in range(arguments.steps):
        loss = engine.train_batch()
        print(f"step {step} loss {loss.item():.9f}", flush=True)


if __name__ == "__main__":
    main()
