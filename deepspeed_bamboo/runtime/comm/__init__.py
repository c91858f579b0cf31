"""Messages between workers: channels that can be aborted, groups of them, and the thread that watches epochs."""
