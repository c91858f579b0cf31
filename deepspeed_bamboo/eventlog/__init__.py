"""The event log: written by workers and scripts, read back, merged and summed up."""
