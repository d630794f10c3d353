"""The thread that writes checkpoints, one after another, while training goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mirrax._src.train import storage
from mirrax._src.train.storage import Contents


class Writer:
    """Writes one checkpoint at a time; the next one waits for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._waits_at_exit = False

    def start(
        self,
        path: Path,
        arrays: Mapping[str, Any],
        values: Mapping[str, Any],
        is_one_of_many: bool,
        then: Callable[[Contents], None] | None = None,
    ) -> None:
        """Begins to write a checkpoint; when it is on the disk, `then` hears of it.

        Raises:
            OSError: If its directory cannot be made, or the last one could not be written.
        """
        with self._lock:
            self._wait()
            self._wait_at_exit(path)
            hidden = storage.begin(path)
            self._thread = threading.Thread(
                target=self._write,
                args=(then, hidden, path, arrays, values, is_one_of_many),
                name=f"mirrax-save-{path.name}",
                daemon=True,
            )
            self._thread.start()

    def wait(self, raising: bool = True) -> None:
        """Waits for what is being written, and raises what went wrong."""
        with self._lock:
            self._wait(raising)

    def _wait(self, raising: bool = True) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        if raising and self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, then: Callable[[Contents], None] | None, *args: Any) -> None:
        try:
            contents = storage.write(*args)
            if then is not None:
                then(contents)
        except Exception as error:
            self._error = error

    def _wait_at_exit(self, path: Path) -> None:
        """Makes the end of the program wait; threads of Orbax cannot be started after it."""
        if self._waits_at_exit:
            return
        # `atexit` is too late: Python then refuses new threads, which Orbax needs.
        import concurrent.futures.thread  # noqa: F401 - its own hook has to run after this one

        try:
            threading._register_atexit(self._finish)  # type: ignore[attr-defined]
        except RuntimeError:
            raise RuntimeError(
                f"The checkpoint {path} was not saved: the program is ending. Save before "
                "the main thread ends."
            ) from None
        self._waits_at_exit = True

    def _finish(self) -> None:
        try:
            self.wait()
        except Exception as error:
            print(
                f"mirrax: the last checkpoint was not saved: {error}", file=sys.stderr
            )


writer = Writer()


def wait_for_saves(raising: bool = True) -> None:
    """Waits until no checkpoint is being written in this process."""
    writer.wait(raising)
