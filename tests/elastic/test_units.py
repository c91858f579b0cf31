"""The small parts: command line, environment, settings, mailbox, courier, error report."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_bamboo.config.section import BambooConfig, parse_bamboo_section
from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobNameTaken
from deepspeed_bamboo.elastic.boot import Boot
from deepspeed_bamboo.elastic.command_line import CommandLine, parse_command_line
from deepspeed_bamboo.elastic.courier import Courier, Errand
from deepspeed_bamboo.elastic.decisions import Event, Woken
from deepspeed_bamboo.elastic.error_report import ErrorReport, last_line
from deepspeed_bamboo.elastic.errors import LaunchError
from deepspeed_bamboo.elastic.greeting import greeting
from deepspeed_bamboo.elastic.launching import drop_other_launchers_variables
from deepspeed_bamboo.elastic.mailbox import Mailbox
from deepspeed_bamboo.elastic.running_job import private_name
from deepspeed_bamboo.elastic.settings_source import find_source, load_section, section_in_script
from deepspeed_bamboo.elastic.slot import key_part, slot_from_environment
from deepspeed_bamboo.elastic.starting import quiet_grpc
from deepspeed_bamboo.errors import ConfigError
from tests.elastic.launched import REPOSITORY

# -- command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["train.py"], CommandLine("train.py", ())),
        (
            ["--local_rank=3", "--job", "j", "train.py", "--job", "theirs", "-h"],
            CommandLine("train.py", ("--job", "theirs", "-h"), job="j", local_rank=3),
        ),
        (
            ["--job=j", "--bamboo_config=f", "--local_rank", "0", "t.py", "a", "--", "b"],
            CommandLine("t.py", ("a", "--", "b"), job="j", bamboo_config="f", local_rank=0),
        ),
        (["t.py", "x", "--local_rank=2"], CommandLine("t.py", ("x", "--local_rank=2"))),
    ],
)
def test_command_line(arguments: list[str], wanted: CommandLine) -> None:
    assert parse_command_line(arguments) == wanted


def test_the_script_line_is_what_the_launcher_would_have_run() -> None:
    assert parse_command_line(["--local_rank=1", "t.py", "-x"]).script_line == ["t.py", "--local_rank=1", "-x"]
    assert parse_command_line(["t.py", "-x"]).script_line == ["t.py", "-x"]


@pytest.mark.parametrize("arguments", [[], ["--job", "j"], ["--jobs", "j", "t.py"], ["--local_rank=x", "t.py"]])
def test_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse_command_line(arguments)
    assert leaving.value.code == 2 and "usage: deepspeed --module deepspeed_bamboo.launch" in capsys.readouterr().err


# -- environment -----------------------------------------------------------------------------------

LAUNCHED = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "BAMBOO_NODE": "host one!",
    "BAMBOO_ZONE": "eu-1a",
}


def test_slot_of_a_launcher() -> None:
    slot = slot_from_environment(LAUNCHED, local_rank=1)
    assert (slot.rank, slot.local_rank, slot.world_size, slot.local_world_size) == (3, 1, 4, 2)
    assert (slot.node, slot.zone, slot.master_addr, slot.one_machine) == ("host-one", "eu-1a", "10.0.0.1", False)
    assert slot.worker(generation=2) == "host-one-3-2"
    assert slot_from_environment({**LAUNCHED, "LOCAL_SIZE": "4"}).one_machine


def test_the_configured_zone_wins_unless_it_is_auto() -> None:
    assert slot_from_environment(LAUNCHED, zone="rack-7").zone == "rack-7"
    without = {name: value for name, value in LAUNCHED.items() if name != "BAMBOO_ZONE"}
    assert slot_from_environment(without).zone == "unknown"


def test_without_a_launcher_it_is_the_only_slot() -> None:
    slot = slot_from_environment({})
    assert (slot.rank, slot.world_size, slot.one_machine, slot.passed_local_rank) == (0, 1, True, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": None}, "not WORLD_SIZE; start with: deepspeed"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ],
)
def test_broken_environment(changes: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in {**LAUNCHED, **changes}.items() if value is not None}
    with pytest.raises(LaunchError, match=message):
        slot_from_environment(environment)


@pytest.mark.parametrize(
    ("text", "wanted"), [("a/b c", "a-b-c"), ("..", "unnamed"), ("ü", "unnamed"), ("x.1_y", "x.1_y")]
)
def test_key_parts(text: str, wanted: str) -> None:
    assert key_part(text) == wanted


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--steps", "3", "--deepspeed_config", "a.json"], "a.json"),
        (["--deepspeed_config=b.json", "--x"], "b.json"),
        (["--deepspeed", "--deepspeed_config", "c.json"], "c.json"),
        (["--deepspeed", "d.json"], "d.json"),
        (["--ds_config", "e.json"], "e.json"),
        (["--ds_config", "e.json", "--ds_config=f.json"], "f.json"),
        (["--deepspeed", "--lr", "1"], None),
        (["--deepspeed_config"], None),
        ([], None),
    ],
)
def test_the_configuration_is_found_in_the_scripts_arguments(arguments: list[str], wanted: str | None) -> None:
    assert find_source(bamboo_config=None, arguments=arguments) == wanted
    assert find_source(bamboo_config="mine.json", arguments=arguments) == "mine.json"


LENIENT = """
{ // a comment
  # another
  "train_batch_size": 4, /* a third */
  "bamboo": {"coordinator": {"lease_seconds": 7.5,},},
}
"""


def test_the_section_is_read_as_leniently_as_deepspeed_reads(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(LENIENT, encoding="utf-8")
    settings = {"bamboo": {"coordinator": {"lease_seconds": 7.5}}, "longer than a file name": "x" * 9000}
    encoded = base64.urlsafe_b64encode(json.dumps(settings).encode())
    for source in (str(file), encoded.decode()):
        section = load_section(source)
        assert section is not None and section.coordinator.lease_seconds == 7.5
    file.write_text('{"train_batch_size": 4}', encoding="utf-8")
    assert load_section(str(file)) is None


def test_reading_the_section_imports_neither_torch_nor_deepspeed(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(LENIENT, encoding="utf-8")
    code = (
        "import sys; from deepspeed_bamboo.elastic import launching, settings_source; "
        f"settings_source.load_section({str(file)!r}); print([m for m in ('torch', 'deepspeed') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("text", ['{"bamboo": {}, "bamboo": {}}', '["bamboo"]', "{"])
def test_what_deepspeed_refuses_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ds\.json"):
        load_section(str(file))


# -- mailbox ---------------------------------------------------------------------------------------


def test_events_come_in_order_and_later_ones_in_time() -> None:
    box = Mailbox()
    start = time.monotonic()
    box.put_later(Woken("late"), after_seconds=0.2)
    box.put_later(Woken("early"), after_seconds=0.1)
    box.put(Woken("now"))
    box.put_call(lambda: Woken("called"))
    assert [box.get() for _ in range(4)] == [Woken(text) for text in ("now", "called", "early", "late")]
    assert time.monotonic() - start >= 0.2


def test_waiting_has_an_end() -> None:
    box = Mailbox()
    seen: list[Event | None] = []

    def never(event: Event | None) -> bool:
        seen.append(event)
        return False

    threading.Timer(0.05, lambda: box.put(Woken("x"))).start()
    assert box.wait_until(never, within_seconds=0.2) is False
    assert seen[:2] == [None, Woken("x")]
    assert box.wait_until(lambda event: True, within_seconds=0) is True


# -- courier ---------------------------------------------------------------------------------------


def unavailable() -> None:
    raise CoordinatorUnavailable(endpoints=["h:1"], tried_seconds=0, reason="down")


def test_an_errand_is_repeated_until_it_succeeds_and_keeps_its_turn() -> None:
    done: list[str] = []
    outcomes = iter([unavailable, unavailable, lambda: done.append("first")])
    courier = Courier()
    courier.send(Errand("first", lambda: next(outcomes)(), within_seconds=10))
    courier.send(Errand("second", lambda: done.append("second"), within_seconds=10))
    assert courier.stop(within_seconds=10) is True
    assert done == ["first", "second"]


def test_an_errand_that_cannot_be_done_is_given_up_in_time() -> None:
    done: list[str] = []
    courier = Courier()
    courier.send(Errand("hopeless", unavailable, within_seconds=0.1, give_up=lambda: done.append("given up")))
    courier.send(Errand("next", lambda: done.append("next"), within_seconds=10))
    assert courier.stop(within_seconds=10) is True
    assert done == ["given up", "next"]


def test_stopping_does_not_wait_for_an_outage_to_end() -> None:
    courier = Courier()
    courier.send(Errand("endless", unavailable, within_seconds=float("inf")))
    start = time.monotonic()
    assert courier.stop(within_seconds=0.2) is False
    assert time.monotonic() - start < 2


# -- error report ----------------------------------------------------------------------------------


def test_a_report_travels_between_processes_and_the_first_one_stands() -> None:
    report = ErrorReport()
    code = "from deepspeed_bamboo.elastic.error_report import write_report as w; print(w('first ü'), w('second'))"
    environment = {**os.environ, "BAMBOO_ERROR_FILE": report.path, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
    assert report.read() == "first ü"
    report.close()


def test_of_a_very_long_report_the_end_is_kept() -> None:
    report = ErrorReport()
    Path(report.path).write_text("x" * 500_000 + "\nValueError: last", encoding="utf-8")
    assert len(report.read()) <= 200_000 and last_line(report.read()) == "ValueError: last"
    report.close()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Traceback (most recent call last):\n  File x\n    y\nKeyError: 1\n", "KeyError: 1"),
        ("SyntaxError: bad\n    ^\n", "SyntaxError: bad"),
        ("", ""),
    ],
)
def test_last_line(text: str, wanted: str) -> None:
    assert last_line(text) == wanted


def test_grpc_is_quiet_in_workers_unless_the_user_wants_to_hear_it() -> None:
    assert quiet_grpc({}) == {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "ERROR"}
    assert quiet_grpc({"GRPC_VERBOSITY": "DEBUG"}) == {"GRPC_ENABLE_FORK_SUPPORT": "0"}


def test_only_one_command_at_a_time_looks_for_a_job_or_starts_it() -> None:
    with private_name("one-start", within_seconds=0.1):
        with pytest.raises(JobNameTaken, match="'one-start' is just starting"):
            with private_name("one-start", within_seconds=0.1):
                pass
        with private_name("another", within_seconds=0.1):
            pass
    with private_name("one-start", within_seconds=0.1):
        pass


def test_the_greeting_says_what_runs_and_how_to_look_at_it() -> None:
    slot = slot_from_environment({"RANK": "0", "WORLD_SIZE": "6", "LOCAL_SIZE": "6"})
    boot = Boot("gpt", "/deepspeed_bamboo", ("127.0.0.1:77",), "127.0.0.1", (1,), 5)
    assert greeting(boot, replace(slot, start_workers=4), BambooConfig(), source=None) == (
        "job gpt: 4 workers and 2 stand-bys; redundancy lazy; its own etcd at 127.0.0.1:77. "
        "See it with: ds_bamboo status --job gpt"
    )
    config = parse_bamboo_section({"coordinator": {"endpoints": ["e:1", "f:2"]}, "event_log": "/logs"})
    shared = replace(boot, endpoints=("e:1", "f:2"))
    assert greeting(shared, slot, config, source="ds.json") == (
        "job gpt: 6 workers; redundancy lazy; etcd at e:1, f:2; event log in /logs. "
        "See it with: ds_bamboo status --job gpt --endpoints e:1,f:2"
    )
    guarded = parse_bamboo_section({"coordinator": {"endpoints": ["e:1"], "ca_cert": "ca.pem"}})
    joining = greeting(replace(shared, ranks=(6,)), slot, guarded, source="a b.json")
    assert "1 worker of this command will join it, as rank 6;" in joining
    two_of_four = replace(slot, world_size=4, local_world_size=2)
    there = greeting(replace(shared, ranks=(4, 5, 6, 7)), two_of_four, config, source=None)
    assert (
        "2 workers of this command will join it, as ranks 4, 5 (started elsewhere, its others join as ranks 6, 7);"
        in there
    )
    assert joining.endswith("--deepspeed_config 'a b.json'")


def test_a_signal_while_a_slot_ends_is_not_heard_of() -> None:
    program = """
