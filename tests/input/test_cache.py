"""`cache`: the first whole pass is kept, in memory or in a file."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import mirrax as mx

Dataset = mx.data.Dataset


class Source:
    """A generator that counts how often it was run to the end."""

    def __init__(self, elements):
        self.elements = elements
        self.started = self.finished = 0

    def __call__(self):
        self.started += 1
        yield from self.elements
        self.finished += 1


ELEMENTS = {
    "numbers": [np.int64(i) for i in range(5)],
    "vectors": [np.full(3, i, "float32") for i in range(5)],
    "ragged": [np.arange(i) for i in range(4)],
    "text": [b"a", b"", b"long"],
    "pairs": [(np.int32(i), {"t": b"%d" % i}) for i in range(3)],
    "nothing": [],
}


def same(found, wanted):
    assert repr(found) == repr(wanted)


@pytest.fixture(params=["memory", "file"])
def where(request, tmp_path):
    return "" if request.param == "memory" else str(tmp_path / "folder" / "cache")


@pytest.mark.parametrize("kind", ELEMENTS)
def test_later_passes_do_not_read_the_source(kind, where):
    source = Source(ELEMENTS[kind])
    dataset = Dataset.from_generator(source).cache(where)
    for _ in range(3):
        same(list(dataset), ELEMENTS[kind])
    assert (source.started, source.finished) == (1, 1)
    same(list(dataset.repeat(2)), ELEMENTS[kind] * 2)
    assert source.started == 1


@pytest.mark.parametrize("kind", ELEMENTS)
def test_a_file_serves_later_programs(kind, tmp_path):
    path = tmp_path / "cache"
    list(Dataset.from_generator(Source(ELEMENTS[kind])).cache(str(path)))
    source = Source([])
    same(list(Dataset.from_generator(source).cache(path)), ELEMENTS[kind])
    assert source.started == 0


def test_only_a_whole_pass_is_kept(where):
    source = Source(ELEMENTS["numbers"])
    dataset = Dataset.from_generator(source).cache(where)
    for expected in (1, 2):
        iterator = iter(dataset)
        next(iterator)
        iterator.close()
        assert (source.started, source.finished) == (expected, 0)
    same(list(dataset.take(2)), ELEMENTS["numbers"][:2])
    assert source.finished == 0
    same(list(dataset), ELEMENTS["numbers"])
    same(list(dataset), ELEMENTS["numbers"])
    assert source.finished == 1


def test_two_passes_at_a_time_both_give_everything(where):
    source = Source(ELEMENTS["numbers"])
    dataset = Dataset.from_generator(source).cache(where)
    one, other = iter(dataset), iter(dataset)
    for iterator in (one, other, other):
        next(iterator)
    same(list(one), ELEMENTS["numbers"][1:])
    same(list(other), ELEMENTS["numbers"][2:])
    same(list(dataset), ELEMENTS["numbers"])


def test_what_comes_after_the_cache_is_done_every_time(where):
    calls = []

    def count(x):
        calls.append(int(x))
        return x

    dataset = (
        Dataset.from_generator(Source(ELEMENTS["numbers"])).cache(where).map(count)
    )
    for _ in range(2):
        list(dataset)
    assert calls == [0, 1, 2, 3, 4] * 2


def test_what_comes_before_the_cache_is_done_once(where):
    calls = []

    def count(x):
        calls.append(int(x))
        return x

    dataset = Dataset.range(5).map(count).cache(where)
    for later in (dataset, dataset.batch(2), dataset.shuffle(5)):
        list(later)
    assert calls == [0, 1, 2, 3, 4]


def test_a_random_order_before_the_cache_is_kept(where):
    for source in (Dataset.range(20), Dataset.from_generator(Source(range(20)))):
        dataset = source.shuffle(20).cache(where)
        first = list(dataset)
        assert list(dataset) == first
        if where:
            break


def test_a_generator_may_use_one_buffer_again_and_again(where):
    def generator():
        buffer = np.zeros(3)
        for i in range(4):
            buffer[...] = i
            yield buffer

    dataset = Dataset.from_generator(generator).cache(where)
    for _ in range(3):
        assert [x[0] for x in dataset] == [0, 1, 2, 3]


def test_a_file_that_cannot_be_read_says_what_to_do(tmp_path):
    path = tmp_path / "cache"
    list(Dataset.from_generator(Source(ELEMENTS["numbers"])).cache(str(path)))
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"something else"):
        path.write_bytes(damaged)
        with pytest.raises(
            OSError, match=r"file of `cache` cannot be read: .*Delete it"
        ):
            list(Dataset.from_generator(Source([])).cache(str(path)))


def test_an_error_while_the_cache_is_filled_keeps_nothing(where, tmp_path):
    def broken():
        yield 1
        raise KeyError("broken")

    dataset = Dataset.from_generator(broken).cache(where)
    for _ in range(2):
        with pytest.raises(KeyError):
            list(dataset)
    folder = tmp_path / "folder"
    assert not folder.exists() or list(folder.iterdir()) == []


class _Trap:
    """What runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_file_that_somebody_else_has_written_runs_no_code(tmp_path):
    path, trap = tmp_path / "cache", tmp_path / "sprung"
    path.write_bytes(pickle.dumps([_Trap(trap)]))
    with pytest.raises(OSError, match="file of `cache` cannot be read"):
        list(Dataset.from_generator(Source([])).cache(str(path)))
    assert not trap.exists()


def test_a_flipped_byte_is_found(tmp_path):
    path = tmp_path / "cache"
    list(Dataset.from_generator(Source(ELEMENTS["vectors"])).cache(str(path)))
    whole = path.read_bytes()
    for place in (20, len(whole) // 2, len(whole) - 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(OSError, match="Delete it"):
            list(Dataset.from_generator(Source([])).cache(str(path)))


def test_what_cannot_be_kept_in_a_file_says_so(tmp_path):
    windows = Dataset.range(4).window(2)
    with pytest.raises(
        TypeError, match="Datasets in elements cannot be kept in a file"
    ):
        list(windows.cache(str(tmp_path / "cache")))
    assert list(tmp_path.iterdir()) == []
