"""What an agent and its worker share: names of environment variables, and exit codes. Each stands here only."""

from __future__ import annotations

import signal

# ---- what an agent puts into the environment of its worker ---------------------------------------------------

JOB = "BAMBOO_JOB"  # the job's name
ENDPOINTS = "BAMBOO_ENDPOINTS"  # host:port of the job's etcd servers, comma-separated
PREFIX = "BAMBOO_PREFIX"  # where the job's keys are in etcd
WORKER = "BAMBOO_WORKER"  # the worker's identity in the job
GENERATION = "BAMBOO_GENERATION"  # how often all workers have started again before training
JOINING = "BAMBOO_JOINING"  # "1" for a worker that joins a running job
PIPELINES = "BAMBOO_PIPELINES"  # topology.pipelines, where it is set
REACHED = "BAMBOO_REACHED"  # how many steps the job had complete, in workers that start it anew
AGENT_PID = "BAMBOO_AGENT_PID"  # the worker ends when this process does
ERROR_FILE = "BAMBOO_ERROR_FILE"  # where the worker writes its traceback
PULSE_FILE = "BAMBOO_PULSE_FILE"  # where the worker notes what it does, see pulse.py
STACK_FILE = "BAMBOO_STACK_FILE"  # where the worker's stack is written when it is sent STACK_SIGNAL
NOTICE_SIGNALS = "BAMBOO_NOTICE_SIGNALS"  # signals that the worker ignores, since its agent handles them
SECRET = "BAMBOO_SECRET"  # the job's secret; who has it is a part of the job
ETCD_PREFIX = "BAMBOO_ETCD_"  # begins the names of what a guarded etcd asks for

START_DIRECTORY = "BAMBOO_START_DIRECTORY"  # where the job was started: what relative paths of its settings mean
OTHER_ENGINES = "BAMBOO_OTHER_ENGINES"  # what to do about engines that are not the plugin's: other_engines

BY_IMPORT = "BAMBOO_BY_IMPORT"  # "1": the script itself has started the launch module, by an import
RUN_PLAIN = "BAMBOO_RUN_PLAIN"  # "1": that launch module has found the plugin off, and runs the bare script

# What `ds_bamboo run` puts into the environment of its command: a folder for the notes of its slots, see outcome.py.
OUTCOME = "BAMBOO_OUTCOME"
# Since when (seconds of the epoch) the command wants its job done: one that is complete since then is not begun anew.
SINCE = "BAMBOO_SINCE"
# The fleet that this machine belongs to: its start script says so.
FLEET = "BAMBOO_FLEET"

# Sent to a worker that stands still. A handler in C writes the main thread's Python stack to STACK_FILE.
STACK_SIGNAL = int(signal.SIGRTMIN) + 9

# ---- what users may set, and agents pass to their workers ----------------------------------------------------

NODE = "BAMBOO_NODE"  # this machine's name; default: its host name
ZONE = "BAMBOO_ZONE"  # the zone that this machine is in
ADDRESS = "BAMBOO_ADDRESS"  # the address under which others reach this machine
SECRET_FILE = "BAMBOO_SECRET_FILE"  # a file with the secret that the machines of a job share
FAULTS = "BAMBOO_FAULTS"  # a JSON file with scripted faults
NOTICES = "BAMBOO_NOTICES"  # a JSON file with scripted notices
CONFIG = "BAMBOO_CONFIG"  # a DeepSpeed JSON with the section, for scripts whose own configuration has none
OPTIONS = "BAMBOO_OPTIONS"  # of the launch module, for scripts that import deepspeed_bamboo.launched
STANDALONE = "BAMBOO_STANDALONE"  # "1": workers without launcher and agents

# ---- exit codes of a worker ----------------------------------------------------------------------------------

EXIT_USER_ERROR = 1  # the script failed
EXIT_JOB_FAILED = 3  # the job failed elsewhere
EXIT_EXPELLED = 4  # the job went on without this worker
EXIT_DRAINED = 5  # this worker left at a boundary, as it was asked to

# ---- exit code of an agent, and so of its launcher -----------------------------------------------------------

# Machines were wanting, and the script did nothing wrong: the same command, given again, may do better (EX_TEMPFAIL
# of sysexits.h).
EXIT_TRY_AGAIN = 75
