"""Which line of a script calls ``torch.distributed`` now."""

from __future__ import annotations

import inspect
import traceback
from typing import NamedTuple

from deepspeed_bamboo.errors import ConfigError

_LIBRARIES = ("torch", "deepspeed", "deepspeed_bamboo")
_DISTRIBUTED = "torch.distributed.distributed_c10d"
_INSIDE = {"train": "an iteration", "evaluate": "an evaluation", "data": "an iteration"}
_WITHOUT_RESULT = ("barrier", "monitored_barrier")


class ScriptCall(NamedTuple):
    """``name`` is the function that the script calls, ``where`` its line; empty where it isn't known."""

    name: str
    where: str

    @property
    def decides(self) -> bool:
        """Whether a script may decide by what the call returns."""
        return self.name not in _WITHOUT_RESULT


def script_call(called: str = "") -> ScriptCall:
    """The collective that this thread is in, as the script called it; ``called``: where it is the engine's."""
    name, where = called or "a collective", ""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        module = str(frame.f_globals.get("__name__", ""))
        if module == _DISTRIBUTED and not called:
            name = frame.f_code.co_name
        elif module.partition(".")[0] not in _LIBRARIES:
            where = f"{frame.f_code.co_filename}:{line}"
            break
    return ScriptCall(name, where)


def refuse_inside(activity: str | None, *, call: str = "") -> None:
    """Raise ConfigError where the script calls something collective within an ``activity`` of the plugin.

    There it would be called by whoever hosts a stage, for each of its stages, and once more where a forward is done
    again. ``call``: its name, where it is none of ``torch.distributed``.
    """
    if activity is None:
        return
    name, where = script_call()
    raise ConfigError(
        f"{call or name} was called inside {_INSIDE.get(activity, repr(activity))}{where and f', at {where}'}: in a "
        "layer, the loss function, a hook or the data iterator. After a loss fewer workers would take part in it than "
        "before, so results would be others. Call it between iterations (before or after train_batch and eval_batch), "
        "let each stage do with its own values (BatchNorm in place of SyncBatchNorm), or run this model without the "
        'plugin ("bamboo": {"enabled": false})'
    )
