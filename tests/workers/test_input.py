"""Datasets: every worker gets its rows, all take the same steps, and none waits in vain."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import all_sum, both_engines, compile_if

import mirrax as mx
from mirrax.data.experimental import SHARD_HINT, AutoShardPolicy
from mirrax.distribute import InputOptions, InputReplicationMode

from .comparing import Pool, agreements, error_of, per_worker, worker_of
from .dealing import by_rows, chunks, dealt, in_turn, together

Dataset = mx.data.Dataset


def with_policy(dataset: Dataset, name: str) -> Dataset:
    options = mx.data.Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    return dataset.with_options(options)


def taken(strategy, dataset, most=None):
    """The parts that this worker gets, as lists."""
    return [
        [np.asarray(part).tolist() for part in strategy.experimental_local_results(x)]
        for x in itertools.islice(dataset, most)
    ]


def of_all(found, step):
    """All workers' rows in a step, sorted."""
    return sorted(row for own in found for part in own[step] for row in part)


# Policies -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["AUTO", "DATA"])
def test_batches_are_dealt_out(two_by_two: Pool, policy: str) -> None:
    cases = [(11, 8), (14, 8), (12, 6), (5, 8), (1, 4), (16, 8), (0, 4)]

    def steps(strategy):
        return [
            taken(
                strategy,
                strategy.experimental_distribute_dataset(
                    with_policy(Dataset.range(n).batch(size), policy)
                ),
            )
            for n, size in cases
        ]

    for k, own in enumerate(two_by_two.run(steps)):
        for found, (n, size) in zip(own, cases):
            assert found == dealt(chunks(range(n), size), 2, 2)[k], (n, size)


def test_draws_groups_and_snapshots_are_the_same_on_all_workers(
    two_by_two: Pool, tmp_path
) -> None:
    parts = Dataset.range(10), Dataset.range(10, 20)
    folder = str(tmp_path)

    def steps(strategy):
        mixed = Dataset.sample_from_datasets(parts)
        datasets = [
            mixed.batch(4),
            Dataset.range(20)
            .rejection_resample(lambda x: x % 2, [0, 1], [0.5, 0.5])
            .map(lambda kind, x: x)
            .batch(4),
            mixed.window(4, shift=2).flat_map(lambda window: window.batch(4)),
            Dataset.range(20)
            .shuffle(20)
            .group_by_window(
                lambda x: x % 3, lambda key, w: w.shuffle(4).batch(4), window_size=4
            ),
            Dataset.range(20).batch(4).snapshot(folder).repeat(2),
        ]
        return [
            taken(strategy, strategy.experimental_distribute_dataset(dataset))
            for dataset in datasets
        ]

    found = two_by_two.run(steps)
    once, odd = list(range(20)), list(range(1, 20, 2))
    # Every number but the first two is in two windows.
    wanted = [once, odd, None, once, once * 2]
    for i, numbers in enumerate(wanted):
        every = [own[i] for own in found]
        rows = [row for k in range(len(every[0])) for row in of_all(every, k)]
        if numbers is None:
            assert sorted(np.bincount(rows)) == [1, 1, *[2] * 18]
        else:
            assert sorted(rows) == sorted(numbers)


def test_without_sharding_every_worker_has_all_rows(two_by_two: Pool) -> None:
    cases = [(10, 5), (22, 8), (8, 8), (7, 6), (3, 2)]

    def steps(strategy):
        return [
            taken(
                strategy,
                strategy.experimental_distribute_dataset(
                    with_policy(Dataset.range(n).batch(size), "OFF")
                ),
            )
            for n, size in cases
        ]

    results = two_by_two.run(steps)
    for i, (n, size) in enumerate(cases):
        own = [by_rows(range(n), size, k, 4, 2) for k in range(2)]
        assert [found[i] for found in results] == together(own, 2), (n, size)


