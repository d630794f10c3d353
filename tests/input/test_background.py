"""Threads that read ahead: bounded, prompt with errors, and gone when nobody needs them."""

from __future__ import annotations

import gc
import itertools
import pickle
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.engines import mirrored
from helpers.programs import WARNINGS_ARE_ERRORS
from helpers.scripts import run_script
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from mirrax._src.base import logical
from mirrax._src.input import background, distributed
from mirrax._src.input.blocks import Block
from mirrax._src.input.transforms import processes

Dataset = mx.data.Dataset


def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("mirrax")]


class Source:
    """Counts how far a generator has run, and whether it was closed."""

    def __init__(self, n=1000):
        self.n = n
        self.made = 0
        self.open = 0

    def __call__(self):
        self.open += 1
        try:
            for i in range(self.n):
                self.made = i + 1
                yield np.full(2, i)
        finally:
            self.open -= 1


def identity(x):
    """Not a function of NumPy's, so that it is called for each element."""
    return np.array(x.tolist())


PIPELINES = {
    "prefetch": lambda d: d.prefetch(3),
    "parallel map": lambda d: d.map(identity, num_parallel_calls=2),
    "unordered map": lambda d: d.map(
        identity, num_parallel_calls=2, deterministic=False
    ),
    "both": lambda d: d.map(identity, num_parallel_calls=2).batch(2).prefetch(1),
    "two prefetches": lambda d: d.prefetch(2).map(identity).prefetch(2),
    "shuffle": lambda d: d.shuffle(4).prefetch(2),
    "repeat": lambda d: d.take(5).prefetch(2).repeat(50),
    "zip": lambda d: Dataset.zip(d.prefetch(1), d.prefetch(2)),
    "interleave": lambda d: Dataset.range(2).interleave(
        lambda i: d, cycle_length=2, num_parallel_calls=2
    ),
}


@pytest.fixture(params=[*PIPELINES, "distributed", "distributed, 3 ahead"])
def make(request):
    """Makes an iterator with threads over a source."""

    def make(source):
        dataset = Dataset.from_generator(source)
        if request.param in PIPELINES:
            return iter(PIPELINES[request.param](dataset))
        ahead = 3 if "3" in request.param else 1
        options = mx.distribute.InputOptions(experimental_per_replica_buffer_size=ahead)
        return iter(mirrored(2).experimental_distribute_dataset(dataset, options))

    return make


# Ends ---------------------------------------------------------------------------------------


def test_threads_end_when_the_iterator_is_dropped(make):
    source = Source()
    iterator = make(source)
    next(iterator)
    next(iterator)
    assert threads()
    del iterator
    assert not threads()
    assert source.open == 0, "the generator was closed"


def test_threads_end_when_the_iterator_is_closed(make):
    source = Source()
    iterator = make(source)
    next(iterator)
    iterator.close()
    assert not threads()
    assert source.open == 0
    iterator.close()
    assert next(iterator, None) is None, "a closed iterator has ended"


def test_threads_end_with_the_data(make):
    source = Source(6)
    iterator = make(source)
    for _ in iterator:
        pass
    assert not threads()
    assert source.open == 0
    assert next(iterator, None) is None


def test_threads_end_when_a_loop_is_left(make):
    source = Source()
    for _ in make(source):
        break
    assert not threads()
    assert source.open == 0


def test_threads_end_when_an_iterator_in_a_cycle_is_collected(make):
    source = Source()
    holder = {"iterator": make(source)}
    holder["itself"] = holder
    next(holder["iterator"])
    del holder
    gc.collect()
    assert not threads()
    assert source.open == 0


def test_threads_end_when_a_state_is_restored(make):
    iterator = make(Source())
    next(iterator)
    state = iterator.get_state()
    for _ in range(6):
        iterator.set_state(state)
        next(iterator)
    assert len(threads()) <= 4, "those of one pass"
    iterator.close()
    assert not threads()


def test_an_iterator_that_was_never_used_has_no_threads(make):
    iterator = make(Source())
    assert len(threads()) <= 4
    del iterator
    assert not threads()


def test_many_iterators_at_a_time():
    dataset = Dataset.from_generator(Source()).prefetch(2)
    iterators = [iter(dataset) for _ in range(20)]
    for i in range(3):
        assert [next(iterator)[0] for iterator in iterators] == [i] * 20
    del iterators
    assert not threads()


# How far ahead ------------------------------------------------------------------------------


def settled(source, at_least=0):
    """What the source has made when it makes no more; it is waited for to make `at_least`."""
    before, deadline = -1, time.monotonic() + SECONDS_TO_HANG
    while source.made < at_least and time.monotonic() < deadline:
        time.sleep(0.01)
    while before != source.made:
        before = source.made
        time.sleep(0.05)
    return before


