"""Everything that touches DeepSpeed's insides: replicas of stages, their optimizers, collectives and process groups."""