def test_hints(two_by_two: Pool) -> None:
    def steps(strategy):
        hinted = Dataset.range(21).shard(SHARD_HINT, SHARD_HINT).batch(8)
        return taken(
            strategy,
            strategy.experimental_distribute_dataset(with_policy(hinted, "HINT")),
        )

    own = [by_rows(range(k, 21, 2), 8, k, 4, 2) for k in range(2)]
    assert two_by_two.run(steps) == together(own, 2)


@pytest.mark.parametrize("policy", ["AUTO", "FILE"])
def test_files(two_by_two: Pool, tmp_path, policy: str) -> None:
    lines = [[f"{file} {i}".encode() for i in range(2 + file)] for file in range(3)]
    names = [str(tmp_path / f"{file}.txt") for file in range(3)]
    for name, own in zip(names, lines):
        with open(name, "wb") as file:
            file.write(b"\n".join(own))

    def steps(strategy):
        dataset = mx.data.TextLineDataset(names).batch(4)
        return taken(
            strategy,
            strategy.experimental_distribute_dataset(with_policy(dataset, policy)),
        )

    own = [
        by_rows(rows, 4, k, 4, 2)
        for k, rows in enumerate([lines[0] + lines[2], lines[1]])
    ]
    assert two_by_two.run(steps) == together(own, 2)


def test_too_few_files(two_by_two: Pool, tmp_path) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("a\nb\nc")

    def steps(strategy):
        dataset = mx.data.TextLineDataset([str(file)]).batch(4)
        error = error_of(
            lambda: strategy.experimental_distribute_dataset(
                with_policy(dataset, "FILE")
            )
        )
        with pytest.warns(UserWarning, match="fewer than the 2 workers"):
            distributed = strategy.experimental_distribute_dataset(dataset)
        return taken(strategy, distributed), error

    (first, error), (second, other) = two_by_two.run(steps)
    assert [first, second] == dealt([[b"a", b"b", b"c"]], 2, 2)
    assert error == other
    assert error[0] == "ValueError" and "2 workers and 1 file(s)" in error[1]


def test_different_datasets_are_an_error_on_all_workers(two_by_two: Pool) -> None:
    def make(strategy):
        wrong = per_worker(
            strategy, [Dataset.range(8).batch(4), Dataset.range(8).batch(2)]
        )
        other = with_policy(
            Dataset.range(8).batch(4), per_worker(strategy, ["OFF", "DATA"])
        )
        return [
            error_of(lambda d=d: strategy.experimental_distribute_dataset(d))
            for d in (wrong, other)
        ]

    (kind, text), (_, about_policy) = two_by_two.run_alike(make)
    assert kind == "ValueError"
    assert "batch(4)" in text and "batch(2)" in text
    assert "OFF on worker 0" in about_policy and "DATA on worker 1" in about_policy


# Data of each worker's own --------------------------------------------------------------


def test_lengths_that_differ(two_by_two: Pool) -> None:
    """As many steps as the longest needs; the others go on with empty batches."""
    lengths = [(4, 10), (10, 4), (8, 8), (3, 0), (0, 5), (1, 1), (9, 8)]
    sources = {
        "known": lambda data: data,
        "unknown": lambda data: data.filter(lambda x: True),
        "in a generator": lambda data: Dataset.from_generator(
            lambda: iter(list(data)), output_signature=mx.TensorSpec((), "int64")
        ),
    }

    def steps(strategy):
        def dataset_of(context, length, change):
            k = context.input_pipeline_id
            data = Dataset.range(100 * k, 100 * k + length[k])
            return change(data).batch(2)

        return [
            [
                taken(
                    strategy,
                    strategy.distribute_datasets_from_function(
                        lambda ctx, n=n, f=f: dataset_of(ctx, n, f)
                    ),
                )
                for n in lengths
            ]
            for f in sources.values()
        ]

    results = two_by_two.run(steps)
    for s, i in itertools.product(range(len(sources)), range(len(lengths))):
        rows = [range(100 * k, 100 * k + lengths[i][k]) for k in range(2)]
        own = [in_turn(chunks(each, 2), 2) for each in rows]
        found = [result[s][i] for result in results]
        assert found == together(own, 2), (list(sources)[s], lengths[i])


