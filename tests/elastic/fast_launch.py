"""``deepspeed_bamboo.launch`` with workers that start fast, and agents that soon say which slots are missing."""

from __future__ import annotations

import sys

from deepspeed_bamboo.elastic import gathering, launching

if __name__ == "__main__":
    launching.WORKER_MODULE = "tests.elastic.run_script"
    gathering._FIRST_WORD_SECONDS = 2.0
    sys.exit(launching.main())
