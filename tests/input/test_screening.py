"""Windows, choices, scans and the others: errors, specs, threads, distribution."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest

import mirrax as mx

Dataset = mx.data.Dataset


def mirrored(n):
    return mx.MirroredStrategy([f"CPU:{i}" for i in range(n)])


# Windows and groups -------------------------------------------------------------------------


def test_windows_of_a_batch_cannot_be_stacked():
    with pytest.raises(TypeError, match=r"flat_map\(lambda window"):
        list(Dataset.range(4).window(2).batch(2))


def test_windows_cannot_be_distributed():
    with pytest.raises((TypeError, ValueError)):
        list(mirrored(2).experimental_distribute_dataset(Dataset.range(4).window(2)))


def test_a_window_describes_itself():
    windows = Dataset.range(5).batch(2).window(2)
    assert windows.element_spec == mx.data.DatasetSpec(mx.TensorSpec((None,), "int64"))
    (first, *_) = windows
    assert first.element_spec == mx.TensorSpec((None,), "int64")
    assert len(first) == 2
    assert "window" in repr(first)
    assert hash(windows.element_spec) == hash(first.window(1).element_spec)


def test_a_window_outlives_its_pass():
    windows = list(Dataset.range(5).window(2))
    assert [list(window) for window in windows] == [[0, 1], [2, 3], [4]]
    assert [list(window) for window in windows] == [[0, 1], [2, 3], [4]]


def test_windows_over_elements_that_differ():
    source = Dataset.from_generator(lambda: iter([1, (2, 3)]))
    with pytest.raises(ValueError, match="must be alike"):
        list(Dataset.from_generator(lambda: iter([(1, 2), 3])).window(2))
    assert [len(list(w)) for w in source.take(1).window(2)] == [1]


def test_windows_of_ragged_elements():
    ragged = Dataset.range(4).map(lambda n: np.full(n, n))
    batches = ragged.window(2).flat_map(lambda window: window.padded_batch(2))
    assert [b.tolist() for b in batches] == [[[0], [1]], [[2, 2, 0], [3, 3, 3]]]


def test_a_function_is_called_once_for_each_element_of_overlapping_windows():
    calls = []

    def count(x):
        calls.append(x)
        return x

    windows = Dataset.range(6).map(count).window(3, shift=1, drop_remainder=True)
    assert len(list(windows.flat_map(lambda window: window.batch(3)))) == 4
    assert len(calls) == 6


def test_spec_of_windows_over_nothing():
    windows = Dataset.range(0).window(2).flat_map(lambda window: window.batch(2))
    assert windows.element_spec == mx.TensorSpec((None,), "int64")
    assert list(windows) == []


def test_errors_of_groups_name_what_was_wrong():
    numbers = Dataset.range(4)

    def groups(**kwargs):
        arguments = {
            "key_func": lambda x: x % 2,
            "reduce_func": lambda key, window: window,
            "window_size": 2,
        }
        return list(numbers.group_by_window(**{**arguments, **kwargs}))

    with pytest.raises(TypeError, match="`key_func` must return an integer"):
        groups(key_func=lambda x: "a")
    with pytest.raises(ValueError, match=r"array of shape \(1,\)"):
        groups(key_func=lambda x: [x])
    with pytest.raises(ValueError, match="must be positive, got 0 for the key 0"):
        groups(window_size=0)
    with pytest.raises(TypeError, match="must return a dataset, got int64"):
        groups(reduce_func=lambda key, window: key)
    with pytest.raises(TypeError, match="needs a function"):
        groups(key_func=3)
    with pytest.raises(ValueError, match="Add a boundary"):
        list(
            numbers.map(lambda n: np.full(n, n)).bucket_by_sequence_length(
                len, [2], [1, 1], pad_to_bucket_boundary=True
            )
        )


def test_buckets_of_different_sizes_are_split_as_they_are():
    buckets = Dataset.range(8).map(lambda n: np.full(n % 4, n))
    buckets = buckets.bucket_by_sequence_length(len, [2], [2, 4], drop_remainder=True)
    assert buckets.element_spec == mx.TensorSpec((None, None), "int64")
    dataset = mirrored(2).experimental_distribute_dataset(buckets)
    sizes = [[len(part) for part in batch.values] for batch in dataset]
    assert sorted(sizes) == [[1, 1], [1, 1], [2, 2]]


# Choices ------------------------------------------------------------------------------------


def test_errors_of_choices_say_what_is_possible():
    a = Dataset.range(3)
    with pytest.raises(ValueError, match="from 0 to 1"):
        list(Dataset.choose_from_datasets([a, a], Dataset.range(5)))
    with pytest.raises(TypeError, match="must be int64"):
        floats = Dataset.from_generator(lambda: iter([0.5]))
        list(Dataset.choose_from_datasets([a, a], floats))
    with pytest.raises(ValueError, match="one for each dataset"):
        weights = Dataset.from_tensors([1.0, 2.0, 3.0])
        list(Dataset.sample_from_datasets([a, a], weights))
    with pytest.raises(TypeError, match="takes datasets, got 5"):
        Dataset.sample_from_datasets([a, 5])  # type: ignore[list-item]


def test_samples_follow_their_weights():
    parts = [Dataset.from_tensors(i).repeat() for i in range(3)]
    drawn = Dataset.sample_from_datasets(parts, [0.5, 0.3, 0.2], seed=1).take(4000)
    shares = np.bincount(list(drawn)) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=0.03)


def test_samples_depend_on_the_seed_alone():
    def order(seed):
        parts = [Dataset.range(50), Dataset.range(50, 100)]
        return list(Dataset.sample_from_datasets(parts, seed=seed))

    assert order(1) == order(1) != order(2)


def test_classes_are_resampled():
    data = Dataset.from_tensor_slices(np.array([0] * 9 + [1])).repeat(300)
    for initial in ([0.9, 0.1], None):
        found = data.rejection_resample(lambda x: x, [0.3, 0.7], initial, seed=2)
        kinds = [int(kind) for kind, _ in found]
        assert 0.6 < np.mean(kinds) < 0.8
    with pytest.raises(ValueError, match="returned 2.* 0 to 1"):
        list(Dataset.range(2, 9).rejection_resample(lambda x: x, [0, 1], [0.5, 0.5]))
    with pytest.raises(ValueError, match="2 and 1"):
        Dataset.range(3).rejection_resample(lambda x: x, [0.5, 0.5], [1.0])


# Scans --------------------------------------------------------------------------------------


def test_errors_of_scan_say_what_was_returned():
    numbers = Dataset.range(3)
    with pytest.raises(TypeError, match="a pair of the new state and a result"):
        list(numbers.scan(np.int64(0), lambda s, x: s))
    with pytest.raises(TypeError, match="The state of `scan` must be alike"):
        list(numbers.scan(np.int64(0), lambda s, x: (s + 0.5, x)))

    def broken(state, x):
        raise KeyError("as raised")

    with pytest.raises(KeyError) as caught:
        list(numbers.scan(np.int64(0), broken))
    assert "In `scan` of" in caught.value.__notes__[0]


# Errors that are ignored ----------------------------------------------------------------


def fail_at(*numbers):
    def check(x):
        if x in numbers:
            raise ValueError(f"not {x}")
        return x

    return check


def test_ignored_errors_are_shown_if_asked_for():
    dataset = Dataset.range(4).map(fail_at(2)).ignore_errors(log_warning=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(dataset) == [0, 1, 3]
    (warning,) = caught
    assert "not 2" in str(warning.message)
    with pytest.raises(UserWarning, match="not 2"):
        list(dataset)


def test_a_source_that_cannot_go_on_ends():
    def source():
        yield np.int64(1)
        raise OSError("disk")

    assert list(Dataset.from_generator(source).ignore_errors()) == [1]
    inner = Dataset.from_generator(source).prefetch(2)
    dataset = Dataset.range(2).flat_map(lambda x: inner.prefetch(1)).ignore_errors()
    assert list(dataset)[:1] == [1]
    assert list(Dataset.range(9).map(fail_at(1)).skip(3).ignore_errors()) == []


def test_files_that_are_missing_or_damaged_are_passed_over(tmp_path):
    for name in "ac":
        with mx.io.TFRecordWriter(str(tmp_path / name)) as writer:
            for i in range(2):
                writer.write(b"%s%d" % (name.encode(), i))
    (tmp_path / "d").write_bytes(b"no records at all")
    files = [str(tmp_path / name) for name in "abcd"]
    dataset = mx.data.TFRecordDataset(files).ignore_errors()
    assert list(dataset) == [b"a0", b"a1", b"c0", b"c1"]
    parallel = mx.data.TFRecordDataset(files, num_parallel_reads=2).ignore_errors()
    assert sorted(parallel) == [b"a0", b"a1", b"c0", b"c1"]
    assert not [t for t in threading.enumerate() if t.name.startswith("mirrax")]


def test_what_a_user_interrupts_is_not_ignored():
    def interrupt(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(Dataset.range(3).map(interrupt).ignore_errors())


# Asking -----------------------------------------------------------------------------------


def test_fingerprints_see_what_functions_refer_to():
    scale = np.array([1, 2])

    def times(factor):
        return Dataset.range(3).map(lambda x: x * scale * factor).fingerprint()

    before = times(2)
    assert times(2) == before != times(3)
    scale[0] = 5
    assert times(2) != before
    assert before.dtype == np.uint64
    inner = [Dataset.range(n).flat_map(lambda x: Dataset.range(2)) for n in (3, 4, 3)]
    prints = [each.fingerprint() for each in inner]
    assert prints[0] == prints[2] != prints[1]
    windows = [Dataset.range(n).window(2).fingerprint() for n in (3, 3, 4)]
    assert windows[0] == windows[1] != windows[2]


def test_a_single_element_needs_a_dataset_of_one():
    with pytest.raises(ValueError, match="has none"):
        Dataset.range(0).get_single_element()
    with pytest.raises(ValueError, match="more than one"):
        Dataset.range(5).prefetch(2).get_single_element()
    assert not [t for t in threading.enumerate() if t.name.startswith("mirrax")]


def test_batches_that_are_not_fetched_stay_on_the_host():
    strategy = mirrored(2)
    options = mx.distribute.InputOptions(experimental_fetch_to_device=False)
    dataset = Dataset.range(6).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset, options)
    batches = list(distributed)
    for batch in batches:
        assert all(type(part) is np.ndarray for part in batch.values)
        assert batch.values[0].dtype == np.int64
    assert [[p.tolist() for p in b.values] for b in batches] == [
        [[0, 1], [2, 3]],
        [[4], [5]],
    ]
    sums = [strategy.run(lambda x: x.sum(), args=(batch,)) for batch in batches]
    assert [int(strategy.reduce("SUM", s, axis=None)) for s in sums] == [6, 9]
    (one,) = mirrored(1).experimental_distribute_dataset(dataset.take(1), options)
    assert type(one) is np.ndarray


def test_cardinalities_are_in_both_doors():
    for name in ("INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY"):
        assert getattr(mx.data.experimental, name) == getattr(mx.data, name)
    assert mx.data.experimental.INFINITE_CARDINALITY == -1


def test_a_distributed_dataset_says_where_steps_belong():
    dataset = mirrored(2).experimental_distribute_dataset(Dataset.range(4).batch(2))
    with pytest.raises(
        AttributeError, match=r"call `\.window\(\.\.\.\)` on the dataset"
    ):
        dataset.window(2)
