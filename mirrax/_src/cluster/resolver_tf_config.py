"""`TFConfigClusterResolver`: the cluster that the environment variable TF_CONFIG describes.

Its properties answer as TensorFlow's do; `claim` is what is read strictly before training.
"""

from __future__ import annotations

import collections
import json
import os
from typing import Any

from mirrax._src.cluster.resolvers import ClusterResolver, with_protocol
from mirrax._src.cluster.spec import Claim, ClusterSpec, check_keys, show

_VARIABLE = "TF_CONFIG"
_TASK = f'{_VARIABLE}["task"]'
# Those after the first two are read by TensorFlow, or written by platforms that start it.
_KEYS = ("cluster", "task", "environment", "job", "rpc_layer", "session_master")
_TASK_KEYS = ("type", "index", "trial", "cloud")
_CONTEXT_CHARACTERS = 20


class TFConfigClusterResolver(ClusterResolver):
    """The cluster in the environment variable `TF_CONFIG`, which is JSON.

    >>> os.environ["TF_CONFIG"] = '''{
    ...     "cluster": {"worker": ["a:2222", "b:2222"]},
    ...     "task": {"type": "worker", "index": 1}}'''
    >>> resolver = mx.distribute.cluster_resolver.TFConfigClusterResolver()
    >>> resolver.cluster_spec(), resolver.task_type, resolver.task_id
    (ClusterSpec({'worker': ['a:2222', 'b:2222']}), 'worker', 1)
    >>> del os.environ["TF_CONFIG"]

    `TF_CONFIG` is read each time. Without it, or where it is empty, there is no cluster.

    Args:
        task_type: The job of this process, in place of the one in `TF_CONFIG`.
        task_id: Its index, likewise.
        rpc_layer: The protocol for `master`, likewise.
        environment: What `environment` gives.
    """

    __module__ = "mirrax.distribute.cluster_resolver"

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type, self._task_id = task_type, task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """The cluster; empty if `TF_CONFIG` has none."""
        return ClusterSpec(_read().get("cluster", {}))

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, this one by default; "" in a cluster of one task."""
        session_master = _read().get("session_master")
        if session_master is not None:
            return session_master
        cluster = self.cluster_spec()
        if not cluster or [len(cluster.job_tasks(job)) for job in cluster.jobs] == [1]:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise ValueError(f'{_VARIABLE} has no "task", so say which task you mean.')
        address = cluster.task_address(task_type, task_id)
        return with_protocol(
            address, self.rpc_layer if rpc_layer is None else rpc_layer
        )

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """How many accelerators a task has, this one by default."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        return super().num_accelerators(task_type, task_id, config_proto)

    @property
    def task_type(self) -> str | None:
        """The job of this process, or None if it is not set."""
        job = self._task("type") if self._task_type is None else self._task_type
        return None if job is None else str(job)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None if it is not set."""
        index = self._task("index") if self._task_id is None else self._task_id
        return None if index is None else int(index)

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def environment(self) -> str | None:
        """The environment that it was given."""
        return self._environment

    @property
    def rpc_layer(self) -> str | None:
        """The protocol for `master`."""
        return _read().get("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def claim(self) -> Claim:
        """What `training_cluster` is to check, with the places in `TF_CONFIG`."""
        config = _read()
        if not config:
            return Claim({}, None, None)
        check_keys(config, _VARIABLE, _KEYS)
        if "cluster" not in config:
            raise ValueError(
                f'{_VARIABLE} has no "cluster", only {", ".join(map(show, config))}. Add '
                '"cluster": {"worker": ["host:port", ...]}, or "cluster": {} to train alone.'
            )
        cluster = _object(config["cluster"], f'{_VARIABLE}["cluster"]')
        task = _object(config.get("task", {}), _TASK)
        check_keys(task, _TASK, _TASK_KEYS)
        values = {"type": self._task_type, "index": self._task_id}
        is_given = {key: value is not None for key, value in values.items()}
        values |= {key: task.get(key) for key in values if not is_given[key]}
        for key, value in values.items():
            if cluster and value is None:
                where, what = (_TASK, key) if "task" in config else (_VARIABLE, "task")
                raise ValueError(
                    f'{where} has no "{what}". Each process of the cluster needs its own: '
                    '"task": {"type": "worker", "index": 0}.'
                )
        return Claim(
            cluster,
            task_type=values["type"],
            task_id=values["index"],
            cluster_label=f'{_VARIABLE}["cluster"]',
            type_label="task_type" if is_given["type"] else f'{_TASK}["type"]',
            id_label="task_id" if is_given["index"] else f'{_TASK}["index"]',
        )

    def __repr__(self) -> str:
        return f"TFConfigClusterResolver({_VARIABLE}={os.environ.get(_VARIABLE)!r})"

    def _task(self, key: str) -> Any:
        return _object(_read().get("task", {}), _TASK).get(key)


def _read() -> dict[str, Any]:
    """What TF_CONFIG holds; nothing if it is empty."""
    text = os.environ.get(_VARIABLE, "")
    if not text.strip():
        return {}
    try:
        config = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise _syntax_error(error) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_VARIABLE} cannot be read: {error}") from None
    return _object(config, _VARIABLE)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, count in collections.Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"the key {show(key)} appears twice in one object.")
    return dict(pairs)


def _syntax_error(error: json.JSONDecodeError) -> json.JSONDecodeError:
    """The error with the text around the place, since TF_CONFIG is often one long line."""
    start = max(0, error.pos - _CONTEXT_CHARACTERS)
    before = error.doc[start : error.pos]
    after = error.doc[error.pos : error.pos + _CONTEXT_CHARACTERS]
    hint = " JSON wants double quotes: write it with json.dumps." * ("'" in after)
    return json.JSONDecodeError(
        f"{_VARIABLE} is not JSON.{hint} After {show(before)} comes {show(after)}: "
        f"{error.msg}",
        error.doc,
        error.pos,
    )


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(
            f"{where} is {show(value)}, but must be a JSON object: {{...}}."
        )
    return value
