"""Seeded faults, each found with a remedy, and a machine in order, of which nothing is said."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.core import set_initial_no_auth_action_count

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.device_queues import queue_problems
from deepspeed_bamboo.doctor import coordinator
from deepspeed_bamboo.doctor.examination import examine
from deepspeed_bamboo.doctor.finding import Finding
from deepspeed_bamboo.doctor.machine import Gpu, ThisMachine
from deepspeed_bamboo.doctor.settings import check_settings
from deepspeed_bamboo.doctor.software import NEEDED
from deepspeed_bamboo.doctor.subject import Host, ModelFacts, Subject, read_hosts
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.stock.symbols import TRIED
from tests.doctor.good import GIB, SETTINGS, FakeMachine, section, subject

BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    with PrivateEtcd() as server:
        yield str(server.endpoint)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}/job"


def found(given: Subject) -> list[Finding]:
    return list(examine(given))


def with_etcd(etcd: str, **changes: Any) -> Subject:
    """As ``subject``, at that etcd; ``changes`` of the section."""
    return subject(section=section(coordinator={"endpoints": [etcd]}, **changes))


def test_of_a_machine_in_order_nothing_is_said(etcd: str, bucket: str) -> None:
    assert found(with_etcd(etcd, checkpoint={"dir": bucket})) == []
    assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket=BUCKET)
    store = EtcdStore([PrivateEtcdEndpoint(etcd)])
    assert store.read("/deepspeed_bamboo/doctor").entries == ()
    store.close()


def PrivateEtcdEndpoint(text: str) -> Any:

    return Endpoint.parse(text)


FAULTS: dict[str, tuple[dict[str, Any], bool, str, str]] = {
    "1 old Python": ({"machine": FakeMachine(python_version=(3, 9, 1))}, True, "Python is 3.9.1", "3.10"),
    "2 torch is missing": (
        {"machine": FakeMachine(versions={"deepspeed": "0.19.8"})},
        True,
        "torch is not installed",
        "2.11 or later",
    ),
    "3 DeepSpeed is too new": (
        {"machine": FakeMachine(versions={"torch": "2.13.0", "deepspeed": "0.20.1"})},
        True,
        "deepspeed is 0.20.1",
        "below 0.20",
    ),
    "4 an NCCL that hangs": (
        {"machine": FakeMachine(versions={**FakeMachine().versions, "nvidia-nccl-cu13": "2.28.5"})},
        True,
        "nvidia-nccl-cu13 is 2.28.5",
        "2.28.9",
    ),
    "5 fewer GPUs than slots": (
        {"machine": FakeMachine(cards=FakeMachine().cards[:2])},  # type: ignore[index]
        True,
        "4 slots, and it has 2 GPUs",
        "slots=2",
    ),
    "6 a GPU in use": (
        {"machine": FakeMachine(cards=(*FakeMachine().cards[:3], Gpu("H200", 139 * GIB, 90 * GIB)))},  # type: ignore[index]
        False,
        "GPU 3 has 90.0 of 139.0 GiB in use",
        "nvidia-smi",
    ),
    "7 an NCCL setting": ({"environment": {"NCCL_NVLS_ENABLE": "1"}}, True, "NCCL_NVLS_ENABLE is 1", "unset"),
    "8 an interface that is not there": (
        {"environment": {"GLOO_SOCKET_IFNAME": "ens5"}},
        True,
        "names 'ens5', and this machine has eth0, lo",
        "unset GLOO_SOCKET_IFNAME",
    ),
    "9 the master's port is in use": (
        {"machine": FakeMachine(used_ports=frozenset({29500}))},
        True,
        "port 29500",
        "--master_port",
    ),
    "10 little shared memory": (
        {"machine": FakeMachine(shared_bytes=64 << 20)},
        True,
        "/dev/shm has 64 MiB",
        "--shm-size",
    ),
    "11 a clock that nobody sets": ({"machine": FakeMachine(synchronised=False)}, False, "clock", "chrony"),
    "12 a host twice": (
        {"hosts": tuple(Host(name, 4) for name in ("n0", "n1", "n2", "n1"))},
        True,
        "names n1 2 times",
        "once",
    ),
    "13 two names of one host": (
        {"machine": FakeMachine(names={**FakeMachine().names, "n3": "10.0.0.2"})},
        True,
        "hosts n1, n3 are one machine (10.0.0.2)",
        "once",
    ),
    "14 a host without address": (
        {"machine": FakeMachine(names={"n0": "10.0.0.1", "n1": "10.0.0.2", "n2": "10.0.0.3"})},
        True,
        "n3: unknown on this machine",
        "DNS",
    ),
    "15 ZeRO stage 2": (
        {"settings": {**SETTINGS, "zero_optimization": {"stage": 2}}},
        True,
        "zero_optimization.stage is 2",
        "set it to 1 or 0",
    ),
    "16 more stages than layers": (
        {"model": ModelFacts("alexnet", layers=3, stage_parameters=(1, 1, 1, 1))},
        True,
        "alexnet has 3 layers, too few for 4 stages",
        "at most 3 stages",
    ),
    "17 workers that have nothing to do": (
        {"stages": 5},
        False,
        "16 workers train 3 pipelines of 5 stages, and 1 stand by",
        "stages that divide the workers",
    ),
    "18 a batch that does not fit the grid": (
        {"settings": {**SETTINGS, "train_batch_size": 100}},
        True,
        "do not fit 4 pipelines",
        "leave one of them out",
    ),
    "19 fewer micro-batches than stages": (
        {"settings": {**SETTINGS, "gradient_accumulation_steps": 2}},
        False,
        "2 micro-batches in 4 stages: each stage waits 60 %",
        "raise gradient_accumulation_steps",
    ),
    "20 too little device memory": (
        {"model": ModelFacts("large", layers=52, stage_parameters=(9_000_000_000,) * 4)},
        True,
        "state takes 150.9 GiB in mode lazy, of 139.0 GiB, before activations (off 75.4 GiB",
        "more stages",
    ),
    "21 what torchrun left": (
        {"environment": {"TORCHELASTIC_USE_AGENT_STORE": "True"}},
        True,
        "TORCHELASTIC_USE_AGENT_STORE is set",
        "unset",
    ),
    "22 an address of another machine": (
        {"environment": {"BAMBOO_ADDRESS": "10.0.0.9"}},
        True,
        "BAMBOO_ADDRESS is '10.0.0.9', which is no address of this machine; it has 10.0.0.1, 127.0.0.1",
        "unset it",
    ),
    "23 an address that others don't reach": (
        {"environment": {"BAMBOO_ADDRESS": "127.0.0.1"}},
        True,
        "BAMBOO_ADDRESS is '127.0.0.1', where other machines don't reach this one, and there are 4",
        "name the address that they reach",
    ),
    "24 a secret that others can read": (
        {"machine": FakeMachine(wrong_secret="the secret S must be a file that nobody else can read; use chmod 600")},
        True,
        "the secret S must be a file that nobody else can read",
        "use chmod 600",
    ),
    "25 too few queues of a GPU": (
        {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
        True,
        "CUDA_DEVICE_MAX_CONNECTIONS is 1",
        "set it to 8 or more",
    ),
    "26 a lock that a killed build left": (
        {"machine": FakeMachine(locks=((Path("/cache/py311_cu130/cpu_adam/lock"), 7200.0),))},
        True,
        "/cache/py311_cu130/cpu_adam/lock is 2.0 h old",
        "rm /cache/py311_cu130/cpu_adam/lock",
    ),
    "27 a lock that may be of a killed build": (
        {"machine": FakeMachine(locks=((Path("/cache/py311_cpu/deepspeed_shm_comm/lock"), 300.0),))},
        False,
        "deepspeed_shm_comm/lock is 5 min old",
        "rm /cache/py311_cpu/deepspeed_shm_comm/lock",
    ),
    "27b a lock of what only plain DeepSpeed builds": (
        {"machine": FakeMachine(locks=((Path("/cache/py311_cpu/deepspeed_shm_comm/lock"), 7200.0),))},
        False,
        "plain DeepSpeed on a CPU (no job of the plugin) waits for its lock",
        "rm /cache/py311_cpu/deepspeed_shm_comm/lock",
    ),
    "28 torch is newer than what was tried": (
        {"machine": FakeMachine(versions={**FakeMachine().versions, "torch": "2.14.1+cu130"})},
        False,
        "torch is 2.14.1+cu130, and this version of the plugin was tried with 2.13 at most",
        "pip install 'torch==2.13.*'",
    ),
    "29 DeepSpeed is newer than what was tried": (
        {"machine": FakeMachine(versions={**FakeMachine().versions, "deepspeed": "0.19.9"})},
        False,
        "deepspeed is 0.19.9, and",
        "pip install 'deepspeed==0.19.8'",
    ),
    "31 fewer GPUs chosen than slots": (
        {"environment": {"CUDA_VISIBLE_DEVICES": "0,1"}},
        True,
        "4 slots, and it has 2 GPUs that CUDA_VISIBLE_DEVICES names (0,1)",
        "slots=2",
    ),
    "32 no GPU chosen": (
        {"environment": {"CUDA_VISIBLE_DEVICES": ""}},
        True,
        "CUDA_VISIBLE_DEVICES is '', which hides all GPUs",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "33 a host file without this machine": (
        {
            "machine": FakeMachine(names={f"n{number}": f"10.0.0.{number + 1}" for number in (1, 2, 3, 4)}),
            "hosts": tuple(Host(f"n{number}", 4) for number in (1, 2, 3, 4)),
        },
        False,
        "none of them is this machine (n0.cluster)",
        "correct its name there",
    ),
}


def test_versions_are_those_of_setup_and_of_the_guard() -> None:
    setup = (Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    for package, least, tried, too_new in NEEDED:
        low, last, high = (".".join(map(str, version)) for version in (least, tried, too_new))
        assert f'"{package}>={low},<{high}"' in setup
        assert TRIED[package] in (last, f"{low} to {last}")


@pytest.mark.parametrize("waits", [True, False])
def test_a_file_is_a_lock_where_torch_waits_for_files(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    code = tmp_path / "torch" / "utils" / "cpp_extension.py"
    code.parent.mkdir(parents=True)
    code.write_text("baton = FileBaton(path)" if waits else "with FileLock(path): pass", encoding="utf-8")
    spec = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    locks = ThisMachine().build_locks({"TORCH_EXTENSIONS_DIR": str(lock.parent.parent)})
    assert [path for path, _ in locks] == ([lock] if waits else [])


def test_a_new_lock_and_versions_that_were_tried_are_no_news(etcd: str) -> None:
    fresh = FakeMachine(
        locks=((Path("/cache/op/lock"), 5.0),),
        versions={**FakeMachine().versions, "torch": "2.11.0", "deepspeed": "0.19.8"},
    )
    assert found(subject(section=section(coordinator={"endpoints": [etcd]}), machine=fresh)) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_remedy(name: str, etcd: str) -> None:
    changes, blocker, what, remedy = FAULTS[name]
    given = subject(section=section(coordinator={"endpoints": [etcd]}), **changes)
    matching = [finding for finding in found(given) if what in finding.what]
    assert len(matching) == 1, found(given)
    assert matching[0].blocker is blocker and remedy in matching[0].remedy
    if name not in ("12 a host twice", "13 two names of one host"):  # which also change the placement
        assert found(given) == matching


@pytest.mark.parametrize(
    ("changes", "blocker", "what"),
    [
        ({"checkpoint": {"dir": "/var/tmp/../../tmp/here"}}, True, "checkpoint.dir is '/tmp/here', and each machine"),
        ({"checkpoint": {"dir": "/tmp/checkpoints"}}, True, "each machine has a /tmp of its own"),
        ({"event_log": "/proc/nope"}, True, "event_log is '/proc/nope', and /proc can't be written to"),
        ({"topology": {"zones": "auto"}}, False, "this machine's zone is not known"),
        (
            {"notices": {"source": "gcp", "base_url": "http://127.0.0.1:9"}},
            True,
            "notices.source is 'gcp', and its metadata service does not answer",
        ),
        ({"topology": {"zones": "a", "pipelines": 5}}, False, "16 workers train 5 pipelines of 4 stages: some host 2"),
        ({"coordinator": {}}, False, "etcd runs on n0, and the job ends with that machine"),
    ],
)
def test_faults_of_the_section_are_found(changes: dict[str, Any], blocker: bool, what: str, etcd: str) -> None:
    given = subject(section=section(**{"coordinator": {"endpoints": [etcd]}, **changes}))
    (finding,) = found(given)
    assert what in finding.what and finding.blocker is blocker


def test_an_etcd_that_is_away_blocks_and_one_of_three_does_not(etcd: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{probe.getsockname()[1]}"
    also_nowhere, same = nowhere.replace("127.0.0.1", "localhost"), etcd.replace("unix:/", "unix:/./")
    for endpoints, blocks in (
        ([nowhere], [True]),
        ([nowhere, etcd, same], [False]),
        ([nowhere, also_nowhere, etcd], [True] * 2),
    ):
        settings = {"endpoints": endpoints, "connect_timeout_seconds": 0.5}
        findings = found(subject(section=section(coordinator=settings)))
        assert f"etcd at {nowhere}: " in findings[0].what
        assert [finding.blocker for finding in findings] == blocks


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("etcdserver: authentication failed, invalid user ID or password", "don't restart it: correct user, password"),
        ("etcdserver: mvcc: database space exceeded", "don't restart it"),
        ("connection refused", "raise coordinator.connect_timeout_seconds"),
    ],
)
def test_what_to_do_about_an_etcd_fits_what_it_says(
    reason: str, remedy: str, etcd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: EtcdStore, *, within_seconds: float) -> None:
        raise CoordinatorUnavailable(endpoints=["h:1"], tried_seconds=within_seconds, reason=reason)

    monkeypatch.setattr(EtcdStore, "ping", refused)
    (finding,) = found(with_etcd(etcd))
    assert remedy in str(finding)
    assert ("start it, or open its port" in finding.remedy) == (reason == "connection refused")


def test_a_slow_etcd_is_told_of(etcd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    late = itertools.count(step=0.25)
    monkeypatch.setattr(coordinator, "time", SimpleNamespace(perf_counter=lambda: next(late)))
    (finding,) = found(with_etcd(etcd))
    assert "takes 250 ms for a write, and the lease is 3 s" in finding.what and not finding.blocker


def test_a_bucket_that_is_not_there_blocks(etcd: str, bucket: str) -> None:
    (finding,) = found(with_etcd(etcd, checkpoint={"dir": "s3://other-bucket/job"}))
    assert "NoSuchBucket" in finding.what and finding.blocker


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("s3:PutObject", "allow s3:PutObject for"),
        ("s3:GetObject", "allow s3:GetObject for"),
        ("s3:DeleteObject", "allow s3:DeleteObject for"),
        ("s3:ListBucket", "allow s3:ListBucket (of the bucket) for"),
    ],
)
def test_a_right_that_is_missing_is_named(
    missing: str, named: str, etcd: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rights = {"s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:ListBucket", "s3:AbortMultipartUpload"}
    statement = {"Effect": "Allow", "Action": sorted(rights - {missing}), "Resource": "*"}
    iam = boto3.client("iam")
    iam.create_user(UserName="worker")
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam.put_user_policy(UserName="worker", PolicyName="rights", PolicyDocument=policy)
    key = iam.create_access_key(UserName="worker")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # which keeps the credentials of before
    findings = set_initial_no_auth_action_count(0)(found)(with_etcd(etcd, checkpoint={"dir": bucket}))
    assert any(named in finding.remedy and "AccessDenied" in finding.what for finding in findings), findings


def test_a_loss_that_ends_the_job_is_named(etcd: str) -> None:
    two = tuple(Host(name, 4) for name in ("n0", "n1"))
    off = section(coordinator={"endpoints": [etcd]}, redundancy={"mode": "off"}, checkpoint={"dir": "/"})
    findings = found(subject(hosts=two, section=off))
    assert any("the loss of n0, n1 ends the job" in finding.what and not finding.blocker for finding in findings)
    assert found(subject(hosts=two, section=section(coordinator={"endpoints": [etcd]}))) == []


def test_this_machine_answers_every_question() -> None:
    machine = ThisMachine()
    assert machine.python() >= (3, 10) and machine.version("torch") and machine.version("no-such-package") is None
    assert "lo" in machine.interfaces() and "127.0.0.1" in machine.addresses()
    assert machine.resolve("localhost") in ("127.0.0.1", "::1") and machine.resolve("no.such.host.invalid") is None
    assert machine.clock_is_synchronised() in (True, False, None)
    assert isinstance(machine.gpus(), tuple | None)
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        assert not machine.port_is_free(used.getsockname()[1])


@pytest.mark.parametrize(("mode", "problem"), [(0o600, None), (0o644, "nobody else can read")])
def test_this_machine_looks_at_the_secret_file(tmp_path: Path, mode: int, problem: str | None) -> None:
    file = tmp_path / "secret"
    file.write_text("5" * 64, encoding="ascii")
    file.chmod(mode)
    found = ThisMachine().secret_problem({"BAMBOO_SECRET_FILE": str(file)})
    assert found is None if problem is None else problem in (found or "")


@pytest.mark.parametrize(
    ("chosen", "numbers"),
    [(None, [0, 1, 2, 3]), ("2,3", [2, 3]), ("1,9,2", [1]), ("-1", []), ("GPU-a,GPU-b", [0, 1]), (" 3 ", [3])],
)
def test_the_gpus_are_those_that_a_job_would_use(chosen: str | None, numbers: list[int]) -> None:
    seen = subject(environment={} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}, hosts=())
    assert list(seen.gpus or {}) == numbers
    assert seen.workers == (len(numbers) or None)


def test_where_nothing_says_how_many_workers_there_are_that_is_said() -> None:
    given = subject(environment={"DS_ACCELERATOR": "cpu"}, hosts=(), stages=2)
    assert any("nothing says how many workers" in finding.what for finding in check_settings(given))
    assert not list(check_settings(subject(environment={"DS_ACCELERATOR": "cpu"}, stages=2)))


def test_host_files(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two machines\nn0 slots=4\n\nn1   slots=8  # larger\n")
    assert read_hosts(path) == (Host("n0", 4), Host("n1", 8))
    for text, message in (("n0\n", "line 1 is 'n0'"), ("", "names no host"), ("n0 slots=0", "slots=N")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_hosts(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_hosts(tmp_path / "missing")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))  # no locks of other builds
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setattr(ThisMachine, "version", lambda self, package: FakeMachine().version(package))
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "bamboo": {}}  // as DeepSpeed reads it')
    assert main(["doctor", "--config", str(path)]) == 0
    assert capsys.readouterr().out == ""
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bamboo": {}}')
    assert main(["doctor", "--config", str(path), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert (
        finding["blocker"] and "zero_optimization.stage is 3" in finding["what"] and "set it to 1" in finding["remedy"]
    )
    assert main(["doctor", "--config", str(path)]) == 1
    assert capsys.readouterr().out.startswith("BLOCKER: zero_optimization.stage is 3")
    assert main(["doctor", "--config", str(tmp_path / "missing.json")]) == 1
    wrong = {"redundancy": {"mod": "lazy"}, "checkpoint": {"keep": 3}}
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "bamboo": wrong}))
    monkeypatch.setenv("HOME", str(tmp_path))
    capsys.readouterr()
    assert main(["doctor", "--config=~/ds.json"]) == 1
    shown = capsys.readouterr().out
    for text in ("unknown key bamboo.redundancy.mod", "checkpoint.keep is 3", "zero_optimization.stage is 3"):
        assert f"BLOCKER: {text}" in shown or f"BLOCKER: bamboo.{text}" in shown
    assert "    set checkpoint.dir, too, or leave keep out" in shown


def test_layers_and_memory_are_looked_at_where_the_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=16\n")
    assert main(["doctor", "--hostfile", str(hosts), "--stages", "16", "--model", "alexnet"]) == 1
    assert "alexnet has 8 layers, too few for 16 stages" in capsys.readouterr().out
    assert main(["doctor", "--model", "alexnett"]) == 1
    assert "did you mean 'alexnet'" in capsys.readouterr().err


@pytest.mark.parametrize("own", [True, False])
def test_locks_of_builds_are_found_where_torch_has_them(tmp_path: Path, *, own: bool) -> None:
    folder = tmp_path / "cpu_adam" if own else tmp_path / "torch_extensions" / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    environment = {"TORCH_EXTENSIONS_DIR" if own else "XDG_CACHE_HOME": str(tmp_path)}
    assert ThisMachine().build_locks(environment) == ()
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (0.0, 0.0))
    [(path, age_seconds)] = ThisMachine().build_locks(environment)
    assert path == lock and age_seconds > 1e9


@pytest.mark.parametrize(("value", "wrong"), [("1", True), ("7", True), ("8", False), ("32", False), ("", False)])
def test_few_queues_of_a_gpu_are_wrong_and_no_value_is_right(value: str, *, wrong: bool) -> None:
    assert [remedy.split(",")[0] for _, remedy in queue_problems({"CUDA_DEVICE_MAX_CONNECTIONS": value})] == (
        ["unset CUDA_DEVICE_MAX_CONNECTIONS"] if wrong else []
    )
    assert queue_problems({}) == []


def test_one_priority_for_all_of_nccl_is_wrong() -> None:
    [(problem, remedy)] = queue_problems({"TORCH_NCCL_HIGH_PRIORITY": "1"})
    assert problem.startswith("TORCH_NCCL_HIGH_PRIORITY is 1, so receives can stand behind sends")
    assert remedy == "unset TORCH_NCCL_HIGH_PRIORITY"
    assert queue_problems({"TORCH_NCCL_HIGH_PRIORITY": "0"}) == []
