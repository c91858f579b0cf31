"""The policies. Each is an engine.Policy; scenario.py builds them by name."""