@pytest.mark.parametrize("size", [1, 2, 5])
def test_prefetch_makes_no_more_than_it_was_told(size):
    source = Source()
    iterator = iter(Dataset.from_generator(source).prefetch(size))
    for taken in range(1, 5):
        next(iterator)
        assert settled(source, taken + size) == taken + size
    iterator.close()


def test_prefetch_of_nothing_makes_nothing_ahead():
    source = Source()
    iterator = iter(Dataset.from_generator(source).prefetch(0))
    next(iterator)
    assert settled(source, 1) == 1


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_are_copied_ahead_as_far_as_the_options_say(
    ahead, two_cpus, monkeypatch
):
    monkeypatch.setattr(distributed, "takes_all_cores", lambda devices: False)
    source = Source()
    options = mx.distribute.InputOptions(experimental_per_replica_buffer_size=ahead)
    dataset = Dataset.from_generator(source).batch(4)
    iterator = iter(two_cpus.experimental_distribute_dataset(dataset, options))
    for taken in range(1, 4):
        next(iterator)
        expected = 4 * (taken + ahead)
        assert settled(source, expected) == expected
    iterator.close()


@pytest.mark.parametrize(
    "slow_seconds, slow_part, is_ahead",
    [(1e9, 0, False), (0, 1e9, False), (0, 0, True)],
    ids=["quick", "quick beside the steps", "slow"],
)
def test_where_no_core_is_free_only_slow_batches_are_copied_ahead(
    slow_seconds, slow_part, is_ahead, two_cpus, monkeypatch
):
    monkeypatch.setattr(distributed, "takes_all_cores", lambda devices: True)
    monkeypatch.setattr(background, "_SLOW_SECONDS", slow_seconds)
    monkeypatch.setattr(background, "_SLOW_PART", slow_part)
    source = Source(80)
    dataset = Dataset.from_generator(source).batch(4)
    iterator = iter(two_cpus.experimental_distribute_dataset(dataset))
    first_ahead = 1 + background._SLOW_ELEMENTS  # the first one does not count
    for taken in range(1, 10):
        next(iterator)
        expected = 4 * (taken + (is_ahead and taken >= first_ahead))
        assert settled(source, expected) == expected
    assert len(list(iterator)) == 11


def test_cores_that_replicas_leave_free(two_cpus, monkeypatch):
    devices = two_cpus.replica_mesh.local_devices
    for cores, workers, is_taken in [(2, 1, True), (3, 1, False), (4, 2, True)]:
        monkeypatch.setattr(logical, "_cores", lambda cores=cores: cores)
        monkeypatch.setattr(logical.Pool, "workers_here", workers)
        assert logical.takes_all_cores(devices) is is_taken
    accelerators = [SimpleNamespace(platform="gpu")] * 8
    assert not logical.takes_all_cores(accelerators)  # type: ignore[arg-type]


@pytest.mark.parametrize("calls", [1, 3])
def test_a_parallel_map_reads_a_bounded_number_of_elements_ahead(calls):
    source = Source()
    dataset = Dataset.from_generator(source).map(identity, num_parallel_calls=calls)
    iterator = iter(dataset)
    for taken in range(1, 5):
        next(iterator)
        assert settled(source) <= taken + 2 * calls * 16  # tasks of short calls grow
    iterator.close()


def test_a_parallel_map_calls_its_function_that_often_at_a_time():
    running, most, lock = 0, 0, threading.Lock()

    def slow(x):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return x

    assert len(list(Dataset.range(13).map(slow, num_parallel_calls=3))) == 13
    assert most == 3


def test_a_parallel_map_keeps_the_order_or_does_not_wait_for_it():
    gate = threading.Event()

    def first_is_slow(x):
        if x == 0:
            gate.wait(SECONDS_TO_HANG)
        return int(x)

    dataset = Dataset.range(6)
    ready = iter(dataset.map(first_is_slow, num_parallel_calls=2, deterministic=False))
    assert next(ready) != 0
    gate.set()
    assert 0 in list(ready)
    assert list(dataset.map(first_is_slow, num_parallel_calls=2)) == list(range(6))


def test_reading_ahead_goes_on_while_an_element_is_used():
    started = [threading.Event() for _ in range(5)]

    def source():
        for i, each in enumerate(started):
            each.set()
            yield i

    iterator = iter(Dataset.from_generator(source).prefetch(2))
    assert next(iterator) == 0
    assert started[2].wait(SECONDS_TO_HANG)
    assert [int(x) for x in iterator] == [1, 2, 3, 4]


# Errors -------------------------------------------------------------------------------------


