"""`ClusterSpec`, and training clusters of resolvers other than TF_CONFIG's.

What TensorFlow answers is in tests/conformance/scenarios/cluster_resolvers.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property.examples import examples

from mirrax._src.cluster.spec import TrainingCluster, training_cluster
from mirrax.distribute.cluster_resolver import (
    ClusterSpec,
    JaxClusterResolver,
    SimpleClusterResolver,
    UnionResolver,
)

WORKERS = {"worker": ["a:1", "b:2"]}


def simple(cluster: Any, *task: Any) -> SimpleClusterResolver:
    task_type, task_id = task or (None, None)
    return SimpleClusterResolver(
        ClusterSpec(cluster), task_type=task_type, task_id=task_id
    )


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (["a:1"], "from jobs to lists of addresses, such as"),
        ({"worker": "a:1"}, "tasks of job 'worker' are a list of addresses, or a"),
        ({"worker": ["a:1", 5]}, "job 'worker' has 5"),
        ({5: ["a:1"]}, "name of a job is a string, got 5"),
    ],
)
def test_what_is_no_cluster_is_a_type_error(cluster: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        ClusterSpec(cluster)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"x": "a:1"}, "In job 'worker' the task 'x' is not an index"),
        ({-1: "a:1"}, "In job 'worker' the task -1 is not an index"),
        ({True: "a:1"}, "In job 'worker' the task True is not an index"),
        ({"0": "a:1", 0: "b:1"}, "In job 'worker' the task 0 is there twice"),
    ],
)
def test_what_is_no_index_is_a_value_error(tasks: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterSpec({"worker": tasks})


def test_what_is_not_in_the_cluster_is_named_with_what_is() -> None:
    cluster = ClusterSpec({**WORKERS, "ps": []})
    with pytest.raises(
        ValueError, match="no job 'chief' in the cluster; it has \"worker"
    ):
        cluster.num_tasks("chief")
    with pytest.raises(ValueError, match='"worker" has no task 2; it has 0, 1'):
        cluster.task_address("worker", 2)
    with pytest.raises(ValueError, match='"ps" has no task 0; it has none'):
        cluster.task_address("ps", 0)


jobs = st.text(min_size=1, max_size=5)
tasks = st.dictionaries(st.integers(0, 6), st.text(max_size=5), max_size=4)


@examples(200)
@given(st.dictionaries(jobs, tasks, max_size=4))
def test_all_views_of_a_cluster_agree(cluster: dict[str, dict[int, str]]) -> None:
    spec = ClusterSpec(cluster)
    assert spec.jobs == list(cluster) and bool(spec) == bool(cluster)
    assert ClusterSpec(spec) == spec == ClusterSpec(spec.as_dict()) == cluster
    for job, addresses in cluster.items():
        indices = spec.task_indices(job)
        assert indices == sorted(addresses) and spec.num_tasks(job) == len(addresses)
        assert {i: spec.task_address(job, i) for i in indices} == addresses
        in_order = spec.job_tasks(job)
        assert {i: a for i, a in enumerate(in_order) if a is not None} == addresses
        is_dense = None not in in_order and in_order != []
        assert spec.as_dict()[job] == (in_order if is_dense else addresses)


def test_a_training_cluster_of_any_resolver() -> None:
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    expected = TrainingCluster(
        ("a:1", "b:1", "c:1"), ("chief 0", "worker 0", "worker 1"), 2, "worker", 1
    )
    assert training_cluster(simple(cluster, "worker", 1)) == expected
    parts = [simple({job: cluster[job]}) for job in cluster]
    assert (
        training_cluster(UnionResolver(*parts, task_type="worker", task_id=1))
        == expected
    )


def test_only_jax_may_leave_addresses_open() -> None:
    found = training_cluster(JaxClusterResolver("a:1", 3, 2))
    assert found.addresses == ("a:1", "", "") and found.index == 2
    with pytest.raises(
        ValueError, match=re.escape('cluster_spec()["worker"][1] is ""')
    ):
        training_cluster(simple({"worker": ["a:1", ""]}, "worker", 0))
    with pytest.raises(
        ValueError, match=re.escape('["worker"][0] is "a": the port is')
    ):
        training_cluster(JaxClusterResolver("a", 3, 2))


@pytest.mark.parametrize(
    ("cluster", "task", "message"),
    [
        (WORKERS, (), "task_type is not set"),
        (WORKERS, ("worker", None), "task_id is not set"),
        (WORKERS, ("worker", 2), 'task_id is 2, but "worker" has 2 tasks'),
        (WORKERS, ("worker", 0.5), "task_id is 0.5, but must be an integer"),
        (WORKERS, ("worker", True), "task_id is true, but must be an integer"),
        (WORKERS, ("wrk", 0), 'task_type is "wrk", not one of "chief", "worker"'),
        (WORKERS, ("master", 0), 'It is an older name of "chief"'),
        (WORKERS, ((1,), 0), "task_type is (1,), not one of"),
        (WORKERS, ("chief", 0), 'task_type is "chief", but cluster_spec() has only'),
        (
            {"worker": {1: "b:2"}},
            ("worker", 1),
            'cluster_spec()["worker"] has no task 0',
        ),
        ({"worker": []}, ("worker", 0), 'cluster_spec()["worker"] is empty'),
        ({"main": ["a:1"]}, ("main", 0), 'cluster_spec() has the unknown key "main"'),
        ({"worker": ["a:1", "A:1"]}, ("worker", 0), 'are both "A:1". Each task needs'),
        ({"worker": ["a:1:2"]}, ("worker", 0), 'the port "1:2" is not a number'),
        ({"worker": ["[::1]"]}, ("worker", 0), "the port is missing"),
        ({"worker": ["[::1:2"]}, ("worker", 0), 'or "[::1]:port" with an IPv6 address'),
        ({"worker": ["a:1\n"]}, ("worker", 0), 'an address is "host:port"'),
        (
            {"worker": {i: "a:1" for i in range(1, 500)}},
            ("worker", 1),
            "has no task 0, only 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, .... All workers",
        ),
        ({"worker": ["a" * 500]}, ("worker", 0), "aaa...: the port is missing"),
    ],
)
def test_what_is_wrong_is_named(cluster: Any, task: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        training_cluster(simple(cluster, *task))


def test_another_librarys_resolver_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a ClusterResolver of mx.distribute"):
        training_cluster(object())  # type: ignore[arg-type]
