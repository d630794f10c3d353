"""TFRecord files: what TensorFlow writes mirrax reads, and the other way round."""

from __future__ import annotations

import gzip
import zlib

import numpy as np
import pytest
from helpers.engines import mirrored, parts

import mirrax as mx
from interop import libraries
from interop.comparing import take, through_json

tf = libraries.tensorflow()

RECORDS = [b"one", b"", b"\0\xff\0", b"x" * 300_000, *(b"%d" % i for i in range(200))]
compressions = pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])


def write_theirs(path, records, compression=""):
    options = tf.io.TFRecordOptions(compression_type=compression)
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for record in records:
            writer.write(record)
    return path


def write_ours(path, records, compression=""):
    with mx.io.TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)
    return path


def read_theirs(paths, compression="", **kwargs):
    dataset = tf.data.TFRecordDataset(
        [str(path) for path in paths], compression, **kwargs
    )
    return list(dataset.as_numpy_iterator())


def read_ours(paths, compression="", **kwargs):
    return list(mx.data.TFRecordDataset(paths, compression, **kwargs))


def options_of(data, policy):
    options = data.Options()
    known = data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = known[policy]
    return options


@compressions
def test_mirrax_reads_what_tensorflow_writes(compression, tmp_path):
    path = write_theirs(tmp_path / "a", RECORDS, compression)
    assert read_ours(path, compression) == RECORDS


@compressions
def test_tensorflow_reads_what_mirrax_writes(compression, tmp_path):
    path = write_ours(tmp_path / "a", RECORDS, compression)
    assert read_theirs([path], compression) == RECORDS


@pytest.mark.parametrize("level", [0, 1, 9])
@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_tensorflow_reads_every_level_of_compression(compression, level, tmp_path):
    options = mx.io.TFRecordOptions(compression, compression_level=level)
    with mx.io.TFRecordWriter(tmp_path / "a", options) as writer:
        for record in RECORDS:
            writer.write(record)
    assert read_theirs([tmp_path / "a"], compression) == RECORDS


def test_uncompressed_files_are_byte_by_byte_the_same(tmp_path):
    theirs = write_theirs(tmp_path / "theirs", RECORDS)
    ours = write_ours(tmp_path / "ours", RECORDS)
    assert theirs.read_bytes() == ours.read_bytes()


@compressions
def test_what_was_flushed_can_be_read_by_tensorflow(compression, tmp_path):
    with mx.io.TFRecordWriter(tmp_path / "a", compression) as writer:
        writer.write(b"one")
        writer.flush()
        dataset = tf.data.TFRecordDataset(str(tmp_path / "a"), compression)
        assert next(dataset.as_numpy_iterator()) == b"one"


@pytest.mark.parametrize("reads", [None, 1, 2, 3])
def test_several_files_are_read_in_tensorflows_order(reads, tmp_path):
    lengths = [3, 0, 5, 1]
    paths = [
        write_theirs(tmp_path / f"{k}", [b"%d.%d" % (k, i) for i in range(n)])
        for k, n in enumerate(lengths)
    ]
    expected = read_theirs(paths, num_parallel_reads=reads)
    assert read_ours(paths, num_parallel_reads=reads) == expected


@compressions
def test_a_restored_pass_gives_the_remaining_records(compression, tmp_path):
    paths = [
        write_theirs(tmp_path / f"{k}", RECORDS[:7], compression) for k in range(2)
    ]
    for count in (0, 3, 7, 9):
        iterator = iter(mx.data.TFRecordDataset(paths, compression))
        take(iterator, count)
        again = iter(mx.data.TFRecordDataset(paths, compression))
        again.set_state(through_json(iterator.get_state()))
        assert list(again) == list(iterator) == (2 * RECORDS[:7])[count:]


