"""The "bamboo" section: defaults, refusals, and every form in which DeepSpeed takes a configuration."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from deepspeed_bamboo.config.locations import endpoint_problem
from deepspeed_bamboo.config.section import (
    BambooConfig,
    Location,
    Section,
    load_bamboo_section,
    parse_bamboo_section,
)
from deepspeed_bamboo.errors import BambooError, ConfigError

COMMENTED = """
// a comment
{
  # another
  "train_batch_size": 8,  /* and one more */
  "bamboo": {"redundancy": {"mode": "eager",},},
}
"""


def message_for(section: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_bamboo_section(section)
    return str(caught.value)


def test_empty_section_turns_it_on_with_defaults() -> None:
    config = parse_bamboo_section({})
    assert config.enabled
    assert (config.redundancy.mode, config.redundancy.offload) == ("lazy", "cpu")
    assert config.coordinator.endpoints == []
    assert (config.coordinator.lease_seconds, config.coordinator.connect_timeout_seconds) == (3.0, 5.0)
    assert (config.topology.zones, config.checkpoint.dir, config.checkpoint.interval_minutes) == ("auto", None, 10.0)
    assert (config.event_log, config.faults, config.seed, config.debug_check_shadows) == (None, None, None, 0)


def test_suspicion_follows_the_lease_unless_set() -> None:
    follows = parse_bamboo_section({"coordinator": {"lease_seconds": 7}})
    own = parse_bamboo_section({"coordinator": {"lease_seconds": 7, "suspicion_seconds": 2.5}})
    assert follows.coordinator.suspicion_limit_seconds == 7
    assert own.coordinator.suspicion_limit_seconds == 2.5


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"redundncy": {}}, ["bamboo.redundncy", "'redundancy'"]),
        ({"redundncy": {}}, ["unknown key bamboo.redundncy; did you mean 'redundancy'? Valid are: enabled, "]),
        ({"mode": "lazy"}, ["unknown key bamboo.mode; did you mean 'bamboo.redundancy.mode'? Valid are: enabled, "]),
        ({"dir": "x"}, ["did you mean 'bamboo.checkpoint.dir'?"]),
        ({"redundancy": {"seed": 1}}, ["did you mean 'bamboo.seed'? Valid are: mode, "]),
        ({"topology": {"sigterm": "drain"}}, ["did you mean 'bamboo.notices.sigterm'?"]),
        ({"redundancy": {"offlod": "cpu"}}, ["bamboo.redundancy.offlod", "'offload'", "memory_limit_gigabytes"]),
        ({"redundancy": {"mode": "lzay"}}, ["'lzay'", "did you mean 'lazy'", "off, lazy, eager, full"]),
        ({"redundancy": {"mode": "x" * 9}}, ["Valid are: off, lazy, eager, full"]),
        ({"redundancy": {"offload": "gpu"}}, ["'gpu'", "none, cpu, recompute"]),
        ({"redundancy": {"copies": 3}}, ["copies", "3", "2"]),
        ({"redundancy": {"copies": 2, "mode": "off"}}, ["copies is 2", "'off'", "lazy, eager or auto", "copies to 1"]),
        ({"redundancy": {"copies": 2, "mode": "full"}}, ["copies is 2", "'full'"]),
        ({"redundancy": {"memory_limit_gigabytes": 0}}, ["greater than 0", "Most memory"]),
        ({"redundancy": "lazy"}, ["bamboo.redundancy", "'lazy'", "must be an object"]),
        ({"coordinator": {"lease_seconds": "3"}}, ["bamboo.coordinator.lease_seconds", "'3'", "number"]),
        ({"coordinator": {"lease_seconds": float("inf")}}, ["inf", "finite"]),
        ({"coordinator": {"lease_seconds": 1e300}}, ["lease_seconds: 1e+300", "less than or equal to 1000000"]),
        ({"coordinator": {"lease_seconds": 1e-9}}, ["lease_seconds: 1e-09", "greater than or equal to 0.1"]),
        ({"topology": {"restart_seconds": 1e300}}, ["restart_seconds: 1e+300", "less than or equal to 1000000"]),
        ({"seed": 2**63}, ["bamboo.seed", "less than 9223372036854775808"]),
        ({"coordinator": {"endpoints": "a:1"}}, ["bamboo.coordinator.endpoints", "'a:1'", "list"]),
        ({"coordinator": {"endpoints": ["http://h:2379/"]}}, ["write 'h:2379'"]),
        ({"coordinator": {"endpoints": ["h:1", "h:1"]}}, ["listed twice"]),
        ({"coordinator": {"prefix": "jobs"}}, ["bamboo.coordinator.prefix", "slash"]),
        ({"checkpoint": {"interval_minutes": -1}}, ["bamboo.checkpoint.interval_minutes", "-1"]),
        ({"checkpoint": {"dir": "gs://b/p"}}, ["bamboo.checkpoint.dir: 'gs://b/p'", "gs://", "s3://bucket/prefix"]),
        ({"checkpoint": {"dir": "s3:///p"}}, ["bamboo.checkpoint.dir: 's3:///p'", "no bucket", "s3://bucket/prefix"]),
        (
            {"checkpoint": {"interval_minutes": 1.0, "keep": 3}},
            ["interval_minutes is 1.0", "keep is 3", "set checkpoint.dir, too, or leave keep out"],
        ),
        ({"checkpoint": {"memory_copies": 2, "dir": "c"}}, ["memory_copies is 2", "memory_interval_seconds"]),
        ({"checkpoint": {"memory_megabytes_per_second": 9.0}}, ["memory_megabytes_per_second is 9.0", "set it, too"]),
        ({"checkpoint": {"memory_limit_gigabytes": 1.0}}, ["memory_limit_gigabytes is 1.0", "dir and", "set one"]),
        ({"topology": {"wait_for_machines_seconds": 9.0}}, ["wait_for_machines_seconds is 9.0", "checkpoint.dir"]),
        ({"redundancy": {"losses_per_hour": 2.0}}, ["losses_per_hour is 2.0", "mode is 'lazy'", 'mode to "auto"']),
        (
            {"policy_interval_seconds": 5.0},
            ["policy_interval_seconds is 5.0", "policy 'fixed'", 'policy to "proactive"'],
        ),
        ({"redundancy": {"mode": "full", "overlap": True}}, ["overlap is True", "mode is 'full'", 'mode to "eager"']),
        ({"notices": {"source": "none", "poll_seconds": 1.0}}, ["poll_seconds is 1.0", "another source"]),
        ({"notices": {"source": "none", "rebalance": "drain"}}, ["rebalance is 'drain'", "another source"]),
        ({"redundancy": {"memory_limit_gigabytes": 1.0}}, ["memory_limit_gigabytes is 1.0", "mode is 'lazy'"]),
        ({"redundancy": {"mode": "off", "offload": "none"}}, ["offload is 'none'", "mode is 'off'", '"eager"']),
        ({"redundancy": {"mode": "off"}, "debug_check_shadows": 3}, ["debug_check_shadows is 3", "no shadows"]),
        ({"checkpoint": {"dir": "c", "interval_minutes": 1e300}}, ["interval_minutes: 1e+300", "equal to 16000"]),
        ({"topology": {"wait_for_machines_seconds": 1e9}}, ["wait_for_machines_seconds: 1000000000.0", "to 1000000"]),
        ({"event_log": ""}, ["bamboo.event_log", "names nothing", "write a path", "null"]),
        ({"checkpoint": {"dir": ""}}, ["bamboo.checkpoint.dir", "names nothing", "write a path", "null"]),
        ({"topology": {"zones": ""}}, ["bamboo.topology.zones: '' is empty, and must not be"]),
        ({"event_log": "a\0b"}, ["bamboo.event_log", "control characters", "write another path"]),
        ({"checkpoint": {"dir": "  "}}, ["bamboo.checkpoint.dir: '  '", "blank"]),
        ({"enabled": "yes"}, ["bamboo.enabled", "'yes'", "bool"]),
        ({"debug_check_shadows": True}, ["bamboo.debug_check_shadows", "True", "integer"]),
        ({"faults": 3}, ["bamboo.faults", "3"]),
        ({"faults": [{"step": 1, "stage": 0, "at": "forwrd"}]}, ["bamboo.faults", "'forwrd'", "'forward'"]),
        (True, ["True", "{}"]),
        (None, ["None", "{}"]),
    ],
)
def test_wrong_values_name_value_rule_and_remedy(section: object, expected: list[str]) -> None:
    message = message_for(section)
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    "section",
    [
        {"checkpoint": {"dir": "c", "interval_minutes": 1.0, "keep": 3, "memory_limit_gigabytes": 1.0}},
        {"checkpoint": {"memory_interval_seconds": 5.0, "memory_copies": 2, "memory_limit_gigabytes": 1.0}},
        {"checkpoint": {"dir": None, "interval_minutes": 1.0}, "topology": {"wait_for_machines_seconds": 9.0}},
        {"topology": {"wait_for_machines_seconds": 0.0}},
        {"redundancy": {"mode": "auto", "losses_per_hour": 2.0, "overlap": True}},
        {"redundancy": {"overlap": False}},
        {"redundancy": {"mode": "lazy", "offload": "cpu"}, "debug_check_shadows": 1},
        {"redundancy": {"mode": "auto", "offload": "none", "memory_limit_gigabytes": 1.0}},
        {"notices": {"source": "none", "rebalance": "tell"}},
        {"enabled": False, "checkpoint": {"keep": 3}},
    ],
)
def test_settings_with_an_effect_and_those_switched_off_on_purpose_pass(section: dict[str, Any]) -> None:
    parse_bamboo_section(section)


def test_a_section_with_all_defaults_written_out_passes() -> None:
    shown = parse_bamboo_section({}).model_dump()
    assert parse_bamboo_section(shown).model_dump() == shown


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"redundancy": {"mod": "lazy"}, "checkpoint": {"keep": 3}},
            ["bamboo.redundancy.mod", "bamboo.checkpoint.keep"],
        ),
        (
            {
                "seed": "1",
                "redundancy": {"copies": 2, "mode": "off"},
                "notices": {"source": "none", "poll_seconds": 1.0},
            },
            ["bamboo.seed", "copies is 2", "bamboo.notices.poll_seconds"],
        ),
        # What another wrong part may be the cause of is left out.
        ({"checkpoint": {"dri": "c", "keep": 3}, "topology": {"wait_for_machines_seconds": 9.0}}, ["checkpoint.dri"]),
        ({"chekpoint": {"dir": "c"}, "topology": {"wait_for_machines_seconds": 9.0}}, ["bamboo.chekpoint"]),
        ({"enabled": "no", "checkpoint": {"keep": 3}}, ["bamboo.enabled"]),
    ],
)
def test_problems_of_all_kinds_are_listed_at_once(section: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bamboo_section(section)
    assert len(caught.value.problems) == len(expected)
    for part in expected:
        assert part in str(caught.value)


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bamboo_section({"enabld": True, "redundancy": {"mode": "on"}, "seed": 1.5})
    assert len(caught.value.problems) == 3
    assert "3 problems" in str(caught.value)


def test_config_error_is_also_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, BambooError)


def test_config_is_immutable() -> None:
    config = parse_bamboo_section({})
    with pytest.raises(ValueError, match="frozen"):
        config.enabled = False  # type: ignore[misc]


def test_every_field_has_a_docstring() -> None:
    pending: list[Any] = [BambooConfig]
    while pending:
        model = pending.pop()
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            if hasattr(field.annotation, "model_fields"):
                pending.append(field.annotation)


@pytest.mark.parametrize(
    ("endpoint", "good"),
    [
        ("127.0.0.1:2379", True),
        ("etcd-0.cluster.local:2379", True),
        ("[::1]:2379", True),
        ("[fe80::1%eth0]:2379", True),
        ("::1:2379", False),
        ("host", False),
        ("host:", False),
        ("host:0", False),
        ("host:65536", False),
        ("host:²", False),
        (":2379", False),
        ("ho st:2379", False),
        ("https://host:2379", False),
        ("host:2379/", False),
    ],
)
def test_endpoints(endpoint: str, *, good: bool) -> None:
    assert (endpoint_problem(endpoint) is None) is good


class TestSources:
    def test_dict_without_section(self) -> None:
        assert load_bamboo_section({"train_batch_size": 8}) is None

    def test_disabled_section_is_read(self) -> None:
        config = load_bamboo_section({"bamboo": {"enabled": False}})
        assert config is not None
        assert not config.enabled

    def test_dict_is_not_changed(self) -> None:
        settings = {"train_batch_size": "auto", "bamboo": {"redundancy": {"mode": "eager"}, "faults": []}}
        before = copy.deepcopy(settings)
        load_bamboo_section(settings)
        assert settings == before

    def test_path_object_is_fine_in_a_dict(self, tmp_path: Path) -> None:
        config = load_bamboo_section({"bamboo": {"event_log": tmp_path}})
        assert config is not None
        assert config.event_log == str(tmp_path)

    def test_file_with_comments_and_trailing_commas(self, tmp_path: Path) -> None:
        path = tmp_path / "ds.json"
        path.write_text(COMMENTED)
        for source in (path, str(path)):
            config = load_bamboo_section(source)
            assert config is not None
            assert config.redundancy.mode == "eager"

    def test_base64(self) -> None:
        text = json.dumps({"bamboo": {"redundancy": {"mode": "off"}}})
        config = load_bamboo_section(base64.urlsafe_b64encode(text.encode()).decode())
        assert config is not None
        assert config.redundancy.mode == "off"

    @pytest.mark.parametrize("name", ["missing.json", "dir/missing", "abcd", "YWJj"])
    def test_missing_file_is_named(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match=name):
            load_bamboo_section(name)

    def test_duplicate_keys_are_refused_as_deepspeed_does(self, tmp_path: Path) -> None:
        path = tmp_path / "ds.json"
        path.write_text('{"bamboo": {}, "bamboo": {}}')
        with pytest.raises(ConfigError, match=r"ds\.json.*bamboo"):
            load_bamboo_section(path)

    def test_broken_file_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "ds.json"
        path.write_text('{"bamboo": ')
        with pytest.raises(ConfigError, match=r"ds\.json"):
            load_bamboo_section(path)

    def test_directory_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="directory"):
            load_bamboo_section(tmp_path)

    @pytest.mark.parametrize("key", ["bambo", "Bamboo", "BAMBOO", "bamboos"])
    def test_misspelled_section_is_not_silently_off(self, key: str) -> None:
        with pytest.raises(ConfigError, match="did you mean 'bamboo'"):
            load_bamboo_section({key: {}})

    def test_wrong_type_is_named(self) -> None:
        with pytest.raises(ConfigError, match="int"):
            load_bamboo_section(3)  # type: ignore[arg-type]


def test_paths_are_those_of_the_place_where_the_job_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("RUN", "seven")
    monkeypatch.setenv("BAMBOO_START_DIRECTORY", "/started/here")
    monkeypatch.chdir(tmp_path)
    found = {
        text: parse_bamboo_section({"event_log": text}).event_log
        for text in ("~/log", "$RUN/log", "../log", "/log", "s3://bucket/log", "s3://bucket/${RUN}", "$5/./~x")
    }
    assert list(found.values()) == [
        "/home/somebody/log", "/started/here/seven/log", "/started/log", "/log", "s3://bucket/log", "s3://bucket/seven",
        "/started/here/$5/~x",
    ]  # fmt: skip


PATHS = {
    "coordinator.ca_cert": {"endpoints": ["h:1"]},
    "coordinator.cert": {"endpoints": ["h:1"], "ca_cert": "/ca", "key": "/key"},
    "coordinator.key": {"endpoints": ["h:1"], "ca_cert": "/ca", "cert": "/cert"},
    "notices.script": {"source": "scripted"},
    "checkpoint.dir": {},
    "event_log": {},
    "profile": {},
    "faults": {},
}


def test_those_are_all_settings_that_are_paths() -> None:
    sections = {"": BambooConfig, **{
        f"{name}.": field.annotation
        for name, field in BambooConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }}  # fmt: skip
    found = {
        prefix + name
        for prefix, section in sections.items()
        for name, hint in get_type_hints(section, include_extras=True).items()
        if Location in (hint, *get_args(hint))
    }
    assert found == set(PATHS)


@pytest.mark.parametrize("value", ["$UNSET/x", "/x/${UNSET}/y", "s3://bucket/$UNSET", "x$EMPTY"])
@pytest.mark.parametrize("name", PATHS)
def test_a_path_with_a_variable_that_is_not_set_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNSET", raising=False)
    monkeypatch.setenv("EMPTY", "")
    *part, last = name.split(".")
    section = {part[0]: {**PATHS[name], last: value}} if part else {last: value}
    message = message_for(section)
    variable = "$EMPTY" if "EMPTY" in value else "$UNSET"
    for words in (f"bamboo.{name}", repr(value), f"has {variable} in it, which is unset or empty", "set it on every"):
        assert words in message, message


def test_a_home_that_nobody_knows_and_a_variable_in_an_endpoint_are_refused() -> None:
    assert "'~nobody-like-that'" in message_for({"event_log": "~nobody-like-that/log"})
    assert "the variable $HOME" in message_for({"coordinator": {"endpoints": ["unix:/$HOME/etcd"]}})