class UsersError(Exception):
    """An exception of the user's own."""


def breaks_after(n):
    def deep_in_the_generator():
        raise UsersError("broken")

    def generator():
        for i in range(n):
            yield np.full(2, i)
        deep_in_the_generator()

    return generator


def test_an_error_comes_after_the_elements_before_it_with_its_own_traceback(make):
    iterator = make(breaks_after(4))
    seen = 0
    with pytest.raises(UsersError, match="broken") as caught:
        for _ in iterator:
            seen += 1
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "deep_in_the_generator" in names
    assert seen <= 8
    iterator.close()
    del caught
    gc.collect()
    assert not threads()


@pytest.mark.parametrize("n", [0, 3])
def test_no_element_before_an_error_is_lost(n, two_cpus):
    dataset = Dataset.from_generator(breaks_after(n))
    distributed = two_cpus.experimental_distribute_dataset(dataset)
    for iterator in (iter(dataset.prefetch(2)), iter(distributed)):
        for _ in range(n):
            next(iterator)
        for _ in range(2):
            with pytest.raises(UsersError):
                next(iterator)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_other_exceptions_pass_too(kind):
    def generator():
        yield 1
        raise kind("stop")

    iterator = iter(Dataset.from_generator(generator).prefetch(1))
    assert next(iterator) == 1
    with pytest.raises(kind):
        next(iterator)


def test_an_error_does_not_wait_for_slow_calls_beside_it():
    gate, returned = threading.Event(), []

    def fails_or_waits(x):
        if x == 0:
            raise UsersError("broken")
        gate.wait(SECONDS_TO_HANG)
        returned.append(x)
        return x

    iterator = iter(Dataset.range(8).map(fails_or_waits, num_parallel_calls=3))
    with pytest.raises(UsersError):
        next(iterator)
    assert not returned
    gate.set()
    iterator.close()


def test_an_error_is_raised_before_the_source_sleeps_on():
    gate, woken = threading.Event(), []

    def generator():
        yield from range(3)
        gate.wait(SECONDS_TO_HANG)
        woken.append(3)
        yield 3

    def fails_at_2(x):
        if x == 2:
            raise UsersError("broken")
        return int(x)

    iterator = iter(Dataset.from_generator(generator).map(fails_at_2).prefetch(1))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(UsersError) as caught:
        next(iterator)
    assert not woken
    assert any("`map`" in note for note in caught.value.__notes__)
    gate.set()


def test_after_an_error_in_a_map_the_next_element_follows():
    def fails_at_3(x):
        if x == 3:
            raise UsersError("broken")
        return int(x)

    for calls in (None, 1, 3):
        iterator = iter(Dataset.range(20).map(fails_at_3, num_parallel_calls=calls))
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(UsersError):
            next(iterator)
        assert [int(x) for x in iterator] == list(range(4, 20))


def test_a_function_that_raises_stop_iteration_does_not_end_the_data():
    def stops(x):
        return next(iter(()))

    for dataset in (
        Dataset.range(3).map(stops),
        Dataset.range(3).map(stops, num_parallel_calls=2),
        Dataset.range(3).map(stops).prefetch(1),
        Dataset.range(3).filter(stops),
    ):
        with pytest.raises(RuntimeError, match="stop"):
            list(dataset)


# Processes that end -------------------------------------------------------------------------

