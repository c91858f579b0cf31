"""The cases of the fault sweep: all can happen, none comes twice, none is missing."""

from __future__ import annotations

import itertools
import random

import pytest

from deepspeed_bamboo.config.section import parse_bamboo_section
from deepspeed_bamboo.faults import INSTRUCTIONS, RECOVERY_POINTS
from deepspeed_bamboo.sweep.cases import PROFILES, select
from deepspeed_bamboo.sweep.covering import pairwise
from deepspeed_bamboo.sweep.kinds import KINDS
from deepspeed_bamboo.sweep.setups import FACTORS, FIRST_SETUPS, MODE_SETUPS, STEPS, Setup, covering_setups, few_setups


@pytest.mark.parametrize("profile", PROFILES)
def test_every_case_can_happen(profile: str) -> None:
    for case in select(profile):
        case.faults.check(case.setup.grid, micro_batches=case.setup.micro_batches)
        assert case.faults.faults or case.outside
        assert all(fault.step < STEPS for fault in case.faults.faults), case.name


@pytest.mark.parametrize("profile", PROFILES)
def test_names_are_unique(profile: str) -> None:
    names = [case.name for case in select(profile)]
    assert len(set(names)) == len(names)


def test_first_covers_every_stage_instruction_and_step() -> None:
    def points(signal: str) -> set[tuple[object, ...]]:
        return {
            (case.setup.micro_batches, fault.step, fault.stage, fault.at, fault.micro_batch)
            for case in select("first")
            for fault in case.faults.faults
            if fault.signal == signal
        }

    expected = {
        (micro_batches, step, stage, at, micro_batch)
        for micro_batches in (4, 8)
        for step in (0, 5)
        for stage in range(4)
        for at in ("forward", "backward", "send_activation", "send_grad", "reduce", "step", "idle")
        for micro_batch in ([None] if at in ("reduce", "step", "idle") else [0, micro_batches // 2, micro_batches - 1])
        if (at, stage) not in (("send_activation", 3), ("send_grad", 0))
    }
    assert points("KILL") == expected
    assert {point[2] for point in points("STOP")} == {0, 1, 2, 3}


def test_quick_tries_every_stage_and_every_kind_of_instruction() -> None:
    faults = [fault for case in select("quick") for fault in case.faults.faults]
    assert {fault.stage for fault in faults} == {0, 1, 2, 3}
    assert {fault.at for fault in faults} == set(INSTRUCTIONS)
    assert {fault.signal for fault in faults} == {"KILL", "STOP"}
    assert len(faults) <= 8


def test_kills_from_outside_are_twenty_and_the_same_each_time() -> None:
    kills = [case.outside for case in select("random")]
    assert len(set(kills)) == 20
    assert kills == [case.outside for case in select("random")]
    assert {kill.rank for kill in kills if kill is not None} == {0, 1, 2, 3}


def test_the_full_profile_covers_every_pair_of_values_and_every_kind_of_loss() -> None:
    setups = {case.setup.name: set(case.setup.name.split("-")) for case in select("covering")}
    for one, other in itertools.combinations(FACTORS, 2):
        for pair in itertools.product(FACTORS[one], FACTORS[other]):
            if pair not in IMPOSSIBLE:
                assert any(set(pair) <= values for values in setups.values()), pair
    faults = [fault for case in select("covering") for fault in case.faults.faults]
    assert {fault.at for fault in faults} == {*INSTRUCTIONS, *RECOVERY_POINTS}
    assert {fault.attempt for fault in faults} == {0, 1}
    assert {len(case.faults.faults) for case in select("covering")} == {1, 2, 3}
    assert set(setups) <= {case.setup.name for case in select("full")}


def test_the_full_profile_has_jobs_that_start_on_few_workers() -> None:
    """Every value that can be, blocks of two and more, every kind of loss that is survived wherever stages are."""
    cases = select("few")
    assert len(cases) <= 60 and {case.name for case in cases} <= {case.name for case in select("full")}
    setups = few_setups()
    assert all(setup.workers == setup.few < len(setup.grid) for setup in setups)
    assert {case.setup for case in cases} == set(setups)
    names = {part for setup in setups for part in setup.name.split("-")}
    assert {value for name in FACTORS if name != "grid" for value in FACTORS[name]} - names == {"off"}
    faults = [fault for case in cases for fault in case.faults.faults]
    assert {len(case.faults.faults) for case in cases} == {1, 2, 3} and {"KILL", "STOP"} == {f.signal for f in faults}
    assert {fault.at for fault in faults} == set(INSTRUCTIONS)
    for case in cases:
        assert len({fault.step for fault in case.faults.faults}) == len(case.faults.faults) < case.setup.workers
        assert case.setup.whole.workers == len(case.setup.grid) and case.setup.whole.whole == case.setup.whole
        assert case.setup.settings({})["bamboo"]["topology"] == {"pipelines": case.setup.pipelines}


# Without shadows only another pipeline that holds all of the state survives; one stage can't have fewer micro-batches.
IMPOSSIBLE = {
    *(("off", precision) for precision in ("bf16", "fp32.zero1", "bf16.zero1", "fp16.zero1")),
    *((f"1x{stages}", "off") for stages in range(2, 7)),
    *((f"{pipelines}x1", "fewer") for pipelines in (2, 3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_loss_leave_out_what_nobody_survives(kind: str) -> None:
    numbers = random.Random(0)
    assert KINDS[kind](Setup("big", stages=4, pipelines=3), numbers) is not None
    alone = KINDS[kind](Setup("pair", stages=2), numbers)
    assert (alone is None) == (kind not in ("in-a-pass", "in-the-tail", "stopped"))


def test_pairwise_is_much_smaller_than_the_product_and_says_what_it_cannot_cover() -> None:
    factors = {name: [f"{name}{n}" for n in range(4)] for name in "abcd"}
    chosen = pairwise(factors)
    assert 16 <= len(chosen) <= 28 < 4**4
    with pytest.raises(ValueError, match="in no combination"):
        pairwise(factors, possible=lambda combination: len(combination) < 4)


def test_cases_are_selected_by_name() -> None:
    names = [case.name for case in select("first", only=["M8/KILL-0.2-*-step0", "M4/STOP-0.1-*"])]
    assert len(names) == 16
    assert all(name.startswith(("M8/KILL-0.2-", "M4/STOP-0.1-")) for name in names)
    assert select("first", only=["nothing"]) == []


@pytest.mark.parametrize(
    "setup", (*FIRST_SETUPS, *MODE_SETUPS, *covering_setups(), *few_setups()), ids=lambda setup: setup.name
)
def test_every_setup_is_a_valid_configuration(setup: Setup) -> None:
    base = {"optimizer": {"type": "Adam"}, "bamboo": {"coordinator": {"lease_seconds": 2}}}
    settings = setup.settings(base)
    config = parse_bamboo_section(settings["bamboo"])
    assert (config.redundancy.mode, config.coordinator.lease_seconds) == (setup.mode, 2)
    assert settings["gradient_accumulation_steps"] == setup.micro_batches
    assert settings["optimizer"] == base["optimizer"]
    assert base == {"optimizer": {"type": "Adam"}, "bamboo": {"coordinator": {"lease_seconds": 2}}}


def test_setups_have_names_of_their_own() -> None:
    names = [setup.name for setup in (*FIRST_SETUPS, *MODE_SETUPS, *covering_setups(), *few_setups())]
    assert len(set(names)) == len(names)