@both_engines
def test_sums_over_data_that_ends_early(two_by_two: Pool, engine: str) -> None:
    def sums(strategy):
        fn = compile_if(engine, lambda x: all_sum((jnp.sum(x), x.shape[0])))
        dataset = strategy.distribute_datasets_from_function(
            lambda ctx: (
                Dataset.range(4 + 5 * ctx.input_pipeline_id)
                .filter(lambda x: True)
                .batch(2)
            )
        )
        return [strategy.run(fn, (x,)) for x in dataset]

    found = two_by_two.run_alike(sums)
    assert [int(total.parts[0]) for total, _ in found] == [12, 22, 8]
    assert [int(count.parts[0]) for _, count in found] == [8, 4, 1]


def test_data_without_end(two_by_two: Pool) -> None:
    def steps(strategy):
        endless = strategy.experimental_distribute_dataset(
            Dataset.range(6).repeat().batch(8)
        )
        own = strategy.distribute_datasets_from_function(
            lambda ctx: Dataset.range(3).repeat().batch(2 + ctx.input_pipeline_id)
        )
        mixed = strategy.distribute_datasets_from_function(
            lambda ctx: (
                Dataset.range(3).repeat() if ctx.input_pipeline_id else Dataset.range(3)
            ).batch(1)
        )
        return [taken(strategy, dataset, 3) for dataset in (endless, own, mixed)]

    results = two_by_two.run(steps)
    rows = list(itertools.islice(itertools.cycle(range(6)), 24))
    assert [own[0] for own in results] == dealt(chunks(rows, 8), 2, 2)
    assert results[0][1] == [[[0, 1], [2, 0]], [[1, 2], [0, 1]], [[2, 0], [1, 2]]]
    assert results[1][1] == [[[0, 1, 2]] * 2] * 3
    assert results[0][2] == [[[0], [1]], [[2], []], [[], []]]
    assert results[1][2] == [[[0], [1]], [[2], [0]], [[1], [2]]]


@both_engines
def test_padded_batches_of_varying_lengths(two_by_two: Pool, engine: str) -> None:
    """In one step replicas have other lengths than those of another worker."""
    lengths = [1, 3, 2, 5, 4, 1, 2, 2, 7]

    def sums(strategy):
        def rows():
            return iter([np.full(n, n, "float32") for n in lengths])

        spec = mx.TensorSpec((None,), "float32")
        data = Dataset.from_generator(rows, output_signature=spec)
        own = strategy.distribute_datasets_from_function(
            lambda ctx: data.shard(2, ctx.input_pipeline_id).padded_batch(2)
        )
        whole = strategy.experimental_distribute_dataset(data.padded_batch(4))
        fn = compile_if(engine, lambda x: (x * 2, all_sum(jnp.sum(x))))
        found = []
        for dataset in (own, whole):
            for x in dataset:
                doubled, total = strategy.run(fn, (x,))
                again = strategy.reduce("SUM", doubled, axis=(0, 1))
                shapes = [p.shape for p in strategy.experimental_local_results(x)]
                found.append((total, again, shapes))
        return found

    for result in two_by_two.run(sums):
        totals = [int(total.parts[0]) for total, *_ in result]
        assert [int(again) for _, again, _ in result] == [2 * t for t in totals]
        squares = [n * n for n in lengths]
        assert sum(totals[:-3]) == sum(squares)
        assert totals[-3:] == [sum(squares[i : i + 4]) for i in (0, 4, 8)]


def test_scalars_for_each_replica(two_by_two: Pool) -> None:
    """As in TensorFlow zeros stand for those that are missing: a scalar cannot be empty."""

    def steps(strategy):
        dataset = strategy.distribute_datasets_from_function(
            lambda ctx: Dataset.range(3 + 2 * ctx.input_pipeline_id).map(
                lambda x: x + 100 * ctx.input_pipeline_id
            )
        )
        return taken(strategy, dataset)

    assert two_by_two.run(steps) == [
        [[0, 1], [2, 0], [0, 0]],
        [[100, 101], [102, 103], [104, 0]],
    ]