START = """
    import threading, time
    import numpy as np
    import mirrax as mx

    Dataset = mx.data.Dataset

    def sleeps(x=None):
        yield np.arange(4)
        yield np.arange(4)
        time.sleep(600)

    def sleep(x):
        time.sleep(600)

    def goodbye():
        print("end", flush=True)
"""
SLEEPERS = {
    "prefetch": """
    iterator = iter(Dataset.from_generator(sleeps).prefetch(2))
    next(iterator)
    """,
    "distributed": """
    strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    iterator = iter(strategy.experimental_distribute_dataset(Dataset.from_generator(sleeps)))
    next(iterator)
    """,
    "parallel map": """
    slow = Dataset.range(9).map(sleep, num_parallel_calls=4)
    iterator = iter(Dataset.zip(Dataset.range(9), slow).prefetch(1))
    time.sleep(0.2)
    """,
    "dropped": """
    iterator = iter(Dataset.from_generator(sleeps).prefetch(3))
    next(iterator)
    next(iterator)
    del iterator
    """,
    "error": """
    iterator = iter(Dataset.from_generator(sleeps).prefetch(3))
    next(iterator)
    goodbye()
    raise KeyError("the end")
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLEEPERS)
def test_a_process_whose_source_sleeps_for_ever_ends(name):
    done = run_script(START + SLEEPERS[name] + "\n    goodbye()")
    assert (done.returncode == 0) == (name != "error"), done.stderr
    assert ("KeyError" in done.stderr) == (name == "error")
    assert "end" in done.stdout.splitlines()


PROCESSES = """
import gc, json, os, time
import numpy as np

def double(x):
    return x * 2 if x >= 0 else x

def mixed(x):
    return {"text": str(x), "ragged": np.arange(x % 3), "whose": os.getpid()}

def broken(x):
    if x == 70:
        raise LookupError("no 70")
    return x

def dies(x):
    if x == 70:
        os._exit(3)
    return x

def processes(fn, n=100):
    import mirrax as mx
    return mx.data.Dataset.range(n).map(fn, num_parallel_calls=2, workers="processes")

def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

def main():
    doubled = processes(double)
    assert [int(x) for x in doubled] == list(range(0, 200, 2))
    assert [int(x) for x in doubled] == list(range(0, 200, 2))
    dataset = processes(mixed)
    found = [(e["text"], len(e["ragged"])) for e in dataset]
    assert found == [(str(i).encode(), i % 3) for i in range(100)]
    found = {int(e["whose"]) for e in dataset}
    assert os.getpid() not in found and 1 <= len(found) <= 2
    iterator = iter(dataset)
    next(iterator)
    del iterator, dataset
    gc.collect()
    assert not any(map(is_alive, found)), "processes are left"

    iterator = iter(doubled)
    for k in range(100):
        state = json.loads(json.dumps(iterator.get_state()))
        if k in (63, 65):  # around the end of the first block
            again = iter(processes(double) if k == 63 else doubled)
            again.set_state(state)
            assert [int(x) for x in again] == list(range(2 * k, 200, 2)), k
        assert int(next(iterator)) == 2 * k

    for fn, kind, words in (
        (broken, LookupError, "no 70"),
        (dies, RuntimeError, "exit code 3"),
    ):
        try:
            list(processes(fn))
        except kind as error:
            assert words in str(error), error
            assert fn is dies or "in broken" in "".join(error.__notes__)
        else:
            raise SystemExit(f"{fn} has not failed")

    global kept
    kept = iter(doubled)
    next(kept)
    print("done", flush=True)

if __name__ == "__main__":
    main()
"""


def test_a_process_is_ended_once_by_whoever_comes_first(monkeypatch):
    worker = processes._Worker(pickle.dumps(abs), "abs")
    assert list(worker.call(Block.of(np.arange(-2, 2), 4)).elements()) == [2, 1, 0, 1]
    unlink, delays, failed = SharedMemory.unlink, itertools.count(0.1, 0.1), []

    def slow_unlink(memory):
        time.sleep(next(delays))  # so that both are in the middle of it
        unlink(memory)

    def end():
        try:
            worker.end()
        except OSError as error:
            failed.append(error)

    monkeypatch.setattr(SharedMemory, "unlink", slow_unlink)
    ending = [threading.Thread(target=end) for _ in range(2)]
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join()
    assert not failed
    assert not worker.is_alive()


@pytest.mark.slow
def test_a_map_in_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROCESSES)
    done = subprocess.run(
        [sys.executable, *WARNINGS_ARE_ERRORS, script],
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert done.stderr == ""


def test_functions_for_processes_must_be_pickled():
    dataset = Dataset.range(3).map(
        lambda x: str(x), num_parallel_calls=2, workers="processes"
    )
    with pytest.raises(ValueError, match="cannot be pickled.*top of a module.*threads"):
        list(dataset)


def test_two_threads_may_take_from_two_iterators_of_one_dataset():
    dataset = Dataset.from_generator(Source(200)).map(identity).shuffle(20, seed=1)
    wanted = [[x[0] for x in dataset] for _ in range(2)]
    dataset = Dataset.from_generator(Source(200)).map(identity).shuffle(20, seed=1)
    iterators, found = [iter(dataset), iter(dataset)], [[], []]

    def take(i):
        found[i] += [x[0] for x in iterators[i]]

    workers = [threading.Thread(target=take, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS_TO_HANG)
    assert found == wanted


def test_the_state_is_that_of_what_was_delivered_however_far_a_thread_has_read():
    source = Source(20)
    for size in (1, 4):
        dataset = Dataset.from_generator(source).prefetch(size)
        iterator = iter(dataset)
        for k in itertools.count():
            state = iterator.get_state()
            settled(source) if k % 7 == 0 else None
            again = iter(Dataset.from_generator(Source(20)).prefetch(size))
            again.set_state(state)
            element, other = next(iterator, None), next(again, None)
            again.close()
            if element is None:
                assert other is None and k == 20
                break
            assert other is not None and element[0] == other[0] == k
