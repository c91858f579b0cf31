"""What a job has measured of itself: from its log to a scenario."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.cli.profile import said
from deepspeed_bamboo.core.timing import Profile
from deepspeed_bamboo.errors import EventLogError
from deepspeed_bamboo.eventlog.costs import measured_job
from deepspeed_bamboo.sim.errors import ScenarioError
from deepspeed_bamboo.sim.measured import said_of_measurements, with_measurements
from deepspeed_bamboo.sim.own import alike, overhead_of
from deepspeed_bamboo.sim.scenario import LiveSpec, Scenario, load_preset

STEP = 0.5  # 4 micro-batches through 2 stages of 20 + 40 ms are 5 x 60 ms, and 200 ms more
PROFILE = {"forward": [0.02, 0.02], "backward": [0.04, 0.04], "speeds": {}, "handover": 0.0}


def log(*more: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Twenty steps of two workers, each with a stage."""
    files: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
    for worker, name in enumerate(files):
        for step in range(20):
            event = {
                "t": 100.0 + step * STEP,
                "worker": name,
                "step": step,
                "event": "step",
                "loss": 1.0,
                "samples": 16,
            }
            files[name].append({**event, "hosted": [f"0.{worker}"]})
    profile = {"t": 103.0, "worker": "a", "step": 6, "event": "profile", "pipelines": 1, "micro_batches": 4, **PROFILE}
    files["a"] += [profile, *more]
    return files


LOSS = {
    "t": 106.2, "worker": "a", "step": 12, "epoch": 1, "event": "failover", "taken_over": ["0.1"],
    "pause_seconds": {"detect": 0.05, "abort": 0.01, "regroup": 0.04}, "regrouped_t": 106.1,
    "first_recomputed_t": 106.12,
}  # fmt: skip
MOVES = [
    {"t": 107.0 + n, "worker": "a", "step": 14 + 2 * n, "epoch": 2 + n, "event": "reconfigured", "joining": ["c"],
     "seconds": 0.3 + 0.1 * n, "transfer_seconds": 0.2 + 0.1 * n, "received": 1 + n}
    for n in range(2)
]  # fmt: skip


def test_what_an_iteration_takes_besides_its_passes_is_found() -> None:
    found = measured_job(log())
    assert (found.mode, found.copies, found.alike) == (None, None, None)
    assert found.profile == Profile.from_json(PROFILE)
    assert (found.pipelines, found.micro_batches, found.samples_per_step) == (1, 4, 16)
    assert found.fixed_seconds == pytest.approx(0.2)
    assert found.costs == {}


def test_losses_and_moves_are_measured() -> None:
    found = measured_job(log(LOSS, *MOVES))
    assert found.costs == pytest.approx(
        {
            "detect_seconds": 0.05,
            "regroup_seconds": 0.07,
            "handover_seconds": 0.1,
            "transfer_seconds": 0.1,
            "coordinate_copy_seconds": 0.1,
        }
    )
    assert found.counts == {"losses": 1, "moves": 2, "ways_back": 0}


def test_what_going_back_takes_is_measured_without_the_steps_done_again() -> None:
    """Begun at 100 s; the state is there after 0.5 s, and two steps of 0.3 s follow. One step alone says less."""

    def way(worker: str, *redone: float, begun: float, source: str, step: int) -> list[dict[str, Any]]:
        steps = [{"t": t, "worker": worker, "step": 5, "event": "redone", "loss": 1.0} for t in redone]
        back = {"t": redone[-1] + 0.01, "worker": worker, "step": step, "event": "restored", "source": source}
        return [*steps, {**back, "from_step": step - len(redone), "seconds": redone[-1] + 0.01 - begun}]

    events = [
        *way("a", 100.8, 101.1, begun=100.0, source="memory", step=8),
        *way("b", 100.7, 101.1, begun=100.0, source="memory", step=8),
        *way("a", 104.0, begun=103.0, source="store", step=12),
    ]
    found = measured_job(log(*events))
    assert found.costs == pytest.approx({"in_place_seconds": 0.5, "restore_seconds": 1.01})
    assert found.counts["ways_back"] == 2


def test_who_joins_takes_longer_than_who_is_there() -> None:
    """A transfer takes 0.1 s and 0.05 s for each stage, a join 0.2 s more. Its survivors wait for it, and 0.1 s longer;
    0.16 s longer where somebody joins.
    """

    def move(number: int, joining: list[str], received: int) -> list[dict[str, Any]]:
        transfer = 0.1 + 0.05 * received + (0.2 if joining else 0.0)
        event = {"t": 107.0 + number, "step": 14 + 2 * number, "epoch": 2 + number, "joining": joining}
        short = {"worker": "a", "event": "reconfigured", "transfer_seconds": 0.01, "received": 0}
        long = {"worker": "b", "event": "joined" if joining else "reconfigured", "transfer_seconds": transfer}
        seconds = transfer + (0.16 if joining else 0.1)
        return [{**event, **short, "seconds": seconds}, {**event, **long, "received": received, "seconds": seconds}]

    events = [*move(0, [], 1), *move(1, [], 3), *move(2, ["b"], 2)]
    found = measured_job(log(*events)).costs
    assert found == pytest.approx(
        {
            "handover_seconds": 0.1,
            "transfer_seconds": 0.1,
            "coordinate_copy_seconds": 0.05,
            "join_handover_seconds": 0.06,
            "join_transfer_seconds": 0.2,
        }
    )