def test_a_dataset_for_each_replica(two_by_two: Pool) -> None:
    def steps(strategy):
        ids = []

        def dataset_fn(context):
            ids.append(context.input_pipeline_id)
            assert context.num_input_pipelines == 4
            i = context.input_pipeline_id
            return Dataset.range(10 * i, 10 * i + 2 + i).batch(2)

        options = InputOptions(
            experimental_replication_mode=InputReplicationMode.PER_REPLICA
        )
        return taken(
            strategy, strategy.distribute_datasets_from_function(dataset_fn, options)
        ), ids

    (first, ids), (second, others) = two_by_two.run(steps)
    assert (ids, others) == ([0, 1], [2, 3])
    assert first == [[[0, 1], [10, 11]], [[], [12]], [[], []]]
    assert second == [[[20, 21], [30, 31]], [[22, 23], [32, 33]], [[], [34]]]


def test_shapes_in_turn_of_unknown_number(two_by_one: Pool) -> None:
    """What the reading thread agrees on meets steps that change their program each time."""

    def count(strategy):
        def batches():
            return (np.ones(2 + i % 2, "float32") for i in range(1000))

        spec = mx.TensorSpec((None,), "float32")
        dataset = strategy.distribute_datasets_from_function(
            lambda ctx: Dataset.from_generator(batches, output_signature=spec)
        )
        fn = mx.function(lambda x: all_sum(jnp.sum(x)))
        total = strategy.replicate(jnp.float32(0))
        add = mx.function(lambda a, b: a + b)
        for x in dataset:
            total = strategy.run(add, (total, strategy.run(fn, (x,))))
        return total

    assert float(two_by_one.run_alike(count).parts[0]) == 2 * 1000 * 2.5


# The last batch -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dealt", "own", "unknown"])
def test_the_last_batch_dropped_or_filled_up(two_by_two: Pool, kind: str) -> None:
    def steps(strategy):
        def distributed(way):
            options = InputOptions(last_batch=way)
            if kind == "dealt":
                return strategy.experimental_distribute_dataset(
                    Dataset.range(1, 12).batch(8), options
                )

            def own(context):
                k = context.input_pipeline_id
                data = Dataset.range(1, 6 + 4 * k)
                return (
                    data.filter(lambda x: True) if kind == "unknown" else data
                ).batch(2)

            return strategy.distribute_datasets_from_function(own, options)

        dropped = taken(strategy, distributed("drop"))
        padded = []
        for x, mask in distributed("pad"):
            shapes = [p.shape for p in strategy.experimental_local_results(x)]
            total = strategy.reduce("SUM", x, axis=0)
            count = strategy.reduce(
                "SUM", strategy.run(lambda m: m.astype(int), (mask,)), axis=0
            )
            padded.append((shapes, int(total), int(count)))
        return dropped, padded

    results = two_by_two.run(steps)
    if kind == "dealt":
        expected = dealt(chunks(range(1, 9), 8), 2, 2)
        assert [dropped for dropped, _ in results] == expected
        wanted = [([(2,), (2,)], 36, 8), ([(2,), (2,)], 30, 3)]
    else:
        # Worker 0 has 1..5, worker 1 has 1..9; a step counts where all its own is full.
        assert [own for own, _ in results] == together(
            [[[[1, 2], [3, 4]]], [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]], 2
        )
        wanted = [
            ([(2,), (2,)], 20, 8),
            ([(2,), (2,)], 31, 5),
            ([(2,), (2,)], 9, 1),
        ]
    assert [padded for _, padded in results] == [wanted, wanted]


# Several passes and iterators -----------------------------------------------------------


