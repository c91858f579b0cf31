"""What a user is told before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from argparse import Namespace
from pathlib import Path

import pytest

from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.job import JobCoordinator
from deepspeed_bamboo.coordination.records import AgentRecord
from deepspeed_bamboo.coordination.server import PrivateEtcd, free_port
from deepspeed_bamboo.elastic.plain_script import refusing
from deepspeed_bamboo.errors import ConfigError
from tests.coordination.helpers import stretched
from tests.elastic.launched import REPOSITORY


def run(folder: Path, config: object, *options: str, script: str = "train.py") -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text("import sys; print('must not run', sys.argv)", encoding="utf-8")
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "ds.json").write_text(text, encoding="utf-8")
    return launch(folder, *options, script, "--deepspeed_config", "ds.json")


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deepspeed_bamboo.launch", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )


def check(result: subprocess.CompletedProcess[str], *wanted: str, code: int = 2) -> None:
    """``code``: 75 for what time may mend."""
    assert result.returncode == code and "must not run" not in result.stdout, result
    assert "Traceback" not in result.stderr, result.stderr
    for text in wanted:
        assert text in result.stderr, result.stderr


def test_unreachable_endpoint(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    settings = {"endpoints": [f"127.0.0.1:{port}"], "connect_timeout_seconds": 1.0}
    start = time.monotonic()
    result = run(tmp_path, {"bamboo": {"coordinator": settings}})
    assert time.monotonic() - start < 15
    check(result, f"127.0.0.1:{port} gave no answer within 1.", "coordinator.endpoints", code=75)


@pytest.mark.parametrize(
    ("bamboo", "wanted"),
    [
        ({"coordinator": {"endpoints": ["http://x:2379"]}}, "scheme"),
        ({"coordinator": {"endpoints": ["x"]}}, "host:port"),
        ({"coordinater": {}}, "coordinator"),
        ({"redundancy": {"mode": "eagre"}}, "eager"),
    ],
)
def test_malformed_section(tmp_path: Path, bamboo: object, wanted: str) -> None:
    check(run(tmp_path, {"bamboo": bamboo}), wanted)


def test_with_the_section_disabled_the_script_just_runs(tmp_path: Path) -> None:
    result = run(tmp_path, {"bamboo": {"enabled": False, "coordinator": {"endpoints": ["nowhere:1"]}}})
    assert result.returncode == 0
    assert result.stdout.strip() == "must not run ['train.py', '--deepspeed_config', 'ds.json']"
    assert result.stderr == ""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_without_the_section_the_user_is_told_once_that_nothing_is_protected(tmp_path: Path, rank: str) -> None:
    result = run(tmp_path, {"train_batch_size": 4}, f"--local_rank={rank}")
    assert result.returncode == 0
    told = 'deepspeed_bamboo: ds.json has no "bamboo" section, so this is plain DeepSpeed, which survives no losses.'
    assert result.stderr.startswith(told) if rank == "0" else result.stderr == ""


def test_without_any_configuration_the_user_is_told_that_nothing_is_protected(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('runs')", encoding="utf-8")
    result = launch(tmp_path, "train.py")
    assert result.returncode == 0
    assert result.stdout.strip() == "runs"
    assert result.stderr.count("this is plain DeepSpeed, which survives no losses") == 1
    assert "--bamboo_config FILE" in result.stderr


def test_a_section_that_only_the_script_finds_is_refused_where_it_is_passed(tmp_path: Path) -> None:
    """In the script's file no section is seen, since it reads one from a file; DeepSpeed is a small one here."""
    (tmp_path / "deepspeed.py").write_text("def initialize(args=None, model=None, *, config=None): print('trains')")
    (tmp_path / "ds.json").write_text('{"bamboo": {"redundancy": {"mode": "eager"}}}', encoding="utf-8")
    script = """
        import sys
        assert "deepspeed" not in sys.modules and "torch" not in sys.modules
        print(__name__, sys.argv, sys.path[0], flush=True)
        from deepspeed import initialize
        initialize(None, None, config={"train_batch_size": 4})
        initialize(config="ds.json")
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script), encoding="utf-8")
    result = launch(tmp_path, "train.py", "--seed", "1")
    assert result.returncode == 1
    assert result.stdout.splitlines() == [f"__main__ ['train.py', '--seed', '1'] {tmp_path}", "trains"]
    for part in ('ds.json has an enabled "bamboo" section', "--bamboo_config ds.json SCRIPT", "BAMBOO_CONFIG=ds.json"):
        assert part in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("section", "refused"),
    [({}, True), ({"enabled": False}, False), ({"other_engines": "warn"}, False), (None, False)],
)
def test_which_sections_are_refused_in_a_plain_script(
    section: dict[str, object] | None, refused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train_batch_size": 4, **({} if section is None else {"bamboo": section})}
    initialize = refusing(lambda args=None, config=None, config_params=None: "engine")
    for call in ({"config": settings}, {"config_params": settings}, {"args": Namespace(deepspeed_config=settings)}):
        if refused:
            with pytest.raises(ConfigError, match=r"for a configuration made in code, a JSON file with that section"):
                initialize(**call)
        else:
            assert initialize(**call) == "engine"
    assert ("a loss would end the job" in capsys.readouterr().err) == (section == {"other_engines": "warn"})


def test_an_event_log_that_nobody_can_write(tmp_path: Path) -> None:
    check(run(tmp_path, {"bamboo": {"event_log": "/proc/nope"}}), "event_log is '/proc/nope'", "name a directory")


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        ("BAMBOO_ADDRESS", "192.0.2.7", "BAMBOO_ADDRESS is '192.0.2.7', which is no address of this machine; it has "),
        ("GLOO_SOCKET_IFNAME", "eth77", "this machine has no interface 'eth77'; it has "),
    ],
)
def test_an_address_or_interface_that_is_not_this_machines(
    variable: str, value: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    start = time.monotonic()
    check(run(tmp_path, {"bamboo": {}}), wanted)
    assert time.monotonic() - start < stretched(5)


def test_missing_script(tmp_path: Path) -> None:
    check(run(tmp_path, {"bamboo": {}}, script="trian.py"), "'trian.py'", "check the path")


def test_missing_configuration(tmp_path: Path) -> None:
    check(run(tmp_path, {}, "--bamboo_config", "nowhere.json"), "nowhere.json", "does not exist")


def test_broken_configuration(tmp_path: Path) -> None:
    check(run(tmp_path, '{"bamboo": {'), "ds.json")


def test_a_name_that_is_no_key(tmp_path: Path) -> None:
    check(run(tmp_path, {"bamboo": {}}, "--job", "a/b"), "job name 'a/b'")


def test_a_job_name_in_use(tmp_path: Path) -> None:
    with PrivateEtcd() as server:
        store = EtcdStore([server.endpoint])
        agent = JobCoordinator(store, job="busy").register_agent(AgentRecord(0, "n1", 1), lease_seconds=60)
        result = run(tmp_path, {"bamboo": {"coordinator": {"endpoints": [str(server.endpoint)]}}}, "--job", "busy")
        check(result, "a job named 'busy' is just starting", "--job NAME", code=75)
        agent.withdraw()
        store.close()


def test_of_several_endpoints_one_is_enough(tmp_path: Path) -> None:
    with PrivateEtcd() as server:
        store = EtcdStore([server.endpoint])
        agent = JobCoordinator(store, job="busy").register_agent(AgentRecord(0, "n1", 1), lease_seconds=60)
        endpoints = [str(Endpoint("127.0.0.1", free_port("127.0.0.1"))), str(server.endpoint)]
        result = run(tmp_path, {"bamboo": {"coordinator": {"endpoints": endpoints}}}, "--job", "busy")
        check(result, "a job named 'busy' is just starting", code=75)
        agent.withdraw()
        store.close()


def test_a_slot_whose_launcher_was_killed_before_it_began_starts_nothing(tmp_path: Path) -> None:
    """It would train for ever, with init for a parent, and nobody to end it."""
    (tmp_path / "train.py").write_text("print('must not run')", encoding="utf-8")
    (tmp_path / "ds.json").write_text('{"bamboo": {}}', encoding="utf-8")
    launcher = """if True:
        import os, sys
        launcher = os.getpid()
        if os.fork() == 0:
            while os.getppid() == launcher:
                pass
            slot = ["-m", "deepspeed_bamboo.launch", "train.py", "--deepspeed_config", "ds.json"]
            os.execv(sys.executable, [sys.executable, *slot])
    """
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "CROSS_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE"), "1")
    result = subprocess.run(
        [sys.executable, "-c", launcher],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, **ranks, "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
        check=True,
    )
    assert "the launcher ended before its slots had started" in result.stderr, result.stderr
    assert "must not run" not in result.stdout


def test_usage_names_the_whole_command(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "deepspeed_bamboo.launch", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=True,
    )
    assert "deepspeed [launcher flags] --module deepspeed_bamboo.launch" in result.stdout
