"""Messages between workers: channels that can be aborted, groups of them, and the signal that ends waits."""