import atexit, os, signal, sys
from deepspeed_bamboo.elastic.cleaning_up import cleaning_up_when_told_to_end
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
with cleaning_up_when_told_to_end():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("cleaned up", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("cleaned up\n", "", -signal.SIGTERM)


def test_an_import_that_a_signal_breaks_ends_without_its_traceback() -> None:
    program = """
import os, signal
from deepspeed_bamboo.elastic.cleaning_up import cleaning_up_when_told_to_end
with cleaning_up_when_told_to_end():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit:
        raise ImportError("cannot load module more than once per process")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 143)
    done = subprocess.run([sys.executable, "-c", program.replace("os.kill", "print")], capture_output=True, text=True)
    assert done.returncode == 0, "without the signal nothing fails"
    failing = program.replace("os.kill(os.getpid(), signal.SIGTERM)", "raise SystemExit")
    done = subprocess.run([sys.executable, "-c", failing], capture_output=True, text=True)
    assert done.returncode == 1 and "more than once" in done.stderr, "an error without a signal is told"


# -- what is found in the script, and in the environment -----------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("config = {'train_batch_size': 4}", None),
        ("config = {'bamboo': {}}", BambooConfig()),
        ("config['bamboo'] = {'seed': 3}", BambooConfig(seed=3)),
        ("config['bamboo'] = json.loads(os.environ['SECTION'])", BambooConfig()),
        ("config = {'bamboo': {'enabled': False}}", BambooConfig(enabled=False)),
        ("no python at all (", None),
    ],
)
def test_a_section_that_a_script_writes_itself_is_found(tmp_path: Path, text: str, wanted: BambooConfig | None) -> None:
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    assert section_in_script(str(script)) == wanted


def test_a_wrong_section_in_a_script_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("config = {'bamboo': {'sed': 3}}", encoding="utf-8")
    with pytest.raises(ConfigError, match="did you mean 'seed'"):
        section_in_script(str(script))


def test_what_another_launcher_has_left_in_the_environment_is_dropped() -> None:
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x", "RANK": "0"}
    drop_other_launchers_variables(environment)
    assert environment == {"RANK": "0"}
