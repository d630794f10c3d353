"""What the launcher shows: every line of every worker, and its own messages between them.

The workers write to their log files and a thread reads on in these. So a worker never waits
for a slow terminal, its children may keep its output open, and a log is complete whatever
happens to the launcher.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.text import Text

_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 16
_POLL_SECONDS = 0.05
# What Gloo says each time that devices connect; it is in the log.
_CHATTER = b"[Gloo] Rank "
# How long the beginning of a line, or a progress bar, waits for its end.
_PATIENCE_SECONDS = 2.0
_URGENT_SECONDS = 1.0
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_MOVES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-ln-z]")
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\x1b")) + b"\x7f"


class Screen:
    """The terminal, or whatever stdout and stderr are.

    Args:
        is_urgent: Whether there is no time to wait for a terminal that does not take lines.
    """

    def __init__(self, is_urgent: Callable[[], bool]) -> None:
        self._is_urgent, self._urgent_polls = is_urgent, 0
        self._messages: queue.SimpleQueue[Text] = queue.SimpleQueue()
        self._logs: list[_Log] = []
        self._wish = threading.Event()
        self._drained = threading.Event()
        self._is_over = False
        self.is_broken = False
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._has_colours = Console(file=sys.stdout).color_system is not None
        self._thread = threading.Thread(
            target=self._work, name="mirrax-screen", daemon=True
        )

    def __enter__(self) -> Screen:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_over = True
        self.drain()

    def say(self, message: str, style: str = "") -> None:
        """A message of the launcher's own."""
        self._messages.put(Text(message, style))

    def follow(self, logs: list[Path], starts: list[int], first: int = 0) -> None:
        """Shows what is written to the logs of workers from number `first` on, from now on."""
        width = len(str(first + len(logs) - 1))
        self._logs = [
            _Log(path, start, self._prefix(worker, width))
            for worker, (path, start) in enumerate(zip(logs, starts), first)
        ]

    def drain(self) -> None:
        """Waits until all is shown, the logs to their ends."""
        self._drained.clear()
        self._wish.set()
        while not self._drained.wait(_POLL_SECONDS) and self._thread.is_alive():
            self._urgent_polls += self._is_urgent()
            if self._urgent_polls * _POLL_SECONDS > _URGENT_SECONDS:
                return

    def _prefix(self, worker: int, width: int) -> bytes:
        name = f"worker {worker:>{width}} |"
        if self._has_colours:
            name = f"\x1b[0;{_COLOURS[worker % len(_COLOURS)]}m{name}\x1b[0m"
        return name.encode() + b" "

    # In the thread --------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            is_wished = self._wish.is_set()
            if self._show_messages() | self._show_lines():
                continue
            if is_wished:
                self._write(b"".join(log.rest() for log in self._logs))
                for log in self._logs:
                    log.close()
                self._logs = []
                self._wish.clear()
                self._drained.set()
                if self._is_over:
                    return
            self._wish.wait(_POLL_SECONDS)

    def _show_messages(self) -> bool:
        if self._messages.empty():
            return False
        try:
            self._console.print(self._messages.get())
        except OSError:
            self.is_broken = True
        return True

    def _show_lines(self) -> bool:
        has_more = False
        for log in self._logs:
            chunk = log.read()
            self._write(log.lines(chunk))
            has_more |= bool(chunk)
        return has_more

    def _write(self, lines: bytes) -> None:
        is_closed = sys.stdout is None  # as with `>&-`
        if self.is_broken or is_closed or not lines:
            return
        try:
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()
        except OSError:
            self.is_broken = True


class _Log:
    """A worker's log, turned into whole lines with a prefix."""

    def __init__(self, path: Path, start: int, prefix: bytes) -> None:
        self._path, self._start, self._prefix = path, start, prefix
        self._file: BinaryIO | None = None
        self._pending = b""
        self._since = 0.0

    def read(self) -> bytes:
        """More of the log, which may not be there yet, and may go on in a new file."""
        if self._file is None:
            try:
                self._file = self._path.open("rb", buffering=0)
            except OSError:
                return b""
            self._file.seek(self._start)
            self._start = 0
        chunk = self._file.read(_CHUNK)
        if not chunk and not self._is_current():
            chunk = self._file.read(_CHUNK)  # what came before it was renamed
            if not chunk:
                self.close()
                return self.read()
        return chunk

    def _is_current(self) -> bool:
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return True  # the next one is not there yet

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def lines(self, chunk: bytes) -> bytes:
        """The lines that `chunk` completes."""
        if not chunk:
            waits = self._pending and time.monotonic() - self._since > _PATIENCE_SECONDS
            return self.rest() if waits else b""
        data = self._pending + chunk
        whole, self._pending = _split(data)
        if whole or len(chunk) == len(data):
            self._since = time.monotonic()
        if len(self._pending) > _LONGEST_LINE:
            whole, self._pending = data + b"\n", b""
        return self._prefixed(whole)

    def rest(self) -> bytes:
        """A line that has no end yet."""
        rest, self._pending = self._pending, b""
        return self._prefixed(rest + b"\n") if rest.strip(b"\r") else b""

    def _prefixed(self, text: bytes) -> bytes:
        """`text`, whole lines, as a terminal would show each: no garbage, no movements."""
        if not text:
            return b""
        if b"\x1b" in text:
            text = _MOVES.sub(b"", text)
        lines = text.translate(None, _CONTROL).split(b"\n")[:-1]
        lines = [line for line in lines if not line.startswith(_CHATTER)]
        if not lines:
            return b""
        if b"\r" in text:
            lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        shown = self._prefix + (b"\n" + self._prefix).join(lines) + b"\n"
        return shown.decode(errors="replace").encode()


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The whole lines of `data`, and what comes after them."""
    end = data.rfind(b"\n") + 1
    return data[:end], data[end:]
