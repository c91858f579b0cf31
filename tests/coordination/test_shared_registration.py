"""How often a worker's key is renewed by its agent, whose settings may have another lease than the worker's."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.coordination.shared_registration import (
    LEASE_SECONDS,
    Conditions,
    SharedRegistration,
    renewal_seconds,
)

ALWAYS = Conditions(may_stay=lambda: True, may_return=lambda: True, in_charge=lambda: True)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = MemoryStore()
    yield made
    made.close()


def test_an_agent_with_a_longer_lease_renews_as_often_as_the_worker_needs(store: MemoryStore) -> None:
    SharedRegistration(store, key="/w", lease_seconds=3.0, conditions=ALWAYS).enter('{"worker":"w"}')
    entry = store.get("/w")
    assert entry is not None and json.loads(entry.value)[LEASE_SECONDS] == 3.0
    assert renewal_seconds(entry.value, own_lease_seconds=15.0) == pytest.approx(1.0)
    assert renewal_seconds(entry.value, own_lease_seconds=1.5) == pytest.approx(0.5)


def test_before_the_worker_has_come_its_agent_looks_often() -> None:
    assert renewal_seconds(None, own_lease_seconds=600.0) < 1.0


@pytest.mark.parametrize("value", ['{"lease":1}', '{"lease":1,"lease_seconds":"x"}', '{"lease":1,"lease_seconds":-1}'])
def test_without_a_sensible_lease_in_the_key_the_own_one_counts(value: str) -> None:
    assert renewal_seconds(value, own_lease_seconds=3.0) == pytest.approx(1.0)
