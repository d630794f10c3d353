"""Random `tf.train.Example`s, written and parsed by TensorFlow and by mirrax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import mirrax as mx
from interop import libraries

tf = libraries.tensorflow()

LISTS = {
    "int64": st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300),
    "float32": st.floats(width=32, allow_nan=True, allow_infinity=True),
    "string": st.binary(max_size=6),
}
names = st.text(max_size=3)
kinds = st.sampled_from(sorted(LISTS))
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def features(draw, min_size=0, max_size=4):
    """A kind and its values, as one feature of one example."""
    kind = draw(kinds)
    values = st.lists(LISTS[kind], min_size=min_size, max_size=max_size)
    return kind, draw(values)


def as_array(kind: str, values: list[Any]) -> np.ndarray:
    if kind != "string":
        return np.array(values, kind)
    array = np.empty(len(values), object)
    array[:] = values
    return array


def theirs(example: dict[str, tuple[str, list[Any]]]) -> bytes:
    """The example as TensorFlow writes it."""
    train = tf.train
    made = {
        "int64": lambda v: train.Feature(int64_list=train.Int64List(value=v)),
        "float32": lambda v: train.Feature(float_list=train.FloatList(value=v)),
        "string": lambda v: train.Feature(bytes_list=train.BytesList(value=v)),
    }
    feature = {name: made[kind](values) for name, (kind, values) in example.items()}
    return train.Example(features=train.Features(feature=feature)).SerializeToString()


def ours(example: dict[str, tuple[str, list[Any]]]) -> bytes:
    """The example as mirrax writes it."""
    return mx.io.encode_example({name: as_array(*f) for name, f in example.items()})


def assert_equal(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


def both(parse_ours: Callable[[], Any], parse_theirs: Callable[[], Any]) -> Any:
    """What both parse, or None if both refuse."""
    try:
        expected = parse_theirs()
    except (tf.errors.InvalidArgumentError, ValueError):
        with pytest.raises(ValueError):
            parse_ours()
        return None
    return parse_ours(), expected


# The wire ----------------------------------------------------------------------------------


@SETTINGS
@given(st.dictionaries(names, features()))
def test_each_reads_what_the_other_writes(example):
    found = mx.io.decode_example(theirs(example))
    assert set(found) == set(example)
    read = tf.train.Example.FromString(ours(example)).features.feature
    assert set(read) == set(example)
    for name, (kind, values) in example.items():
        assert_equal(found[name], as_array(kind, values))
        field = {"int64": "int64_list", "float32": "float_list", "string": "bytes_list"}
        assert read[name].WhichOneof("kind") == field[kind]
        back = getattr(read[name], field[kind]).value
        assert_equal(as_array(kind, list(back)), as_array(kind, values))


@SETTINGS
@given(st.binary(max_size=40))
def test_noise_is_read_as_tensorflow_reads_it_or_refused(noise):
    """TensorFlow overlooks some damage that mirrax finds; neither makes values up."""
    try:
        found = mx.io.parse_single_example(noise, {"a": mx.io.VarLenFeature("int64")})
    except ValueError:
        return
    expected = tf.io.parse_single_example(noise, {"a": tf.io.VarLenFeature("int64")})
    assert_equal(found["a"], expected["a"].values.numpy())


@SETTINGS
@given(st.dictionaries(names, features(min_size=1), min_size=1), st.data())
def test_a_record_that_is_cut_off_is_refused_or_has_no_other_values(example, data):
    record = theirs(example)
    cut = record[: data.draw(st.integers(0, len(record) - 1))]
    try:
        found = mx.io.decode_example(cut)
    except ValueError:
        return
    assert cut == b"" and found == {}


# One example -------------------------------------------------------------------------------

written_by = pytest.mark.parametrize("write", [theirs, ours])


@written_by
@SETTINGS
@given(data=st.data(), kind=kinds, shape=st.sampled_from([(), (1,), (3,), (2, 2)]))
def test_a_fixed_feature_of_one_example(data, kind, shape, write):
    size = int(np.prod(shape))
    values = data.draw(st.lists(LISTS[kind], min_size=size, max_size=size))
    record = write({"a": (kind, values), "other": ("int64", [1])})
    expected = tf.io.parse_single_example(
        record, {"a": tf.io.FixedLenFeature(shape, kind)}
    )
    found = mx.io.parse_single_example(
        record, {"a": mx.io.FixedLenFeature(shape, kind)}
    )
    assert_equal(found["a"], expected["a"].numpy())


@written_by
@SETTINGS
@given(feature=features(), asked=kinds)
def test_a_feature_of_any_length_of_one_example(feature, asked, write):
    record = write({"a": feature})
    for ask in ("VarLenFeature", "RaggedFeature"):
        result = both(
            lambda ask=ask: mx.io.parse_single_example(
                record, {"a": getattr(mx.io, ask)(asked)}
            ),
            lambda ask=ask: tf.io.parse_single_example(
                record, {"a": getattr(tf.io, ask)(tf.dtypes.as_dtype(asked))}
            ),
        )
        if result is not None:
            found, expected = result[0]["a"], result[1]["a"]
            assert_equal(found, getattr(expected, "values", expected).numpy())


@written_by
@SETTINGS
@given(feature=st.none() | features(max_size=3), asked=kinds, has_default=st.booleans())
def test_missing_and_empty_features_and_defaults(feature, asked, has_default, write):
    record = write({} if feature is None else {"a": feature})
    default = None
    if has_default:
        default = {"int64": 7, "float32": 0.5, "string": "none"}[asked]
        default = [default, default]
    spec = tf.io.FixedLenFeature([2], asked, default)
    wanted = mx.io.FixedLenFeature([2], asked, default)
    result = both(
        lambda: mx.io.parse_single_example(record, {"a": wanted}),
        lambda: tf.io.parse_single_example(record, {"a": spec}),
    )
    if result is not None:
        assert_equal(result[0]["a"], result[1]["a"].numpy())


# Batches -----------------------------------------------------------------------------------


@st.composite
def batches(draw, max_size=4):
    """Examples of one kind of feature "a", some of which may lack it."""
    kind = draw(kinds)
    values = st.lists(LISTS[kind], max_size=max_size)
    rows = draw(st.lists(st.none() | values, min_size=1, max_size=5))
    return kind, rows


def records_of(write, kind, rows):
    return [write({} if row is None else {"a": (kind, row)}) for row in rows]


@written_by
@SETTINGS
@given(data=st.data(), kind=kinds, shape=st.sampled_from([(), (3,), (2, 2)]))
def test_a_batch_of_fixed_features(data, kind, shape, write):
    size = int(np.prod(shape))
    row = st.lists(LISTS[kind], min_size=size, max_size=size)
    rows = data.draw(st.lists(row, min_size=1, max_size=4))
    records = records_of(write, kind, rows)
    expected = tf.io.parse_example(records, {"a": tf.io.FixedLenFeature(shape, kind)})
    found = mx.io.parse_example(records, {"a": mx.io.FixedLenFeature(shape, kind)})
    assert_equal(found["a"], expected["a"].numpy())


@written_by
@SETTINGS
@given(batches())
def test_a_batch_of_sparse_features(write, batch):
    kind, rows = batch
    records = records_of(write, kind, rows)
    sparse = tf.io.parse_example(records, {"a": tf.io.VarLenFeature(kind)})["a"]
    found = mx.io.parse_example(records, {"a": mx.io.VarLenFeature(kind)})["a"]
    expected = tf.RaggedTensor.from_sparse(sparse)
    assert_equal(found.values, expected.values.numpy())
    assert found.row_splits.tolist() == expected.row_splits.numpy().tolist()
    filling = b"" if kind == "string" else 0
    dense = tf.sparse.to_dense(sparse, filling).numpy()
    assert_equal(found.to_tensor(), dense)


@written_by
@SETTINGS
@given(batches())
def test_a_batch_of_ragged_features(write, batch):
    kind, rows = batch
    records = records_of(write, kind, rows)
    spec = tf.io.RaggedFeature(tf.dtypes.as_dtype(kind), value_key="a")
    expected = tf.io.parse_example(records, {"b": spec})["b"]
    wanted = mx.io.RaggedFeature(kind, value_key="a")
    found = mx.io.parse_example(records, {"b": wanted})["b"]
    assert_equal(found.values, expected.values.numpy())
    assert found.row_splits.tolist() == expected.row_splits.numpy().tolist()


@written_by
@SETTINGS
@given(batches(), st.booleans())
def test_a_batch_of_sequences(write, batch, in_pairs):
    kind, rows = batch
    shape = (2,) if in_pairs else ()
    records = records_of(write, kind, rows)
    spec = tf.io.FixedLenSequenceFeature(shape, kind, allow_missing=True)
    wanted = mx.io.FixedLenSequenceFeature(shape, kind, allow_missing=True)
    result = both(
        lambda: mx.io.parse_example(records, {"a": wanted}),
        lambda: tf.io.parse_example(records, {"a": spec}),
    )
    if result is not None:
        assert_equal(result[0]["a"], result[1]["a"].numpy())


# Corners -----------------------------------------------------------------------------------


def test_numbers_that_were_not_packed_are_read():
    """Protocol buffers allow lists of numbers without packing; old writers do that."""

    def field(number, body):
        return bytes([number << 3 | 2, len(body)]) + body

    numbers = b"\x08\x05\x08\xac\x02"  # 5, 300, each with a tag of its own
    floats = b"\x0d\x00\x00\xc0\x3f\x0d\x00\x00\x20\x40"  # 1.5, 2.5
    entries = b"".join(
        field(1, field(1, name) + field(2, field(kind, body)))
        for name, kind, body in [(b"i", 3, numbers), (b"f", 2, floats)]
    )
    record = field(1, entries)
    read = tf.train.Example.FromString(record).features.feature
    assert list(read["i"].int64_list.value) == [5, 300]
    found = mx.io.decode_example(record)
    assert found["i"].tolist() == [5, 300]
    assert found["f"].tolist() == [1.5, 2.5]


def test_a_name_that_comes_twice_counts_as_in_tensorflow():
    first, second = theirs({"a": ("int64", [1, 2])}), theirs({"a": ("int64", [3])})
    record = first + second  # protocol buffers: the later entry of a map wins
    expected = tf.io.parse_single_example(record, {"a": tf.io.VarLenFeature("int64")})
    found = mx.io.parse_single_example(record, {"a": mx.io.VarLenFeature("int64")})
    assert_equal(found["a"], expected["a"].values.numpy())


def test_a_map_over_records_equals_tensorflows(tmp_path):
    records = [
        theirs({"x": ("float32", [i, i + 0.5]), "n": ("int64", list(range(i)))})
        for i in range(5)
    ]
    with mx.io.TFRecordWriter(tmp_path / "a") as writer:
        for record in records:
            writer.write(record)

    def parse(io, record):
        return io.parse_single_example(
            record,
            {"x": io.FixedLenFeature([2], "float32"), "n": io.VarLenFeature("int64")},
        )

    expected = tf.data.TFRecordDataset(str(tmp_path / "a")).map(
        lambda record: {
            **parse(tf.io, record),
            "n": tf.sparse.to_dense(parse(tf.io, record)["n"]),
        }
    )
    found = mx.data.TFRecordDataset(tmp_path / "a").map(
        lambda record: parse(mx.io, record)
    )
    for a, b in zip(found, expected.as_numpy_iterator(), strict=True):
        assert_equal(a["x"], b["x"])
        assert_equal(a["n"], b["n"])
