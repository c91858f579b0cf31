"""``import deepspeed_bamboo.launched`` as the first line of a script, for launchers that take no ``--module``.

Whatever starts the script (a codebase's own launcher, ``torchrun``, ``srun``, ``deepspeed``), each process that it
starts becomes an agent here, and the agent runs the script. In the script that the agent runs, and without a launcher,
the line does nothing.
"""

from __future__ import annotations

from deepspeed_bamboo.elastic import processes  # noqa: F401 - first: it remembers the parent, which may end any time
from deepspeed_bamboo.elastic.way_in import become_agent

become_agent()