def test_no_cost_is_below_nothing() -> None:
    """Copies of 1, 2 and 3 stages that take 0.1, 0.3 and 0.5 s: the best line without a negative constant."""
    moves = [
        {**MOVES[0], "epoch": n, "joining": [], "received": n, "transfer_seconds": 0.2 * n - 0.1} for n in (1, 2, 3)
    ]
    found = measured_job(log(*moves)).costs
    assert found["transfer_seconds"] == 0.0
    assert found["coordinate_copy_seconds"] == pytest.approx((0.1 + 0.6 + 1.5) / 14)


def test_a_log_without_a_profile_says_what_to_do() -> None:
    files = log()
    files["a"] = [event for event in files["a"] if event["event"] != "profile"]
    with pytest.raises(EventLogError, match="let the job run for longer"):
        measured_job(files)


def test_from_a_log_to_advice_with_costs_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    for name, events in log(LOSS, *MOVES).items():
        (folder / f"events-{name}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    profile = tmp_path / "profile.json"
    assert main(["profile", str(folder), "--output", str(profile)]) == 0
    assert "measured: 1 loss, 2 moves." in capsys.readouterr().err
    scenario = with_measurements(load_preset("bert"), profile)
    live = scenario.policies.live
    assert live is not None
    assert (live.pipelines, live.stages, live.lazy_overhead) == (1, 2, 0.0)
    assert live.regroup_seconds == pytest.approx(0.07)
    assert live.detect_seconds == 3.0, "a machine that vanishes takes its lease; in the log a process died"
    assert Profile.from_json(json.loads(profile.read_text())) == Profile.from_json(
        PROFILE
    )  # what `plan --profile` reads
    command = ["simulate", "--preset", "bert", "--profile", str(profile), "--duration-hours", "1"]
    assert main([*command, "--policy", "deepspeed-bamboo"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "times of layers from the profile" in text and "measured in your own job" in text


def profile_of(folder: Path, *, drop: tuple[str, ...] = (), mode: str | None = None, **said: Any) -> Path:
    """What the command writes of a job in that mode, whose event `profile` says so much."""
    files = log()
    for events in files.values():
        for event in events:
            event |= said if event["event"] == "profile" else {} if mode is None else {"mode": mode}
    found = {name: value for name, value in measured_job(files).to_json().items() if name not in drop}
    path = folder / "profile.json"
    path.write_text(json.dumps(found))
    return path


def live_of(scenario: Scenario, **over: Any) -> LiveSpec:
    assert scenario.policies.live is not None
    return scenario.policies.live.model_copy(update=over)


@pytest.mark.parametrize(
    ("ran", "lazy", "eager", "two_copies"),
    [
        ({}, 0.0, 0.0, 0.08),
        ({"mode": "lazy", "copies": 1}, 0.0, 0.0, 0.08),
        ({"mode": "lazy", "copies": 2}, 0.0, 0.0, 0.0),
        ({"mode": "eager", "copies": 1}, 0.0, 0.0, 0.08),
        ({"mode": "off", "copies": 1}, 0.08, 0.08, 0.16),
    ],
)
def test_replicas_cost_what_is_not_in_the_measured_times(
    ran: dict[str, Any], lazy: float, eager: float, two_copies: float, tmp_path: Path
) -> None:
    scenario = with_measurements(load_preset("bert"), profile_of(tmp_path, **ran))
    for redundancy, expected in (("lazy", lazy), ("eager", eager), ("off", 0.0)):
        assert overhead_of(live_of(scenario, redundancy=redundancy)) == pytest.approx(expected)
    assert overhead_of(live_of(scenario, copies=2)) == pytest.approx(two_copies)


def test_what_eager_costs_more_than_lazy_stays(tmp_path: Path) -> None:
    given = load_preset("bert")
    live = given.policies.live
    assert live is not None
    dear = live.model_copy(update={"lazy_overhead": 0.05, "eager_overhead": 0.26, "second_overhead": 0.02})
    given = given.model_copy(update={"policies": given.policies.model_copy(update={"live": dear})})
    found = live_of(with_measurements(given, profile_of(tmp_path, mode="lazy")))
    assert (found.lazy_overhead, found.second_overhead) == (0.0, 0.02)
    assert found.eager_overhead == pytest.approx(0.2)


@pytest.mark.parametrize(("told", "expected"), [(True, True), (False, False), (None, True)])
def test_whether_pipelines_have_each_others_state_is_the_jobs(
    told: bool | None, expected: bool, tmp_path: Path
) -> None:
    said = {} if told is None else {"alike": told}
    for precision in ("fp32", "bf16"):
        given = load_preset("bert")
        given = given.model_copy(update={"model": given.model.model_copy(update={"precision": precision})})
        model = with_measurements(given, profile_of(tmp_path, **said)).model
        assert alike(model) is (expected if told is not None else precision == "fp32")
        lines = said_of_measurements(given.model_copy(update={"model": model}), given={}, others=False)
        assert (f"model.precision {precision}" in lines[0]) is (told is None)


def test_advice_by_a_profile_says_what_is_not_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job in mode off with ZeRO, of which the preset knows neither steps nor parameters."""
    path = profile_of(tmp_path, mode="off", alike=False)
    command = ["advise", "--preset", "bert", "--profile", str(path), "--seeds", "1", "--grids", "2x2", "--json", "-"]
    assert main([*command, "--machines", "4", "--steps", "500"]) == 0
    found = json.loads(capsys.readouterr().out)
    assumed = found["assumptions"]
    assert "Assumed: 500 steps;" in assumed and "(--steps)" not in assumed
    assert "no pipeline has another one's state (bf16 or ZeRO), so mode off survives no loss" in assumed
    assert "the job ran in mode off; its replicas would add 8.0%, which is not measured" in assumed
    assert "the profile doesn't say, and the preset or scenario does: 340,000,000 parameters (--parameters" in assumed
    assert found["not_looked_at"] == ["on-demand, since the preset's step time is of another model"]
    hours = {one["option"]["mode"]: one["hours"] for one in found["options"]}
    assert hours["off"] < hours["lazy"]
    assert main([*command, "--machines", "4", "--modes", "lazy"]) == 0
    assert "does: 22,194 steps (--steps), 340,000,000 parameters" in json.loads(capsys.readouterr().out)["assumptions"]
    assert main([*command, "--machines", "4", "--modes", "lazy", "--parameters", "1000"]) == 0
    told = json.loads(capsys.readouterr().out)["assumptions"]
    assert "--parameters" not in told and "policies.live.state_memory_bytes 8e+09 (state that" in told


def test_who_keeps_no_replicas_pays_for_measured_ones_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode, words in (
        ("lazy", "the job ran in mode lazy: what its replicas cost is in the measured times"),
        (None, "the profile doesn't say in which mode the job ran, so in lazy: what its"),
        ("off", "the job ran in mode off; its replicas would add 8.0%"),
    ):
        command = ["simulate", "--preset", "bert", "--profile", str(profile_of(tmp_path, mode=mode, alike=True))]
        for policy, is_said in (("varuna", True), ("deepspeed-bamboo-off", True), ("deepspeed-bamboo", mode == "off")):
            assert main([*command, "--duration-hours", "1", "--policy", policy, "--json", "-"]) == 0
            assumed = json.loads(capsys.readouterr().out)["assumed"]
            assert any(line.startswith(words) for line in assumed) is is_said
            assert not any("(--steps)" in line for line in assumed)
    assert main([*command, "--steps", "0"]) == 2
    assert "option --steps: model.steps is 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fixed_seconds": float("inf")}, "fixed_seconds is inf; seconds are from 0 to 1,000,000"),
        ({"fixed_seconds": float("nan")}, "fixed_seconds is nan"),
        ({"handover": -1.0}, "handover_seconds is -1.0"),
        ({"forward": [1e308, 1e308]}, "layer 0 takes 1e+308 s"),
        ({"backward": [float("nan"), 0.1]}, "layer 0 takes nan s"),
        ({"pipelines": True}, "pipelines is True; it is a whole number from 1"),
        ({"micro_batches": 2.7}, "micro_batches is 2.7; it is a whole number from 1"),
        ({"samples_per_step": 0}, "samples_per_step is 0"),
        ({"mode": "hope"}, "model.measured.mode is 'hope'"),
        ({"costs": {"copying_slowdown": float("inf")}}, "copying_slowdown is inf"),
    ],
)
def test_figures_that_make_no_sense_are_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = profile_of(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ScenarioError, match=re.escape(words)) as caught:
        with_measurements(load_preset("bert"), path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path) -> None:
    for text in ("{}", "no", '{"forward": [1.0], "backward": [1.0]}'):
        (tmp_path / "profile.json").write_text(text)
        with pytest.raises(ScenarioError, match="ds_bamboo profile"):
            with_measurements(load_preset("bert"), tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"losses": 1, "moves": 0}, "4 micro-batches; measured: 1 loss; no moves in this log, so their costs stay"),
        ({"losses": 2, "moves": 1}, "4 micro-batches; measured: 2 losses, 1 move."),
        ({"losses": 0, "moves": 0}, "4 micro-batches; no losses and no moves in this log"),
        ({"losses": 3, "moves": 2, "ways_back": 1}, "2 moves, 1 time that survivors went back in place."),
    ],
)
def test_what_a_profile_rests_on_reads_well(counts: dict[str, int], words: str) -> None:
    assert words in said(replace(measured_job(log()), counts=counts))
