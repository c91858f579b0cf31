"""``deepspeed [launcher flags] --module deepspeed_bamboo.launch [--job NAME] train.py [its arguments]``."""

from __future__ import annotations

import sys

from deepspeed_bamboo.elastic.launching import main

if __name__ == "__main__":
    sys.exit(main())
