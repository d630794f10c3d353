"""`mx.train.Checkpoint`: saves what training needs, and brings it back."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mirrax._src.base import context
from mirrax._src.base.errors import DataLossError, warn_user
from mirrax._src.base.hiding import all_brief, brief, hides
from mirrax._src.base.jax_compat import outside_traces
from mirrax._src.base.launching import launching
from mirrax._src.base.mesh import on_host
from mirrax._src.cluster.runtime import current_cluster
from mirrax._src.state.spec import VariableSpec
from mirrax._src.state.variable import OrdinaryVariable, Variable
from mirrax._src.train import exporting, storage
from mirrax._src.train.copying import out_of_reach
from mirrax._src.train.pieces import Gathering, Pieces, is_spread
from mirrax._src.train.restoring import Matching, RestoreStatus, open_checkpoint
from mirrax._src.train.saving import (
    Item,
    Part,
    holds_something,
    is_plain,
    may_hold_state,
)
from mirrax._src.train.storage import Contents
from mirrax._src.train.writer import wait_for_saves, writer

_COUNTER = "save_counter"


@dataclass(frozen=True)
class CheckpointOptions:
    """How a checkpoint is saved.

    Args:
        experimental_enable_async_checkpoint: Whether `save` returns while a thread still
            writes; False waits until all is on the disk.
    """

    experimental_enable_async_checkpoint: bool = True


CheckpointOptions.__module__ = "mirrax.train"


def waiting(options: CheckpointOptions | None, wait: bool) -> CheckpointOptions | None:
    """`options`, and to wait if that is wanted."""
    asynchronous = "experimental_enable_async_checkpoint"
    return (
        replace(options or CheckpointOptions(), **{asynchronous: False})
        if wait
        else options
    )


@all_brief
@hides("collect", "replace_parts", "save_as", "saved_parts")
class Checkpoint:
    """Variables, optimizers, metrics, iterators, pytrees and numbers, saved together.

    >>> v, path = mx.Variable(3.0), tempfile.mkdtemp() + "/ckpt"
    >>> checkpoint = mx.train.Checkpoint(v=v, epoch=7)
    >>> saved = checkpoint.save(path)
    >>> v.assign(0.0), setattr(checkpoint, "epoch", 0)
    (<mx.Variable 'Variable' shape=() dtype=float32, numpy=0.0>, None)
    >>> status = checkpoint.restore(saved)
    >>> v.numpy(), checkpoint.epoch
    (array(3., dtype=float32), 7)

    Each keyword is an attribute of the checkpoint. Variables and other objects with state are
    restored in place, on any number of replicas. Arrays, numbers and pytrees of them are
    attributes to set before saving (`checkpoint.params = params`) and to read after restoring.
    Of any other object its variables, JAX arrays and objects with state are saved.

    Args:
        root: An object whose attributes are saved under their own names.
        **kwargs: What to save, by name.
    """

    __module__ = "mirrax.train"

    def __init__(self, root: Any = None, **kwargs: Any) -> None:
        self._parts: dict[str, Any] = {}
        self._lock = threading.RLock()
        has_parts = hasattr(root, "saved_parts") or may_hold_state(root)
        if root is not None and not has_parts:
            raise ValueError(
                f"`root` must be an object with attributes to save, got a "
                f"{type(root).__name__}; give structures and numbers a name: "
                "`Checkpoint(name=...)`."
            )
        self._root = root
        self._counter: Variable | None = None
        self._matching: Matching | None = None
        for name, value in kwargs.items():
            if name.startswith("_"):
                raise ValueError(
                    f"{name!r} cannot be a part of a checkpoint: names that begin with an "
                    "underscore are its own."
                )
            setattr(self, name, value)
        self.collect()  # complains of what cannot be saved

    # Attributes ------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        if hasattr(type(self), name):
            raise AttributeError(
                f"{name!r} is an attribute of Checkpoint itself; choose another name."
            )
        if not holds_something(value):
            raise ValueError(
                f"A checkpoint cannot save {name!r}, a {type(value).__name__}. It saves "
                "variables, optimizers, metrics, iterators, arrays, numbers, structures of "
                "them, and objects that have them as attributes."
            )
        is_new = name not in self._parts
        self._parts[name] = value
        if is_new and self._matching is not None:
            self._matching.restore_more(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_parts"][name]
        except KeyError:
            raise AttributeError(f"This checkpoint has no part {name!r}.") from None

    def __delattr__(self, name: str) -> None:
        if name not in self._parts:
            raise AttributeError(f"This checkpoint has no part {name!r}.")
        del self._parts[name]

    @property
    def save_counter(self) -> Variable:
        """How often `save` has been called, restores included."""
        counter = self._counter
        if counter is None:
            counter = OrdinaryVariable(VariableSpec(np.int32(0), name=_COUNTER))
            self._counter = counter
        return counter

    def saved_parts(self) -> dict[str, Any]:
        """What another checkpoint saves of this one, by name."""
        return dict(self._parts)

    def replace_parts(self, new: Mapping[str, Any]) -> None:
        """Takes the parts that were restored."""
        self._parts.update((k, v) for k, v in new.items() if k in self._parts)

    def collect(self) -> Part:
        """Everything to save, as separate items."""
        parts: dict[str, Any] = dict(self._parts)
        if self._counter is not None:
            parts[_COUNTER] = self._counter
        seen: list[Any] = [self]
        whole = Part("", parts, self.replace_parts, is_plain, seen)
        if self._root is not None:
            whole.include(self._root, seen)
        whole.name_slots()
        return whole

    # Saving ----------------------------------------------------------------------------

    def save(
        self,
        file_prefix: str | os.PathLike[str],
        options: CheckpointOptions | None = None,
        *,
        wait: bool = False,
    ) -> str:
        """Saves as `file_prefix-N`, where N counts the saves, and returns this path.

        It returns as soon as the values are safe from later steps; a thread writes them, and
        `sync` waits for it. An error of that thread is raised by the next `save` or `sync`;
        so call `sync` after the last one, or have it waited for. Of several workers all have
        to call it; the first one writes, of an optimizer's state in parts each its own.

        Args:
            file_prefix: Where, and the beginning of the name.
            options: How to save.
            wait: Whether to return only when the checkpoint is on the disk.
        """
        _check_outside("save")
        with self._lock:
            number = int(self.save_counter.numpy()) + 1
            path = f"{os.fsdecode(file_prefix)}-{number}"
            return self.save_as(path, waiting(options, wait))

    def save_as(
        self,
        path: str,
        options: CheckpointOptions | None = None,
        then: Callable[[Contents], None] | None = None,
    ) -> str:
        """Saves under exactly this path, counts it, and calls `then` when it is written."""
        _check_outside("save")
        with self._lock:
            before = int(self.save_counter.numpy())
            self._count(before + 1)
            try:
                return self._write(path, options, True, then)
            except BaseException:
                self._count(before)
                raise

    def _count(self, number: int) -> None:
        # Not `assign_add`, for which JAX would compile a program in the first save.
        self.save_counter.store_local(jax.device_put(np.int32(number)))

    def write(
        self,
        file_prefix: str | os.PathLike[str],
        options: CheckpointOptions | None = None,
        *,
        wait: bool = False,
    ) -> str:
        """Saves as `file_prefix`, without counting; returns this path.

        `latest_checkpoint` does not look at it. Arguments as those of `save`.
        """
        _check_outside("write")
        path = os.fsdecode(file_prefix)
        return self._write(path, waiting(options, wait), False)

    def _write(
        self,
        path: str,
        options: CheckpointOptions | None,
        is_one_of_many: bool,
        then: Callable[[Contents], None] | None = None,
    ) -> str:
        # The thread may outlive a `chdir`, and must not replace a link.
        place = Path(os.path.realpath(path))
        cluster = current_cluster()
        is_writer = cluster is None or cluster.worker == 0
        arrays, values, together = self._take(is_writer, place)
        if not is_writer:
            # For who cleans up after it.
            place.parent.mkdir(parents=True, exist_ok=True)
            writer.leave_to_first_worker()
            if together is None:
                return path
            writer.start_part(self, place, arrays, together)
        else:
            writer.start(self, place, arrays, values, is_one_of_many, then, together)
        if options is not None and not options.experimental_enable_async_checkpoint:
            self.sync()
        return path

    def _take(
        self, is_writer: bool, place: Path | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], Gathering | None]:
        """Arrays and values as they are now.

        With a `place` for a checkpoint, of arrays that no worker has as a whole each worker
        takes its own pieces, and the third result is how these come together.
        """
        arrays, values, together = {}, {}, None
        with launching():  # no other thread's step may take the memory meanwhile
            for name, item in self.collect().items.items():
                (arrays if item.is_array else values)[name] = _taken(name, item)
            spread = {n: a for n, a in arrays.items() if is_spread(a)}
            if spread and place is not None:
                together = _begin_together(place)
            for name, array in spread.items():
                # One after another, so that never more than one is whole on the devices.
                arrays[name] = Pieces.of(array) if together else on_host(array)
            if is_writer:
                arrays = out_of_reach(arrays)
        return arrays, values, together

    def sync(self) -> None:
        """Waits until everything that was saved is on the disk.

        Raises:
            OSError: If it could not be written.
        """
        writer.wait(self)

    def export(
        self,
        path: str | os.PathLike[str],
        format: str = "safetensors",
        *,
        overwrite: bool = False,
    ) -> str:
        """Writes the arrays for those who do not have mirrax; returns the path.

        >>> checkpoint = mx.train.Checkpoint(model={"w": mx.Variable(3.0)}, epoch=7)
        >>> path = checkpoint.export(tempfile.mkdtemp() + "/weights", format="orbax")
        >>> import orbax.checkpoint  # those who read it need no more
        >>> found = orbax.checkpoint.StandardCheckpointer().restore(path)
        >>> float(found["model"]["w"]), found["epoch"]
        (3.0, 7)

        Names are those of a checkpoint: `model/dense/kernel`. In a safetensors file numbers
        and strings are in the metadata, as JSON; with `format="orbax"`,
        `orbax.checkpoint.StandardCheckpointer().restore(path)` gives a nested dict of all.
        States of iterators are left out. What is written is there on return, and whole or
        not at all. Of several workers all have to call it, and the first one writes.

        Args:
            path: The file, or with "orbax" the directory.
            format: "safetensors" or "orbax".
            overwrite: Whether to replace what is at `path`.

        Raises:
            ModuleNotFoundError: If safetensors is not installed.
            FileExistsError: If there is something at `path`.
        """
        _check_outside("export")
        write, cluster = exporting.writer_for(format), current_cluster()
        arrays, values, _ = self._take(cluster is None or cluster.worker == 0)
        arrays.pop(_COUNTER, None)
        exporting.export(write, Path(path), arrays, values, overwrite, cluster)
        return os.fsdecode(path)

    # Restoring -------------------------------------------------------------------------

    def restore(self, save_path: str | os.PathLike[str] | None) -> RestoreStatus:
        """Restores what `save` has saved; the number of replicas may be another one.

        All is checked before anything is changed. What is only here or only in the checkpoint
        is left alone; the returned status knows its names and warns of them when it goes,
        unless one of its methods was called. An attribute that is set later is restored then.

        Raises:
            FileNotFoundError: If there is no checkpoint at `save_path`.
            mx.errors.DataLossError: If it is damaged.
            ValueError: If a shape or dtype is not that of the checkpoint.
        """
        self.save_counter  # noqa: B018 - made now, to be restored
        return self.read(save_path)

    def read(self, save_path: str | os.PathLike[str] | None) -> RestoreStatus:
        """Restores what `write` has written; as `restore`, without a count of saves."""
        _check_outside("restore")
        if save_path is None:
            return RestoreStatus(None)
        matching = Matching(self, _opened_together(save_path))
        matching.restore_more()
        self._matching = matching
        return RestoreStatus(matching)

    def __repr__(self) -> str:
        return f"<mx.train.Checkpoint of {', '.join(self._parts) or 'nothing'}>"


def _opened_together(path: str | os.PathLike[str]) -> Contents:
    """A checkpoint to read, the same on all workers."""
    cluster = current_cluster()
    if cluster is None:
        return open_checkpoint(path)
    wait_for_saves()
    cluster.agree("a checkpoint to restore", None)  # the first worker has written it
    contents = open_checkpoint(path)
    own = [os.path.realpath(contents.path), contents.sequence, contents.saved_at]
    found = cluster.agree("a checkpoint to restore", own)
    for k, theirs in enumerate(found):
        if theirs[1:] != found[0][1:]:
            raise ValueError(
                f"The workers restore different checkpoints: {found[0][0]} on "
                f"{cluster.names[0]}, {theirs[0]} on {cluster.names[k]}, which were not saved "
                "at the same time. Give all workers the same path, in a directory that all "
                "of them see."
            )
    return contents


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """The path of the checkpoint in `checkpoint_dir` that was saved last, or None.

    Half-written and damaged checkpoints are passed over; of a damaged one a warning tells.
    """
    wait_for_saves()
    told: dict[str, None] = {}

    def tell(error: Exception) -> None:
        told[str(error)] = None

    newest = None
    for _ in range(3):  # another process may delete one while this one looks at it
        newest = newest or newest_sound(
            find_checkpoints(Path(checkpoint_dir), tell), tell
        )
    for message in told:
        warn_user(message)
    return None if newest is None else os.path.join(checkpoint_dir, newest.path.name)


def warn_of(error: Exception) -> None:
    """Tells of a checkpoint that is passed over."""
    warn_user(str(error))


def find_checkpoints(
    directory: Path, tell: Callable[[Exception], None] = warn_of
) -> list[Contents]:
    """The checkpoints of a directory, in the order in which they were saved."""
    storage.recover(directory)
    return storage.checkpoints_in(directory, tell)


def newest_sound(
    found: list[Contents], tell: Callable[[Exception], None] = warn_of
) -> Contents | None:
    """The last one of these checkpoints whose files are as they were written."""
    for contents in reversed(found):
        try:
            storage.verify(contents)
            return contents
        except FileNotFoundError:
            continue
        except DataLossError as error:
            tell(error)
    return None


@brief
def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Everything in a checkpoint by name, arrays as NumPy's: to look at it without a model."""
    contents = open_checkpoint(path)
    return {**storage.read_arrays(contents, contents.arrays), **contents.values}


