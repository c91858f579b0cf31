"""The first part of an iteration's end: reduce gradients over tied stages and over pipelines."""

from __future__ import annotations

from collections.abc import Callable

from deepspeed_bamboo.runtime.iteration.messages import IterationContext
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.stock.collectives import CallSet
from deepspeed_bamboo.runtime.stock.exchange import exchange_requests
from deepspeed_bamboo.runtime.stock.running_calls import RunningCalls
from deepspeed_bamboo.runtime.stock.stock_steps import StockSteps


class Reduction:
    """One worker's part of it, for all stages that it owns. Until the agreement it can be undone.

    Args:
        worker: whose stages.
        stock: what reduces.
        running: knows which of its calls runs.
    """

    def __init__(self, worker: Worker, *, stock: StockSteps, running: RunningCalls) -> None:
        self._worker = worker
        self._stock = stock
        self._running = running

    def reduce_tied(self, context: IterationContext) -> None:
        """Over the stages that share weights; first keep what undoes all reductions. Raises what interrupts a wait."""
        host = self._worker.host
        for replica in host.owners():
            host.activate(replica)
            replica.before_reduction = self._stock.remember_gradients()
        self._reduce(self._stock.reduce_tied, label=f"{context.activity}/tied", context=context)

    def reduce(self, context: IterationContext) -> None:
        """Over the pipelines. Raises what interrupts a wait."""
        for replica in self._worker.host.owners():
            self._worker.strike_if_scripted(replica.coordinate, "reduce")
        self._reduce(self._stock.reduce, label=f"{context.activity}/reduce", context=context)

    def undo(self) -> None:
        """Back to the gradients before the reduction."""
        for replica in self._worker.host.owners():
            if replica.before_reduction is not None:
                replica.before_reduction()
                replica.before_reduction = None

    def _reduce(self, function: Callable[[], None], *, label: str, context: IterationContext) -> None:
        worker = self._worker
        calls = CallSet(worker.host, worker.host.owners(), function, device=worker.device)
        try:
            with self._running.during(calls):
                calls.advance(None)
            while pending := calls.pending():
                answers = exchange_requests(
                    pending, links=worker.links, placement=context.placement, me=worker.me, label=label
                )
                with self._running.during(calls):
                    calls.advance(answers, later=pending.keys() - answers.keys())
        finally:
            calls.cancel()
