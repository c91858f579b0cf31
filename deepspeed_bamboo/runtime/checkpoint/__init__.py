"""DeepSpeed's checkpoint files for stages that change hands, and the checkpoints that the plugin takes by itself."""