def _taken(name: str, item: Item) -> Any:
    """What to save, as it is now: a state may go on changing."""
    try:
        value = item.take()
        if item.is_array:
            return value
        _check_keys(value)
        return json.loads(json.dumps(value))
    except Exception as error:
        error.add_note(f"Raised while a checkpoint saved {name!r}; nothing was saved.")
        raise


def _begin_together(place: Path) -> Gathering | None:
    """Has all workers write the checkpoint `place`; None if they do not share a directory."""
    cluster = current_cluster()
    assert cluster is not None
    if cluster.worker > 0:
        return Gathering.begin(cluster, None)
    try:
        hidden = storage.begin(place)
    except OSError:
        with contextlib.suppress(OSError):
            Gathering.begin(cluster, None)
        raise
    together = Gathering.begin(cluster, hidden)
    if together is None:
        storage.abandon(hidden)
    return together


def _check_keys(value: Any) -> None:
    """Raises where JSON would turn keys into strings."""
    for key in value if isinstance(value, dict) else ():
        if not isinstance(key, str):
            raise TypeError(f"The keys of a state must be strings, got {key!r}.")
    inner = value.values() if isinstance(value, dict) else value
    for each in inner if isinstance(value, dict | list | tuple) else ():
        _check_keys(each)


def _check_outside(what: str) -> None:
    if context.current().frame is not None or not outside_traces():
        raise RuntimeError(
            f"`Checkpoint.{what}` is called inside a compiled function. Call it outside."
        )
    if context.current().replica is not None and not context.is_default():
        raise RuntimeError(
            f"`Checkpoint.{what}` is called inside a replica, so it would happen once for "
            "each. Call it outside `strategy.run`."
        )
