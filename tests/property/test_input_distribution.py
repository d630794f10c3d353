"""Random datasets over random numbers of workers and replicas: every row where it belongs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.engines import mirrored
from hypothesis import example, given
from hypothesis import strategies as st

import mirrax as mx
from mirrax._src.input.blocks import value_of
from mirrax._src.input.distributed import DistributedDataset
from mirrax._src.input.feeding import distribute_from_function
from mirrax._src.input.options import InputContext, InputOptions
from mirrax._src.input.sharding import make_plan
from mirrax._src.input.splitting import Share

from .examples import examples

Dataset = mx.data.Dataset
STRATEGIES = {n: mirrored(n) for n in range(1, 9)}
HINT = mx.data.experimental.SHARD_HINT

rows = st.integers(0, 40)
batch_sizes = st.integers(1, 12)
workers = st.integers(1, 4)
replicas = st.integers(1, 3)
sources = st.sampled_from(["memory", "one by one", "mapped", "in a dict"])


def with_policy(dataset, policy):
    options = mx.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        mx.data.experimental.AutoShardPolicy[policy]
    )
    return dataset.with_options(options)


def numbers(source, n):
    """The numbers up to n, each as an element."""
    if source == "one by one":
        return Dataset.from_generator(lambda: iter(np.arange(n)))
    if source == "mapped":
        return Dataset.range(-1, n - 1).map(lambda x: x + 1)
    if source == "in a dict":
        pairs = {"x": np.arange(n), "twice": 2 * np.arange(n)}
        return Dataset.from_tensor_slices(pairs).map(lambda e: e["twice"] - e["x"])
    return Dataset.range(n)


def plan_of(dataset, share, last_batch="exact"):
    return make_plan(dataset, share, InputOptions(last_batch=last_batch))


def steps_of(dataset, share, last_batch="exact"):
    """`steps[step][replica]`: lists of rows, or pairs of rows and mask."""
    cursor = plan_of(dataset, share, last_batch).steps((0,), None)
    found = [[listed(value_of(part)) for part in step] for step in cursor]
    cursor.close()
    return found


def listed(value):
    return jax.tree.map(lambda x: np.asarray(x).tolist(), value)


def shares(num_workers, replicas_per_worker):
    return [Share(num_workers, w, replicas_per_worker) for w in range(num_workers)]


# DATA ---------------------------------------------------------------------------------------


@examples(120)
@given(
    source=sources,
    n=rows,
    size=batch_sizes,
    w=workers,
    r=replicas,
    drop=st.booleans(),
    policy=st.sampled_from(["AUTO", "DATA"]),
)
def test_data_cuts_every_batch_into_equal_parts(source, n, size, w, r, drop, policy):
    dataset = with_policy(numbers(source, n).batch(size, drop_remainder=drop), policy)
    batches = [list(range(n))[i : i + size] for i in range(0, n, size)]
    batches = [b for b in batches if len(b) == size or not drop]
    found = [steps_of(dataset, share) for share in shares(w, r)]
    assert {len(steps) for steps in found} == {len(batches)}, "all end at one step"
    for number, batch in enumerate(batches):
        most = -(-len(batch) // (w * r))
        wanted = [batch[i * most : (i + 1) * most] for i in range(w * r)]
        # The parts are dealt out: 0 to the first worker, 1 to the second, ...
        for worker in range(w):
            assert found[worker][number] == wanted[worker::w]


@examples(60)
@given(sizes=st.lists(st.integers(1, 7), max_size=6), w=workers, r=replicas)
def test_batches_of_any_size_are_split_one_by_one(sizes, w, r):
    def make():
        return iter([np.arange(size) + 10 * i for i, size in enumerate(sizes)])

    dataset = Dataset.from_generator(make)
    found = [steps_of(dataset, share) for share in shares(w, r)]
    for number, batch in enumerate(make()):
        parts = [None] * (w * r)
        for worker in range(w):
            parts[worker::w] = found[worker][number]
        assert np.concatenate([np.asarray(p, int) for p in parts]).tolist() == list(
            batch
        )
    assert {len(steps) for steps in found} == {len(sizes)}


# By rows: OFF, FILE, HINT -------------------------------------------------------------------


def cut(data, size, share):
    """A worker's rows in steps: the sizes that a full batch would give, again and again."""
    count = share.num_workers * share.replicas_per_worker
    sizes = [size // count + (i < size % count) for i in range(count)]
    turn = share.worker * share.replicas_per_worker
    data, steps = list(data), []
    while data:
        step = []
        for _ in range(share.replicas_per_worker):
            wanted = sizes[turn % count]
            step.append(data[:wanted])
            data = data[wanted:]
            turn += 1
        steps.append(step)
    return steps


def without_empty_end(steps):
    while steps and not any(steps[-1]):
        steps = steps[:-1]
    return steps


@examples(80)
@given(source=sources, n=rows, size=batch_sizes, w=workers, r=replicas)
def test_off_gives_everything_to_every_worker(source, n, size, w, r):
    if w * r == 1:
        return
    dataset = with_policy(numbers(source, n).batch(size), "OFF")
    for share in shares(w, r):
        found = steps_of(dataset, share)
        assert without_empty_end(found) == cut(range(n), size, share)
        assert [x for step in found for part in step for x in part] == list(range(n))


@examples(60)
@given(n=rows, size=batch_sizes, w=workers, r=replicas, is_late=st.booleans())
def test_hint_divides_where_the_dataset_says(n, size, w, r, is_late):
    if w * r == 1:
        return
    dataset = numbers("memory", n)
    if is_late:
        dataset = dataset.map(lambda x: x + 100).shard(HINT, HINT)
    else:
        dataset = dataset.shard(HINT, HINT).map(lambda x: x + 100)
    dataset = with_policy(dataset.batch(size), "HINT")
    everything = []
    for share in shares(w, r):
        own = list(range(n))[share.worker :: w]
        found = steps_of(dataset, share)
        wanted = cut([x + 100 for x in own], size, share)
        assert without_empty_end(found) == wanted
        everything += [x for step in found for part in step for x in part]
    assert sorted(everything) == [x + 100 for x in range(n)]


@examples(60)
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    size=batch_sizes,
    w=workers,
    r=replicas,
    reader=st.sampled_from(
        ["list", "flat_map", "interleave", "list_files", "shuffled"]
    ),
    policy=st.sampled_from(["FILE", "AUTO"]),
)
def test_file_gives_every_worker_files_of_its_own(counts, size, w, r, reader, policy):
    if len(counts) < w or w * r == 1:
        return
    with tempfile.TemporaryDirectory() as folder:
        dataset = with_policy(
            files_dataset(Path(folder), counts, reader).batch(size), policy
        )
        everything, is_shuffled = [], reader == "shuffled"
        for share in shares(w, r):
            plan = plan_of(dataset, share)
            found = steps_of(dataset, share)
            got = [int(x) for step in found for part in step for x in part]
            own = [i for i in range(len(counts)) if i % w == share.worker]
            wanted = [100 * i + j for i in own for j in range(counts[i])]
            assert sorted(got) == wanted
            if w > 1:
                assert plan.policy.name == "FILE"
                names = [int(Path(name).name) for name in plan.files or ()]
                assert sorted(names) == own, "explain() tells what is read"
            if reader in ("list", "flat_map", "list_files"):
                assert got == wanted, "in order"
            if not is_shuffled and (w > 1 or policy == "FILE"):
                sizes = [[len(part) for part in step] for step in found]
                cuts = [[len(part) for part in s] for s in cut(wanted, size, share)]
                assert without_empty_sizes(sizes) == cuts
            everything += got
        total = [100 * i + j for i, n in enumerate(counts) for j in range(n)]
        assert sorted(everything) == total, "every record exactly once"


