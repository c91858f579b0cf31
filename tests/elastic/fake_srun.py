"""Stands in for ``srun``: starts so many tasks of one node with the variables that SLURM sets, and waits for them.

``python -m tests.elastic.fake_srun N COMMAND...``: as ``srun --ntasks N COMMAND...``.
"""

from __future__ import annotations

import os
import subprocess
import sys

if __name__ == "__main__":
    tasks, command = int(sys.argv[1]), sys.argv[2:]
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    started = [
        subprocess.Popen(command, env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
        for rank in range(tasks)
    ]
    sys.exit(max(task.wait() for task in started))
