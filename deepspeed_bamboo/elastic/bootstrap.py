"""What a worker process runs before and around its real entry point.

``python -u -m deepspeed_bamboo.elastic.bootstrap MODULE ARGUMENTS...`` is ``python -u -m MODULE
ARGUMENTS...``, except that the process ends with its agent, that an uncaught exception goes to
the agent (which prints it with worker and rank) instead of being printed here, and that a process
which failed cannot linger in its exit handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType

from deepspeed_bamboo.elastic.error_report import write_report
from deepspeed_bamboo.elastic.orphans import die_with_agent
from deepspeed_bamboo.protocol import NOTICE_SIGNALS, STACK_FILE, STACK_SIGNAL

_LINGER_SECONDS = 2.0


def main() -> None:
    """Run the module named on the command line. Ends the process as that module would."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m deepspeed_bamboo.elastic.bootstrap MODULE ARGUMENTS...")
    del sys.argv[0]
    module = sys.argv[0]
    code = guarded(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))
    run_exit_handlers()
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own teardown comes after that. A thread that sits in torch's C++ code aborts the process in it.
    os._exit(code)


def run_exit_handlers() -> None:
    """What the interpreter would do first at its end, which ``os._exit`` leaves out."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()


def guarded(function: Callable[[], object]) -> int:
    """Call ``function``; returns the exit code that the process should end with.

    When that is not 0, the process will end within two seconds even if an exit handler or a thread
    that is no daemon hangs, because its peers wait for news of it.
    """
    die_with_agent()
    _leave_notices_to_agent()
    _show_stack_when_asked()
    code = _call(function, _Interrupts())
    if code != 0:
        timer = threading.Timer(_LINGER_SECONDS, os._exit, args=(code,))
        timer.daemon = True
        timer.start()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


class _Interrupts:
    """Whether this process was interrupted, as by Ctrl-C. A script that raises KeyboardInterrupt itself was not."""

    def __init__(self) -> None:
        self._came = False
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)

    @property
    def came(self) -> bool:
        """Whether one came, or may have come where the script has a handler of its own."""
        return self._came or signal.getsignal(signal.SIGINT) != self._note

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        signal.default_int_handler(number, frame)


def _call(function: Callable[[], object], interrupts: _Interrupts) -> int:
    try:
        function()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        _report(f"{leaving.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - the user's bug, whatever it is: handed on, then the process ends
        if isinstance(error, KeyboardInterrupt) and interrupts.came:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)  # so that the agent sees what it was
        _report("".join(traceback.format_exception(type(error), error, _of_the_user(error.__traceback__))))
        return 1
    return 0


def _leave_notices_to_agent() -> None:
    """A scheduler signals all processes of a node; those that mean a notice are the agent's business.

    A handler that the script sets later is its own business.
    """
    for text in os.environ.get(NOTICE_SIGNALS, "").split(","):
        if text:
            signal.signal(int(text), signal.SIG_IGN)


def _show_stack_when_asked() -> None:
    """Have C code write the main thread's stack for the agent: it works while Python code can't run any more."""
    path = os.environ.get(STACK_FILE)
    if path:
        with contextlib.suppress(OSError):  # the agent has gone
            stream = open(path, "a", encoding="utf-8")  # noqa: PTH123, SIM115 - faulthandler keeps it open
            faulthandler.register(STACK_SIGNAL, file=stream, all_threads=False)


def _report(text: str) -> None:
    if not write_report(text):
        sys.stderr.write(text)


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` without the frames that led to the script, if anything is left then."""
    machinery = (__file__, runpy.__file__, "<frozen runpy>")
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in machinery:
        rest = rest.tb_next
    return rest if rest is not None else trace


if __name__ == "__main__":
    main()
