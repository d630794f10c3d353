"""Records in files: written, read, found, saved and parsed."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import mirrax as mx

Dataset = mx.data.Dataset
io: Any = mx.io  # given what pyright would not let pass
COMPRESSIONS = ["", "GZIP", "ZLIB"]
few = settings(deadline=None, max_examples=60, derandomize=True, database=None)


def write(path, records, compression=""):
    with io.TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)
    return path


def compressed(data, compression):
    if compression == "GZIP":
        return gzip.compress(data)
    return zlib.compress(data) if compression == "ZLIB" else data


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def assert_goes_on_everywhere(make):
    """A pass that is saved after each record goes on with the next one."""
    everything = list(make())
    iterator = iter(make())
    for k in range(len(everything) + 1):
        state = json.loads(json.dumps(iterator.get_state()))
        again = iter(make())
        again.set_state(state)
        assert list(again) == everything[k:]
        assert next(iterator, b"end") == [*everything, b"end"][k]
    return everything


# TFRecord files -----------------------------------------------------------------------------

RECORDS = [b"one", b"", b"three" * 100, b"\n\r\x00\xff", bytes(range(256)) * 5]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("buffer_size", [None, 0, 1, 7, 1 << 20])
def test_what_is_written_is_read(tmp_path, compression, buffer_size):
    path = write(tmp_path / "a", RECORDS, compression)
    dataset = mx.data.TFRecordDataset(path, compression, buffer_size)
    assert list(dataset) == RECORDS
    assert list(dataset) == RECORDS
    assert dataset.cardinality() == mx.data.UNKNOWN_CARDINALITY
    assert dataset.element_spec == mx.TensorSpec((), "string")


@few
@given(
    records=st.lists(st.binary(max_size=50), max_size=8),
    compression=st.sampled_from(COMPRESSIONS),
)
def test_any_records_come_back(tmp_path_factory, records, compression):
    path = tmp_path_factory.mktemp("records") / "a"
    write(path, records, compression)
    assert list(mx.data.TFRecordDataset(str(path), compression)) == records


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("reads", [None, 1, 2, 3])
def test_a_pass_over_several_files_goes_on_after_each_record(
    tmp_path, compression, reads
):
    names = [
        str(
            write(tmp_path / f"{i}", [b"%d %d" % (i, j) for j in range(n)], compression)
        )
        for i, n in enumerate([3, 0, 1, 4])
    ]

    def make():
        return mx.data.TFRecordDataset(names, compression, num_parallel_reads=reads)

    everything = assert_goes_on_everywhere(make)
    wanted = [b"%d %d" % (i, j) for i, n in enumerate([3, 0, 1, 4]) for j in range(n)]
    assert sorted(everything) == sorted(wanted)
    if reads in (None, 1):
        assert everything == wanted
    if reads == 2:
        assert everything[:2] == [b"0 0", b"0 1"] or everything[:2] == [b"0 0", b"2 0"]


def test_names_may_be_paths_bytes_arrays_and_datasets(tmp_path):
    a, b = write(tmp_path / "a", [b"1"]), write(tmp_path / "b", [b"2"])
    for names in (
        [a, b],
        (str(a), str(b)),
        [bytes(a), bytes(b)],
        np.array([str(a), str(b)]),
        Dataset.from_tensor_slices([str(a), str(b)]),
        Dataset.list_files(str(tmp_path / "*"), shuffle=False),
        iter([a, b]),
    ):
        dataset = mx.data.TFRecordDataset(names)
        assert list(dataset) == [b"1", b"2"]
        assert list(dataset) == [b"1", b"2"]
    assert list(mx.data.TFRecordDataset(a)) == [b"1"]
    assert list(mx.data.TFRecordDataset([])) == []


def test_files_are_not_opened_before_they_are_read(tmp_path):
    a = write(tmp_path / "a", [b"1", b"2"])
    iterator = iter(mx.data.TFRecordDataset([a, tmp_path / "missing"]))
    assert take(iterator, 2) == [b"1", b"2"]
    with pytest.raises(FileNotFoundError, match=r"no file .*missing.*looked in"):
        next(iterator)


def test_tensorflows_own_files_are_read():
    """tests/conformance/files were written by TensorFlow."""
    from pathlib import Path

    files = Path(__file__).parents[1] / "conformance" / "files"
    plain = list(mx.data.TFRecordDataset(files / "plain.tfrecord"))
    assert len(plain) > 1
    assert plain == list(mx.data.TFRecordDataset(files / "gzip.tfrecord.gz", "GZIP"))
    assert plain == list(mx.data.TFRecordDataset(files / "zlib.tfrecord.zlib", "ZLIB"))


# Writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_was_flushed_can_be_read(tmp_path, compression):
    path = tmp_path / "a"
    writer = io.TFRecordWriter(path, io.TFRecordOptions(compression))
    writer.write(b"one")
    writer.flush()
    if compression != "GZIP":  # which Python reads to the end of what there is
        iterator = iter(mx.data.TFRecordDataset(path, compression))
        assert next(iterator) == b"one"
        iterator.close()
    writer.write(bytearray(b"two"))
    writer.write(memoryview(b"three"))
    writer.close()
    writer.close()
    assert list(mx.data.TFRecordDataset(path, compression)) == [
        b"one",
        b"two",
        b"three",
    ]
    with pytest.raises(ValueError, match=r"writer of .*a is closed"):
        writer.write(b"four")


def test_a_writer_replaces_a_file_and_closes_it_after_an_error(tmp_path):
    path = write(tmp_path / "a", [b"old"] * 3)
    with pytest.raises(KeyError), io.TFRecordWriter(path, "GZIP") as writer:
        writer.write(b"new")
        raise KeyError
    assert list(mx.data.TFRecordDataset(path, "GZIP")) == [b"new"]


def test_compression_levels(tmp_path):
    sizes = []
    for level in (0, 9):
        path = tmp_path / f"{level}"
        options = io.TFRecordOptions("ZLIB", compression_level=level)
        with io.TFRecordWriter(path, options) as writer:
            writer.write(b"a" * 10_000)
        assert list(mx.data.TFRecordDataset(path, "ZLIB")) == [b"a" * 10_000]
        sizes.append(path.stat().st_size)
    assert sizes[1] < 200 < 10_000 < sizes[0]


def test_wrong_arguments_of_readers_and_writers(tmp_path):
    path = write(tmp_path / "a", [b"1"])
    with pytest.raises(ValueError, match=r"compression_type.*'GZIP'.*got 'gzip'"):
        mx.data.TFRecordDataset(path, "gzip")
    with pytest.raises(ValueError, match=r"compression_type.*'ZLIB'.*got 'BZ2'"):
        io.TFRecordOptions("BZ2")
    with pytest.raises(ValueError, match="buffer_size.*got -1"):
        mx.data.TFRecordDataset(path, buffer_size=-1)
    with pytest.raises(TypeError, match="file name is a string or a path, got 3"):
        mx.data.TFRecordDataset([path, 3])
    with pytest.raises(TypeError, match="file name|filenames"):
        mx.data.TFRecordDataset(3)
    with pytest.raises(
        TypeError, match="record is bytes, got str; `mx.io.encode_example`"
    ):
        with io.TFRecordWriter(tmp_path / "b") as writer:
            writer.write("text")
    with pytest.raises(ValueError, match="num_parallel_.*positive"):
        mx.data.TFRecordDataset(path, num_parallel_reads=0)
    with pytest.raises(ValueError, match="record_bytes.*positive.*got 0"):
        mx.data.FixedLengthRecordDataset(path, 0)
    with pytest.raises(ValueError, match="header_bytes.*negative"):
        mx.data.FixedLengthRecordDataset(path, 1, header_bytes=-1)


# Lines ------------------------------------------------------------------------------------------

lines = st.lists(
    st.text(st.characters(exclude_characters="\n\r"), max_size=8), max_size=6
)


@few
@given(
    lines=lines,
    end=st.sampled_from(["\n", "\r\n"]),
    has_last_end=st.booleans(),
    compression=st.sampled_from(COMPRESSIONS),
    buffer_size=st.sampled_from([None, 1, 5]),
)
def test_lines_come_without_their_ends(
    tmp_path_factory, lines, end, has_last_end, compression, buffer_size
):
    lines = [line.encode("utf-8", "surrogatepass") for line in lines]
    data = end.encode().join(lines) + (end.encode() if has_last_end and lines else b"")
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes(compressed(data, compression))
    wanted = lines if has_last_end or not lines or lines[-1] else lines[:-1]

    def make():
        return mx.data.TextLineDataset([path, path], compression, buffer_size)

    assert list(make()) == wanted * 2
    assert_goes_on_everywhere(make)


# Fixed lengths ------------------------------------------------------------------------------------


@few
@given(
    record=st.integers(1, 5),
    header=st.integers(0, 3),
    footer=st.integers(0, 6),
    count=st.integers(0, 5),
    compression=st.sampled_from(COMPRESSIONS),
)
def test_records_of_one_length(
    tmp_path_factory, record, header, footer, count, compression
):
    data = bytes(i % 251 for i in range(header + record * count + footer))
    body = data[header : header + record * count]
    wanted = [body[i : i + record] for i in range(0, len(body), record)]
    path = tmp_path_factory.mktemp("fixed") / "a.bin"
    path.write_bytes(compressed(data, compression))

    def make():
        return mx.data.FixedLengthRecordDataset(
            [path, path], record, header, footer, None, compression
        )

    assert assert_goes_on_everywhere(make) == wanted * 2


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_file_that_is_no_whole_number_of_records(tmp_path, compression):
    path = tmp_path / "a.bin"
    path.write_bytes(compressed(b"HHaaabbbcFF", compression))
    dataset = mx.data.FixedLengthRecordDataset(
        path, 3, 2, 2, compression_type=compression
    )
    # The size of a plain file tells before anything is read.
    lost = (ValueError, mx.errors.DataLossError)
    iterator = iter(dataset)
    found = []
    with pytest.raises(lost, match=r"a\.bin.* records? of 3"):
        while True:
            found.append(next(iterator))
    assert found == ([] if not compression else [b"aaa", b"bbb"])
    path.write_bytes(compressed(b"H", compression))
    with pytest.raises(lost, match=r"a\.bin.*header of 2"):
        next(iter(dataset))


# Finding files --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    for name in ("b-1.rec", "a-2.rec", "a-10.rec", "other.txt", "[x].rec"):
        write(tmp_path / name, [name.encode()])
    return tmp_path


def names_of(dataset):
    return [name.decode().rpartition("/")[2] for name in dataset]


def test_list_files_sorts_or_shuffles(folder):
    plain = Dataset.list_files(f"{folder}/?-*.rec", shuffle=False)
    assert names_of(plain) == ["a-10.rec", "a-2.rec", "b-1.rec"]
    assert len(plain) == 3
    orders = set()
    for seed in range(20):
        shuffled = Dataset.list_files(f"{folder}/?-*.rec", seed=seed)
        assert sorted(names_of(shuffled)) == names_of(plain)
        again = Dataset.list_files(f"{folder}/?-*.rec", shuffle=True, seed=seed)
        assert names_of(again) == names_of(
            Dataset.list_files(f"{folder}/?-*.rec", seed=seed)
        )
        orders.add(tuple(names_of(again)))
    assert len(orders) > 2


def test_list_files_takes_several_patterns_and_paths(folder):
    both = Dataset.list_files([f"{folder}/a-*", f"{folder}/o*"], False)
    assert names_of(both) == ["a-10.rec", "a-2.rec", "other.txt"]
    assert names_of(Dataset.list_files(folder / "b-*")) == ["b-1.rec"]
    assert names_of(Dataset.list_files([folder / "b-*"])) == ["b-1.rec"]
    assert names_of(Dataset.list_files(bytes(folder / "b-*"))) == ["b-1.rec"]


def test_list_files_without_a_match_says_where_it_looked(folder):
    with pytest.raises(FileNotFoundError, match=r"No file matches '.*/z\*'.*looked in"):
        Dataset.list_files(f"{folder}/z*")


def test_files_in_turn_are_restored_wherever_they_were(folder):
    for name in ("a-2.rec", "b-1.rec"):
        write(folder / name, [b"%s %d" % (name.encode(), i) for i in range(4)])

    def make():
        files = Dataset.list_files(f"{folder}/?-*.rec", seed=3)
        read = files.interleave(mx.data.TFRecordDataset, cycle_length=2, block_length=2)
        return read.shuffle(3, seed=1).repeat(2)

    assert len(assert_goes_on_everywhere(make)) == 18


# What is in records -----------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
numbers = arrays.arrays(
    st.sampled_from(["int64", "int32", "uint8", "bool"]),
    arrays.array_shapes(max_side=4),
)
floats = arrays.arrays(
    st.sampled_from(["float32", "float16"]),
    arrays.array_shapes(max_side=4),
    elements=st.floats(width=16),
)
texts = st.lists(st.binary(max_size=6), min_size=1, max_size=4)


@few
@given(features=st.dictionaries(names, st.one_of(numbers, floats, texts), max_size=5))
def test_examples_come_back(features):
    record = io.encode_example(features)
    found = io.decode_example(record)
    assert found.keys() == features.keys()
    for name, value in features.items():
        if isinstance(value, list):
            assert found[name].tolist() == value
            continue
        kind = "float32" if value.dtype.kind == "f" else "int64"
        assert found[name].dtype == kind
        np.testing.assert_array_equal(found[name], value.ravel().astype(kind))
    if not features:
        return
    specs = {
        name: io.FixedLenFeature([len(value)], "string")
        if isinstance(value, list)
        else io.FixedLenFeature(value.shape, found[name].dtype)
        for name, value in features.items()
    }
    parsed = io.parse_single_example(record, specs)
    for name, value in features.items():
        wanted = np.empty(len(value), object) if isinstance(value, list) else value
        if isinstance(value, list):
            wanted[:] = value
        np.testing.assert_array_equal(parsed[name], wanted)
    batch = io.parse_example([record] * 3, specs)
    for name in features:
        assert batch[name].shape == (3, *specs[name].shape)
        np.testing.assert_array_equal(batch[name][2], parsed[name])


@few
@given(
    rows=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=5)
)
def test_features_of_any_length(rows):
    records = [io.encode_example({"x": np.array(row, np.int64)}) for row in rows]
    ragged = io.parse_example(records, {"x": io.VarLenFeature("int64")})["x"]
    assert ragged.to_list() == rows
    assert len(ragged) == len(rows)
    width = max(map(len, rows), default=0)
    filled = [row + [0] * (width - len(row)) for row in rows]
    assert ragged.to_tensor().tolist() == filled
    if records:
        feature = io.FixedLenSequenceFeature([], "int64", allow_missing=True)
        assert io.parse_example(records, {"x": feature})["x"].tolist() == filled
    for record, row in zip(records, rows):
        found = io.parse_single_example(record, {"y": io.RaggedFeature("int64", "x")})
        assert found["y"].tolist() == row


def test_zeros_at_the_end_of_bytes_are_kept():
    data = b"\x01\x00\x00"
    values = {
        "one": data,
        "list": [data, data],
        "numpy": np.bytes_(data),
        "text": "a\0",
    }
    found = io.decode_example(io.encode_example(values))
    assert [found[name].tolist() for name in ("one", "numpy", "text")] == [
        [data],
        [data],
        [b"a\0"],
    ]
    assert found["list"].tolist() == [data, data]
    features = {"one": io.FixedLenFeature([], bytes, default_value=data)}
    record = io.encode_example({"x": 1})
    assert io.parse_single_example(record, features)["one"] == data


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(data=st.binary(max_size=40))
def test_bytes_that_are_no_example_are_a_clear_error(data):
    try:
        found = io.decode_example(data)
    except ValueError as error:
        assert f"record of {len(data)} bytes is not a `tf.train.Example`" in str(error)
    else:
        assert all(isinstance(value, np.ndarray) for value in found.values())


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(place=st.floats(0, 1), change=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_example_is_an_error_or_an_example(place, change, cut):
    good = bytearray(
        io.encode_example({"x": np.arange(-3, 3), "f": [1.5, 2.5], "s": ["ab", "c"]})
    )
    at = int(place * (len(good) - 1))
    if cut:
        del good[at:]
    else:
        good[at] ^= change
    try:
        io.decode_example(bytes(good))
    except ValueError as error:
        assert "is not a `tf.train.Example`" in str(error)


def test_integers_that_an_example_cannot_hold():
    with pytest.raises((ValueError, OverflowError), match="int64"):
        io.encode_example({"x": np.array([2**63], np.uint64)})


def test_missing_features_and_defaults():
    record = io.encode_example({"x": 1.5})
    one = io.FixedLenFeature([], "float32")
    assert io.parse_single_example(record, {"x": one})["x"] == np.float32(1.5)
    with pytest.raises(
        ValueError, match=r"'y' is missing and has no default.*'x' \(float32"
    ):
        io.parse_single_example(record, {"y": one})
    default = io.FixedLenFeature([2], "int64", default_value=7)
    assert io.parse_single_example(record, {"y": default})["y"].tolist() == [7, 7]
    text = io.FixedLenFeature([], "string", default_value="none")
    assert io.parse_single_example(record, {"y": text})["y"] == b"none"


def test_wrong_features_say_what_the_record_has():
    record = io.encode_example({"x": [1.5, 2.0], "n": 3})
    with pytest.raises(ValueError, match="'x' is float32, not int64"):
        io.parse_single_example(record, {"x": io.FixedLenFeature([2], "int64")})
    with pytest.raises(ValueError, match=r"'x' has 2 values.*3.*VarLenFeature"):
        io.parse_single_example(record, {"x": io.FixedLenFeature([3], "float32")})
    two = [record, io.encode_example({"x": 1})]
    with pytest.raises(ValueError, match="'x' of record 1 is int64, not float32"):
        io.parse_example(two, {"x": io.FixedLenFeature([2], "float32")})
    with pytest.raises(
        (ValueError, TypeError), match="int64, float32 or string.*float64"
    ):
        io.parse_single_example(record, {"x": io.FixedLenFeature([2], "float64")})
    with pytest.raises(ValueError, match="allow_missing=True"):
        io.parse_single_example(record, {"n": io.FixedLenSequenceFeature([], "int64")})
    with pytest.raises(ValueError, match="names no feature"):
        io.parse_single_example(record, {})
    wrong = (TypeError, ValueError)
    with pytest.raises(wrong, match="'x' must be a FixedLenFeature.*got 'float32'"):
        io.parse_single_example(record, {"x": "float32"})
    with pytest.raises(
        TypeError, match="one record as bytes, got list; `parse_example`"
    ):
        io.parse_single_example([record], {"x": io.VarLenFeature("float32")})
    with pytest.raises(TypeError, match="'z' is complex"):
        io.encode_example({"z": 1j})


def test_parsing_in_a_pipeline(tmp_path):
    records = [io.encode_example({"x": [i, i + 1], "name": f"n{i}"}) for i in range(5)]
    path = write(tmp_path / "a", records)
    features = {
        "x": io.FixedLenFeature([2], "int64"),
        "name": io.FixedLenFeature([], "string"),
    }
    single = mx.data.TFRecordDataset(path).map(
        lambda record: io.parse_single_example(record, features)
    )
    at_once = (
        mx.data.TFRecordDataset(path)
        .batch(2)
        .map(lambda batch: io.parse_example(batch, features))
    )
    for dataset in (single.batch(2), at_once):
        batches = list(dataset)
        assert [b["x"].tolist() for b in batches] == [
            [[0, 1], [1, 2]],
            [[2, 3], [3, 4]],
            [[4, 5]],
        ]
        assert [b["name"].tolist() for b in batches][2] == [b"n4"]
