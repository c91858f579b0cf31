"""Agents from launchers that are not DeepSpeed's: torchrun, srun, and whatever starts a script that says so itself."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path

import pytest

from deepspeed_bamboo.elastic.command_line import CommandLine
from deepspeed_bamboo.elastic.errors import LaunchError
from deepspeed_bamboo.elastic.schedulers import first_host, ranks_of_scheduler, tasks_of_node
from deepspeed_bamboo.elastic.settings_source import find_section
from deepspeed_bamboo.elastic.slot import slot_from_environment
from deepspeed_bamboo.elastic.way_in import agent_line, is_for_agent
from tests.elastic.launched import LaunchedJob

LOSES_ONE = """
    training = FakeTraining()
    training.begin()
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} has {sys.argv[1:2]}", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while training.job.epoch().number < 1:
        time.sleep(0.01)
    print("goes on because", training.job.epoch().reason, flush=True)
    training.job.finish({})
    training.wait()
"""
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2")
SRUN = (sys.executable, "-m", "tests.elastic.fake_srun", "2", sys.executable, "-u")


@pytest.mark.parametrize("way", ["torchrun", pytest.param("srun", marks=pytest.mark.sweep)])
def test_a_worker_is_lost_under_another_launcher_and_its_job_goes_on(
    tmp_path: Path, way: str, temporary_folder: Path
) -> None:
    launcher = {"torchrun": TORCHRUN, "srun": SRUN}[way]
    module = ("-m", "tests.elastic.fast_launch")
    with LaunchedJob(tmp_path, LOSES_ONE, launcher=launcher, module=module, options=("--job", way)) as job:
        assert job.wait(within_seconds=180) == 0, job.output
    for rank in (0, 1):
        assert f"rank {rank} of 2 has ['--deepspeed_config']" in job.output, job.output
    assert "its process was killed by SIGKILL" in job.output
    for left in temporary_folder.glob("torchelastic_*"):  # torchrun's own, which it doesn't remove
        shutil.rmtree(left)


def test_tasks_of_srun_have_ranks_and_meet_at_their_first_node() -> None:
    second = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_TASKS_PER_NODE": "4,3",
        "SLURM_STEP_NODELIST": "gpu[07-09,12]",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
    }
    found = ranks_of_scheduler(second)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [found[name] for name in names] == ["5", "1", "7", "3", "gpu07"]
    first = {**second, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert ranks_of_scheduler(first)["MASTER_PORT"] == found["MASTER_PORT"]
    another = ranks_of_scheduler({**second, "SLURM_STEP_ID": "1"})
    assert another["MASTER_PORT"] != found["MASTER_PORT"] and 1024 < int(found["MASTER_PORT"]) < 32768
    assert not slot_from_environment(found).one_machine
    assert ranks_of_scheduler({**second, "RANK": "0"}) == {}, "a launcher inside of the task"
    assert ranks_of_scheduler({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == {}, "a batch script is no task of a step"
    assert "MASTER_ADDR" not in ranks_of_scheduler({**second, "MASTER_ADDR": "mine"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("a-1,b-2", "a-1"), ("gpu[07-09]", "gpu07"), ("r1n[2,5]-ib,x", "r1n2-ib"), ("n[3],m[1-2]", "n3")],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_lists_that_say_nothing_are_refused() -> None:
    assert [tasks_of_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        first_host("")
    for counts, node in (("4", 1), ("four", 0), ("", 0)):
        with pytest.raises(LaunchError, match="start with srun"):
            tasks_of_node(counts, node)


def test_slots_meet_beside_the_store_that_torchrun_serves() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
    assert slot_from_environment(environment).master_port == 29500
    of_torchrun = {**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert slot_from_environment(of_torchrun).master_port == 29501
    assert slot_from_environment({**of_torchrun, "MASTER_PORT": "65535"}).master_port == 65534


def test_a_script_becomes_an_agent_once_and_only_under_a_launcher() -> None:
    launched = {"RANK": "0"}
    assert is_for_agent(launched) and is_for_agent({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"} | SLURM_REST)
    assert not is_for_agent({})
    assert not is_for_agent({**launched, "BAMBOO_WORKER": "w0"}), "an agent has started it"
    assert not is_for_agent({**launched, "BAMBOO_RUN_PLAIN": "1"}), "the plugin is off"


SLURM_REST = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1"}


def test_the_line_of_an_agent_has_the_launchers_rank_the_options_and_the_script() -> None:
    script = types.SimpleNamespace(__file__="train.py", __spec__=None)
    line = agent_line(["train.py", "--local_rank=1", "-x", "2"], main=script, options="--job 'a b' --workers 3")
    assert line == ["--local_rank=1", "--job", "a b", "--workers", "3", "train.py", "-x", "2"]
    assert agent_line(["train.py", "-x"], main=script, options="") == ["train.py", "-x"]
    module = types.SimpleNamespace(__file__="a/train.py", __spec__=types.SimpleNamespace(name="a.train"))
    for main, wanted in ((module, "this is module a.train"), (types.SimpleNamespace(__spec__=None), "this is no file")):
        with pytest.raises(LaunchError, match=wanted):
            agent_line(["train.py"], main=main, options="")


def test_a_section_is_found_in_the_file_that_the_environment_names(tmp_path: Path) -> None:
    script, own, named = tmp_path / "train.py", tmp_path / "own.json", tmp_path / "named.json"
    script.write_text("import deepspeed\n")
    own.write_text(json.dumps({"train_batch_size": 1}))
    named.write_text(json.dumps({"bamboo": {"topology": {"pipelines": 3}}}))
    environment = {"BAMBOO_CONFIG": str(named)}
    for arguments in ((), ("--deepspeed_config", str(own))):
        line = CommandLine(str(script), arguments)
        config, source = find_section(line, environment)
        assert config is not None and config.topology.pipelines == 3 and source == str(named)
        assert find_section(line, {})[0] is None
    own.write_text(json.dumps({"bamboo": {"topology": {"pipelines": 2}}}))
    config, source = find_section(CommandLine(str(script), ("--deepspeed_config", str(own))), environment)
    assert config is not None and config.topology.pipelines == 2 and source == str(own), "the script's own counts"
