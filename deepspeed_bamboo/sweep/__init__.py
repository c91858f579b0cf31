"""The fault sweep: many small jobs, each with scripted faults, compared bit by bit with an undisturbed one."""
