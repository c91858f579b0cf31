"""How slots find each other before anything can be coordinated."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.coordination.server import free_port
from deepspeed_bamboo.elastic.boot import Boot
from deepspeed_bamboo.elastic.errors import ExchangeError, LaunchError
from deepspeed_bamboo.elastic.exchange_file import FileExchange
from deepspeed_bamboo.elastic.exchange_socket import SocketExchange
from deepspeed_bamboo.trust.secret import job_secret
from tests.coordination.helpers import wait_until

KEY = "a key that two machines share, of 32 characters at least"
BOOT = Boot(
    job="j",
    prefix="/p",
    endpoints=("h:1", "i:2"),
    master_addr="h",
    master_ports=(3, 4),
    salt="of this job",
    secret=job_secret(hashlib.sha256(KEY.encode()).hexdigest(), salt="of this job"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"deepspeed_bamboo-{os.getuid()}"


def test_without_a_place_to_write_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    exchange = FileExchange(os.getpid())
    with pytest.raises(LaunchError, match="point TMPDIR"):
        exchange.give(BOOT)
    exchange.refuse()


def test_a_slot_that_comes_early_waits(folder: Path) -> None:
    taken: list[Boot] = []
    slots = [FileExchange(os.getpid()) for _ in range(3)]
    threads = [threading.Thread(target=lambda s=s: taken.append(s.take(within_seconds=10))) for s in slots]
    for thread in threads:
        thread.start()
    leader = FileExchange(os.getpid())
    leader.give(BOOT)
    for thread in threads:
        thread.join()
    assert taken == [BOOT] * 3
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    leader.close()
    assert not folder.exists()
    leader.close()


def test_two_launchers_never_meet(folder: Path) -> None:
    one, two = FileExchange(os.getpid()), FileExchange(os.getppid())
    one.give(BOOT)
    with pytest.raises(ExchangeError, match=r"did not start the job within 0 s"):
        two.take(within_seconds=0.1)
    other = Boot(job="k", prefix="/p", endpoints=(), master_addr="h", master_ports=())
    two.give(other)
    assert one.take(within_seconds=1) == BOOT and two.take(within_seconds=1) == other
    one.close()
    assert two.take(within_seconds=1) == other
    two.close()
    assert not folder.exists()


def test_a_refusal_is_passed_on(folder: Path) -> None:
    FileExchange(os.getpid()).refuse()
    with pytest.raises(ExchangeError, match="rank 0 could not start"):
        FileExchange(os.getpid()).take(within_seconds=1)
    FileExchange(os.getpid()).close()


def test_files_of_dead_launchers_are_removed(folder: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    dead = FileExchange(launcher.pid)
    dead.give(BOOT)
    launcher.kill()
    launcher.wait()
    with pytest.raises(ExchangeError, match="is gone"):
        FileExchange(launcher.pid)
    live = FileExchange(os.getpid())
    live.give(BOOT)
    assert len(list(folder.iterdir())) == 1
    live.close()
    assert not folder.exists()


def test_waiting_ends_with_the_launcher(folder: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    slot = FileExchange(launcher.pid)
    launcher.kill()
    launcher.wait()
    start = time.monotonic()
    with pytest.raises(ExchangeError, match="ended during the start"):
        slot.take(within_seconds=30)
    assert time.monotonic() - start < 5


def test_a_folder_that_others_can_write_is_not_trusted(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(LaunchError, match=r"mode 700; remove it"):
        FileExchange(os.getpid()).give(BOOT)


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match="mode 700"):
        FileExchange(os.getpid()).give(BOOT)


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_text(KEY)
    monkeypatch.setenv("BAMBOO_SECRET_FILE", str(file))
    return file


def over_socket(port: int, rank: int, **arguments: Any) -> SocketExchange:
    return SocketExchange(address="127.0.0.1", port=port, world_size=3, rank=rank, **arguments)


def test_machines_meet_at_the_masters_port_and_leave_it_free() -> None:
    port = free_port("")
    taken: list[Boot] = []
    threads = [
        threading.Thread(target=lambda r=rank: taken.append(over_socket(port, r).take(within_seconds=10)))
        for rank in (1, 2)
    ]
    for thread in threads:
        thread.start()
    leader = over_socket(port, 0)
    leader.give(BOOT)
    for thread in threads:
        thread.join()
    assert taken == [BOOT, BOOT]
    wait_until(lambda: not _listening(port), what="the port to be free")
    leader.close()


def test_strangers_at_the_port_are_ignored() -> None:
    port = free_port("")
    leader = over_socket(port, 0)
    leader.give(BOOT)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"bamboo 1 1\n".ljust(72))  # as long as a proof
        heard = stranger.makefile("rb").read()
    assert len(heard) == 40 and b"h:1" not in heard, "a greeting with a number, and nothing else"
    assert over_socket(port, 1).take(within_seconds=5) == BOOT
    assert _listening(port), "rank 2 has not asked yet"
    leader.close()
    assert not _listening(port)


def test_an_answer_that_was_changed_on_its_way_is_not_believed() -> None:
    """It has the certificate of the way to etcd. Who changes it has seen the proofs of both sides, which are true."""
    port, changed = free_port(""), list[int]()
    leader = over_socket(port, 0)
    leader.give(BOOT)
    with socket.create_server(("127.0.0.1", 0)) as between:

        def pass_on() -> None:
            while True:
                with between.accept()[0] as one, socket.create_connection(("127.0.0.1", port)) as other:
                    one.sendall(other.recv(40, socket.MSG_WAITALL))
                    other.sendall(one.recv(72, socket.MSG_WAITALL))
                    one.sendall(other.recv(32, socket.MSG_WAITALL))
                    other.sendall(one.recv(200))
                    answer = other.makefile("rb").readline()
                    changed.append(answer.count(b"h:1"))
                    one.sendall(answer.replace(b"h:1", b"k:1"))

        threading.Thread(target=pass_on, daemon=True).start()
        with pytest.raises(ExchangeError, match="has changed its answer"):
            over_socket(between.getsockname()[1], 1).take(within_seconds=1)
    assert set(changed) == {1}
    leader.close()


def test_silent_connections_keep_nobody_out() -> None:
    port = free_port("")
    leader = over_socket(port, 0)
    leader.give(BOOT)
    with contextlib.ExitStack() as strangers:
        for _ in range(400):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        start = time.monotonic()
        assert over_socket(port, 1).take(within_seconds=10) == BOOT
        assert time.monotonic() - start < 4
    leader.close()


def test_a_machine_with_another_key_gets_nothing_and_is_told_in_seconds(tmp_path: Path) -> None:
    port = free_port("")
    leader = over_socket(port, 0)
    leader.give(BOOT)
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text(KEY[::-1])
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"does not know this secret.*has the same secret"):
        over_socket(port, 1, environment={"BAMBOO_SECRET_FILE": str(other)}).take(within_seconds=60)
    assert time.monotonic() - start < 12
    leader.close()


def test_a_machine_without_a_key_is_told_how_to_get_one(tmp_path: Path) -> None:
    told: list[str] = []
    port = free_port("")
    waiting = over_socket(port, 1, environment={"HOME": str(tmp_path)}, tell=told.append, told_after_seconds=0.1)
    with pytest.raises(ExchangeError, match=r"this machine has no secret .* copy it to every machine"):
        waiting.take(within_seconds=0.5)
    assert "this machine has no secret" in told[0]


def test_an_absent_leader_is_named_with_how_long_it_was_tried() -> None:
    port = free_port("")
    with pytest.raises(ExchangeError, match=rf"127\.0\.0\.1:{port} gave no answer within 1 s .*--master_port"):
        over_socket(port, 1).take(within_seconds=1)


def test_who_waits_for_rank_0_says_so_once_and_how_running_jobs_are_joined() -> None:
    port, told = free_port(""), list[str]()
    waiting = SocketExchange(
        address="127.0.0.1", port=port, world_size=3, rank=1, tell=told.append, told_after_seconds=0.2
    )
    with pytest.raises(ExchangeError, match=r"a running job can be joined .* only through coordinator\.endpoints"):
        waiting.take(within_seconds=1)
    (text,) = told
    assert text.startswith(f"waiting for rank 0 at 127.0.0.1:{port}, 1 s at most ([Errno 111] Connection refused).")
    assert "only through coordinator.endpoints" in text


def test_a_port_in_use_is_an_error_with_a_remedy() -> None:
    with socket.create_server(("", 0)) as taken:
        with pytest.raises(ExchangeError, match=r"cannot be used.*--master_port"):
            over_socket(taken.getsockname()[1], 0).give(BOOT)


def test_a_refusal_reaches_those_who_wait() -> None:
    port = free_port("")
    leader = over_socket(port, 0)
    refuse = threading.Thread(target=leader.refuse)
    refuse.start()
    with pytest.raises(ExchangeError, match="rank 0 could not start"):
        over_socket(port, 1).take(within_seconds=5)
    refuse.join()
    assert not _listening(port)


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
