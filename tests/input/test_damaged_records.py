"""Damaged record files: the error names file and place, and no wrong record is given."""

from __future__ import annotations

import gzip
import re
import struct
import zlib

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mirrax as mx

DataLossError = mx.errors.DataLossError
RECORDS = [b"first record", b"", b"x" * 300, b"the last one"]
WHERE = re.compile(r"damaged at byte (\d+): ")


def masked(data):
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(record):
    """A record as TensorFlow's documentation says it lies in a file."""
    length = struct.pack("<Q", len(record))
    crcs = struct.pack("<I", masked(length)), struct.pack("<I", masked(record))
    return length + crcs[0] + record + crcs[1]


PLAIN = b"".join(map(framed, RECORDS))
STARTS = [sum(len(framed(r)) for r in RECORDS[:i]) for i in range(len(RECORDS) + 1)]


def compressed(data, compression):
    if compression == "GZIP":
        return gzip.compress(data, mtime=0)
    return zlib.compress(data) if compression == "ZLIB" else data


def read(path, compression=""):
    """The records before the error, and the error."""
    found = []
    iterator = iter(mx.data.TFRecordDataset(path, compression))
    try:
        while True:
            found.append(next(iterator))
    except StopIteration:
        return found, None
    except DataLossError as error:
        return found, error
    finally:
        iterator.close()


def check(path, compression, error):
    assert str(path) in str(error)
    place = WHERE.search(str(error))
    assert place, error
    assert 0 <= int(place[1]) <= len(PLAIN)
    assert "Write the file again" in str(error)
    return int(place[1])


many = settings(deadline=None, max_examples=150, derandomize=True, database=None)


def test_the_format_is_tensorflows(tmp_path):
    path = tmp_path / "a"
    with mx.io.TFRecordWriter(path) as writer:
        for record in RECORDS:
            writer.write(record)
    assert path.read_bytes() == PLAIN
    assert read(path) == (RECORDS, None)


@many
@given(place=st.integers(0, len(PLAIN) - 1), change=st.integers(1, 255))
def test_a_changed_byte_is_noticed_at_its_record(tmp_path_factory, place, change):
    path = tmp_path_factory.mktemp("changed") / "a"
    data = bytearray(PLAIN)
    data[place] ^= change
    path.write_bytes(data)
    found, error = read(path)
    number = max(i for i, start in enumerate(STARTS) if start <= place)
    assert found == RECORDS[:number]
    assert check(path, "", error) == STARTS[number]
    assert "checksum" in str(error)


@many
@given(place=st.integers(0, len(PLAIN) - 1))
def test_a_file_that_is_cut_off_ends_in_an_error_or_between_records(
    tmp_path_factory, place
):
    path = tmp_path_factory.mktemp("cut") / "a"
    path.write_bytes(PLAIN[:place])
    found, error = read(path)
    number = max(i for i, start in enumerate(STARTS) if start <= place)
    assert found == RECORDS[:number]
    if place in STARTS:
        assert error is None
    else:
        assert check(path, "", error) == STARTS[number]
        assert "the file ends inside" in str(error)


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@many
@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(0, 255))
def test_damaged_compressed_files(tmp_path_factory, compression, place, change):
    path = tmp_path_factory.mktemp("compressed") / "a"
    whole = bytearray(compressed(PLAIN, compression))
    at = int(place * len(whole))
    if change:
        whole[at] ^= change
    else:
        del whole[at:]
    path.write_bytes(whole)
    found, error = read(path, compression)
    assert found == RECORDS[: len(found)], "no wrong record"
    if error is not None:
        check(path, compression, error)
    elif change:  # name, time or system in the head of a gzip file do not matter
        assert found == RECORDS
    else:
        assert at == 0, "only an empty file is whole"


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("place", range(0, len(PLAIN), 23))
def test_damage_before_compression_is_noticed_too(tmp_path, compression, place):
    data = bytearray(PLAIN)
    data[place] ^= 1
    path = tmp_path / "a"
    path.write_bytes(compressed(bytes(data), compression))
    found, error = read(path, compression)
    number = max(i for i, start in enumerate(STARTS) if start <= place)
    assert found == RECORDS[:number]
    assert check(path, compression, error) == STARTS[number]


