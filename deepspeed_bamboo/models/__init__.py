"""The evaluation models as lists of layers for ``deepspeed.pipe.PipelineModule``, and text to train them on."""