@pytest.mark.parametrize("policy", ["AUTO", "DATA", "FILE", "OFF"])
@pytest.mark.parametrize("is_ours", [False, True], ids=["tf.data", "mx.data"])
def test_replicas_get_what_tensorflows_replicas_get(is_ours, policy, tmp_path):
    path = write_theirs(tmp_path / "a", [b"%d" % i for i in range(11)])
    theirs = tf.data.TFRecordDataset(str(path)).batch(8)
    theirs = theirs.with_options(options_of(tf.data, policy))
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    expected = [
        [part.numpy().tolist() for part in strategy.experimental_local_results(step)]
        for step in strategy.experimental_distribute_dataset(theirs)
    ]
    ours = mx.data.TFRecordDataset(path).batch(8)
    ours = ours.with_options(options_of(mx.data, policy))
    strategy = mirrored(4)
    steps = strategy.experimental_distribute_dataset(ours if is_ours else theirs)
    assert [parts(strategy, step) for step in steps] == expected


@pytest.mark.parametrize(
    ("where", "what"),
    [(3, "length"), (14, "record"), (-2, "record")],
    ids=["length", "record", "checksum"],
)
def test_a_damaged_file_is_found_where_tensorflow_finds_it(where, what, tmp_path):
    path = write_theirs(tmp_path / "a", [b"some bytes"])
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(tf.errors.DataLossError):
        read_theirs([path])
    with pytest.raises(mx.errors.DataLossError, match=what):
        read_ours(path)


@pytest.mark.parametrize("left", [12, 20, 25, 40])
def test_a_file_that_ends_inside_a_record_is_an_error_for_both(left, tmp_path):
    path = write_theirs(tmp_path / "a", [b"some bytes", b"more"])
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(tf.errors.DataLossError):
        read_theirs([path])
    with pytest.raises(mx.errors.DataLossError, match="ends inside a record"):
        read_ours(path)


def test_a_file_that_ends_inside_a_length_is_an_error_for_mirrax_alone(tmp_path):
    """TensorFlow takes the bytes for the end of the file, which hides what was lost."""
    path = write_theirs(tmp_path / "a", [b"some bytes", b"more"])
    path.write_bytes(path.read_bytes()[:30])
    assert read_theirs([path]) == [b"some bytes"]
    iterator = iter(mx.data.TFRecordDataset(path))
    assert next(iterator) == b"some bytes"
    with pytest.raises(mx.errors.DataLossError, match="at byte 26.*inside the length"):
        next(iterator)


@compressions
def test_lines_are_split_as_in_tensorflow(compression, tmp_path):
    text = b"one\r\ntwo\n\n\rthree\r\r\nlast"
    path = tmp_path / "a"
    compress = {"": bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}
    path.write_bytes(compress[compression](text))
    expected = tf.data.TextLineDataset(str(path), compression).as_numpy_iterator()
    assert list(mx.data.TextLineDataset(path, compression)) == list(expected)


@pytest.mark.parametrize(("header", "footer"), [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_fixed_lengths_are_cut_as_in_tensorflow(header, footer, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"h" * header + bytes(range(20)) + b"f" * footer)
    expected = tf.data.FixedLengthRecordDataset(
        str(path), 4, header_bytes=header, footer_bytes=footer
    )
    found = mx.data.FixedLengthRecordDataset(path, 4, header, footer)
    assert list(found) == list(expected.as_numpy_iterator())


def test_images_written_here_are_trained_on_there(tmp_path):
    """The whole way: arrays to a file by mirrax, a parsed batch by TensorFlow."""
    images = np.arange(5 * 4, dtype=np.float32).reshape(5, 2, 2)
    examples = [
        mx.io.encode_example({"image": image, "label": label, "name": f"é{label}"})
        for label, image in enumerate(images)
    ]
    path = write_ours(tmp_path / "a", examples, "GZIP")
    features = {
        "image": tf.io.FixedLenFeature([2, 2], tf.float32),
        "label": tf.io.FixedLenFeature([], tf.int64),
        "name": tf.io.FixedLenFeature([], tf.string),
    }
    dataset = tf.data.TFRecordDataset(str(path), "GZIP").batch(5)
    (batch,) = dataset.map(lambda records: tf.io.parse_example(records, features))
    np.testing.assert_array_equal(batch["image"], images)
    assert batch["label"].numpy().tolist() == [0, 1, 2, 3, 4]
    assert batch["name"].numpy()[4] == "é4".encode()
