"""What every store must do, shown on each of them: the one in memory and a real etcd."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from deepspeed_bamboo.coordination.errors import LeaseExpired
from deepspeed_bamboo.coordination.store import KeyValueStore, StoreEvent
from tests.coordination.helpers import Collector, unique_name, wait_until

OpenStore = Callable[[], KeyValueStore]


@pytest.fixture
def root() -> str:
    return f"/{unique_name()}/"


def test_a_value_comes_back_until_it_is_deleted(open_store: OpenStore, root: str) -> None:
    store = open_store()
    assert store.get(root + "a") is None
    store.put(root + "a", "ä\n{}")
    first = store.get(root + "a")
    assert first is not None and first.value == "ä\n{}" and first.revision > 0
    store.put(root + "a", "two")
    second = store.get(root + "a")
    assert second is not None and second.value == "two" and second.revision > first.revision
    assert store.delete(root + "a") is True
    assert store.delete(root + "a") is False
    assert store.get(root + "a") is None


def test_read_returns_the_prefix_in_key_order_and_nothing_else(open_store: OpenStore, root: str) -> None:
    store = open_store()
    for name in ("b", "a", "c/d"):
        store.put(f"{root}x/{name}", name)
    store.put(f"{root}xy", "a neighbour whose name begins alike")
    snapshot = store.read(f"{root}x/")
    assert [entry.key for entry in snapshot.entries] == [f"{root}x/a", f"{root}x/b", f"{root}x/c/d"]
    assert snapshot.revision >= max(entry.revision for entry in snapshot.entries)
    assert store.delete_prefix(f"{root}x/") == 3
    assert store.read(f"{root}x/").entries == ()
    assert store.get(f"{root}xy") is not None


def test_compare_and_swap_needs_the_right_revision(open_store: OpenStore, root: str) -> None:
    store = open_store()
    key = root + "k"
    assert store.compare_and_swap(key, "no", revision=5) is False
    assert store.compare_and_swap(key, "one", revision=0) is True
    assert store.compare_and_swap(key, "again", revision=0) is False
    entry = store.get(key)
    assert entry is not None and entry.value == "one"
    assert store.compare_and_swap(key, "two", revision=entry.revision) is True
    assert store.compare_and_swap(key, "three", revision=entry.revision) is False
    entry = store.get(key)
    assert entry is not None and entry.value == "two"


def test_a_guard_must_hold_too(open_store: OpenStore, root: str) -> None:
    store = open_store()
    assert store.compare_and_swap(root + "a", "1", revision=0, guard=(root + "b", 7)) is False
    assert store.compare_and_swap(root + "a", "1", revision=0, guard=(root + "b", 0)) is True
    store.put(root + "b", "x")
    guard = store.get(root + "b")
    assert guard is not None
    assert store.compare_and_swap(root + "c", "1", revision=0, guard=(root + "b", 0)) is False
    assert store.compare_and_swap(root + "c", "1", revision=0, guard=(root + "b", guard.revision)) is True


def test_of_many_swaps_at_once_one_wins(open_store: OpenStore, root: str) -> None:
    stores = [open_store() for _ in range(8)]
    together = threading.Barrier(len(stores))
    won: list[int] = []

    def compete(number: int) -> None:
        together.wait()
        if stores[number].compare_and_swap(root + "k", str(number), revision=0):
            won.append(number)

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entry = stores[0].get(root + "k")
    assert entry is not None and won == [int(entry.value)]


def test_a_watch_says_resync_first_then_every_change_in_order(open_store: OpenStore, root: str) -> None:
    watching, changing = open_store(), open_store()
    told: Collector[StoreEvent] = Collector()
    watch = watching.watch(root + "x/", told)
    told.wait_for(lambda event: event.kind == "resync")
    changing.put(root + "x/a", "1")
    changing.put(root + "other", "not told")
    changing.put(root + "x/a", "2")
    changing.delete(root + "x/a")
    changing.put(root + "x/b", "3")
    told.wait_for(lambda event: event.value == "3")
    changes = [(event.kind, event.key.removeprefix(root), event.value) for event in told.items[1:]]
    assert changes == [("put", "x/a", "1"), ("put", "x/a", "2"), ("delete", "x/a", ""), ("put", "x/b", "3")]
    revisions = [event.revision for event in told.items[1:]]
    assert revisions == sorted(revisions) and len(set(revisions)) == 4

    watch.stop()
    before = len(told.items)
    changing.put(root + "x/c", "too late")
    assert changing.get(root + "x/c") is not None
    assert len(told.items) == before


def test_a_watch_can_be_stopped_from_its_own_callback(open_store: OpenStore, root: str) -> None:
    store = open_store()
    told: Collector[StoreEvent] = Collector()
    stopped = threading.Event()

    def stop_at_first_put(event: StoreEvent) -> None:
        told(event)
        if event.kind == "put":
            watch.stop()
            stopped.set()

    watch = store.watch(root, stop_at_first_put)
    told.wait_for(lambda event: event.kind == "resync")
    store.put(root + "a", "1")
    assert stopped.wait(5)
    store.put(root + "b", "2")
    watch.stop()
    assert [event.value for event in told.items if event.kind == "put"] == ["1"]


def test_keys_vanish_with_a_lease_that_is_not_kept(open_store: OpenStore, root: str) -> None:
    store = open_store()
    told: Collector[StoreEvent] = Collector()
    store.watch(root, told)
    lease = store.grant_lease(1)
    store.put(root + "leased", "x", lease=lease)
    store.put(root + "free", "y")
    told.wait_for(lambda event: event.kind == "delete" and event.key == root + "leased", within_seconds=5)
    assert store.get(root + "leased") is None
    assert store.get(root + "free") is not None
    assert store.keep_alive(lease) is False
    with pytest.raises(LeaseExpired):
        store.put(root + "leased", "x", lease=lease)
    with pytest.raises(LeaseExpired):
        store.compare_and_swap(root + "leased", "x", revision=0, lease=lease)


def test_a_lease_lives_while_it_is_kept_and_ends_when_revoked(open_store: OpenStore, root: str) -> None:
    store = open_store()
    told: Collector[StoreEvent] = Collector()
    store.watch(root, told)
    lease = store.grant_lease(1)
    assert store.compare_and_swap(root + "leased", "x", revision=0, lease=lease) is True
    stop = threading.Event()
    kept: list[bool] = []

    def keep() -> None:
        while not stop.wait(0.25):
            kept.append(store.keep_alive(lease))

    keeper = threading.Thread(target=keep)
    keeper.start()
    wait_until(lambda: len(kept) >= 8, what="a lease kept for twice its length")
    stop.set()
    keeper.join()
    assert all(kept)
    assert store.get(root + "leased") is not None
    store.revoke(lease)
    told.wait_for(lambda event: event.kind == "delete", within_seconds=1)
    store.revoke(lease)
    assert store.get(root + "leased") is None


def test_a_key_put_again_without_lease_outlives_it(open_store: OpenStore, root: str) -> None:
    store = open_store()
    lease = store.grant_lease(5)
    store.put(root + "k", "leased", lease=lease)
    store.put(root + "k", "free")
    store.revoke(lease)
    entry = store.get(root + "k")
    assert entry is not None and entry.value == "free"
