"""Where the secret that machines share comes from, and which files are not believed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.trust.secret import job_secret, key_file, make_key, new_secret, proof_of, read_key

KEY = "0123456789abcdef" * 4


def write(path: Path, text: str = KEY, mode: int = 0o600) -> dict[str, str]:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return {"BAMBOO_SECRET_FILE": str(path)}


def test_it_is_made_once_in_the_home_directory_for_the_user_alone(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert read_key(home) is None
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.append(make_key(home))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and len(set(made)) == 1 and read_key(home) == made[0]
    file = key_file(home)
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(file.parent) == [file.name], "nothing is left behind"  # noqa: PTH208


def test_the_file_that_the_user_names_counts(tmp_path: Path) -> None:
    named = write(tmp_path / "key")
    assert read_key({**named, "HOME": str(tmp_path)}) == make_key(named)
    assert read_key(write(tmp_path / "same", KEY + "\n")) == read_key(named)
    assert read_key(write(tmp_path / "other", KEY[::-1])) != read_key(named)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622, 0o644])
def test_a_file_that_others_can_read_or_write_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"nobody else can read, and it has mode {mode:o}.*chmod 600"):
        read_key(write(tmp_path / "key", mode=mode))


def test_a_short_text_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 5 characters, and needs 32 at least"):
        read_key(write(tmp_path / "key", "short"))
    with pytest.raises(ConfigError, match="there is no such file"):
        read_key({"BAMBOO_SECRET_FILE": str(tmp_path / "absent")})
    with pytest.raises(ConfigError, match="must be a file|can't be read"):
        read_key({"BAMBOO_SECRET_FILE": str(tmp_path)})


def test_without_a_place_for_one_the_remedy_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="BAMBOO_SECRET_FILE"):
        make_key({"HOME": str(tmp_path / "file")})


def test_a_user_without_a_home_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    assert key_file({}) == Path("/.deepspeed_bamboo/secret")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    named = write(tmp_path / "key")
    os.chown(tmp_path / "key", 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        read_key(named)


def test_secrets_of_jobs_differ_and_their_proofs_say_nothing_else() -> None:
    one, other = job_secret(KEY, salt=new_secret()), job_secret(KEY, salt=new_secret())
    assert one != other and job_secret(KEY, salt="s") == job_secret(KEY, salt="s") != job_secret(KEY[1:], salt="s")
    assert proof_of(one) == proof_of(one) != proof_of(other)
    assert one not in proof_of(one)
