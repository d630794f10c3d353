"""`mirrax run --nodes`: each machine's share of a cluster, here twice on one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mirrax._src.cluster.local_cluster import free_ports
from mirrax._src.cluster.nodes import Nodes, find_nodes
from mirrax._src.command_line.commands import commands

from .launching import Process
from .test_cluster import TRAINING

TF_CONFIG = json.dumps(
    {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
)
SLURM = {"SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    "given, environment, expected",
    [
        ((2, 1, "a:7"), {}, Nodes(1, ("a", "node-1"), 7)),
        ((2, 0, "[::1]:7"), {}, Nodes(0, ("[::1]", "node-1"), 7)),
        ((1, 0, "a:7"), {}, Nodes(0, ("a",), 7)),
        ((2, None, None), {"TF_CONFIG": TF_CONFIG}, Nodes(1, ("a", "b"), 1)),
        ((2, None, "c:9"), {"TF_CONFIG": TF_CONFIG}, Nodes(1, ("c", "b"), 9)),
        ((2, None, None), SLURM, Nodes(1, ("n1", "n2"), 8888)),
        ((2, 0, None), SLURM, Nodes(0, ("n1", "n2"), 8888)),
    ],
)
def test_which_machines_there_are(given, environment, expected) -> None:
    assert find_nodes(*given, environment=environment) == expected


@pytest.mark.parametrize(
    "given, environment, message",
    [
        (
            (2, None, "a:7"),
            {},
            "--nodes 2 needs --node-rank as well: neither TF_CONFIG",
        ),
        ((2, None, None), {}, "needs --node-rank and --master HOST:PORT as well"),
        ((2, 2, "a:7"), {}, "--node-rank is 2, but must be 0 to 1"),
        ((2, 0, "a"), {}, "'a' is not an address; write HOST:PORT"),
        ((3, None, None), SLURM, "--nodes is 3, but Slurm has 2: n1, n2"),
        ((2, None, None), {"TF_CONFIG": "{"}, "TF_CONFIG must list the machines .*'{'"),
    ],
)
def test_what_is_missing_or_does_not_fit(given, environment, message) -> None:
    with pytest.raises(ValueError, match=message):
        find_nodes(*given, environment=environment)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--node-rank", "1"], "--node-rank 1 needs --nodes"),
        (
            ["--nodes", "2", "--workers", "1:2", "--max-restarts", "2"],
            "do not go with --nodes 2",
        ),
        (["--nodes", "2", "--node-rank", "0"], "--nodes 2 needs --master HOST:PORT"),
    ],
)
def test_options_that_do_not_go_together(options, message) -> None:
    done = CliRunner().invoke(commands, ["run", *options, __file__], env={})
    assert done.exit_code == 2 and message in " ".join(done.output.split())


def start(tmp_path: Path, body: str, *options: str) -> list[Process]:
    """The launchers of two machines with two workers each."""
    [port] = free_ports(1)
    job = ["--workers", "2", "--nodes", "2", "--master", f"127.0.0.1:{port}", *options]
    found = []
    for rank in range(2):
        folder = tmp_path / f"machine-{rank}"
        folder.mkdir()
        found.append(Process(folder, TRAINING + body, *job, "--node-rank", str(rank)))
    return found


def test_two_machines_train_together_and_start_anew_together(tmp_path: Path) -> None:
    body = """
if attempt == 0 and me == 3:
    raise SystemExit("worker three has had enough")
print("I am", strategy.cluster_resolver.task_id, "of", strategy.num_replicas_in_sync)
train(2)
"""
    launchers = start(tmp_path, body, "--max-restarts", "1")
    for rank, launcher in enumerate(launchers):
        assert launcher.wait() == 0, launcher.out + launcher.err
        assert "restart 1 of 1" in launcher.err
        for worker in (2 * rank, 2 * rank + 1):
            assert f"worker {worker} | I am {worker} of 4" in launcher.out
            assert f"worker {worker} | step 1 8.0" in launcher.out
    assert "because worker 3 ended" in launchers[1].err
