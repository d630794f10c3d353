"""One connection to the roster: lines in, lines out, and how long strangers may stay."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from .proving import LONGEST_LINE, VERSION, is_proof, new_challenge, proof_of
from .showing import picture_of

if TYPE_CHECKING:
    from .server import Roster

# What somebody may do who has not joined yet.
_SECONDS_FOR_STRANGERS = 10.0
_FIRST_LINE = 8 * 1024
_MOST_STRANGERS = 64


def line_of(kind: str, content: Any) -> bytes:
    """A message as it travels."""
    return json.dumps({kind: content}).encode() + b"\n"


class _Decoder:
    """Reads messages; of the same line from many workers, as in an agreement, only the first."""

    def __init__(self) -> None:
        self._decode = json.JSONDecoder().raw_decode
        self._last: tuple[bytes, tuple[str, Any]] = b"", ("", None)

    def read(self, line: bytes) -> tuple[str, Any]:
        """What a message is, and its content, which nobody may change."""
        known, message = self._last
        if line == known:
            return message
        text = line.decode()
        content, end = self._decode(text)  # `json.loads` takes half as long again
        if end < len(text) and not text[end:].isspace():
            raise json.JSONDecodeError("more than one value", text, end)
        (message,) = content.items()
        if len(line) < _FIRST_LINE:
            self._last = line, message
        return message


_decoder = _Decoder()


class Door:
    """The connections that have not joined; there are never many, and none stays long.

    Args:
        secret: What workers have to know; "" if there is no secret.
        addresses: Where the workers are: a `hello` repeats them.
    """

    def __init__(self, secret: str, addresses: list[str]) -> None:
        self.secret = secret
        self.longest = _FIRST_LINE + (0 if secret else 2 * len(json.dumps(addresses)))
        self._most = _MOST_STRANGERS + len(addresses)
        self._waiting: dict[Connection, asyncio.TimerHandle] = {}

    def enter(self, connection: Connection) -> None:
        """Lets it in, in place of the one that has waited longest if there are too many."""
        if len(self._waiting) >= self._most:
            next(iter(self._waiting)).close()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(_SECONDS_FOR_STRANGERS, connection.close)
        self._waiting[connection] = timer

    def leave(self, connection: Connection) -> None:
        """Forgets one that has joined, or is gone."""
        if timer := self._waiting.pop(connection, None):
            timer.cancel()


# One for all connections: what comes is copied at once. A new one for each message is slow.
_buffer = memoryview(bytearray(1 << 16))


class Connection(asyncio.BufferedProtocol):
    """A stranger until it has proved itself and said hello, then a worker."""

    transport: asyncio.Transport

    def __init__(self, roster: Roster, door: Door) -> None:
        self._roster, self._door = roster, door
        self._rest = bytearray()
        self._longest = door.longest
        self._challenge = new_challenge() if door.secret else None
        self._proved: int | None = None
        self.worker: int | None = None
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._door.enter(self)
        greeting = {"roster": VERSION, "challenge": self._challenge}
        transport.write(json.dumps(greeting).encode() + b"\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._door.leave(self)
        if self.worker is not None:
            self._roster.leave(self.worker, self)

    def send(self, line: bytes) -> None:
        if not self.is_closed:
            self.transport.write(line)

    def tell(self, kind: str, content: Any) -> None:
        self.send(line_of(kind, content))

    def close(self) -> None:
        """Ends it, as soon as what was said is on its way."""
        self.is_closed = True
        self._door.leave(self)
        self.transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.is_closed:
            return
        data = bytes(_buffer[:nbytes])
        if data.endswith(b"\n") and not self._rest and data.count(b"\n") == 1:
            return self._read(data)  # a whole line, as mostly
        self._rest += data
        if b"\n" in data:
            *lines, rest = bytes(self._rest).split(b"\n")
            self._rest = bytearray(rest)
            for line in lines:
                if not self.is_closed:
                    self._read(line)
        if len(self._rest) > self._longest:
            self._refuse_line(f"of more than {self._longest} bytes")

    def _read(self, line: bytes) -> None:
        if len(line) > self._longest:
            return self._refuse_line(f"of more than {self._longest} bytes")
        try:
            kind, content = _decoder.read(line)
            if self.worker is not None:
                self._roster.hear(self.worker, kind, content)
            elif kind == "prove" and self._challenge is not None:
                self._check(content)
            elif self._door.secret and self._proved is None:
                self._send_away("It must first prove that it knows the job's secret.")
            elif kind == "look":
                self.tell("job", picture_of(self._roster))
                self.close()
            elif kind == "hello":
                self._join(content)
            else:
                self._send_away("It must say hello first.")
        except (json.JSONDecodeError, UnicodeDecodeError):
            self._refuse_line("that is not JSON")
        except Exception:  # nobody of ours, or out of turn
            self._refuse_line("that it does not understand")

    def _check(self, content: dict[str, Any]) -> None:
        """Looks at a worker's proof, and answers with one."""
        secret, worker = self._door.secret, int(content["worker"])
        assert self._challenge is not None
        challenges = self._challenge, str(content["challenge"])
        if not is_proof(content["proof"], secret, "worker", worker, challenges):
            return self._send_away("It has a different secret from the job's roster.")
        self._proved, self._longest = worker, LONGEST_LINE
        self._challenge = new_challenge()  # each is answered once
        self.tell("proved", proof_of(secret, "roster", worker, challenges))

    def _join(self, hello: dict[str, Any]) -> None:
        worker = int(hello["worker"])
        if self._proved not in (None, worker):
            raise ValueError("not the one that has proved itself")
        self._door.leave(self)
        if self._roster.join(worker, dict(hello["facts"]), self):
            self.worker, self._longest = worker, LONGEST_LINE
        else:
            self.close()

    def _send_away(self, why: str) -> None:
        self.tell("refused", why)
        self.close()

    def _refuse_line(self, what: str) -> None:
        if self.worker is not None:
            self._roster.refuse(self.worker, what)
        self.close()