def test_several_passes_and_a_break(two_by_two: Pool) -> None:
    def steps(strategy):
        found = []
        for dataset in (
            strategy.experimental_distribute_dataset(Dataset.range(16).batch(8)),
            strategy.distribute_datasets_from_function(
                lambda ctx: Dataset.range(9).filter(lambda x: True).batch(2)
            ),
        ):
            found += [taken(strategy, dataset, most) for most in (None, 1, None)]
        return found

    for own in two_by_two.run(steps):
        assert own[0] == own[2] and own[1] == own[0][:1]
        assert own[3] == own[5] and own[4] == own[3][:1]
        assert len(own[3]) == 3


def test_several_iterators_in_any_order(two_by_two: Pool) -> None:
    """What one iterator does ahead is not mixed up with another one."""

    def steps(strategy):
        def unknown(start, count):
            return strategy.distribute_datasets_from_function(
                lambda ctx: (
                    Dataset.range(start, start + count + ctx.input_pipeline_id)
                    .filter(lambda x: True)
                    .batch(1)
                )
            )

        iterators = {
            "a": iter(unknown(0, 4)),
            "b": iter(unknown(100, 2)),
            "c": iter(
                strategy.experimental_distribute_dataset(Dataset.range(8).batch(4))
            ),
        }
        found = {name: [] for name in iterators}
        for name in "abcabcbaac":
            optional = iterators[name].get_next_as_optional()
            value = optional.get_value() if optional.has_value() else None
            local = strategy.experimental_local_results(value)
            found[name].append(None if value is None else [p.tolist() for p in local])
        return found

    first, second = two_by_two.run(steps)
    assert first["a"] == [[[0], [1]], [[2], [3]], [[], []], None]
    assert second["a"] == [[[0], [1]], [[2], [3]], [[4], []], None]
    assert first["b"] == [[[100], [101]], [[], []], None]
    assert second["b"] == [[[100], [101]], [[102], []], None]
    assert first["c"] == [[[0], [2]], [[4], [6]], None]


def test_abandoned_iterators_disturb_nobody(two_by_two: Pool) -> None:
    def steps(strategy):
        def unknown():
            return strategy.distribute_datasets_from_function(
                lambda ctx: Dataset.range(50).filter(lambda x: True).batch(2)
            )

        for i in range(6):
            iterator = iter(unknown())
            for _ in range(i % 3):
                next(iterator)
            if i % 2:
                iterator.close()
        return taken(strategy, unknown(), 2)

    assert two_by_two.run_alike(steps) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


# Shuffling ------------------------------------------------------------------------------


def test_byte_orders_that_differ_in_one_step(two_by_two: Pool) -> None:
    def steps(strategy):
        rows = Dataset.from_tensor_slices
        native = rows(np.arange(1, 4, dtype="<f4"))
        swapped = rows(np.arange(4, 7, dtype=">f4"))
        dataset = native.concatenate(swapped).batch(1)
        return taken(
            strategy, strategy.distribute_datasets_from_function(lambda _: dataset)
        )

    for found in two_by_two.run(steps):
        assert found == [[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]]


def test_an_unseeded_shuffle_gives_each_row_once(two_by_two: Pool) -> None:
    def steps(strategy):
        whole = strategy.experimental_distribute_dataset(
            Dataset.range(40).shuffle(40).batch(8)
        )
        sharded = strategy.distribute_datasets_from_function(
            lambda ctx: (
                Dataset.range(40).shuffle(40).shard(2, ctx.input_pipeline_id).batch(4)
            )
        )
        return [
            [taken(strategy, dataset) for _ in range(2)] for dataset in (whole, sharded)
        ]

    results = two_by_two.run(steps)
    for d in range(2):
        passes = []
        for p in range(2):
            found = [own[d][p] for own in results]
            rows = [x for i in range(len(found[0])) for x in of_all(found, i)]
            assert sorted(rows) == list(range(40))
            passes.append(rows)
        assert passes[0] != passes[1]  # shuffled anew