def without_empty_sizes(steps):
    while steps and not any(steps[-1]):
        steps = steps[:-1]
    return steps


def files_dataset(folder, counts, reader):
    names = []
    for i, count in enumerate(counts):
        names.append(str(folder / str(i)))
        with mx.io.TFRecordWriter(names[-1]) as writer:
            for j in range(count):
                writer.write(str(100 * i + j).encode())
    read = mx.data.TFRecordDataset
    match reader:
        case "list":
            return read(names)
        case "flat_map":
            return Dataset.from_tensor_slices(names).flat_map(read)
        case "interleave":
            return Dataset.from_tensor_slices(names).interleave(read, cycle_length=2)
        case "list_files":
            return Dataset.list_files(f"{folder}/*", shuffle=False).flat_map(read)
        case "shuffled":
            return Dataset.list_files(f"{folder}/*", seed=4).flat_map(read)
    raise AssertionError(reader)


def test_two_readers_in_one_dataset_are_explained_as_they_read(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    images = files_dataset(tmp_path / "a", [1, 1, 1], "list")
    labels = files_dataset(tmp_path / "b", [1, 1, 1], "list")
    dataset = with_policy(Dataset.zip(images, labels).batch(2), "FILE")
    told = []
    for share in shares(2, 1):
        plan = plan_of(dataset, share)
        told.append(
            sorted(str(Path(f).relative_to(tmp_path)) for f in plan.files or ())
        )
    assert told == [["a/0", "a/2", "b/0", "b/2"], ["a/1", "b/1"]]


# The last batch -----------------------------------------------------------------------------


@examples(100)
@given(
    n=rows,
    size=batch_sizes,
    w=workers,
    r=replicas,
    policy=st.sampled_from(["DATA", "OFF"]),
)
def test_drop_leaves_out_what_is_not_full(n, size, w, r, policy):
    dataset = with_policy(Dataset.range(n).batch(size), policy)
    for share in shares(w, r):
        exact = steps_of(dataset, share)
        found = steps_of(dataset, share, "drop")
        if policy == "DATA" or w * r == 1:
            wanted = exact[: n // size]
        else:
            full = cut(range(n + 4 * size * w * r), size, share)  # more than enough
            sizes = [[len(part) for part in step] for step in full]
            wanted = [
                step
                for step, lengths in zip(exact, sizes)
                if [len(part) for part in step] == lengths
            ]
        assert found == wanted


@examples(120)
@given(
    n=rows,
    size=batch_sizes,
    w=workers,
    r=replicas,
    policy=st.sampled_from(["DATA", "OFF"]),
    is_known=st.booleans(),
)
@example(n=35, size=9, w=4, r=1, policy="DATA", is_known=False)  # 3, 3, 3, 0 rows
def test_pad_fills_up_to_one_shape_and_marks_the_real_rows(
    n, size, w, r, policy, is_known
):
    dataset = Dataset.range(1, n + 1).batch(size)
    if not is_known:  # a function after `batch`: the size is not known any more
        dataset = dataset.map(lambda batch: batch * 1)
    dataset = with_policy(dataset, policy)
    lengths = set()
    for share in shares(w, r):
        exact = steps_of(dataset, share)
        padded = steps_of(dataset, share, "pad")
        assert len(padded) == len(exact)
        lengths |= {len(part) for step in padded for part, _ in step}
        assert len(lengths) <= 1, "one shape for all steps of all workers"
        for step, plain in zip(padded, exact):
            for (part, mask), real in zip(step, plain):
                assert mask == [True] * len(real) + [False] * (len(part) - len(real))
                assert part == real + [0] * (len(part) - len(real))


# On the devices of one worker ---------------------------------------------------------------


def on_devices(strategy, distributed):
    return [
        [np.asarray(part).tolist() for part in strategy.experimental_local_results(x)]
        for x in distributed
    ]


@examples(60)
@given(
    n=rows,
    size=batch_sizes,
    count=st.integers(1, 8),
    policy=st.sampled_from(["AUTO", "DATA", "OFF", "HINT", "FILE"]),
    ahead=st.integers(0, 3),
    fetch=st.booleans(),
)
def test_replicas_get_what_the_plan_says(n, size, count, policy, ahead, fetch):
    dataset = with_policy(Dataset.range(n).batch(size), policy)
    options = InputOptions(
        experimental_fetch_to_device=fetch, experimental_per_replica_buffer_size=ahead
    )
    strategy = STRATEGIES[count]
    distributed = strategy.experimental_distribute_dataset(dataset, options)
    wanted = steps_of(dataset, Share(1, 0, count))
    for _ in range(2):  # as often as one likes
        assert on_devices(strategy, distributed) == wanted
    assert [x for step in wanted for part in step for x in part] == list(range(n))


@examples(30)
@given(
    n=st.integers(1, 30),
    size=batch_sizes,
    count=st.integers(1, 6),
    is_text=st.booleans(),
)
def test_the_parts_of_a_structure_stay_together(n, size, count, is_text):
    arrays = {"x": np.arange(n), "y": (np.arange(2.0 * n).reshape(n, 2),)}
    if is_text:
        arrays["text"] = np.array([str(i) for i in range(n)])
    strategy = STRATEGIES[count]
    dataset = Dataset.from_tensor_slices(arrays).shuffle(n, seed=1).batch(size)
    seen = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        leaves = [strategy.experimental_local_results(batch["x"])]
        leaves.append(strategy.experimental_local_results(batch["y"][0]))
        if is_text:
            leaves.append(strategy.experimental_local_results(batch["text"]))
        for x, y, *text in zip(*leaves):
            np.testing.assert_array_equal(y, np.stack([2 * x, 2 * x + 1], -1))
            if is_text:
                assert [int(t) for t in text[0]] == x.tolist()
            seen += x.tolist()
    assert sorted(seen) == list(range(n))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_padded_steps_are_compiled_once(count):
    strategy = STRATEGIES[count]
    traces = []

    @mx.function
    def replica_fn(x, mask):
        traces.append(x.shape)
        return (x * mask).sum()

    options = InputOptions(last_batch="pad")
    dataset = Dataset.range(1, 24).batch(7)
    total = 0
    for x, mask in strategy.experimental_distribute_dataset(dataset, options):
        sums = strategy.run(replica_fn, (x, mask))
        total += int(strategy.reduce("SUM", sums, axis=None))
    assert total == sum(range(1, 24))
    assert len(traces) == 1, traces


@examples(40)
@given(
    n=st.integers(1, 30),
    size=batch_sizes,
    count=st.integers(1, 6),
    drop=st.booleans(),
    last=st.sampled_from(["exact", "drop", "pad"]),
    from_function=st.booleans(),
)
def test_the_spec_describes_every_replicas_part(
    n, size, count, drop, last, from_function
):
    arrays = np.ones((n, 2), "float32"), {"y": np.ones(n, "int32")}
    dataset = Dataset.from_tensor_slices(arrays).batch(size, drop_remainder=drop)
    strategy, options = STRATEGIES[count], InputOptions(last_batch=last)
    if from_function:
        distributed = strategy.distribute_datasets_from_function(
            lambda context: dataset, options
        )
    else:
        distributed = strategy.experimental_distribute_dataset(dataset, options)
    steps = 0
    for batch in distributed:
        steps += 1
        leaves, tree = jax.tree.flatten(
            batch, is_leaf=lambda x: hasattr(x, "values") and not isinstance(x, dict)
        )
        specs = tree.flatten_up_to(distributed.element_spec)
        for leaf, spec in zip(leaves, specs):
            parts = strategy.experimental_local_results(leaf)
            described = spec.values if count > 1 else (spec,)
            assert len(parts) == len(described) == count
            for part, each in zip(parts, described):
                assert each.is_compatible_with(part), (each, part.shape)
    if last != "drop" and not from_function:
        assert distributed.cardinality == steps


@examples(60)
@given(n=st.integers(1, 40), size=batch_sizes, w=workers, r=replicas)
def test_explain_tells_the_sizes_of_full_and_last_batches(n, size, w, r):
    if w * r == 1:
        return
    dataset = Dataset.range(n).batch(size)
    found = [steps_of(dataset, share) for share in shares(w, r)]
    lengths = [
        [len(part) for worker in found for part in worker[number]] for number in (0, -1)
    ]
    text = plan_of(dataset, Share(w, 0, r)).explain()
    last = (n - 1) % size + 1
    if n >= size:
        told = ", ".join(map(str, lengths[0]))
        assert f"of {size}: each batch split into {told} for replicas" in text
    if last == size:
        assert "last batch: full, like all others" in text
    else:
        told = ", ".join(map(str, lengths[1]))
        assert f"last batch: exact: {last} rows, split into {told}" in text


# Datasets of a function -----------------------------------------------------------------------


@examples(80)
@given(
    n=st.integers(0, 20),
    size=st.integers(1, 4),
    w=workers,
    r=replicas,
    drop=st.booleans(),
    source=st.sampled_from(["memory", "one by one", "arrays"]),
)
def test_replicas_take_turns_at_the_dataset_of_a_function(n, size, w, r, drop, source):
    def dataset_fn(context):
        if source == "arrays":
            own = np.arange(n)[context.input_pipeline_id :: context.num_input_pipelines]
            parts = [own[i : i + size] for i in range(0, len(own), size)]
            return [part for part in parts if len(part) == size or not drop]
        dataset = numbers(source, n)
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(size, drop_remainder=drop)

    everything = []
    for share in shares(w, r):
        distributed = distribute_from_function(dataset_fn, share, None, None)
        batches = [
            np.asarray(b).tolist()
            for b in dataset_fn(InputContext(w, share.worker, w * r))
        ]
        found = [parts_of(element) for element in distributed]
        wanted = [batches[i : i + r] for i in range(0, len(batches), r)]
        if wanted and len(wanted[-1]) < r:
            # All shapes are fixed: there is no room for an empty batch.
            if w == 1 and drop and source == "memory":
                wanted.pop()
            else:
                wanted[-1] += [[]] * (r - len(wanted[-1]))
        assert found == wanted
        everything += [x for step in found for part in step for x in part]
    if not drop and source != "arrays":
        assert sorted(everything) == list(range(n))


@examples(40)
@given(lengths=st.lists(st.integers(0, 5), min_size=2, max_size=4), drop=st.booleans())
def test_each_replica_may_have_a_dataset_of_its_own(lengths, drop):
    count = len(lengths)
    contexts = []

    def dataset_fn(context):
        i = context.input_pipeline_id
        contexts.append((context.num_input_pipelines, i, context.num_replicas_in_sync))
        return Dataset.range(10 * i, 10 * i + lengths[i]).batch(1, drop_remainder=drop)

    mode = mx.distribute.InputReplicationMode.PER_REPLICA
    distributed = STRATEGIES[count].distribute_datasets_from_function(
        dataset_fn, InputOptions(experimental_replication_mode=mode)
    )
    found = on_devices(STRATEGIES[count], distributed)
    steps = min(lengths) if drop else max(lengths)
    assert found == [
        [[10 * i + k] if k < n else [] for i, n in enumerate(lengths)]
        for k in range(steps)
    ]
    assert contexts == [(count, i, count) for i in range(count)]


# Orders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["memory", "one by one"])
def test_any_number_of_replicas_sees_the_rows_in_one_order(source):
    orders = []
    for count in (1, 2, 4, 8):
        dataset = numbers(source, 50).shuffle(20, seed=3).batch(16)
        distributed = STRATEGIES[count].experimental_distribute_dataset(dataset)
        orders.append(
            [
                [
                    x
                    for step in on_devices(STRATEGIES[count], distributed)
                    for p in step
                    for x in p
                ]
                for _ in range(3)
            ]
        )
    assert orders[0] == orders[1] == orders[2] == orders[3]
    passes = orders[0]
    assert len({tuple(p) for p in passes}) == 3, "each pass has its own order"
    plain = numbers(source, 50).shuffle(20, seed=3)
    assert [[int(x) for x in plain] for _ in range(3)] == passes


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", ["plain", "distributed"])
def test_the_passes_after_a_restored_one_are_the_same_too(kind, seed):
    def make():
        dataset = Dataset.range(20).shuffle(20, seed=seed).batch(4)
        if kind == "distributed":
            return STRATEGIES[2].experimental_distribute_dataset(dataset)
        return dataset

    def rows_of(iterator):
        return [x for element in iterator for part in parts_of(element) for x in part]

    dataset = make()
    for _ in range(2):
        rows_of(dataset)
    iterator = iter(dataset)
    next(iterator)
    state = saved(iterator)
    wanted = [rows_of(iterator), rows_of(dataset), rows_of(dataset)]
    again = make()
    iterator = iter(again)
    iterator.set_state(state)
    assert [rows_of(iterator), rows_of(again), rows_of(again)] == wanted


# Saving and going on with other numbers -----------------------------------------------------


def distributed_over(dataset, share, last_batch="exact"):
    """What a worker of such a cluster would have, with NumPy arrays for the devices'."""
    plan = make_plan(dataset, share, InputOptions(last_batch=last_batch))
    return DistributedDataset.of_plan(plan, None)


def saved(iterator):
    return json.loads(json.dumps(iterator.get_state()))


def parts_of(element):
    values = element.values if hasattr(element, "values") else (element,)
    return [np.asarray(part).tolist() for part in values]


def global_batches(iterators, w):
    """The batches that the workers' parts come from."""
    found = []
    for steps in zip(*(map(parts_of, iterator) for iterator in iterators)):
        order = [None] * (w * len(steps[0]))
        for worker, parts in enumerate(steps):
            order[worker::w] = parts
        found.append([x for part in order for x in part])
    return found


clusters = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4]))


