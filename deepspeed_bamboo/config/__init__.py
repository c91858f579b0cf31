"""The "bamboo" section of a DeepSpeed configuration, and what the rest of that configuration must fulfil."""
