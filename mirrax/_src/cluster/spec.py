"""`ClusterSpec`, the tasks of a cluster, and `training_cluster`, those of them that train.

A `ClusterSpec` takes what TensorFlow's takes. `training_cluster` is strict: training alone,
or waiting for a worker that nobody will start, is the worst way to learn of a typing error.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mirrax._src.cluster.resolvers import ClusterResolver

TRAINING_JOBS = ("chief", "worker")
JOBS = (*TRAINING_JOBS, "ps", "evaluator")
_SHOWN_CHARACTERS, _SHOWN_VALUES = 60, 10
_ADDRESS = re.compile(r"(\[[^\s\[\]]+\]|[^\s:\[\]]+)(:(?P<port>.*))?")


class ClusterSpec:
    """The addresses of a cluster's tasks, by job.

    >>> ClusterSpec = mx.distribute.cluster_resolver.ClusterSpec
    >>> cluster = ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]})
    >>> cluster.jobs
    ['chief', 'worker']
    >>> cluster.task_address("worker", 1)
    'c:2222'

    Args:
        cluster: For each job a list of addresses, or a dictionary from some of its tasks'
            indices to addresses; or another `ClusterSpec`.
    """

    __module__ = "mirrax.distribute.cluster_resolver"
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, cluster: ClusterSpec | dict[str, Any]) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster._jobs
        if not isinstance(cluster, dict):
            raise TypeError(
                "A cluster is a dictionary from jobs to lists of addresses, such as "
                f'{{"worker": ["a:2222", "b:2222"]}}, got {cluster!r}.'
            )
        self._jobs = {job: _tasks_of(job, tasks) for job, tasks in cluster.items()}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == (other._jobs if isinstance(other, ClusterSpec) else other)

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))})"

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Each job's addresses: a list, or a dictionary where an index is left out."""
        return {
            job: list(tasks.values())
            if tasks and len(tasks) > max(tasks)
            else {**tasks}
            for job, tasks in self._jobs.items()
        }

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """How many tasks a job has."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of a job's tasks, in order."""
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of one task."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f'Job "{job_name}" has no task {task_index!r}; it has {_list(tasks)}.'
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """A job's addresses in the order of indices, with None where one is left out."""
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ValueError(
                f"There is no job {job_name!r} in the cluster; it has "
                f"{_list(self._jobs)}."
            )
        return self._jobs[job_name]


@dataclass(frozen=True)
class TrainingCluster:
    """The workers that train together; the chief, if there is one, is the first of them.

    Attributes:
        addresses: Where each worker is; "" where the resolver does not know, which is never
            so for the first. Empty if there is no cluster.
        names: What messages call them: "chief 0", "worker 1".
        index: This process's position among them; None if it is not one of them: an
            evaluator, a parameter server, or without a cluster.
        task_type: This process's job.
        task_id: Its index in that job.
    """

    addresses: tuple[str, ...]
    names: tuple[str, ...]
    index: int | None
    task_type: str | None
    task_id: int | None

    @property
    def size(self) -> int:
        """How many workers train."""
        return len(self.addresses)


@dataclass(frozen=True)
class Claim:
    """What a resolver says of the cluster and of this process, and where it has it from."""

    cluster: dict[str, Any]
    task_type: Any
    task_id: Any
    cluster_label: str = "cluster_spec()"
    type_label: str = "task_type"
    id_label: str = "task_id"
    knows_addresses: bool = True


def training_cluster(resolver: ClusterResolver) -> TrainingCluster:
    """The workers that train, and which of them this process is.

    Raises:
        ValueError: Whatever is wrong with what the resolver says, with its place and value.
    """
    if not hasattr(resolver, "claim"):
        raise ValueError(
            "`cluster_resolver` must be a ClusterResolver of mx.distribute.cluster_resolver, "
            f"got {resolver!r}."
        )
    claim = resolver.claim()
    if not claim.cluster:
        return TrainingCluster((), (), None, None, None)
    check_keys(claim.cluster, claim.cluster_label, JOBS)
    jobs = {job: _addresses(claim, job) for job in claim.cluster}
    _check_duplicates(claim, jobs)
    task_id = _checked_task(claim, jobs)
    workers = {
        f"{job} {index}": address
        for job in TRAINING_JOBS
        for index, address in enumerate(jobs.get(job, ()))
    }
    own = f"{claim.task_type} {task_id}"
    return TrainingCluster(
        addresses=tuple(workers.values()),
        names=tuple(workers),
        index=list(workers).index(own) if own in workers else None,
        task_type=claim.task_type,
        task_id=task_id,
    )


def index_of(value: Any) -> int | None:
    """A task's index, also as digits, as TensorFlow takes it; None if it is none."""
    if isinstance(value, str):
        return int(value) if re.fullmatch("[0-9]{1,9}", value) else None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def show(value: Any) -> str:
    """A value as JSON writes it, not too long."""
    if not isinstance(value, str | int | float | None):
        return reprlib.repr(value)
    text = json.dumps(value)
    cut = len(text) > _SHOWN_CHARACTERS
    return f"{text[:_SHOWN_CHARACTERS]}..." if cut else text


def check_keys(keys: Iterable[str], where: str, known: Sequence[str]) -> None:
    """Refuses a key that nobody reads, and says which one was probably meant."""
    for key in keys:
        if key not in known:
            raise ValueError(
                f"{where} has the unknown key {show(key)}.{_did_you_mean(key, known)} It "
                f"may have {_list(known)}."
            )