def test_workers_that_read_everything_shuffle_each_their_own_way(
    two_by_two: Pool,
) -> None:
    def steps(strategy):
        dataset = with_policy(Dataset.range(40).shuffle(40).batch(8), "OFF")
        return taken(strategy, strategy.experimental_distribute_dataset(dataset))

    found = two_by_two.run(steps)
    for own in found:
        rows = [row for step in own for part in step for row in part]
        assert sorted(rows) == list(range(40))
    assert found[0] != found[1]


# Elements of all kinds ------------------------------------------------------------------


def test_structures_and_text(two_by_two: Pool) -> None:
    def steps(strategy):
        words = np.array([b"a", b"bb", b"", b"dddd", b"e", b"f"], object)
        data = {
            "text": words,
            "x": (np.arange(6, dtype="float32"), np.arange(12).reshape(6, 2)),
            "flag": np.arange(6) % 2 == 0,
        }
        dataset = Dataset.from_tensor_slices(data).batch(4)
        whole = strategy.experimental_distribute_dataset(dataset)
        own = strategy.distribute_datasets_from_function(
            lambda ctx: dataset.skip(ctx.input_pipeline_id).unbatch().batch(2)
        )
        found = []
        for element in itertools.chain(whole, own):
            text = strategy.experimental_local_results(element["text"])
            numbers = {k: element[k] for k in ("x", "flag")}
            total = strategy.run(
                mx.function(lambda n: all_sum(jnp.sum(n["x"][0]))), (numbers,)
            )
            found.append(([t.tolist() for t in text], numbers, total))
        return found

    first, second = two_by_two.run(steps)
    assert [text for text, *_ in first] == [
        [[b"a"], [b""]],
        [[b"e"], []],
        [[b"a", b"bb"], [b"", b"dddd"]],
        [[b"e", b"f"], []],
    ]
    assert [text for text, *_ in second] == [
        [[b"bb"], [b"dddd"]],
        [[b"f"], []],
        [[b"e", b"f"], []],
        [[], []],
    ]
    assert [float(t.parts[0]) for _, _, t in first] == [6.0, 9.0, 15.0, 9.0]
    assert [n["x"][1].parts[0].tolist() for _, n, _ in second][:2] == [
        [[2, 3]],
        [[10, 11]],
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"experimental_per_replica_buffer_size": 0},
        {"experimental_per_replica_buffer_size": 3},
        {"experimental_fetch_to_device": False},
        {
            "experimental_fetch_to_device": False,
            "experimental_per_replica_buffer_size": 0,
        },
    ],
    ids=["no buffer", "a large one", "on the host", "neither"],
)
def test_ways_of_feeding(two_by_two: Pool, options) -> None:
    def steps(strategy):
        fn = mx.function(lambda x: (x * 2, all_sum(jnp.sum(x))))
        found = []
        for dataset in (
            strategy.experimental_distribute_dataset(
                Dataset.range(11).batch(8), InputOptions(**options)
            ),
            strategy.distribute_datasets_from_function(
                lambda ctx: (
                    Dataset.range(3 + 2 * ctx.input_pipeline_id)
                    .filter(lambda x: True)
                    .batch(1)
                ),
                InputOptions(**options),
            ),
        ):
            for x in dataset:
                doubled, total = strategy.run(fn, (x,))
                found.append((total, strategy.reduce("SUM", doubled, axis=0)))
        return found

    found = two_by_two.run_alike(steps)
    assert [int(total.parts[0]) for total, _ in found] == [28, 27, 2, 7, 4]
    assert [int(twice) for _, twice in found] == [56, 54, 4, 14, 8]


