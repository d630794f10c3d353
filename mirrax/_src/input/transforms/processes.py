"""`map(workers="processes")`: a user's function in other processes.

Each process is served by a thread of its own. Elements travel stacked, a chunk at a time,
in shared memory: what is pickled is only where they lie. The processes live as long as the
function that they serve, so later passes find them running.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
import weakref
from multiprocessing import get_context, shared_memory
from typing import Any

from mirrax._src.input.blocks import Block, Singles, rows_of
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.structure import map_leaves, own, stack_elements
from mirrax._src.input.transforms.parallel import Failed, ThreadPool, outcomes

_CHUNK = 64
_SMALLEST = 1 << 16  # bytes of shared memory
_ALIGNMENT = 64


def process_pool(fn: ElementFn, count: int) -> ThreadPool:
    """The pool of `count` processes that call `fn`; the one of an earlier pass, if any."""
    pools = fn.pools
    if count not in pools:
        try:
            pickled = pickle.dumps(fn.fn)
        except Exception as error:
            raise ValueError(
                f'`map(workers="processes")` sends the function to other processes, and '
                f"{fn!r} cannot be pickled ({error}). Define it at the top of a module "
                '(no lambda, no inner function), or use `workers="threads"`.'
            ) from None
        workers = [_Worker(pickled, repr(fn)) for _ in range(count)]
        pools[count] = ThreadPool([w.call for w in workers], _CHUNK, False)
    return pools[count]


class _Worker:
    """A process, seen from the thread that serves it."""

    def __init__(self, pickled: bytes, name: str) -> None:
        # Not "fork": JAX's threads would be copied in the middle of their work.
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, pickled), name="mirrax-map", daemon=True
        )
        self._process.start()
        theirs.close()
        self._name = name
        self._out = _Memory()
        self._in = _Attached()
        self._end = weakref.finalize(
            self, _end_process, self._pipe, self._process, self._out, self._in
        )

    def call(self, block: Block) -> Block:
        try:
            value: Any = len(block), block.value()
        except ValueError:  # elements that differ
            value = None, list(block.elements())
        try:
            self._pipe.send(self._out.write(value))
            is_error, message = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(1)
            raise RuntimeError(
                f"A process that calls {self._name} for `map` has ended (exit code "
                f"{self._process.exitcode}). Look above for what it printed; a script that uses "
                'processes needs `if __name__ == "__main__":` around what it runs.'
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


def _end_process(pipe: Any, process: Any, *memories: Any) -> None:
    pipe.close()
    process.join(2)
    if process.is_alive():
        process.terminate()
    for memory in memories:
        memory.close()


def _together(elements: list[Any]) -> tuple[int | None, Any]:
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
    return (None, results) if failed else _together(results)


def _pickled_error(error: BaseException) -> bytes:
    error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    except Exception:
        return pickle.dumps(RuntimeError("".join(traceback.format_exception(error))))
