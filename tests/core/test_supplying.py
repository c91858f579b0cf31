"""Who sends whom the data of a pipeline's ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.supplying import (
    Claim,
    Delivery,
    by_iterator_first,
    deliveries,
    read_with_messages,
    trusted,
    unlike,
    unsafe_ends,
)

GRID = Grid(1, 4)
MEMBERS = ["a", "b", "c", "d"]
ENDS = {"a": (0,), "b": (), "c": (), "d": (0,)}


def after(*lost: str) -> tuple[Placement, list[str]]:
    placement, members = Placement.initial(GRID, MEMBERS), list(MEMBERS)
    for worker in lost:
        members.remove(worker)
        left, _ = placement.without([worker])
        assert left is not None
        placement = left.protected(members)
    return placement, members


def test_nothing_is_sent_while_the_ends_have_data() -> None:
    placement, members = after()
    assert deliveries(placement, ENDS, members=members, beforehand=False) == ()
    assert list(unsafe_ends(placement, ENDS, members=members)) == []


def test_a_shadow_that_is_computed_beforehand_gets_labels() -> None:
    placement, members = after()
    assert deliveries(placement, ENDS, members=members, beforehand=True) == (Delivery("a", "c", 0, False, True),)


def test_whoever_takes_the_last_stage_over_gets_labels_from_the_first() -> None:
    placement, members = after("d")
    assert placement.owner(Coordinate(0, 3)) == "c"
    assert deliveries(placement, ENDS, members=members, beforehand=False) == (Delivery("a", "c", 0, False, True),)
    placement, members = after("d", "a")
    with pytest.raises(LookupError) as raised:
        deliveries(placement, ENDS, members=members, beforehand=False)
    assert isinstance(raised.value.args[0], Coordinate)


def test_an_end_whose_owner_alone_has_data_is_unsafe() -> None:
    placement, members = after()
    assert list(unsafe_ends(placement, {"a": (0,)}, members=members)) == [Coordinate(0, 0)]
    two = Placement.initial(Grid(2, 1), ["a", "b"])
    alone = {"a": (0,), "b": (1,)}
    assert list(unsafe_ends(two, alone, members=["a", "b"])) == [Coordinate(0, 0), Coordinate(1, 0)]


@given(st.integers(1, 2), st.integers(1, 4), st.data())
def test_every_end_has_data_or_is_sent_it_once(pipelines: int, stages: int, data: st.DataObject) -> None:
    grid = Grid(pipelines, stages)
    members = [f"w{n}" for n in range(data.draw(st.integers(1, len(grid))))]
    placement = Placement.initial(grid, members)
    has = st.sets(st.integers(0, pipelines - 1)).map(tuple)
    table = {worker: data.draw(has) for worker in members}
    beforehand = data.draw(st.booleans())
    try:
        planned = deliveries(placement, table, members=members, beforehand=beforehand)
    except LookupError as error:
        assert not any(error.args[0].pipeline in table[worker] for worker in members)
        return
    sent = {(d.receiver, d.pipeline): d for d in planned}
    assert len(sent) == len(planned)
    for coordinate, worker in (*placement.owners, *(placement.shadows if beforehand else ())):
        if coordinate.stage not in (0, stages - 1) or coordinate.pipeline in table[worker]:
            continue
        delivery = sent[worker, coordinate.pipeline]
        assert coordinate.pipeline in table[delivery.feeder]
        assert delivery.inputs if coordinate.stage == 0 else delivery.labels


def test_whoever_is_there_at_the_start_is_taken_at_its_word() -> None:
    claims = {"a": Claim((0,), (), {0: 1}), "b": Claim((0,), (), {0: 2}), "c": Claim((), (), {})}
    assert trusted(claims) == {"a": (0,), "b": (0,), "c": ()}


@pytest.mark.parametrize(
    ("first", "several", "guesses", "kept"),
    [
        ({0: 1}, False, True, (0,)),  # one iterator, at the same place
        ({0: 2}, False, True, ()),  # an evaluation, or the script, has taken from it
        ({0: -1}, False, True, ()),  # it has ended
        ({0: 1}, True, True, ()),  # the next one may begin at another step
        ({0: 1}, True, False, (0,)),  # the script has passed them all
        ({0: 2}, False, False, ()),
        ({}, True, True, ()),
        ({}, False, False, (0,)),  # made from the step
    ],
)
def test_a_newcomer_has_data_if_it_is_what_the_others_have(
    first: dict[int, int], several: bool, guesses: bool, kept: tuple[int, ...]
) -> None:
    known = ("a", "b")
    claims = {
        "a": Claim((0,), known, {0: 1}, several=several),
        "b": Claim((), known, {}),
        "new": Claim((0,), (), first, guesses=guesses),
    }
    assert trusted({w: Claim.from_json(its.to_json()) for w, its in claims.items()}) == {
        "a": (0,),
        "b": (),
        "new": kept,
    }


def test_where_nobody_else_has_iterators_newcomers_are_believed() -> None:
    claims = {"a": Claim((0,), ("a",), {}), "new": Claim((0,), (), {0: 7}, guesses=True)}
    assert trusted(claims)["new"] == (0,)


def test_iterators_that_begin_with_other_micro_batches_are_named() -> None:
    firsts: list[dict[int, int]] = [{0: 7, 1: 3}, {}, {0: 7}, {0: 8, 1: 3}, {0: 9}]
    claims = {worker: Claim(tuple(first), (), first) for worker, first in zip("abcde", firsts, strict=True)}
    assert unlike(claims) == {0: ("a", "d")}
    assert unlike({worker: claims[worker] for worker in "abc"}) == {}


def test_an_end_that_is_read_with_messages_needs_a_holder_of_its_shadow_that_takes_part() -> None:
    placement, _ = after()
    talks, silent = Claim((0,), (), {}, exchanges=True), Claim((0,), (), {})
    idle, listens = Claim((), (), {}), Claim((), (), {}, exchanges=True)
    ends = {"a": talks, "b": idle, "c": idle, "d": talks}
    found = list(read_with_messages(placement, {w: Claim.from_json(its.to_json()) for w, its in ends.items()}))
    assert found == [(Coordinate(0, 3), "d", "c")], "the first stage's is with the last, which reads, too"
    for one in (talks, silent, listens):
        assert not list(read_with_messages(placement, {**ends, "c": one}))
    assert not list(read_with_messages(placement, {**ends, "d": silent}))
    assert not list(read_with_messages(placement, {**ends, "d": listens}))


def test_a_factory_counts_only_where_no_member_has_an_iterator() -> None:
    every = dict.fromkeys(MEMBERS, (0, 1, 2))
    iterators = {"a": (0,), "b": (), "c": (1,), "d": (1,)}
    table = by_iterator_first(iterators, every, pipelines=3, members=MEMBERS)
    assert table == {"a": {0, 2}, "b": {2}, "c": {1, 2}, "d": {1, 2}}
    left = by_iterator_first(iterators, every, pipelines=3, members=["b", "c"])
    assert left == {"b": {0, 2}, "c": {0, 1, 2}}
    assert by_iterator_first(iterators, iterators, pipelines=3, members=["b"]) == {"b": set()}
