"""The store on real etcd servers, through the v3 API (the v2 API is gone from etcd 3.6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from etcd3 import etcdrpc, utils

from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.errors import LeaseExpired
from deepspeed_bamboo.coordination.etcd_connection import EtcdConnection, Stubs
from deepspeed_bamboo.coordination.etcd_watch import EtcdWatch
from deepspeed_bamboo.coordination.guard import EtcdGuard
from deepspeed_bamboo.coordination.store import Entry, Snapshot, StoreEvent


class EtcdStore:
    """A KeyValueStore on ``endpoints``. Safe to use from any number of threads.

    A call tries for ``call_timeout_seconds``, each single attempt at most ``attempt_timeout_seconds``
    before the next endpoint has its turn. Nothing is connected before the first call.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        call_timeout_seconds: float = 5.0,
        attempt_timeout_seconds: float = 1.0,
        guard: EtcdGuard | None = None,
    ) -> None:
        """``guard``: for servers with encryption or passwords. Raises EndpointError for a file of it."""
        self._connection = EtcdConnection(
            endpoints,
            call_timeout_seconds=call_timeout_seconds,
            attempt_timeout_seconds=attempt_timeout_seconds,
            guard=guard,
        )
        self._watches: list[EtcdWatch] = []

    def ping(self, *, within_seconds: float) -> None:
        """Return once a server answers. Raises CoordinatorUnavailable when none does in time."""
        request = etcdrpc.RangeRequest(key=b"\0", count_only=True)

        def ask(stubs: Stubs, timeout: float) -> None:
            try:
                stubs.kv.Range(request, timeout=timeout)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.PERMISSION_DENIED:  # which is an answer, too
                    raise

        self._connection.call(ask, budget_seconds=within_seconds)

    def get(self, key: str) -> Entry | None:
        answer = self._range(etcdrpc.RangeRequest(key=key.encode()))
        return _entry(answer.kvs[0]) if answer.kvs else None

    def read(self, prefix: str) -> Snapshot:
        answer = self._range(etcdrpc.RangeRequest(key=prefix.encode(), range_end=_end(prefix)))
        return Snapshot(tuple(sorted(map(_entry, answer.kvs), key=lambda e: e.key)), answer.header.revision)

    def put(self, key: str, value: str, *, lease: int | None = None) -> None:
        request = etcdrpc.PutRequest(key=key.encode(), value=value.encode(), lease=lease or 0)
        try:
            self._connection.call(lambda stubs, timeout: stubs.kv.Put(request, timeout=timeout))
        except grpc.RpcError as error:
            raise LeaseExpired(lease or 0) from error

    def compare_and_swap(
        self, key: str, value: str, *, revision: int, lease: int | None = None, guard: tuple[str, int] | None = None
    ) -> bool:
        raw, encoded = key.encode(), value.encode()
        put = etcdrpc.PutRequest(key=raw, value=encoded, lease=lease or 0)
        request = etcdrpc.TxnRequest(
            compare=[_at_revision(*pair) for pair in [(key, revision), *([guard] if guard else [])]],
            success=[etcdrpc.RequestOp(request_put=put)],
            failure=[etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=raw))],
        )
        try:
            answer, repeated = self._connection.call(lambda stubs, timeout: stubs.kv.Txn(request, timeout=timeout))
        except grpc.RpcError as error:
            raise LeaseExpired(lease or 0) from error
        if answer.succeeded:
            return True
        # An attempt that got no answer may have been the one that made this one fail.
        present = answer.responses[0].response_range.kvs
        return bool(repeated and present and present[0].value == encoded)

    def delete(self, key: str) -> bool:
        return self._delete(etcdrpc.DeleteRangeRequest(key=key.encode())) > 0

    def delete_prefix(self, prefix: str) -> int:
        return self._delete(etcdrpc.DeleteRangeRequest(key=prefix.encode(), range_end=_end(prefix)))

    def watch(self, prefix: str, on_event: Callable[[StoreEvent], None]) -> EtcdWatch:
        watch = EtcdWatch(self._connection, prefix, on_event)
        self._watches.append(watch)
        return watch

    def grant_lease(self, seconds: float) -> int:
        """etcd counts whole seconds, and no fewer than 1.5 times its election timeout."""
        request = etcdrpc.LeaseGrantRequest(TTL=max(1, math.ceil(seconds)))
        answer, _ = self._connection.call(lambda stubs, timeout: stubs.lease.LeaseGrant(request, timeout=timeout))
        return int(answer.ID)

    def keep_alive(self, lease: int) -> bool:
        request = etcdrpc.LeaseKeepAliveRequest(ID=lease)
        answer, _ = self._connection.call(
            lambda stubs, timeout: next(stubs.lease.LeaseKeepAlive(iter([request]), timeout=timeout), None)
        )
        return answer is not None and bool(answer.TTL > 0)

    def revoke(self, lease: int) -> None:
        request = etcdrpc.LeaseRevokeRequest(ID=lease)
        try:
            self._connection.call(lambda stubs, timeout: stubs.lease.LeaseRevoke(request, timeout=timeout))
        except grpc.RpcError:
            return  # NOT_FOUND: it has ended already, which is what was asked for

    def compact(self) -> None:
        """etcd knows no compaction of some keys alone: this concerns all that it holds."""
        revision = self._range(etcdrpc.RangeRequest(key=b"\0", count_only=True)).header.revision
        request = etcdrpc.CompactionRequest(revision=revision)

        def ask(stubs: Stubs, timeout: float) -> None:
            try:
                stubs.kv.Compact(request, timeout=timeout)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.OUT_OF_RANGE:  # another has done so
                    raise

        self._connection.call(ask)

    def database_bytes(self) -> int:
        """How large the file of a server is; where it reaches the server's quota, nothing more can be written."""
        request = etcdrpc.StatusRequest()
        answer, _ = self._connection.call(lambda stubs, timeout: stubs.maintenance.Status(request, timeout=timeout))
        return int(answer.dbSize)

    def close(self) -> None:
        self._connection.close()
        for watch in self._watches:
            watch.stop()

    def _range(self, request: Any) -> Any:
        answer, _ = self._connection.call(lambda stubs, timeout: stubs.kv.Range(request, timeout=timeout))
        return answer

    def _delete(self, request: Any) -> int:
        answer, _ = self._connection.call(lambda stubs, timeout: stubs.kv.DeleteRange(request, timeout=timeout))
        return int(answer.deleted)


def _at_revision(key: str, revision: int) -> Any:
    return etcdrpc.Compare(
        result=etcdrpc.Compare.EQUAL, target=etcdrpc.Compare.MOD, key=key.encode(), mod_revision=revision
    )


def _end(prefix: str) -> bytes:
    return bytes(utils.prefix_range_end(prefix.encode()))


def _entry(kv: Any) -> Entry:
    return Entry(kv.key.decode(errors="replace"), kv.value.decode(errors="replace"), kv.mod_revision)