# Positions ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dealt", "own", "OFF"])
def test_a_position_is_saved_and_restored(two_by_two: Pool, kind: str) -> None:
    def steps(strategy):
        def make():
            if kind == "dealt":
                return strategy.experimental_distribute_dataset(
                    Dataset.range(40).shuffle(20).batch(8)
                )
            if kind == "OFF":
                return strategy.experimental_distribute_dataset(
                    with_policy(Dataset.range(18).batch(4), "OFF")
                )
            return strategy.distribute_datasets_from_function(
                lambda ctx: Dataset.range(9 + 4 * ctx.input_pipeline_id).batch(2)
            )

        iterator = iter(make())
        taken(strategy, iterator, 2)
        state = iterator.get_state()
        rest = taken(strategy, iterator)
        again = iter(make())
        next(again)
        again.set_state(state)
        return rest, taken(strategy, again), state

    for rest, again, _ in two_by_two.run(steps):
        assert len(rest) > 1 and rest == again


def test_a_position_holds_for_other_numbers_of_workers(
    two_by_one: Pool, three_by_one: Pool
) -> None:
    def dataset():
        return Dataset.range(60).shuffle(60, seed=5).batch(12)

    def begin(strategy):
        iterator = iter(strategy.experimental_distribute_dataset(dataset()))
        return taken(strategy, iterator, 2), iterator.get_state()

    def go_on(strategy, state):
        iterator = iter(strategy.experimental_distribute_dataset(dataset()))
        iterator.set_state(state)
        return taken(strategy, iterator)

    found = two_by_one.run(begin)
    states = [state for _, state in found]
    before = [row for s in range(2) for row in of_all([steps for steps, _ in found], s)]
    rests = [three_by_one.run(go_on, states[0]), two_by_one.run(go_on, states[1])]
    alone = mx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    rests.append([go_on(alone, states[0])])
    for rest in rests:
        after = [row for s in range(3) for row in of_all(rest, s)]
        assert sorted(before + after) == list(range(60))
        assert [of_all(rest, s) for s in range(3)] == [
            of_all(rests[0], s) for s in range(3)
        ]


def test_a_position_in_data_of_ones_own_is_that_of_one_worker(
    two_by_one: Pool,
) -> None:
    def begin(strategy):
        iterator = iter(
            strategy.distribute_datasets_from_function(
                lambda c: Dataset.range(9).batch(2)
            )
        )
        next(iterator)
        return iterator.get_state()

    def restore(strategy, states):
        iterator = iter(
            strategy.distribute_datasets_from_function(
                lambda c: Dataset.range(9).batch(2)
            )
        )
        return error_of(lambda: iterator.set_state(states[1 - worker_of(strategy)]))

    states = two_by_one.run(begin)
    for k, (kind, text) in enumerate(two_by_one.run(restore, states)):
        assert kind == "ValueError"
        assert f"worker {1 - k}'s of 2, and this is worker {k} of 2" in text


# Cost -----------------------------------------------------------------------------------


def test_no_agreement_in_each_step_where_lengths_are_known(two_by_two: Pool) -> None:
    def count(strategy):
        known = {
            "dealt": strategy.experimental_distribute_dataset(
                Dataset.range(48).batch(8)
            ),
            "endless": strategy.experimental_distribute_dataset(
                Dataset.range(8).repeat().batch(8)
            ),
            "OFF": strategy.experimental_distribute_dataset(
                with_policy(Dataset.range(48).batch(8), "OFF")
            ),
            "own": strategy.distribute_datasets_from_function(
                lambda ctx: Dataset.range(24 + ctx.input_pipeline_id).batch(2)
            ),
        }
        unknown = strategy.distribute_datasets_from_function(
            lambda ctx: Dataset.range(24).filter(lambda x: True).batch(2)
        )
        fn = mx.function(lambda x: all_sum(jnp.sum(x)))
        found = {}
        for name, dataset in {**known, "unknown": unknown}.items():
            with agreements(strategy) as made:
                for x in itertools.islice(dataset, 6):
                    strategy.run(fn, (x,))
            found[name] = sum("the data of pass" in name for name in made), len(made)
        return found

    found = two_by_two.run(count)
    for own in found:
        steps, _ = own.pop("unknown")
        assert steps >= 6
        for name, (in_steps, in_all) in own.items():
            # Once when a pass begins; where it is dealt out, also when it ends.
            assert in_all <= 2 and in_steps <= (name == "dealt"), (name, own)