@examples(80)
@given(
    before=clusters,
    after=clusters,
    n=st.integers(1, 30),
    size=batch_sizes,
    place=st.floats(0, 1),
    kind=st.sampled_from(
        ["plain", "seeded", "unseeded", "generator", "mapped", "cached"]
    ),
    epochs=st.integers(1, 2),
)
def test_data_goes_on_at_the_same_batch_on_another_cluster(
    before, after, n, size, place, kind, epochs
):
    def make():
        dataset = numbers("one by one" if kind == "generator" else "memory", n)
        if kind in ("seeded", "unseeded", "generator", "cached"):
            dataset = dataset.cache() if kind == "cached" else dataset
            dataset = dataset.shuffle(10, seed=3 if kind == "seeded" else None)
        if kind == "mapped":
            dataset = dataset.map(lambda x: x if x % 2 else -x)
        return with_policy(dataset.batch(size).repeat(epochs), "DATA")

    dataset = make()
    w, r = before
    iterators = [iter(distributed_over(dataset, share)) for share in shares(w, r)]
    k = round(place * -(-n // size) * epochs)
    for iterator in iterators:
        for _ in range(k):
            next(iterator)
    states = [saved(iterator) for iterator in iterators]
    wanted = global_batches(iterators, w)
    w, r = after
    again = [iter(distributed_over(make(), share)) for share in shares(w, r)]
    for iterator in again:
        iterator.set_state(states[0])
    assert global_batches(again, w) == wanted


@examples(40)
@given(
    before=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 2, 4]),
    n=st.integers(1, 30),
    size=batch_sizes,
    place=st.floats(0, 1),
    policy=st.sampled_from(["AUTO", "OFF"]),
)
def test_one_worker_goes_on_with_another_number_of_replicas(
    before, after, n, size, place, policy
):
    def make():
        return with_policy(Dataset.range(n).shuffle(n).batch(size), policy)

    iterator = iter(STRATEGIES[before].experimental_distribute_dataset(make()))
    for _ in range(round(place * (n // size))):
        next(iterator)
    state = saved(iterator)
    wanted = [x for element in iterator for part in parts_of(element) for x in part]
    again = iter(STRATEGIES[after].experimental_distribute_dataset(make()))
    again.set_state(state)
    found = [x for element in again for part in parts_of(element) for x in part]
    assert found == wanted


@examples(30)
@given(
    w=workers,
    r=replicas,
    n=rows,
    size=batch_sizes,
    place=st.floats(0, 1),
    policy=st.sampled_from(["DATA", "OFF", "HINT"]),
    last=st.sampled_from(["exact", "drop", "pad"]),
)
def test_a_worker_goes_on_where_it_was(w, r, n, size, place, policy, last):
    def make():
        dataset = Dataset.range(n)
        dataset = dataset.shard(HINT, HINT) if policy == "HINT" else dataset
        return with_policy(dataset.shuffle(8).batch(size), policy)

    for share in shares(w, r):
        dataset = make()
        steps = len(steps_of(dataset, share, last))
        iterator = iter(distributed_over(dataset, share, last))
        for _ in range(round(place * steps)):
            next(iterator)
        state = saved(iterator)
        wanted = [listed(jax.tree.leaves(x)) for x in iterator]
        again = iter(distributed_over(make(), share, last))
        again.set_state(state)
        assert [listed(jax.tree.leaves(x)) for x in again] == wanted


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("last", ["exact", "drop", "pad"])
def test_states_before_the_start_and_after_the_end(ahead, last):
    options = InputOptions(experimental_per_replica_buffer_size=ahead, last_batch=last)
    dataset = Dataset.range(10).shuffle(10).batch(4)
    distributed = STRATEGIES[2].experimental_distribute_dataset(dataset, options)
    iterator = iter(distributed)
    start = saved(iterator)
    everything = [listed(jax.tree.leaves(x)) for x in iterator]
    end = saved(iterator)
    assert len(everything) == (2 if last == "drop" else 3)
    for state, wanted in ((start, everything), (end, [])):
        again = iter(distributed)
        again.set_state(state)
        assert [listed(jax.tree.leaves(x)) for x in again] == wanted
        assert next(again, None) is None


def test_files_of_ones_own_cannot_go_on_with_another_number_of_workers(tmp_path):
    dataset = with_policy(
        files_dataset(tmp_path, [3, 3, 3, 3], "list").batch(2), "FILE"
    )
    for w, worker, other, place in [
        (2, 0, 4, 0),
        (4, 1, 2, 1),
        (2, 1, 1, 0),
        (2, 0, 2, 1),
    ]:
        iterator = iter(distributed_over(dataset, Share(w, worker, 1)))
        next(iterator)
        state = saved(iterator)
        iterator.close()
        again = iter(distributed_over(dataset, Share(other, place, 1)))
        message = rf"worker {worker}'s of {w}.*worker {place} of {other}.*DATA"
        with pytest.raises(ValueError, match=message):
            again.set_state(state)
        again.close()
