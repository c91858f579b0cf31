"""A real etcd that is not open to everybody: encrypted, with client certificates, with users and passwords."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from etcd3 import etcdrpc

from deepspeed_bamboo.coordination import CoordinatorUnavailable, EndpointError, EtcdGuard, connect
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.job import JobCoordinator
from deepspeed_bamboo.coordination.store import StoreEvent
from tests.coordination.helpers import Collector, first_epoch, stretched, wait_until
from tests.coordination.manual_etcd import ManualEtcd

PASSWORD = "TEST_ETCD_PASSWORD"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def openssl(*arguments: str, folder: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def sign(folder: Path, name: str) -> None:
    """``name``.pem and ``name``.key, for loopback, signed by the authority ca.pem."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")
    openssl("req", *key, "-out", f"{name}.csr", "-subj", f"/CN={name}", folder=folder)
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    by_ca = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", f"{name}.csr", *by_ca, "-out", f"{name}.pem", folder=folder)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "ca.key")
    openssl("req", "-x509", *key, "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2", folder=folder)
    sign(folder, "server")
    sign(folder, "client")
    return folder


def server_options(certificates: Path) -> list[str]:
    files = {"cert-file": "server.pem", "key-file": "server.key", "trusted-ca-file": "ca.pem"}
    return [*(f"--{option}={certificates / file}" for option, file in files.items()), "--client-cert-auth"]


def client_guard(certificates: Path) -> EtcdGuard:
    return EtcdGuard(**{name: str(certificates / file) for name, file in CLIENT_FILES.items()})


CLIENT_FILES = {"ca_cert": "ca.pem", "cert": "client.pem", "key": "client.key"}


@needs_openssl
def test_an_encrypted_etcd_serves_whoever_has_its_certificates(certificates: Path, tmp_path: Path) -> None:
    guard = client_guard(certificates)
    etcd = ManualEtcd(tmp_path / "etcd", options=server_options(certificates), guard=guard)
    etcd.start()
    try:
        environment = {"BAMBOO_JOB": "j", "BAMBOO_ENDPOINTS": str(etcd.endpoint), **guard.to_environment()}
        job = connect(environment)
        told: Collector[object] = Collector()
        job.watch(told)
        job.propose(first_epoch(["w0", "w1"]), expected=None)
        told.wait_for(lambda change: getattr(change, "kind", "") == "epoch")
        job.close()
        without = {"no certificate": replace(guard, cert=None, key=None), "no encryption": EtcdGuard()}
        for what, wrong in without.items():
            store = EtcdStore([etcd.endpoint], guard=wrong)
            with pytest.raises(CoordinatorUnavailable):
                store.ping(within_seconds=1)
                pytest.fail(what)
            store.close()
    finally:
        etcd.kill()


@pytest.fixture
def with_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ManualEtcd]:
    """An etcd where the user ``trainer`` may use the keys under /team and nothing else."""
    etcd = ManualEtcd(tmp_path / "etcd")
    etcd.start()
    monkeypatch.setenv(PASSWORD, "s3cret")
    with grpc.insecure_channel(str(etcd.endpoint)) as channel:
        auth = etcdrpc.AuthStub(channel)
        for user, password in (("root", "r"), ("trainer", "s3cret")):
            auth.UserAdd(etcdrpc.AuthUserAddRequest(name=user, password=password))
            auth.RoleAdd(etcdrpc.AuthRoleAddRequest(name=user))
            auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user=user, role=user))
        permission = {"permType": 2, "key": b"/team/", "range_end": b"/team0"}
        auth.RoleGrantPermission(etcdrpc.AuthRoleGrantPermissionRequest(name="trainer", perm=permission))
        auth.AuthEnable(etcdrpc.AuthEnableRequest())
    yield etcd
    etcd.kill()


def test_a_job_lives_under_its_prefix_with_user_and_password(with_users: ManualEtcd) -> None:
    guard = EtcdGuard(username="trainer", password_env=PASSWORD)
    store = EtcdStore([with_users.endpoint], guard=guard)
    store.ping(within_seconds=stretched(2))  # a password costs etcd much of a core
    job = JobCoordinator(store, job="j", prefix="/team")
    told: Collector[object] = Collector()
    with job.claim_name(lease_seconds=5):
        job.watch(told)
        job.propose(first_epoch(["w0", "w1"]), expected=None)
    told.wait_for(lambda change: getattr(change, "kind", "") == "epoch")
    job.request_drain("n", deadline_seconds=None, reason="r")
    elsewhere = JobCoordinator(store, job="j", prefix="/others")
    with pytest.raises(CoordinatorUnavailable, match="PERMISSION_DENIED"):
        elsewhere.request_stop("r")
    store.close()


def test_tokens_are_renewed_after_a_restart_that_forgot_them(with_users: ManualEtcd) -> None:
    store = EtcdStore([with_users.endpoint], guard=EtcdGuard(username="trainer", password_env=PASSWORD))
    store.ping(within_seconds=60)  # a password takes etcd long on loaded cores
    told: Collector[StoreEvent] = Collector()
    store.watch("/team/", told)
    store.put("/team/a", "1")
    told.wait_for(lambda event: event.kind == "resync")
    with_users.kill()
    with_users.launch()
    wait_until(lambda: _answers(store), within_seconds=60, what="etcd to be back")
    store.put("/team/b", "2")
    wait_until(lambda: [e.kind for e in told.items].count("resync") >= 2, within_seconds=60, what="a new watch")
    store.put("/team/c", "3")
    told.wait_for(lambda event: event.key == "/team/c")
    store.close()


def _answers(store: EtcdStore) -> bool:
    with contextlib.suppress(CoordinatorUnavailable):
        store.ping(within_seconds=5)
        return True
    return False


@pytest.mark.parametrize("guard", [EtcdGuard(), EtcdGuard(username="trainer", password_env="TEST_WRONG_PASSWORD")])
def test_without_the_right_password_the_reason_is_told(
    with_users: ManualEtcd, guard: EtcdGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_WRONG_PASSWORD", "guess")
    store = EtcdStore([with_users.endpoint], guard=guard)
    with pytest.raises(CoordinatorUnavailable) as raised:
        store.ping(within_seconds=60)  # a refusal is final; but a password takes etcd long on loaded cores
    assert "user name is empty" in str(raised.value) or "authentication failed" in str(raised.value)
    assert "refuses this user" in str(raised.value) and "gave no answer" not in str(raised.value)
    assert "guess" not in str(raised.value)
    store.close()


def test_nothing_secret_is_handed_on_and_paths_are_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(PASSWORD, "s3cret")
    guard = EtcdGuard(username="u", password_env=PASSWORD, ca_cert="ca.pem")
    told = guard.to_environment()
    assert "s3cret" not in str(told) + repr(guard)
    assert EtcdGuard.from_environment(told) == replace(guard, ca_cert=str(tmp_path / "ca.pem"))
    assert EtcdGuard.from_environment({}) == EtcdGuard()


def test_what_is_missing_is_named_before_anybody_is_asked(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match=r"coordinator.ca_cert is .*nowhere.pem.*No such file.*PEM"):
        EtcdGuard(ca_cert=str(tmp_path / "nowhere.pem")).check({})
    (tmp_path / "x.pem").write_text("hello")
    with pytest.raises(EndpointError, match="no PEM file"):
        EtcdGuard(ca_cert=str(tmp_path / "x.pem")).check({})
    with pytest.raises(EndpointError, match=r"password_env is 'ABSENT'.*user 'u'"):
        EtcdGuard(username="u", password_env="ABSENT").check({})
