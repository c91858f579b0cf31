"""The policies. Each is an engine.Policy; build.py makes them by name."""
