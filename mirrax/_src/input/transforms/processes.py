"""`map(workers="processes")`: a user's function in other processes.

Each process is served by a thread of its own. Elements travel stacked, a chunk at a time,
in shared memory: what is pickled is only where they lie. The processes live as long as the
function that they serve, so later passes find them running.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import traceback
import weakref
from multiprocessing import get_context, shared_memory
from typing import Any

from mirrax._src.input.background import JOIN_SECONDS
from mirrax._src.input.blocks import Block, Singles, rows_of
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.structure import map_leaves, own, stack_elements
from mirrax._src.input.transforms.parallel import Failed, ThreadPool, outcomes

_CHUNK = 64
_SMALLEST = 1 << 16  # bytes of shared memory
_ALIGNMENT = 64


_lock = threading.Lock()


def process_pool(fn: ElementFn, count: int) -> ThreadPool:
    """The pool of `count` processes that call `fn`; the one of an earlier pass, if any."""
    with _lock:
        pool = fn.pools.get(count)
        if pool is None or not all(worker.is_alive() for worker in pool.workers):
            pool = fn.pools[count] = _ProcessPool(fn, count)
        return pool


class _ProcessPool(ThreadPool):
    """Threads that serve a process each."""

    def __init__(self, fn: ElementFn, count: int) -> None:
        try:
            pickled = pickle.dumps(fn.fn)
        except Exception as error:
            raise ValueError(
                f'`map(workers="processes")` sends the function to other processes, and '
                f"{fn!r} cannot be pickled ({error}). Define it at the top of a module "
                '(no lambda, no inner function), or use `workers="threads"`.'
            ) from None
        self.workers = [_Worker(pickled, repr(fn)) for _ in range(count)]
        super().__init__([w.call for w in self.workers], _CHUNK, is_of_one_pass=False)
        weakref.finalize(self, _end_processes, self.workers)


def _end_processes(workers: list[_Worker]) -> None:
    """Closes all pipes, which ends the processes; one that is busy has a second for it."""
    for worker in workers:
        worker.pipe.close()
    deadline = time.monotonic() + JOIN_SECONDS
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.end()


class _Worker:
    """A process, seen from the thread that serves it."""

    def __init__(self, pickled: bytes, name: str) -> None:
        # Not "fork": JAX's threads would be copied in the middle of their work.
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, pickled), name="mirrax-map", daemon=True
        )
        self.process.start()
        theirs.close()
        self._name = name
        self._out = _Memory()
        self._in = _Attached()
        self._ending = threading.Lock()

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def end(self) -> None:
        """Ends the process, if it has not ended by itself, and frees all memory.

        Its own thread does this when the process has died, and the pool's end may come then.
        """
        with self._ending:
            if self.process.is_alive():
                self.process.terminate()
                self.process.join()
            self._in.free()
            self._out.close()

    def call(self, block: Block) -> Block:
        try:
            value: Any = len(block), block.value()
        except ValueError:  # elements that differ
            value = None, list(block.elements())
        try:
            self.pipe.send(self._out.write(value))
            is_error, message = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(1)
            self.end()
            raise RuntimeError(
                f"A process that calls {self._name} for `map` has ended, with exit code "
                f"{self.process.exitcode}. {_advice(self.process.exitcode)} The next pass over "
                "the data starts new processes."
            ) from None
        if is_error:
            raise pickle.loads(message)
        count, value = self._in.read(message)
        if count is not None:
            return Block.of(map_leaves(own, value), count)
        results = [
            Failed(pickle.loads(r.error))
            if isinstance(r, Failed)
            else map_leaves(own, r)
            for r in value
        ]
        return Block(Singles(results), range(len(results)))


def _advice(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return "It was killed by a signal: for -9 look for the system running out of memory."
    return (
        "Look above for what it printed; a script that uses processes needs "
        '`if __name__ == "__main__":` around what it runs.'
    )


def _stacked(elements: list[Any]) -> tuple[int | None, Any]:
    """Elements stacked, and their number; or as a list, if they differ."""
    try:
        return len(elements), stack_elements(elements)
    except ValueError:
        return None, elements


# Shared memory ------------------------------------------------------------------------------


class _Memory:
    """Memory that this side writes; a larger one takes its place when it is too small."""

    def __init__(self) -> None:
        self._memory: shared_memory.SharedMemory | None = None

    def write(self, value: Any) -> tuple[str, bytes, list[tuple[int, int]]]:
        """Where `value` lies: the memory's name, the pickle, the places of its buffers."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        raws = [buffer.raw() for buffer in buffers]
        places, end = [], 0
        for raw in raws:
            places.append((end, raw.nbytes))
            end += -(-raw.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = self._at_least(end)
        for raw, (start, size) in zip(raws, places):
            view: Any = memory.buf
            view[start : start + size] = raw
        return memory.name, pickled, places

    def _at_least(self, size: int) -> shared_memory.SharedMemory:
        if self._memory is None or self._memory.size < size:
            self.close()
            self._memory = shared_memory.SharedMemory(
                create=True, size=max(_SMALLEST, 2 * size)
            )
        return self._memory

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()
            self._memory = None


class _Attached:
    """Memory that the other side writes."""

    def __init__(self) -> None:
        self._memory: shared_memory.SharedMemory | None = None

    def read(self, message: tuple[str, bytes, list[tuple[int, int]]]) -> Any:
        """The value that lies there; its arrays are good until the next one is written."""
        name, pickled, places = message
        if self._memory is None or self._memory.name != name:
            self.close()
            self._memory = shared_memory.SharedMemory(name)
        view: Any = self._memory.buf
        buffers = [view[start : start + size] for start, size in places]
        return pickle.loads(pickled, buffers=buffers)

    def close(self) -> None:
        if self._memory is not None:
            # An array may still look at it; then it is freed with the array.
            with contextlib.suppress(BufferError):
                self._memory.close()
            self._memory = None

    def free(self) -> None:
        """Gives the memory back, where the other side may not have been able to."""
        memory = self._memory
        self.close()
        if memory is not None:
            with contextlib.suppress(FileNotFoundError):
                memory.unlink()


# In the other process -----------------------------------------------------------------------


def _serve(pipe: Any, pickled: bytes) -> None:
    """Calls the function until the pipe is closed, which it also is when the owner dies."""
    fn: Any = None
    out, there = _Memory(), _Attached()
    try:
        while True:
            message = pipe.recv()
            try:
                fn = fn or ElementFn(pickle.loads(pickled), "map")
                results = _results(fn, *there.read(message))
                pipe.send((False, out.write(results)))
            except Exception as error:
                pipe.send((True, _pickled_error(error)))
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    finally:
        there.close()
        out.close()


def _results(fn: ElementFn, count: int | None, value: Any) -> tuple[int | None, Any]:
    """What the function gives for each element; errors as they can be sent."""
    results = outcomes(fn, value if count is None else rows_of(value, count))
    failed = [r for r in results if isinstance(r, Failed)]
    for each in failed:
        each.error = _pickled_error(each.error)
    return (None, results) if failed else _stacked(results)


def _pickled_error(error: BaseException) -> bytes:
    error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    except Exception:
        return pickle.dumps(RuntimeError("".join(traceback.format_exception(error))))
