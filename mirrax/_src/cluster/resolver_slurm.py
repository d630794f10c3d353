"""`SlurmClusterResolver`: the cluster is the tasks of this Slurm step (`srun`)."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

from mirrax._src.cluster.resolvers import ClusterResolver, with_protocol
from mirrax._src.cluster.spec import ClusterSpec

_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_NO_GPU = ("", "-1", "NoDevFiles")
_NVIDIA_SMI_SECONDS = 60


class SlurmClusterResolver(ClusterResolver):
    """The tasks of this Slurm step, in the order in which `srun` numbers them.

    Each task of a node gets a port of its own, from `port_base` on, and an equal part of the
    node's GPUs: `cluster_spec()` sets `CUDA_VISIBLE_DEVICES`, `task_type` and `task_id`.
    Jobs take their tasks in the order of their names.

    Args:
        jobs: How many tasks each job has; by default all are "worker".
        port_base: The port of a node's first task.
        gpus_per_node: The GPUs of each node; by default those in `CUDA_VISIBLE_DEVICES`, or
            those that `nvidia-smi` lists, or none without it.
        gpus_per_task: The GPUs of each task; by default those of a node by its tasks.
        tasks_per_node: The tasks of each node: a number, or a dictionary from host names;
            by default what Slurm says.
        auto_set_gpu: Whether `cluster_spec()` sets `CUDA_VISIBLE_DEVICES` for this process.
        rpc_layer: The protocol for `master`.

    Raises:
        RuntimeError: If this is no Slurm step, or the numbers of tasks or GPUs do not fit.
    """

    __module__ = "mirrax.distribute.cluster_resolver"

    def __init__(
        self,
        jobs: dict[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | dict[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self._rank = _number("PROCID")
        self._jobs = {"worker": _number("STEP_NUM_TASKS")} if jobs is None else jobs
        self._tasks = list(_tasks(tasks_per_node, port_base))
        self._check_tasks()
        visible = _visible_gpus()
        if gpus_per_node is None:
            gpus_per_node = _count_gpus() if visible is None else len(visible)
        most = 1 + max(index for index, _ in self._tasks)
        if gpus_per_task is None:
            gpus_per_task = gpus_per_node // most
            if gpus_per_node and not gpus_per_task:
                raise RuntimeError(
                    f"{most} tasks share a node with {gpus_per_node} GPUs, so that each would "
                    "get none. If Slurm has given each task GPUs of its own, pass "
                    f"gpus_per_node={most}, gpus_per_task=1, auto_set_gpu=False; to use none, "
                    "pass gpus_per_task=0."
                )
        if most * gpus_per_task > gpus_per_node:
            raise RuntimeError(
                f"{most} tasks of a node with {gpus_per_task} GPUs each need "
                f"{most * gpus_per_task}, but a node has {gpus_per_node}."
            )
        is_same_count = visible is not None and len(visible) == gpus_per_node
        self._gpus = visible if is_same_count else list(map(str, range(gpus_per_node)))
        self._gpus_per_task = gpus_per_task
        self._auto_set_gpu = auto_set_gpu
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The cluster; also sets `task_type`, `task_id` and `CUDA_VISIBLE_DEVICES`."""
        cluster: dict[str, list[str]] = {}
        start = 0
        for job, count in sorted(self._jobs.items()):
            cluster[job] = [
                address for _, address in self._tasks[start : start + count]
            ]
            if start <= self._rank < start + count:
                self.task_type, self.task_id = job, self._rank - start
            start += count
        if self._auto_set_gpu and self._gpus:
            first = self._tasks[self._rank][0] * self._gpus_per_task
            own = self._gpus[first : first + self._gpus_per_task]
            os.environ[_VISIBLE_GPUS] = ",".join(own)
        return ClusterSpec(cluster)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """`task_type` and `task_id`; None before `cluster_spec()` was called."""
        return self.task_type, self.task_id

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, this one by default; "" if it is not known which."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return with_protocol(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """The GPUs of each task; the arguments are ignored."""
        return {"GPU": self._gpus_per_task}

    def _check_tasks(self) -> None:
        asked, found = sum(self._jobs.values()), len(self._tasks)
        if asked != found:
            raise RuntimeError(
                f"The jobs {self._jobs} have {asked} tasks, but there are {found} on the nodes "
                f"of this step ({os.environ.get('SLURM_STEP_NODELIST')})."
            )
        if self._rank >= found:
            raise RuntimeError(
                f"SLURM_PROCID is {self._rank}, but there are {found} tasks."
            )
        node = os.environ.get("SLURM_LOCALID"), str(self._tasks[self._rank][0])
        if None not in node and node[0] != node[1]:
            raise RuntimeError(
                f"SLURM_LOCALID of task {self._rank} is {node[0]}, but would be {node[1]} if "
                "Slurm filled one node after the other. Start with srun --distribution=block."
            )


def expand_hosts(text: str) -> list[str]:
    """The hosts of a Slurm list: `n[1-2],m5` is n1, n2, m5."""
    hosts = []
    for part in re.split(r",(?![^\[]*\])", text):
        if not re.fullmatch(r"([^\[\]]|\[[^\[\]]+\])+", part):
            raise ValueError(
                f"{part!r} in Slurm's list of hosts {text!r} is not a host."
            )
        pieces = re.findall(r"\[([^\]]+)\]|([^\[]+)", part)
        choices = [
            list(_expand_ranges(ranges, text)) if ranges else [word]
            for ranges, word in pieces
        ]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def expand_counts(text: str) -> list[int]:
    """The numbers of a Slurm list: `3(x2),1` is 3, 3, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(
                f"{part!r} in Slurm's tasks per node {text!r} is not a number."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_ranges(text: str, hosts: str) -> Iterator[str]:
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise ValueError(
                f"{part!r} in Slurm's list of hosts {hosts!r} is not a range."
            )
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _tasks(
    tasks_per_node: int | dict[str, int] | None, port_base: int
) -> Iterator[tuple[int, str]]:
    """The number on its node and the address of each task, in Slurm's order."""
    nodes = os.environ.get("SLURM_STEP_NODELIST")
    if isinstance(tasks_per_node, dict):
        # Slurm's order is that of its list, in which n9 comes before n10.
        order = expand_hosts(nodes) if nodes else []
        known = [host for host in order if host in tasks_per_node]
        hosts = known + sorted(tasks_per_node.keys() - {*known})
        numbers = [tasks_per_node[host] for host in hosts]
    else:
        hosts = expand_hosts(_variable("STEP_NODELIST"))
        if tasks_per_node is None:
            numbers = expand_counts(_variable("STEP_TASKS_PER_NODE"))
        else:
            numbers = [int(tasks_per_node)] * len(hosts)
    if len(hosts) != len(numbers):
        raise RuntimeError(
            f"Slurm's step has {len(hosts)} nodes, but SLURM_STEP_TASKS_PER_NODE has "
            f"{len(numbers)} numbers."
        )
    for host, count in zip(hosts, numbers):
        for index in range(count):
            yield index, f"{host}:{port_base + index}"


def _variable(name: str) -> str:
    name = f"SLURM_{name}"
    if name not in os.environ:
        raise RuntimeError(
            f"{name} is not in the environment. Is this a Slurm step? Start with srun."
        )
    return os.environ[name]


def _number(name: str) -> int:
    text = _variable(name)
    if not text.isdecimal():
        raise ValueError(f"SLURM_{name} is {text!r}, which is not a number.")
    return int(text)


def _visible_gpus() -> list[str] | None:
    """The GPUs that this process may see; None if that is not known."""
    text = os.environ.get(_VISIBLE_GPUS)
    if text is None:
        return None
    return [gpu for gpu in text.split(",") if gpu.strip() not in _NO_GPU]


def _count_gpus() -> int:
    """The GPUs of this machine, without starting CUDA."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
        )
    except FileNotFoundError:
        return 0
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"nvidia-smi did not answer in {_NVIDIA_SMI_SECONDS} s: pass `gpus_per_node`."
        ) from None
    if listed.returncode:
        said = (listed.stdout + listed.stderr).strip()
        raise RuntimeError(
            f"nvidia-smi failed, so the number of GPUs is unknown: {said}\nPass "
            "`gpus_per_node`; 0 if there are none."
        )
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
