"""Which line of a script calls ``torch.distributed`` now."""

from __future__ import annotations

import inspect
import traceback
from typing import NamedTuple

_LIBRARIES = ("torch", "deepspeed", "deepspeed_bamboo")
_DISTRIBUTED = "torch.distributed.distributed_c10d"
_WITHOUT_RESULT = ("barrier", "monitored_barrier")


class ScriptCall(NamedTuple):
    """``name`` is the function of ``torch.distributed``, ``where`` the script's line; empty where it isn't known."""

    name: str
    where: str

    @property
    def decides(self) -> bool:
        """Whether a script may decide by what the call returns."""
        return self.name not in _WITHOUT_RESULT


def script_call() -> ScriptCall:
    """The collective that this thread is in, as the script called it."""
    name, where = "a collective", ""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        module = str(frame.f_globals.get("__name__", ""))
        if module == _DISTRIBUTED:
            name = frame.f_code.co_name
        elif module.partition(".")[0] not in _LIBRARIES:
            where = f"{frame.f_code.co_filename}:{line}"
            break
    return ScriptCall(name, where)
