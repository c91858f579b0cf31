"""Scripted faults: reading, refusing, fitting to a grid, firing once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.coordination.keys import check_name
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.faults import INSTRUCTIONS, PER_MICRO_BATCH, RECOVERY_POINTS, SIGNALS, Fault, FaultScript

COUNT = st.integers(0, 9)


@st.composite
def a_fault(draw: st.DrawFn) -> Fault:
    at = draw(st.sampled_from(INSTRUCTIONS + RECOVERY_POINTS))
    signal = draw(st.sampled_from(SIGNALS))
    return Fault(
        step=draw(COUNT),
        pipeline=draw(COUNT),
        stage=draw(COUNT),
        at=at,
        micro_batch=draw(COUNT) if at in PER_MICRO_BATCH else None,
        signal=signal,
        seconds=draw(st.floats(0, 1000)) if signal == "NOTICE" else None,
        attempt=draw(COUNT),
    )


@given(st.lists(a_fault(), unique=True))
def test_text_form_reads_back_equal(faults: list[Fault]) -> None:
    script = FaultScript(tuple(faults))
    assert FaultScript.parse(json.loads(json.dumps(script.to_json()))) == script


@given(a_fault(), a_fault())
def test_names_tell_faults_apart(one: Fault, other: Fault) -> None:
    assert (one.name == other.name) == (replace(one, seconds=None) == replace(other, seconds=None))
    assert check_name(one.name, what="fault") == one.name


@given(st.lists(a_fault(), unique=True), a_fault())
def test_matches_exactly_its_own_instruction(faults: list[Fault], probe: Fault) -> None:
    found = FaultScript(tuple(faults)).match(
        step=probe.step,
        pipeline=probe.pipeline,
        stage=probe.stage,
        at=probe.at,
        micro_batch=probe.micro_batch,
        attempt=probe.attempt,
    )

    def place(fault: Fault) -> tuple[object, ...]:
        return (fault.step, fault.coordinate, fault.at, fault.micro_batch, fault.attempt)

    expected = [fault for fault in faults if place(fault) == place(probe)]
    assert found == (expected[0] if expected else None)


@given(st.lists(a_fault(), unique=True, min_size=1), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_check_passes_exactly_faults_that_can_fire(
    faults: list[Fault], pipelines: int, stages: int, micro_batches: int
) -> None:
    grid = Grid(pipelines, stages)
    possible = all(
        fault.coordinate in grid
        and (fault.micro_batch is None or fault.micro_batch < micro_batches)
        and not (fault.at == "send_activation" and fault.stage == stages - 1)
        and not (fault.at == "send_grad" and fault.stage == 0)
        for fault in faults
    )
    try:
        FaultScript(tuple(faults)).check(grid, micro_batches=micro_batches)
    except ConfigError:
        assert not possible
    else:
        assert possible


def test_defaults() -> None:
    script = FaultScript.parse([{"step": 3, "stage": 2, "at": "backward"}])
    assert script.faults == (Fault(step=3, stage=2, at="backward", micro_batch=0, signal="KILL", pipeline=0),)


def test_fires_once_where_the_new_owner_repeats_the_step() -> None:
    script = FaultScript.parse([{"step": 3, "stage": 2, "at": "reduce"}])
    assert script.match(step=3, pipeline=0, stage=2, at="reduce", attempt=0) is not None
    assert script.match(step=3, pipeline=0, stage=2, at="reduce", attempt=1) is None


def test_second_loss_in_the_same_step_is_scriptable() -> None:
    script = FaultScript.parse(
        [{"step": 3, "stage": 2, "at": "reduce"}, {"step": 3, "stage": 2, "at": "reduce", "attempt": 1}]
    )
    fired = [script.match(step=3, pipeline=0, stage=2, at="reduce", attempt=attempt) for attempt in range(3)]
    assert fired == [script.faults[0], script.faults[1], None]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"stage": 0, "at": "idle"}, ["'step' is missing; name the step in which it strikes"]),
        ({"step": 0, "at": "idle"}, ["'stage' is missing; name the stage whose worker"]),
        (
            {"step": 0, "stage": 0},
            ["'at' is missing; name the instruction before which it strikes: forward, backward, "],
        ),
        ({"step": 1, "stage": 0, "at": "idle", "micro_batch": 0}, ["'idle'", "no micro_batch", "leave"]),
        ({"step": 1, "stage": 0, "at": "step", "micro_batch": 0}, ["'step' happens once"]),
        ({"step": 1, "stage": 0, "at": "reduce", "micro_batch": 0}, ["'reduce' happens once"]),
        ({"step": 1, "stage": 0, "at": "send"}, ["'send'", "send_grad"]),
        ({"step": 1, "stage": 0, "at": "forward", "signal": "kill"}, ["'kill'", "did you mean 'KILL'"]),
        ({"step": 1, "stage": 0, "at": "forward", "signal": ["KILL"]}, ["KILL, STOP, TERM, NOTICE"]),
        ({"step": -1, "stage": 0, "at": "forward"}, ["step -1", "from 0 up"]),
        ({"step": 1, "stage": True, "at": "forward"}, ["stage True"]),
        ({"step": 1, "stage": "2", "at": "forward"}, ["stage '2'"]),
        ({"step": 1, "stage": 0, "at": "forward", "micro_batch": None}, ["micro_batch None"]),
        ({"step": 1, "stage": 0, "at": "forward", "microbatch": 1}, ["'microbatch'", "did you mean 'micro_batch'"]),
        ({"step": 1, "stage": 0, "at": "forward", "signal": "NOTICE"}, ["seconds", "None"]),
        ({"step": 1, "stage": 0, "at": "forward", "seconds": 3}, ["seconds", "NOTICE"]),
        ("KILL 2", ["'KILL 2'", "object"]),
    ],
)
def test_wrong_faults_name_value_rule_and_remedy(fault: object, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        FaultScript.parse([fault])
    assert len(caught.value.problems) == 1
    for part in ["fault 0", *expected]:
        assert part in str(caught.value)


def test_listed_twice_is_refused() -> None:
    fault = {"step": 1, "stage": 0, "at": "forward"}
    with pytest.raises(ConfigError, match="twice"):
        FaultScript.parse([fault, dict(fault)])


def test_an_object_instead_of_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"put it in \[ \]"):
        FaultScript.parse({"step": 1, "stage": 0, "at": "forward"})


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"step": 0, "stage": 4, "at": "step"}, "stages 0..3"),
        ({"step": 0, "stage": 0, "pipeline": 2, "at": "step"}, "pipelines 0..1"),
        ({"step": 0, "stage": 1, "at": "forward", "micro_batch": 8}, "this job has 0..7"),
        ({"step": 0, "stage": 3, "at": "send_activation"}, "the last and sends no activation"),
        ({"step": 0, "stage": 0, "at": "send_grad"}, "the first and sends no gradient"),
    ],
)
def test_faults_that_can_never_fire_are_refused(fault: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        FaultScript.parse([fault]).check(Grid(2, 4), micro_batches=8)


class TestSources:
    SCRIPT = '[{"step": 1, "stage": 0, "at": "step"}]'

    def test_environment_wins_over_the_section(self, tmp_path: Path) -> None:
        path = tmp_path / "faults.json"
        path.write_text(self.SCRIPT)
        setting = [{"step": 9, "stage": 0, "at": "idle"}]
        script = FaultScript.of_job(setting, environment={"BAMBOO_FAULTS": str(path)})
        assert script.faults == (Fault(step=1, stage=0, at="step"),)

    def test_section_may_name_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "faults.json"
        path.write_text(self.SCRIPT)
        assert FaultScript.of_job(str(path), environment={}) == FaultScript.parse(json.loads(self.SCRIPT))

    @pytest.mark.parametrize("environment", [{}, {"BAMBOO_FAULTS": ""}])
    def test_none_by_default(self, environment: dict[str, str]) -> None:
        assert FaultScript.of_job(environment=environment) == FaultScript(())

    def test_missing_and_broken_files_are_named(self, tmp_path: Path) -> None:
        path = tmp_path / "faults.json"
        with pytest.raises(ConfigError, match=r"faults\.json.*can't be read"):
            FaultScript.load(path)
        path.write_text("[{")
        with pytest.raises(ConfigError, match=r"faults\.json.*not JSON"):
            FaultScript.load(path)
