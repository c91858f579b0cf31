"""Settings of the "bamboo" section that have no effect, since another one that they need is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from deepspeed_bamboo.config.section import BambooConfig

_NO_FOLDER = "without checkpoint.dir no checkpoints are written; set checkpoint.dir, too"
_NO_COPIES = "without checkpoint.memory_interval_seconds no memory checkpoints are made; set it, too"
_NOTHING_KEPT = "without checkpoint.dir and checkpoint.memory_interval_seconds no checkpoints are made; set one, too"


def idle_settings(config: BambooConfig) -> Iterator[str]:
    """A sentence for each setting that is written out and does nothing: value, rule and remedy.

    Nothing is said where the setting that is needed is written out as ``null``: there it is switched off on purpose.
    """
    if config.enabled:
        yield from _idle_checkpoints(config)
        yield from _idle_redundancy(config)
        if config.notices.source == "none":
            names = ("poll_seconds", *(("rebalance",) if config.notices.rebalance == "drain" else ()))
            yield from _idle(config.notices, "notices", names, 'source "none" asks nobody; set another source')


def _idle_checkpoints(config: BambooConfig) -> Iterator[str]:
    kept = config.checkpoint
    no_folder, no_copies = (_is_missing(kept, name) for name in ("dir", "memory_interval_seconds"))
    if no_folder:
        yield from _idle(kept, "checkpoint", ("interval_minutes", "keep"), _NO_FOLDER)
    if no_copies:
        yield from _idle(kept, "checkpoint", ("memory_copies", "memory_megabytes_per_second"), _NO_COPIES)
    if no_folder and no_copies:
        yield from _idle(kept, "checkpoint", ("memory_limit_gigabytes",), _NOTHING_KEPT)
    if no_folder and config.topology.wait_for_machines_seconds:
        why = "agents wait for machines only where there are checkpoints to start anew from; set checkpoint.dir, too"
        yield from _idle(config.topology, "topology", ("wait_for_machines_seconds",), why)


def _idle_redundancy(config: BambooConfig) -> Iterator[str]:
    redundancy = config.redundancy
    mode = redundancy.mode
    if config.policy == "proactive" and mode == "off":
        why = 'redundancy.mode is "off", in which nobody is taken in and no stage moves for speed; set another mode'
        yield from _idle(config, "", ("policy",), why)
    default = type(config).model_fields["policy_interval_seconds"].default
    if config.policy != "proactive" and config.policy_interval_seconds != default:
        why = f'policy {config.policy!r} counts nothing; set policy to "proactive"'
        yield from _idle(config, "", ("policy_interval_seconds",), why)
    if redundancy.losses_per_hour is not None and mode != "auto":
        yield from _idle(redundancy, "redundancy", ("losses_per_hour",), f'mode is {mode!r}; set mode to "auto"')
    if mode in ("off", "lazy"):
        why = f'mode is {mode!r}, in which nothing is computed for shadows ahead of a loss; set mode to "eager"'
        usual = type(redundancy).model_fields["offload"].default
        names = ("memory_limit_gigabytes", *(("offload",) if redundancy.offload != usual else ()))
        yield from _idle(redundancy, "redundancy", names, why)
    if mode == "off" and config.debug_check_shadows:
        yield from _idle(config, "", ("debug_check_shadows",), "mode is 'off' and keeps no shadows; set another mode")
    if redundancy.overlap and mode not in ("eager", "auto"):
        yield from _idle(redundancy, "redundancy", ("overlap",), f'mode is {mode!r}; set mode to "eager"')


def _is_missing(section: BaseModel, name: str) -> bool:
    return getattr(section, name) is None and name not in section.model_fields_set


def _idle(section: BaseModel, name: str, keys: tuple[str, ...], why: str) -> Iterator[str]:
    where = f"bamboo.{name}" if name else "bamboo"
    for key in keys:
        if key in section.model_fields_set and getattr(section, key) is not None:
            yield f"{where}.{key} is {getattr(section, key)!r} and has no effect: {why}, or leave {key} out"