def _tasks_of(job: Any, tasks: Any) -> dict[int, str]:
    """The addresses of a job's tasks by index, in order."""
    if not isinstance(job, str):
        raise TypeError(f"The name of a job is a string, got {job!r}.")
    if isinstance(tasks, list | tuple):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, dict):
        raise TypeError(
            f"The tasks of job {job!r} are a list of addresses, or a dictionary from "
            f"indices to addresses, got {tasks!r}."
        )
    by_index: dict[int, str] = {}
    for key, address in tasks.items():
        index = index_of(key)
        if index is None or index in by_index:
            problem = "not an index" if index is None else "there twice"
            raise ValueError(f"In job {job!r} the task {key!r} is {problem}.")
        if not isinstance(address, str):
            raise TypeError(
                f"The address of a task is a string, but job {job!r} has {address!r}."
            )
        by_index[index] = address
    return dict(sorted(by_index.items()))


def _addresses(claim: Claim, job: str) -> list[str]:
    """The checked addresses of a job; TensorFlow learns of a bad one when it connects."""
    label = f"{claim.cluster_label}[{show(job)}]"
    tasks = claim.cluster[job]
    if isinstance(tasks, dict):
        tasks = _dense(label, tasks)
    elif not isinstance(tasks, list):
        raise ValueError(
            f"{label} is {show(tasks)}, but must be a list of addresses: "
            '["host:port", ...].'
        )
    if not tasks and job in TRAINING_JOBS:
        raise ValueError(
            f"{label} is empty. List its addresses, or leave {show(job)} out."
        )
    if job not in ("worker", "ps") and len(tasks) > 1:
        raise ValueError(
            f"{label} has {len(tasks)} tasks, but there is at most one {job}."
        )
    for index, address in enumerate(tasks):
        is_unknown = not claim.knows_addresses and index > 0
        problem = None if is_unknown else _problem_of(address)
        if problem:
            raise ValueError(f"{label}[{index}] is {show(address)}: {problem}.")
    return tasks


def _dense(label: str, tasks: dict[Any, Any]) -> list[Any]:
    """The tasks of a dictionary from indices, none of which may be left out."""
    indices = {index_of(key): key for key in tasks}
    wrong = [key for key in tasks if index_of(key) is None]
    wrong = wrong or [key for key in tasks if key not in indices.values()]
    if wrong:
        raise ValueError(
            f"{label} has the key {show(wrong[0])}, which is not an index, or is there "
            "twice. Write a list of addresses."
        )
    for index in range(len(tasks)):
        if index not in indices:
            raise ValueError(
                f"{label} has no task {index}, only {_list(indices)}. All workers have to be "
                "known to train together: write a list of addresses."
            )
    return [tasks[indices[index]] for index in range(len(tasks))]


def _problem_of(address: Any) -> str | None:
    """What is wrong with the address of a task."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        return 'an address is "host:port", or "[::1]:port" with an IPv6 address'
    if match["port"] is None:
        return 'the port is missing, an address is "host:port"'
    port = index_of(match["port"])
    if port is None or not 0 < port < 65536:
        return f"the port {show(match['port'])} is not a number from 1 to 65535"
    return None


def _check_duplicates(claim: Claim, jobs: dict[str, list[str]]) -> None:
    seen: dict[str, str] = {}
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses):
            label = f"{claim.cluster_label}[{show(job)}][{index}]"
            first = seen.setdefault(address.lower(), label) if address else label
            if first != label:
                raise ValueError(
                    f"{first} and {label} are both {show(address)}. Each task needs an "
                    "address of its own; on one machine, a port of its own."
                )


def _checked_task(claim: Claim, jobs: dict[str, list[str]]) -> int:
    """This process's index in its job, which has to be in the cluster."""
    job, label = claim.task_type, claim.type_label
    for name, value in ((label, job), (claim.id_label, claim.task_id)):
        if value is None:
            raise ValueError(
                f"{name} is not set, so that this process cannot know which task of the "
                f"cluster it is. The cluster's jobs are {_list(jobs)}."
            )
    if job not in JOBS:
        raise ValueError(
            f"{label} is {show(job)}, not one of {_list(JOBS)}.{_did_you_mean(job, JOBS)}"
        )
    if job not in jobs and job != "evaluator":  # which trains with nobody
        raise ValueError(
            f"{label} is {show(job)}, but {claim.cluster_label} has only {_list(jobs)}."
        )
    if job == "ps" and jobs.keys().isdisjoint(TRAINING_JOBS):
        raise ValueError(f'{claim.cluster_label} has no "worker" and no "chief".')
    index = index_of(claim.task_id)
    count = len(jobs.get(job, ["itself"]))
    if index is None:
        raise ValueError(
            f"{claim.id_label} is {show(claim.task_id)}, but must be an integer, 0 or larger."
        )
    if index >= count:
        tasks = f"{count} task{'s' * (count != 1)}"
        raise ValueError(
            f"{claim.id_label} is {show(index)}, but {show(job)} has {tasks}: indices "
            "count from 0."
        )
    return index


def _did_you_mean(word: Any, known: Sequence[str]) -> str:
    if word == "master" and "chief" in known:
        return ' It is an older name of "chief".'
    near = difflib.get_close_matches(str(word).lower(), known, 1, 0.7)
    return f" Did you mean {show(near[0])}?" if near else ""


def _list(values: Iterable[Any]) -> str:
    shown = [show(value) for value in values]
    if len(shown) > _SHOWN_VALUES:
        shown = [*shown[:_SHOWN_VALUES], "..."]
    return ", ".join(shown) or "none"
