"""`save`, `load` and `snapshot`: whole or not at all, checked when read, no code in files."""

from __future__ import annotations

import json
import os
import threading
from collections import namedtuple

import jax
import numpy as np
import pytest

import mirrax as mx

Dataset = mx.data.Dataset
Pair = namedtuple("Pair", ["a", "b"])

ELEMENTS = {
    "numbers": [np.int64(i) for i in range(5)],
    "bfloat16": [np.full(3, i, jax.numpy.bfloat16) for i in range(3)],
    "lengths": [np.arange(i) for i in range(4)],
    "text": [b"a", b"", b"\x00\xff"],
    "texts": [np.array([b"a", b""], object)],
    "pairs": [(np.int32(i), {"t": b"%d" % i, "n": None}) for i in range(3)],
    "named": [Pair(np.float64(i), np.ones((2, i), bool)) for i in range(3)],
    "large endian": [np.arange(3, dtype=">i4")],
}


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        assert jax.tree.structure(_plain(a)) == jax.tree.structure(_plain(b))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
            np.testing.assert_array_equal(x, y)
            assert np.asarray(x).dtype.name == np.asarray(y).dtype.name


def _plain(element):
    return tuple(element) if isinstance(element, tuple) else element


def is_even(x):
    return x % 2


@pytest.mark.parametrize("kind", ELEMENTS)
@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB", "AUTO"])
def test_all_kinds_of_elements_are_loaded_as_they_were_saved(
    kind, compression, tmp_path
):
    dataset = Dataset.from_generator(lambda: iter(ELEMENTS[kind]))
    dataset.save(tmp_path / "d", compression=compression)
    loaded = Dataset.load(tmp_path / "d")
    assert_same(list(loaded), ELEMENTS[kind])
    assert len(loaded) == len(ELEMENTS[kind])


@pytest.mark.parametrize("step", ["load", "snapshot"])
def test_a_pass_over_files_is_saved_and_restored(step, tmp_path):
    numbers = Dataset.range(9)
    if step == "load":
        numbers.save(tmp_path / "d", shard_func=lambda x: x % 3)
        dataset = Dataset.load(tmp_path / "d")
    else:
        dataset = numbers.snapshot(tmp_path, shard_func=lambda x: x % 3)
        assert list(dataset) == list(range(9))
    wanted = list(dataset)
    assert sorted(wanted) == list(range(9))
    for k in range(10):
        iterator = iter(dataset)
        head = [next(iterator) for _ in range(k)]
        state = json.loads(json.dumps(iterator.get_state()))
        again = iter(dataset)
        again.set_state(state)
        assert head + list(again) == wanted


def test_the_first_pass_of_a_snapshot_is_saved_and_restored(tmp_path):
    def make():
        return Dataset.range(9).shuffle(9, seed=1).snapshot(tmp_path)

    dataset = make()
    iterator = iter(dataset)
    head = [next(iterator) for _ in range(4)]
    state = json.loads(json.dumps(iterator.get_state()))
    again = iter(make())
    again.set_state(state)
    wanted = head + list(again)
    assert sorted(wanted) == list(range(9))
    assert not list(tmp_path.glob("*/metadata.json"))  # no pass was whole
    assert head + list(iterator) == wanted
    assert list(tmp_path.glob("*/metadata.json"))
    later = iter(dataset)  # which reads the snapshot
    later.set_state(state)
    assert head + list(later) == wanted


def test_a_state_in_a_snapshot_that_is_gone_is_an_error(tmp_path):
    dataset = Dataset.range(4).snapshot(tmp_path)
    list(dataset)
    iterator = iter(dataset)
    next(iterator)
    state = iterator.get_state()
    for file in tmp_path.glob("*/metadata.json"):
        file.unlink()
    again = iter(dataset)
    again.set_state(state)
    with pytest.raises(ValueError, match="not there any more"):
        next(again)


def test_shards_take_turns(tmp_path):
    Dataset.range(10).save(tmp_path / "d", shard_func=lambda x: x % 3)
    assert list(Dataset.load(tmp_path / "d")) == list(range(10))
    files = sorted((tmp_path / "d").glob("run-*/*"))
    assert [file.name for file in files] == [f"{i:08d}.tfrecord" for i in range(3)]


def test_an_error_while_saving_leaves_what_was_there(tmp_path):
    Dataset.range(3).save(tmp_path / "d")

    def bad(x):
        if x == 2:
            raise KeyError("as raised")
        return x

    with pytest.raises(KeyError, match="as raised"):
        Dataset.range(9).map(bad).save(tmp_path / "d")
    assert list(Dataset.load(tmp_path / "d")) == [0, 1, 2]
    assert len(list((tmp_path / "d").iterdir())) == 2  # the metadata, and one run


def test_saving_again_removes_the_files_of_before(tmp_path):
    for n in (3, 5):
        Dataset.range(n).save(tmp_path / "d")
    assert list(Dataset.load(tmp_path / "d")) == [0, 1, 2, 3, 4]
    assert len(list((tmp_path / "d").iterdir())) == 2


