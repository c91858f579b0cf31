"""On a CPU, what otherwise only a GPU does.

Messages are used before they were seen, and are no numbers at all if they never come; shadows take their steps late.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from deepspeed_bamboo.runtime.comm.channel import Channel, Message, Meter
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError, PeerLostError
from deepspeed_bamboo.runtime.iteration.speculative_launch import Deferral
from deepspeed_bamboo.runtime.stock.shadow_steps import LateStep, ShadowSteps


class LateArrival:
    """Stands for :class:`deepspeed_bamboo.runtime.comm.nccl.Arrival`: ``error`` is what its wait will end with."""

    complete = None

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def confirm(self, interruption: Any) -> None:
        if self._error is not None:
            raise self._error

    def abort(self) -> None: ...


class _Deaf:
    """An interruption that is announced only after passes were launched: the latest moment possible."""

    def check(self) -> None: ...


def install() -> Counter[str]:
    """Do it in this process. Returns what is counted: messages ``used`` ahead, ``lost`` of those, ``late`` steps."""
    counts: Counter[str] = Counter()
    forms: dict[tuple[str, ...], tuple[Any, list[torch.Tensor]]] = {}
    receive = Channel.receive

    def receive_late(
        channel: Channel, *, unseen: str | None = None, started: str | None = None, meter: Meter | None = None
    ) -> Message:
        if unseen is None:
            return receive(channel)
        kind = tuple(unseen.split("/")[1:3])
        try:
            message = receive(channel)
        except (EpochChangedError, PeerLostError) as error:
            if kind not in forms:
                raise
            counts["used"] += 1
            counts["lost"] += 1
            data, tensors = forms[kind]
            garbage = [torch.full_like(t, float("nan") if t.is_floating_point() else 0) for t in tensors]
            return Message(unseen, data, garbage, arrival=LateArrival(error))  # type: ignore[arg-type]
        if message.key == unseen:
            counts["used"] += 1
            forms[kind] = message.data, message.tensors
            message.arrival = LateArrival(None)  # type: ignore[assignment]
        return message

    Channel.receive = receive_late  # type: ignore[method-assign]
    Deferral.on_host = True
    stock_init = Deferral.__init__

    def init(self: Deferral, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        self._interruption = _Deaf()  # type: ignore[assignment]

    Deferral.__init__ = init  # type: ignore[method-assign]
    _step_late(counts)
    return counts


def _step_late(counts: Counter[str]) -> None:
    launch = LateStep.launch

    def counted(step: LateStep) -> None:
        counts["late"] += 1
        launch(step)

    LateStep.launch = counted  # type: ignore[method-assign]
    ShadowSteps.active = True  # type: ignore[assignment,method-assign]
    ShadowSteps.covers = lambda self, replica: type(replica.attributes["optimizer"]) is BF16_Optimizer  # type: ignore[method-assign]
