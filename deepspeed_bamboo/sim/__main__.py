"""`python -m deepspeed_bamboo.sim` is `ds_bamboo simulate`."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
