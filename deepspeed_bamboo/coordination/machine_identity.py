"""Whether two processes run on one machine, so that one can look at the other, whatever names their machines bear."""

from __future__ import annotations

from pathlib import Path


def own_machine() -> str:
    """The same text in all processes that see each other's process numbers, and another one in all others.

    Made of the kernel's boot and the pid namespace (a container). Empty, which equals nothing, if they can't be read.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""
