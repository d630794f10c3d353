"""Corners where a user would be surprised."""

from __future__ import annotations

import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx

Dataset = mx.data.Dataset
SOURCES = {
    "list": lambda: [np.ones(n) for n in (4, 4, 2)],
    "generator": lambda: Dataset.from_generator(
        lambda: (np.ones(n) for n in (4, 4, 2))
    ),
    "map": lambda: Dataset.range(10).batch(4).map(lambda x: jnp.asarray(x) + 1),
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_drop_leaves_out_what_is_not_full(replicas, source):
    strategy = mx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    options = mx.distribute.InputOptions(last_batch="drop")
    dataset = strategy.experimental_distribute_dataset(SOURCES[source](), options)
    sizes = [
        sum(map(len, strategy.experimental_local_results(batch))) for batch in dataset
    ]
    assert sizes == [4, 4]


@pytest.mark.parametrize("calls", [None, 1, 4])
def test_an_error_of_the_source_comes_after_the_elements_before_it(calls):
    def source():
        yield from range(6)
        raise OSError("disk")

    dataset = Dataset.from_generator(source)
    iterator = iter(dataset.map(lambda x: x + 1, num_parallel_calls=calls))
    assert [int(next(iterator)) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(OSError, match="disk"):
        next(iterator)


def process_of(x):
    return os.getpid()


def killed_at_five(x):
    if x == 5 and os.environ.get("MIRRAX_TEST_KILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@pytest.mark.slow
def test_processes_are_used_without_a_number_of_calls():
    dataset = Dataset.range(3).map(process_of, workers="processes")
    assert os.getpid() not in {int(pid) for pid in dataset}


@pytest.mark.slow
def test_after_a_process_was_killed_the_next_pass_has_new_ones(monkeypatch):
    monkeypatch.setenv("MIRRAX_TEST_KILL", "1")
    dataset = Dataset.range(9).map(
        killed_at_five, num_parallel_calls=2, workers="processes"
    )
    with pytest.raises(RuntimeError, match="exit code -9.*killed by a signal"):
        list(dataset)
    monkeypatch.delenv("MIRRAX_TEST_KILL")
    assert [int(x) for x in dataset] == list(range(9))


def test_a_distributed_dataset_is_not_distributed_again(two_cpus):
    dataset = two_cpus.experimental_distribute_dataset(Dataset.range(4).batch(2))
    with pytest.raises(ValueError, match="distributed already"):
        two_cpus.experimental_distribute_dataset(dataset)


@pytest.mark.parametrize(
    ("way", "said"),
    [("exact", "gets an empty one"), ("drop", "left out"), ("pad", "filled up")],
)
def test_the_plan_of_a_dataset_function_says_how_it_ends(two_cpus, way, said, capsys):
    dataset = two_cpus.distribute_datasets_from_function(
        lambda context: Dataset.range(6).batch(2),
        mx.distribute.InputOptions(last_batch=way),
    )
    assert said in dataset.explain().splitlines()[-1]
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("replicas", [1, 2])
def test_batches_of_different_structure_are_refused(replicas):
    strategy = mx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    batches = [np.ones(4), (np.ones(4), np.ones(4))]
    iterator = iter(strategy.experimental_distribute_dataset(batches))
    next(iterator)
    with pytest.raises(ValueError, match="Element 1 of the dataset.*one structure"):
        next(iterator)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"experimental_per_replica_buffer_size": "a"}, TypeError),
        ({"experimental_per_replica_buffer_size": 1.5}, TypeError),
        ({"experimental_replication_mode": "PER_FOO"}, ValueError),
        ({"last_batch": "keep"}, ValueError),
    ],
)
def test_options_are_checked_where_they_are_made(wrong, kind):
    with pytest.raises(kind, match=next(iter(wrong))):
        mx.distribute.InputOptions(**wrong)


def test_half_a_state_is_no_state():
    iterator = iter(Dataset.range(3))
    state = iterator.get_state()
    del state["path"]
    with pytest.raises(ValueError, match="not the state"):
        iterator.set_state(state)
