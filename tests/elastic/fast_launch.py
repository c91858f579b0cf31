"""``deepspeed_bamboo.launch`` with workers that start fast."""

from __future__ import annotations

import sys

from deepspeed_bamboo.elastic import launching

if __name__ == "__main__":
    launching.WORKER_MODULE = "tests.elastic.run_script"
    sys.exit(launching.main())
