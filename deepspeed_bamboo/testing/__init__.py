"""Simulated machines for tests and fault sweeps: agents and workers as forks of one process."""
