"""`mx.summary`: what TensorBoard shows, written by TensorBoard's own writer.

    writer = mx.summary.create_file_writer("logs")
    with writer.as_default():
        mx.summary.scalar("loss", loss, step=step)

Of several workers only the first one writes, of several replicas only the first one.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from mirrax._src.base import context
from mirrax._src.base.hiding import brief
from mirrax._src.base.hooks import on_exit
from mirrax._src.base.jax_compat import Tracer, is_staging
from mirrax._src.base.values import PerReplica
from mirrax._src.cluster.runtime import current_cluster

_MAX_QUEUE, _FLUSH_MILLIS = 10, 120_000  # as TensorFlow's
_BUCKETS = 30

# Replicas' threads begin with what the thread that calls `run` has.
_writer: ContextVar[SummaryWriter | None] = ContextVar("writer", default=None)
_step: ContextVar[Any] = ContextVar("step", default=None)
_condition: ContextVar[Any] = ContextVar("condition", default=True)

_open: weakref.WeakSet[SummaryWriter] = weakref.WeakSet()


@brief
def create_file_writer(
    logdir: str | os.PathLike[str],
    max_queue: int | None = None,
    flush_millis: int | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
) -> SummaryWriter:
    """A writer of files for TensorBoard.

        writer = mx.summary.create_file_writer("logs")
        with writer.as_default():
            mx.summary.scalar("loss", 0.25, step=1)

    The file is made by the first summary. On workers other than the first it writes nothing,
    so that all workers can run the same code.

    Args:
        logdir: The directory for the files; `tensorboard --logdir` gets the same.
        max_queue: How many summaries wait to be written; 10 by default.
        flush_millis: After how many milliseconds they are written at the latest; two minutes
            by default.
        filename_suffix: The end of the file's name.
        name: Accepted for TensorFlow, where it names an operation of a graph; not used.

    Raises:
        ModuleNotFoundError: If TensorBoard is not installed.
    """
    _check_tensorboard()
    return SummaryWriter(
        os.fspath(logdir),
        _MAX_QUEUE if max_queue is None else max_queue,
        (_FLUSH_MILLIS if flush_millis is None else flush_millis) / 1000,
        filename_suffix or "",
    )


class SummaryWriter:
    """Writes summaries into one directory; `create_file_writer` makes it."""

    __module__ = "mirrax.summary"

    def __init__(
        self, logdir: str, max_queue: int, flush_seconds: float, suffix: str
    ) -> None:
        self._logdir = logdir
        self._settings = (max_queue, flush_seconds, suffix)
        self._file: Any = None
        self._is_closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator[SummaryWriter]:
        """Makes this the writer of all summaries in a `with` block.

        Args:
            step: The step of summaries that are given none.
        """
        self._check_not_closed()
        writer = _writer.set(self)
        before = _step.set(_step.get() if step is None else step)
        try:
            yield self
        finally:
            self.flush()
            _step.reset(before)
            _writer.reset(writer)

    def set_as_default(self, step: Any = None) -> None:
        """Makes this the writer of all summaries from now on."""
        self._check_not_closed()
        _writer.set(self)
        if step is not None:
            _step.set(step)

    def flush(self) -> None:
        """Writes the summaries that are waiting."""
        with self._lock:
            if self._file is not None:
                self._file.flush()

    def close(self) -> None:
        """Writes the summaries that are waiting and closes the file; later ones are an error."""
        self._is_closed = True
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()

    def add(self, summary: Any, step: int) -> None:
        """Writes a summary in TensorBoard's own form."""
        self._check_not_closed()
        from tensorboard.compat.proto import (  # pyright: ignore[reportMissingImports]
            event_pb2,
        )

        event = event_pb2.Event(wall_time=time.time(), step=step, summary=summary)
        with self._lock:
            if self._file is None:
                self._file = self._new_file()
            self._file.add_event(event)

    def _new_file(self) -> Any:
        from tensorboard.summary.writer import (  # pyright: ignore[reportMissingImports]
            event_file_writer,
        )

        if not _open:
            on_exit(_close_all)
        _open.add(self)
        return event_file_writer.EventFileWriter(self._logdir, *self._settings)

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                f"The summary writer of {self._logdir!r} is closed. Make a new one with "
                "`mx.summary.create_file_writer`."
            )

    def __repr__(self) -> str:
        return f"<mx.summary.SummaryWriter {self._logdir!r}>"


