"""Trains a causal language model of transformers as a pipeline, and saves it in the library's layout.

``--model FOLDER`` is a folder (or a name on the hub) with safetensors files; without it a tiny Llama is trained. The
first line has any launcher start the plugin's agents, so no ``--module`` is needed.
"""

import deepspeed_bamboo.launched  # noqa: F401, I001 - first

import argparse
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

from deepspeed_bamboo.models.huggingface import Decoder


def tiny_llama():
    from transformers import LlamaConfig

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return Decoder.from_config(LlamaConfig(**shape, vocab_size=256, tie_word_embeddings=True), seed=0)


def batches(first):
    """Micro-batches from number ``first`` on: parts of this file. Labels are the tokens themselves: the loss shifts."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    number = first
    while True:
        starts = torch.randint(0, len(text) - 33, (2,), generator=torch.Generator().manual_seed(number))
        tokens = torch.stack([text[start : start + 32] for start in starts.tolist()])
        yield tokens, tokens
        number += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", help="folder for the trained model")
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()

    deepspeed.init_distributed()
    decoder = tiny_llama() if arguments.model is None else Decoder.from_pretrained(arguments.model)
    module = PipelineModule(
        layers=decoder.layers(),
        loss_fn=decoder.loss,
        num_stages=arguments.stages,
        partition_method="type:DecoderLayer",
    )
    engine, *_ = deepspeed.initialize(args=arguments, model=module, model_parameters=list(module.parameters()))
    data = batches(0)
    while engine.global_steps < arguments.steps:
        step, loss = engine.global_steps, engine.train_batch(data)
        print(f"step {step} loss {loss.item():.9f}", flush=True)
    if arguments.save:
        decoder.save_pretrained(engine, arguments.save)


if __name__ == "__main__":
    main()
