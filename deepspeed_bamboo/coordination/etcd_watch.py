"""A watch on a prefix in etcd that survives its server, and says when it may have missed something."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from etcd3 import etcdrpc, utils

from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable
from deepspeed_bamboo.coordination.etcd_connection import EtcdConnection, Stubs
from deepspeed_bamboo.coordination.store import StoreEvent

logger = logging.getLogger(__name__)

# A server asked once a second for a sign of life that stays silent this long is taken for dead.
_ASK_SECONDS = 1.0
_SILENCE_SECONDS = 4.0
_RETRY_SECONDS = 0.1


class EtcdWatch:
    """Runs until :meth:`stop`. ``on_event`` is called from one thread, in order.

    Every new stream begins with a ``resync``: what happened before it is to be read, what happens
    after it is delivered. The stream is bound to a server with a leader (``hasleader``), so one
    that is cut off from its cluster is left for another.
    """

    def __init__(self, connection: EtcdConnection, prefix: str, on_event: Callable[[StoreEvent], None]) -> None:
        self._connection = connection
        self._prefix = prefix
        self._on_event = on_event
        self._stopped = threading.Event()
        self._call: Any = None
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="bamboo-etcd-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._call is not None:
            self._call.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                stubs = self._connection.pick()
            except CoordinatorUnavailable:
                return  # the store was closed
            try:
                self._stream(stubs)
                reason = "the server ended the watch"
            except grpc.RpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            if not self._stopped.is_set():
                logger.info("watch of %s interrupted (%s), watching again", self._prefix, reason)
                stubs.forget_token()
                self._connection.pass_over(stubs, renew=True)
                self._stopped.wait(_RETRY_SECONDS)

    def _stream(self, stubs: Stubs) -> None:
        self._heard = time.monotonic()
        ended = threading.Event()
        call = stubs.watch.Watch(self._requests(ended), metadata=(("hasleader", "true"),))
        self._call = call
        if self._stopped.is_set():
            call.cancel()
        try:
            for response in call:
                self._heard = time.monotonic()
                if response.canceled:
                    return
                if response.created:
                    self._deliver(StoreEvent("resync"))
                for event in response.events:
                    self._deliver(_event(event))
        finally:
            ended.set()
            call.cancel()

    def _requests(self, ended: threading.Event) -> Iterator[Any]:
        """What grpc's sending thread asks for: the watch, then a sign of life now and then."""
        key = self._prefix.encode()
        create = etcdrpc.WatchCreateRequest(key=key, range_end=utils.prefix_range_end(key))
        yield etcdrpc.WatchRequest(create_request=create)
        while not ended.wait(_ASK_SECONDS) and not self._stopped.is_set():
            if time.monotonic() - self._heard > _SILENCE_SECONDS and self._call is not None:
                self._call.cancel()
                return
            yield etcdrpc.WatchRequest(progress_request=etcdrpc.WatchProgressRequest())

    def _deliver(self, event: StoreEvent) -> None:
        if not self._stopped.is_set():
            self._on_event(event)


def _event(event: Any) -> StoreEvent:
    key = event.kv.key.decode(errors="replace")
    if event.type == event.DELETE:
        return StoreEvent("delete", key, "", event.kv.mod_revision)
    return StoreEvent("put", key, event.kv.value.decode(errors="replace"), event.kv.mod_revision)