@pytest.mark.parametrize(
    ("written", "asked"),
    [("GZIP", ""), ("ZLIB", ""), ("", "GZIP"), ("", "ZLIB"), ("GZIP", "ZLIB")],
)
def test_another_compression_than_the_file_has(tmp_path, written, asked):
    path = tmp_path / "a"
    path.write_bytes(compressed(PLAIN, written))
    found, error = read(path, asked)
    assert found == []
    assert check(path, asked, error) == 0


@pytest.mark.parametrize("length", [2**31, 2**40, 2**62, 2**63, 2**64 - 1])
@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_a_length_that_no_file_has(tmp_path, length, compression):
    head = struct.pack("<Q", length)
    path = tmp_path / "a"
    data = head + struct.pack("<I", masked(head)) + b"short"
    path.write_bytes(compressed(data, compression))
    found, error = read(path, compression)
    assert found == []
    assert check(path, compression, error) == 0


def test_after_the_error_nothing_else_of_the_file_is_given(tmp_path):
    damaged, whole = tmp_path / "a", tmp_path / "b"
    data = bytearray(PLAIN)
    data[STARTS[2] + 20] ^= 1
    damaged.write_bytes(data)
    whole.write_bytes(framed(b"of another file"))
    iterator = iter(mx.data.TFRecordDataset([damaged, whole]))
    assert [next(iterator), next(iterator)] == RECORDS[:2]
    with pytest.raises(DataLossError, match=f"a is damaged at byte {STARTS[2]}:"):
        next(iterator)
    state = iterator.get_state()
    try:
        assert next(iterator) == b"of another file"
    except (DataLossError, StopIteration):
        pass
    iterator.close()
    iterator.set_state(state)  # the place that was saved is before the damage
    with pytest.raises(DataLossError, match=f"a is damaged at byte {STARTS[2]}:"):
        next(iterator)
    iterator.close()


@pytest.mark.parametrize("steps", ["map", "batch", "prefetch", "interleave", "shuffle"])
def test_the_error_passes_through_pipelines(tmp_path, steps):
    path = tmp_path / "a"
    path.write_bytes(PLAIN[:-1])
    dataset = mx.data.TFRecordDataset(path)
    dataset = {
        "map": lambda: dataset.map(len, num_parallel_calls=2),
        "batch": lambda: dataset.batch(10),
        "prefetch": lambda: dataset.prefetch(2),
        "interleave": lambda: mx.data.TFRecordDataset([path] * 2, num_parallel_reads=2),
        "shuffle": lambda: dataset.shuffle(10),
    }[steps]()
    with pytest.raises(DataLossError, match=f"a is damaged at byte {STARTS[3]}:"):
        list(dataset)


def test_the_error_reaches_who_iterates_over_a_distributed_dataset(tmp_path, two_cpus):
    path = tmp_path / "a"
    path.write_bytes(PLAIN[:-1])
    dataset = mx.data.TFRecordDataset(path).map(len).batch(2)
    iterator = iter(two_cpus.experimental_distribute_dataset(dataset))
    first = two_cpus.experimental_local_results(next(iterator))
    assert [part.tolist() for part in first] == [[12], [0]]
    with pytest.raises(DataLossError, match=f"a is damaged at byte {STARTS[3]}:"):
        next(iterator)


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("place", [5, 20, 40, -4, -1])
def test_damaged_lines_give_no_wrong_line(tmp_path, compression, place):
    lines = [b"line %d" % i for i in range(20)]
    whole = compressed(b"".join(line + b"\n" for line in lines), compression)
    path = tmp_path / "a"
    path.write_bytes(whole[:place])
    iterator = iter(mx.data.TextLineDataset(path, compression))
    found = []
    with pytest.raises(DataLossError, match=rf"{path} is damaged at byte \d+"):
        while True:
            found.append(next(iterator))
    assert found == lines[: len(found)]


def test_a_file_that_shrank_since_it_was_saved(tmp_path):
    path = tmp_path / "a"
    for compression in ("", "GZIP", "ZLIB"):
        path.write_bytes(compressed(PLAIN, compression))
        iterator = iter(mx.data.TFRecordDataset(path, compression))
        for _ in range(3):
            next(iterator)
        state = iterator.get_state()
        iterator.close()
        path.write_bytes(compressed(PLAIN[: STARTS[1]], compression))
        again = iter(mx.data.TFRecordDataset(path, compression))
        with pytest.raises(DataLossError, match=r"a is damaged at byte.*shorter"):
            again.set_state(state)
            next(again)
        again.close()