def test_a_pass_that_is_left_early_leaves_no_files(tmp_path):
    dataset = Dataset.range(5).snapshot(tmp_path)
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    forgotten = iter(dataset)
    next(forgotten)
    del forgotten
    with pytest.raises(ZeroDivisionError):
        list(Dataset.range(3).map(lambda x: 1 // int(2 - x)).snapshot(tmp_path))
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_two_passes_at_once_write_one_snapshot(tmp_path):
    dataset = Dataset.range(5).snapshot(tmp_path)
    one, other = iter(dataset), iter(dataset)
    assert [next(one), next(other)] == [0, 0]
    assert list(one) == list(other) == [1, 2, 3, 4]
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("run-*"))) == 1
    assert list(dataset) == [0, 1, 2, 3, 4]


def test_a_snapshot_tells_pipelines_and_data_apart(tmp_path):
    def squares(data, power):
        return (
            Dataset.from_tensor_slices(data).map(lambda x: x**power).snapshot(tmp_path)
        )

    assert list(squares(np.array([1, 2]), 2)) == [1, 4]
    assert list(squares(np.array([1, 3]), 2)) == [1, 9]
    assert list(squares(np.array([1, 2]), 3)) == [1, 8]
    assert len(list(tmp_path.iterdir())) == 3
    assert list(squares(np.array([1, 2]), 2)) == [1, 4]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_snapshot_is_read_by_a_parallel_pipeline_whose_threads_end(tmp_path):
    dataset = Dataset.range(20).snapshot(tmp_path).prefetch(2)
    assert list(dataset) == list(dataset) == list(range(20))
    assert not [t for t in threading.enumerate() if t.name.startswith("mirrax")]


# Damage ---------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    Dataset.range(5).save(tmp_path / "d")
    return tmp_path / "d"


def shard(saved):
    (file,) = saved.glob("run-*/*.tfrecord")
    return file


def test_a_changed_byte_is_found(saved):
    file = shard(saved)
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    with pytest.raises(mx.errors.DataLossError, match=r"00000000\.tfrecord.*byte 0"):
        list(Dataset.load(saved))


@pytest.mark.parametrize("size", [-1, -24])
def test_a_file_that_is_cut_is_found(saved, size):
    file = shard(saved)
    whole = file.read_bytes()
    record = len(whole) // 5
    file.write_bytes(whole[:-1] if size == -1 else whole[:-record])
    with pytest.raises(mx.errors.DataLossError, match=r"00000000\.tfrecord is damaged"):
        list(Dataset.load(saved))


def test_a_missing_file_is_named(saved):
    shard(saved).unlink()
    with pytest.raises(FileNotFoundError, match=r"00000000\.tfrecord"):
        list(Dataset.load(saved))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        b"[1]",
        b'{"format": "mirrax elements 1"}',
        b'{"format": "mirrax elements 9", "run": "r"}',
    ],
)
def test_damaged_metadata_is_named(saved, text):
    (saved / "metadata.json").write_bytes(text)
    with pytest.raises(mx.errors.DataLossError, match=r"metadata\.json is damaged"):
        Dataset.load(saved)


def test_metadata_cannot_lead_out_of_the_directory(saved):
    found = json.loads((saved / "metadata.json").read_text())
    found["run"] = "../elsewhere"
    (saved / "metadata.json").write_text(json.dumps(found))
    with pytest.raises(mx.errors.DataLossError, match="not file names"):
        Dataset.load(saved)


def test_records_of_another_dataset_are_found(saved, tmp_path):
    with mx.io.TFRecordWriter(str(shard(saved))) as writer:
        for _ in range(5):
            writer.write(b"something else")
    with pytest.raises(mx.errors.DataLossError, match="element 0 cannot be read"):
        list(Dataset.load(saved))


# Arguments ------------------------------------------------------------------------------


def test_what_cannot_be_saved_is_said_at_once(tmp_path):
    path = tmp_path / "d"
    with pytest.raises(ValueError, match="never ends"):
        Dataset.range(3).repeat().save(path)
    with pytest.raises(TypeError, match="flat_map"):
        Dataset.range(3).window(2).save(path)
    with pytest.raises(ValueError, match="checkpoint_args"):
        Dataset.range(3).save(path, checkpoint_args={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'AUTO', 'GZIP' or 'ZLIB', got 'SNAPPY'"):
        Dataset.range(3).save(path, compression="SNAPPY")
    with pytest.raises(TypeError, match="alike in structure and dtype"):
        Dataset.from_generator(lambda: iter([1, 2.5])).save(path)
    with pytest.raises(ValueError, match="Leave it out"):
        Dataset.range(3).save(path, compression="GZIP")
        Dataset.load(path, compression="ZLIB")
    assert list(Dataset.load(path, compression="GZIP")) == [0, 1, 2]


def test_load_waits_for_a_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr("mirrax._src.input.methods.keeping._RETRY_SECONDS", 0.01)
    writer = threading.Thread(target=lambda: Dataset.range(3).save(tmp_path / "d"))
    timer = threading.Timer(0.1, writer.start)
    timer.start()
    assert list(Dataset.load(tmp_path / "d", wait=True)) == [0, 1, 2]
    timer.join()
    writer.join()


def test_loaded_batches_are_distributed(tmp_path):
    Dataset.range(10).batch(4).save(tmp_path / "d")
    strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = strategy.experimental_distribute_dataset(Dataset.load(tmp_path / "d"))
    steps = [[p.tolist() for p in batch.values] for batch in dataset]
    assert steps == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]


def test_no_permissions_are_changed_and_paths_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Dataset.range(2).save("folder/d")
    assert list(Dataset.load("folder/d")) == [0, 1]
    assert os.listdir("folder") == ["d"]
