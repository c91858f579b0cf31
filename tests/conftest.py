"""Settings for all tests."""

import signal

from hypothesis import settings

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("deepspeed_bamboo", deadline=None)
settings.load_profile("deepspeed_bamboo")

# A shell starts what it runs in the background with Ctrl-C ignored, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
