"""Causal language models of the library transformers as layers of a pipeline, without code for any of them."""

from deepspeed_bamboo.models.huggingface.decoder import Decoder

__all__ = ["Decoder"]
