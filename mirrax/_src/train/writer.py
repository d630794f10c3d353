"""The thread that writes checkpoints, one after another, while training goes on."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mirrax._src.base import hooks
from mirrax._src.base.errors import warn_user
from mirrax._src.cluster.runtime import current_cluster
from mirrax._src.train import storage
from mirrax._src.train.pieces import Gathering
from mirrax._src.train.storage import Contents

_PATIENCE_SECONDS = 60


class Writer:
    """Writes one checkpoint at a time; the next one waits for it."""

    def __init__(self) -> None:
        self._pending: dict[threading.Event, Path] = {}
        self._errors: weakref.WeakKeyDictionary[Any, Exception] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.RLock()
        self._writing = threading.Lock()
        self._waits_at_exit = False
        # Checkpoints that were written, or that the first worker is to write.
        self._count = 0

    def start(
        self,
        owner: Any,
        path: Path,
        arrays: Mapping[str, Any],
        values: Mapping[str, Any],
        is_one_of_many: bool,
        then: Callable[[Contents], None] | None = None,
        gathering: Gathering | None = None,
    ) -> None:
        """Begins to write a checkpoint; when it is on the disk, `then` hears of it.

        Raises:
            OSError: If its directory cannot be made, or the owner's last one was not written.
        """
        hidden = gathering and gathering.hidden
        try:
            self.wait(owner)
            hidden = hidden or storage.begin(path)
            what = hidden, path, arrays, values, is_one_of_many, gathering
            self._start(owner, path, self._write, (then, *what))
        except BaseException:
            if hidden is not None:
                storage.abandon(hidden)
            raise

    def start_part(
        self, owner: Any, path: Path, arrays: Mapping[str, Any], gathering: Gathering
    ) -> None:
        """Begins to write this worker's part of a checkpoint of the first worker's."""
        try:
            self._wait_for_own()
            self._raise(owner)
            self._start(owner, path, self._write_part, (arrays, gathering))
        except BaseException:
            gathering.end()
            raise

    def _start(
        self, owner: Any, path: Path, work: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        done = threading.Event()
        with self._lock:
            self._wait_at_exit(path)
            self._pending[done] = path
            try:
                threading.Thread(
                    target=work,
                    args=(done, owner, *args),
                    name=f"mirrax-save-{path.name}",
                    daemon=True,
                ).start()
            except BaseException:
                done.set()
                raise

    def _write_part(
        self,
        done: threading.Event,
        owner: Any,
        arrays: Mapping[str, Any],
        gathering: Gathering,
    ) -> None:
        try:
            with self._writing:
                gathering.write_own(arrays)
        except Exception as error:
            self._errors[owner] = error
        finally:
            done.set()

    def wait(self, owner: Any = None) -> None:
        """Waits for what is being written, and raises what went wrong for `owner`."""
        self._wait_for_own()
        cluster = current_cluster()
        if cluster is not None and cluster.worker > 0:
            cluster.wait_until_written(self._count)
        self._raise(owner)

    def _wait_for_own(self) -> None:
        # Without the lock, since a signal's handler may save in the middle of this; and for an
        # event, since a `Thread.join` that is interrupted takes the thread for ended.
        for done, path in list(self._pending.items()):
            while not done.wait(_PATIENCE_SECONDS):
                warn_user(
                    f"The checkpoint {path} is still being written after "
                    f"{_PATIENCE_SECONDS} s, and this waits for it. Is the disk slow?"
                )
            self._pending.pop(done, None)

    def _raise(self, owner: Any) -> None:
        error = self._errors.pop(owner, None) if owner is not None else None
        if error is not None:
            raise error

    def _write(
        self,
        done: threading.Event,
        owner: Any,
        then: Callable[[Contents], None] | None,
        hidden: Path,
        path: Path,
        *args: Any,
    ) -> None:
        written = None
        try:
            with self._writing:
                contents = storage.write(hidden, path, *args)
                if then is not None:
                    then(contents)
            written = str(path)
        except Exception as error:
            self._errors[owner] = error
        finally:
            cluster = current_cluster()
            if cluster is not None:
                self._count += 1
                cluster.announce_written(self._count, written)
            done.set()

    def leave_to_first_worker(self) -> None:
        """Notes that another worker writes a checkpoint that this one has helped to save."""
        self._count += 1

    def _wait_at_exit(self, path: Path) -> None:
        """Makes the end of the program wait for what is being written."""
        if self._waits_at_exit:
            return
        try:
            hooks.before_threads_end(self._finish)
        except RuntimeError:
            raise RuntimeError(
                f"The checkpoint {path} was not saved: the program is ending. Save before "
                "the main thread ends."
            ) from None
        self._waits_at_exit = True

    def _finish(self) -> None:
        errors: list[Any] = []
        try:
            self._wait_for_own()
        except KeyboardInterrupt:
            errors = ["interrupted"]
        for error in (*errors, *self._errors.values()):
            print(
                f"mirrax: the last checkpoint was not saved: {error}", file=sys.stderr
            )

    def forget(self) -> None:
        """In a process that was forked: the threads are the parent's."""
        self._pending, self._lock = {}, threading.RLock()


writer = Writer()
hooks.after_fork_in_child(writer.forget)


def wait_for_saves() -> None:
    """Waits until no checkpoint is being written in this process."""
    writer.wait()