def scalar(
    name: str, data: Any, step: Any = None, description: str | None = None
) -> bool:
    """Writes a number.

    >>> mx.summary.scalar("loss", 0.25, step=1)  # there is no default writer
    False

    Args:
        name: What TensorBoard calls it; a slash makes groups.
        data: The number.
        step: An integer, or a variable such as `optimizer.iterations`.
        description: Shown by TensorBoard; Markdown.

    Returns:
        Whether it was written by this process.
    """

    def make() -> Any:
        from tensorboard.plugins.scalar import (  # pyright: ignore[reportMissingImports]
            summary_v2,
        )

        array = _as_array("scalar", name, data)
        if array.size != 1 or array.ndim:
            raise ValueError(
                f"`mx.summary.scalar({name!r}, ...)` takes one number, got an array of shape "
                f"{array.shape}."
            )
        return summary_v2.scalar_pb(name, array.astype(np.float32), description)

    return _write("scalar", name, data, step, make)


def histogram(
    name: str,
    data: Any,
    step: Any = None,
    buckets: int | None = None,
    description: str | None = None,
) -> bool:
    """Writes how values are distributed.

    >>> mx.summary.histogram("weights", np.ones(3), step=1)  # there is no default writer
    False

    Args:
        name: What TensorBoard calls it.
        data: An array of any shape.
        step: An integer or a variable.
        buckets: The number of ranges of equal width; 30 by default.
        description: Shown by TensorBoard; Markdown.

    Returns:
        Whether it was written by this process.
    """

    def make() -> Any:
        from tensorboard.plugins.histogram import (  # pyright: ignore[reportMissingImports]
            metadata,
        )

        values = _as_array("histogram", name, data).astype(np.float64).ravel()
        rows = _counted(values, _BUCKETS if buckets is None else buckets)
        facts = metadata.create_summary_metadata(
            display_name=None, description=description
        )
        return _tensor_summary(name, rows, facts)

    return _write("histogram", name, data, step, make)


def image(
    name: str,
    data: Any,
    step: Any = None,
    max_outputs: int = 3,
    description: str | None = None,
) -> bool:
    """Writes images.

    >>> mx.summary.image("digits", np.zeros((2, 8, 8, 1)), step=1)  # no default writer
    False

    Args:
        name: What TensorBoard calls them.
        data: Images, height, width and 1 to 4 channels; floats in [0, 1], or uint8.
        step: An integer or a variable.
        max_outputs: How many of them are written.
        description: Shown by TensorBoard; Markdown.

    Returns:
        Whether they were written by this process.
    """

    def make() -> Any:
        from tensorboard.plugins.image import (  # pyright: ignore[reportMissingImports]
            metadata,
        )

        images = _as_array("image", name, data)
        if images.ndim != 4 or not 1 <= images.shape[-1] <= 4:
            raise ValueError(
                f"`mx.summary.image({name!r}, ...)` takes images of shape (images, height, "
                f"width, channels) with 1 to 4 channels, got {images.shape}."
            )
        if images.dtype != np.uint8:
            scaled = np.floor(images.astype(np.float32) * 255.5)
            images = np.clip(scaled, 0, 255).astype(np.uint8)
        height, width = images.shape[1:3]
        encoded = [_png(each) for each in images[:max_outputs]]
        values = np.array([str(width).encode(), str(height).encode(), *encoded], object)
        facts = metadata.create_summary_metadata(
            display_name=None, description=description
        )
        return _tensor_summary(name, values, facts)

    return _write("image", name, data, step, make)


def text(
    name: str, data: Any, step: Any = None, description: str | None = None
) -> bool:
    """Writes text; TensorBoard shows it as Markdown.

    >>> mx.summary.text("setup", "batch size **32**", step=0)  # there is no default writer
    False

    Args:
        name: What TensorBoard calls it.
        data: A string, or an array of strings, which becomes a table.
        step: An integer or a variable.
        description: Shown by TensorBoard; Markdown.

    Returns:
        Whether it was written by this process.
    """

    def make() -> Any:
        from tensorboard.plugins.text import (  # pyright: ignore[reportMissingImports]
            summary_v2,
        )

        return summary_v2.text_pb(name, np.array(data, object), description)

    return _write("text", name, data, step, make)


def flush(writer: SummaryWriter | None = None) -> None:
    """Writes the waiting summaries of `writer`, or of the default writer."""
    chosen = writer or _writer.get()
    if chosen is not None:
        chosen.flush()


