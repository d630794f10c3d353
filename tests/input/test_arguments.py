"""Wrong arguments: every message names the argument, shows what came and says what goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mirrax as mx

Dataset: Any = mx.data.Dataset  # given what pyright would not let pass
NUMBERS = Dataset.range(6)
PAIRS = Dataset.from_tensor_slices((np.arange(4), np.ones((4, 2))))


@pytest.mark.parametrize("value", [2.5, None, "2", [2]])
@pytest.mark.parametrize(
    "method", ["batch", "padded_batch", "take", "skip", "prefetch", "enumerate"]
)
def test_counts_are_integers(method, value):
    with pytest.raises(TypeError, match=r"`\w+` must be an integer, got "):
        getattr(NUMBERS, method)(value)


@pytest.mark.parametrize("value", [2.5, "2", [2]])
@pytest.mark.parametrize("method", ["repeat", "shuffle"])
def test_counts_that_may_be_missing_are_integers(method, value):
    with pytest.raises(TypeError, match=r"`\w+` must be an integer, got "):
        getattr(NUMBERS, method)(value)


@pytest.mark.parametrize("arguments", [(2.5,), ("3",), (0, "3"), (0, 3, 1.5)])
def test_ranges_are_of_integers(arguments):
    with pytest.raises(TypeError, match="integer"):
        Dataset.range(*arguments)


@pytest.mark.parametrize("value", [np.int64(2), np.int32(2), np.array(2), True])
def test_integers_may_be_numpys(value):
    assert len(list(NUMBERS.batch(value))) == -(-6 // int(value))
    assert len(list(NUMBERS.take(value))) == int(value)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: NUMBERS.batch(0), ValueError, "`batch_size` must be positive, got 0"),
        (lambda: NUMBERS.padded_batch(-2), ValueError, "`batch_size`.*positive.*-2"),
        (lambda: NUMBERS.shuffle(0), ValueError, "`buffer_size` must be positive.*0"),
        (lambda: NUMBERS.shuffle(3, seed="x"), TypeError, "`seed`.*integer.*'x'"),
        (lambda: NUMBERS.prefetch(-2), ValueError, "`buffer_size`.*negative.*-2"),
        (lambda: NUMBERS.shard(0, 0), ValueError, "`num_shards`.*positive.*0"),
        (lambda: NUMBERS.shard(3, 3), ValueError, "`index`.*0 to 2.*got 3"),
        (lambda: NUMBERS.shard(3, -1), ValueError, "`index`.*0 to 2.*got -1"),
        (lambda: NUMBERS.shard(1.5, 0), TypeError, "`num_shards`.*integer.*1.5"),
        (lambda: NUMBERS.map(3), TypeError, "`map` needs a function, got 3"),
        (
            lambda: NUMBERS.filter(None),
            TypeError,
            "`filter` needs a function, got None",
        ),
        (lambda: NUMBERS.flat_map(3), TypeError, "`flat_map` needs a function, got 3"),
        (lambda: NUMBERS.interleave(3), TypeError, "`interleave` needs a function"),
        (
            lambda: NUMBERS.concatenate([1]),
            TypeError,
            r"`concatenate`.*dataset, got \[1\]",
        ),
        (
            lambda: NUMBERS.with_options({}),
            TypeError,
            "`with_options`.*Options.*got {}",
        ),
        (lambda: NUMBERS.apply(len), TypeError, "`apply`.*returns a dataset, got 6"),
        (lambda: Dataset.zip(), TypeError, "`zip` takes datasets"),
        (lambda: Dataset.zip(NUMBERS, [1]), TypeError, "`zip` takes datasets"),
        (lambda: Dataset.zip([NUMBERS, NUMBERS]), TypeError, "`zip`.*tuple"),
        (lambda: Dataset.zip({"a": 3}), TypeError, "`zip`.*dict of datasets"),
        (
            lambda: Dataset.from_generator([1]),
            TypeError,
            r"function.*iterator, got \[1\]",
        ),
        (lambda: Dataset([1, 2]), TypeError, "from_tensor_slices.*not of list"),
        (lambda: len(NUMBERS.repeat()), TypeError, "length.*infinite.*cardinality"),
        (lambda: len(NUMBERS.filter(bool)), TypeError, "length.*unknown.*cardinality"),
        (
            lambda: NUMBERS.map(str, num_parallel_calls=0),
            ValueError,
            "`num_parallel_calls` must be positive or AUTOTUNE, got 0",
        ),
        (
            lambda: NUMBERS.map(str, 2, synchronous=True),
            ValueError,
            "`synchronous=True` cannot be combined with `num_parallel_calls`",
        ),
        (
            lambda: NUMBERS.map(str, workers="thread"),
            ValueError,
            '"threads" or "processes", got \'thread\'',
        ),
        (
            lambda: NUMBERS.interleave(Dataset.range, cycle_length=0),
            ValueError,
            "`cycle_length` and `block_length` must be positive, got 0 and None",
        ),
        (
            lambda: Dataset.from_generator(
                list, output_types="int32", output_signature=mx.TensorSpec((), "int32")
            ),
            TypeError,
            "either `output_signature` or `output_types`",
        ),
        (
            lambda: Dataset.from_generator(list, output_shapes=()),
            TypeError,
            "`output_shapes` needs `output_types`",
        ),
        (
            lambda: Dataset.from_tensor_slices(3),
            ValueError,
            "first axis.*single int32.*`from_tensors`",
        ),
        (
            lambda: Dataset.from_tensor_slices({"a": np.ones(2), "b": np.ones(3)}),
            ValueError,
            r"equally long.*\['a'\]: 2, \['b'\]: 3",
        ),
        (lambda: Dataset.from_tensor_slices(()), ValueError, "at least one array"),
        (
            lambda: Dataset.from_tensor_slices([[1, 2], [3]]),
            ValueError,
            "list.*differ in shape.*tuple",
        ),
        (
            lambda: Dataset.from_tensors(object()),
            TypeError,
            "object.*not an array, number or string",
        ),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        make()


def test_datasets_of_other_elements_cannot_be_concatenated():
    for other in (PAIRS, NUMBERS.map(lambda x: x / 2), Dataset.from_tensors({"a": 1})):
        with pytest.raises(TypeError, match="(?s)alike in structure and dtype.*int64"):
            list(NUMBERS.concatenate(other).batch(20))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: NUMBERS.filter(lambda x: x),
            (TypeError, ValueError),
            "`filter`.*one boolean, got int64",
        ),
        (
            lambda: PAIRS.filter(lambda x, y: y > 0),
            (TypeError, ValueError),
            r"`filter`.*one boolean, got bool\[2\]",
        ),
        (lambda: PAIRS.map(lambda x: x), TypeError, "argument"),
        (lambda: NUMBERS.map(lambda x, y: x), TypeError, "argument"),
        (lambda: PAIRS.filter(lambda x: True), TypeError, "argument"),
        (
            lambda: NUMBERS.flat_map(lambda x: [x]),
            TypeError,
            "`flat_map` must return a dataset, got list",
        ),
        (
            lambda: NUMBERS.interleave(lambda x: x),
            TypeError,
            "`interleave` must return a dataset, got int64",
        ),
        (lambda: NUMBERS.unbatch(), ValueError, "no rows in common|first axis"),
        (
            lambda: Dataset.from_tensors((np.ones(2), np.ones(3))).unbatch(),
            ValueError,
            "rows in common.*same length",
        ),
        (
            lambda: NUMBERS.map(lambda x: object()),
            TypeError,
            "not an array, number or string.*NumPy",
        ),
        (
            lambda: NUMBERS.shard(-1, -1),
            RuntimeError,
            r"SHARD_HINT.*auto_shard_policy.*HINT",
        ),
        (
            lambda: Dataset.from_generator(
                lambda: iter([1, "a"]), output_signature=mx.TensorSpec((), "int32")
            ),
            TypeError,
            "Element 1 of the generator.*string.*int32",
        ),
        (
            lambda: Dataset.from_generator(
                lambda: iter([np.ones(2), np.ones(3)]),
                output_signature=mx.TensorSpec((2,), "float64"),
            ),
            TypeError,
            r"Element 1 of the generator.*float64\[3\].*\(2,\)",
        ),
        (
            lambda: Dataset.from_generator(
                lambda: iter([(1, 2), 3]),
                output_signature=(mx.TensorSpec((), "int32"),) * 2,
            ),
            TypeError,
            "Element 1 of the generator.*structure",
        ),
        (
            lambda: Dataset.from_generator(lambda: 3),
            TypeError,
            "int.*not iterable|iterator",
        ),
        (
            lambda: Dataset.from_tensor_slices(np.ones((4, 3))).padded_batch(2, [2]),
            ValueError,
            "length 3 along axis 0.*`padded_shapes`.*2",
        ),
        (
            lambda: Dataset.from_tensor_slices(np.ones((4, 3))).padded_batch(2, [2, 2]),
            ValueError,
            "`padded_shapes`.*rank 1",
        ),
    ],
)
def test_what_is_found_out_while_the_data_is_read(make, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        list(make())


def test_options_know_their_names_and_values():
    options: Any = mx.data.Options()
    with pytest.raises(AttributeError, match="'shard_policy'.*auto_shard_policy"):
        options.experimental_distribute.shard_policy = 1
    with pytest.raises(
        AttributeError, match="Options has no option 'x'.*deterministic"
    ):
        options.x = 1
    with pytest.raises(TypeError, match="must be of type AutoShardPolicy, got 7"):
        options.experimental_distribute.auto_shard_policy = 7
    with pytest.raises(TypeError, match="'deterministic' of Options .*, got 'yes'"):
        options.deterministic = "yes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"last_batch": "zeros"}, "`last_batch`.*exact, drop, pad, got 'zeros'"),
        ({"experimental_per_replica_buffer_size": -1}, "number of batches, got -1"),
        ({"experimental_place_dataset_on_device": True}, "not supported.*background"),
        ({"experimental_replication_mode": "ALL"}, "ALL"),
    ],
)
def test_input_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        mx.distribute.InputOptions(**arguments)


def test_a_global_batch_that_cannot_be_divided():
    context = mx.distribute.InputContext(num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(32) == 8
    with pytest.raises(ValueError, match="30 is not divisible by 4 replicas.*28 or 32"):
        context.get_per_replica_batch_size(30)
    with pytest.raises(ValueError, match=r"3 is not divisible.*Use 4\.$"):
        context.get_per_replica_batch_size(3)


def test_distributing_what_is_no_dataset(two_cpus):
    with pytest.raises(TypeError, match="not a dataset: 3.*mx.data.Dataset"):
        two_cpus.experimental_distribute_dataset(3)
    with pytest.raises(TypeError, match="`options` must be an InputOptions, got 3"):
        two_cpus.experimental_distribute_dataset(NUMBERS.batch(2), 3)
    with pytest.raises(TypeError, match="`dataset_fn` must be a function.*got 3"):
        two_cpus.distribute_datasets_from_function(3)
    with pytest.raises(TypeError, match="`dataset_fn` returned is not a dataset: 3"):
        two_cpus.distribute_datasets_from_function(lambda context: 3)
    mode = mx.distribute.InputReplicationMode.PER_REPLICA
    options = mx.distribute.InputOptions(experimental_replication_mode=mode)
    with pytest.raises(NotImplementedError, match="distribute_datasets_from_function"):
        two_cpus.experimental_distribute_dataset(NUMBERS.batch(2), options)


def test_unbatched_scalars_cannot_be_split(two_cpus):
    for dataset in (NUMBERS, PAIRS, NUMBERS.batch(2).enumerate()):
        with pytest.raises(ValueError, match=r"(?s)scalar.*dataset\.batch\(n\)"):
            list(two_cpus.experimental_distribute_dataset(dataset))


def test_parts_of_different_lengths_are_split_each_on_its_own(two_cpus):
    dataset = Dataset.from_tensors((np.ones(4), np.ones(3)))
    (batch,) = two_cpus.experimental_distribute_dataset(dataset)
    lengths = [[len(p) for p in two_cpus.experimental_local_results(x)] for x in batch]
    assert lengths == [[2, 2], [2, 1]]


TRANSFORMATIONS = """map filter batch padded_batch unbatch shuffle repeat take skip shard cache
concatenate enumerate interleave flat_map prefetch with_options""".split()


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_distributed_dataset_cannot_be_transformed(name, two_cpus):
    distributed = two_cpus.experimental_distribute_dataset(NUMBERS.batch(2))
    with pytest.raises(AttributeError, match=rf"`\.{name}\(.*before it is distributed"):
        getattr(distributed, name)
    assert not hasattr(distributed, name)
    with pytest.raises(AttributeError, match="no attribute 'something'"):
        distributed.something  # noqa: B018
    with pytest.raises(TypeError):
        len(distributed)


def test_files_for_workers(tmp_path):
    from mirrax._src.input.sharding import make_plan
    from mirrax._src.input.splitting import Share

    def plan(dataset, policy, workers):
        options = mx.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            mx.data.experimental.AutoShardPolicy[policy]
        )
        return make_plan(
            dataset.with_options(options),
            Share(workers, 0, 1),
            mx.distribute.InputOptions(),
        )

    one = mx.data.TextLineDataset([tmp_path / "a"]).batch(2)
    with pytest.raises(ValueError, match=r"FILE.*3 workers and 1 file\(s\).*DATA"):
        plan(one, "FILE", 3)
    with pytest.raises(ValueError, match=r"FILE.*2 workers and 0 file\(s\)"):
        plan(NUMBERS.batch(2), "FILE", 2)
    with pytest.warns(UserWarning, match=r"1 file\(s\), fewer than the 2 workers"):
        assert plan(one, "AUTO", 2).policy.name == "DATA"
    assert plan(one, "FILE", 1).policy.name == "FILE"

    # What was said of all files is not asked of one worker's.
    two = mx.data.TextLineDataset([tmp_path / "a", tmp_path / "b"]).batch(2)
    two = two.apply(mx.data.experimental.assert_cardinality(9)).prefetch(1)
    assert "assert_cardinality" in plan(two, "DATA", 2).explain()
    assert "assert_cardinality" not in plan(two, "FILE", 2).explain()


def test_older_functions_of_datasets_name_the_methods_in_their_place(monkeypatch):
    monkeypatch.setattr("mirrax._src.base.errors._warned", set())
    experimental = mx.data.experimental
    with pytest.warns(DeprecationWarning, match=r"`dataset\.take_while`"):
        transform = experimental.take_while(lambda x: x < 2)
    assert list(NUMBERS.apply(transform)) == [0, 1]
    with pytest.raises(TypeError, match="num_shards"):
        experimental.unbatch(num_shards=3)
    with pytest.raises(ValueError, match=r"\(2\).*\(3\) exclude each other"):
        experimental.map_and_batch(lambda x: x, 4, 2, num_parallel_calls=3)
