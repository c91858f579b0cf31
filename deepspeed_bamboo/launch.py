"""``deepspeed [launcher flags] --module deepspeed_bamboo.launch [--job NAME] train.py [its arguments]``."""

from __future__ import annotations

import sys

from deepspeed_bamboo.elastic import processes  # noqa: F401 - first: it remembers the parent, which may end any time

if __name__ == "__main__":
    from deepspeed_bamboo.elastic.launching import main

    sys.exit(main())