@contextlib.contextmanager
def record_if(condition: bool | Callable[[], bool]) -> Iterator[None]:
    """Writes summaries in a `with` block only if `condition` holds.

    >>> with mx.summary.record_if(False):
    ...     mx.summary.should_record_summaries()
    False

    Args:
        condition: True or False, or a function that is asked at each summary.
    """
    before = _condition.set(condition)
    try:
        yield
    finally:
        _condition.reset(before)


def should_record_summaries() -> bool:
    """Whether a summary would be written here: there is a writer, and `record_if` allows it."""
    condition = _condition.get()
    allowed = condition() if callable(condition) else condition
    return _writer.get() is not None and bool(allowed) and _is_first()


def set_step(step: Any) -> None:
    """Sets the step of summaries that are given none.

    >>> mx.summary.experimental.set_step(3)
    >>> mx.summary.experimental.get_step()
    3
    >>> mx.summary.experimental.set_step(None)

    Args:
        step: An integer; a variable, which is read at each summary; or None.
    """
    _step.set(step)


def get_step() -> Any:
    """The step of summaries that are given none, or None."""
    return _step.get()


def _write(kind: str, name: str, data: Any, step: Any, make: Callable[[], Any]) -> bool:
    leaves = jax.tree.leaves(data, is_leaf=lambda x: isinstance(x, PerReplica))
    if is_staging() or any(isinstance(leaf, Tracer) for leaf in leaves):
        raise RuntimeError(
            f"`mx.summary.{kind}({name!r}, ...)` is called in a function that is traced, where "
            "values are not known yet. Return the value from the step, combine the replicas' "
            "values with `strategy.reduce`, and write the result outside of `mx.function`."
        )
    writer = _writer.get()
    if writer is None or not should_record_summaries():
        return False
    step = get_step() if step is None else step
    if step is None:
        raise ValueError(
            f"`mx.summary.{kind}({name!r}, ...)` has no step. Pass `step=`, or set one with "
            "`writer.as_default(step)` or `mx.summary.experimental.set_step`."
        )
    writer.add(make(), int(np.asarray(step)))
    return True


def _is_first() -> bool:
    """Whether this is the first worker, and its first replica or cross-replica code."""
    cluster, here = current_cluster(), context.current()
    if cluster is not None and cluster.worker:
        return False
    is_in_replica = here.replica is not None and not context.is_default()
    return not is_in_replica or context.local_index(here) == 0


def _as_array(kind: str, name: str, data: Any) -> np.ndarray:
    if isinstance(data, PerReplica):
        raise ValueError(
            f"`mx.summary.{kind}({name!r}, ...)` was given a per-replica value. Combine its "
            "parts first: `strategy.reduce('MEAN', value, axis=None)`."
        )
    return np.asarray(data)


def _tensor_summary(name: str, values: np.ndarray, facts: Any) -> Any:
    from tensorboard.compat.proto import (  # pyright: ignore[reportMissingImports]
        summary_pb2,
    )
    from tensorboard.util import (  # pyright: ignore[reportMissingImports]
        tensor_util,
    )

    tensor = tensor_util.make_tensor_proto(values)
    summary = summary_pb2.Summary()
    summary.value.add(tag=name, metadata=facts, tensor=tensor)
    return summary


def _counted(values: np.ndarray, buckets: int) -> np.ndarray:
    """Rows of a range's start, its end and how many values it has.

    TensorBoard's own `histogram_pb` does this in memory for `buckets` times the values.
    """
    if not buckets or not values.size:
        return np.zeros((buckets, 3))
    low, high = values.min(), values.max()
    if low == high:
        counts = np.zeros(buckets)
        counts[-1] = values.size
        edges = np.full(buckets + 1, low)
    else:
        counts, edges = np.histogram(values, buckets, (low, high))
    return np.stack([edges[:-1], edges[1:], counts], axis=1)


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image  # pyright: ignore[reportMissingImports]

    file = io.BytesIO()
    whole = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    Image.fromarray(whole).save(file, format="PNG")
    return file.getvalue()


def _check_tensorboard() -> None:
    try:
        import tensorboard  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "`mx.summary.create_file_writer` needs TensorBoard, which is not installed. Type: "
            "pip install 'mirrax[tensorboard]'",
            name="tensorboard",
        ) from None


def _close_all() -> None:
    for writer in list(_open):
        writer.close()
