"""A worker's connection to the roster: finding it, proving the secret, lines there and back."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

from mirrax._src.cluster.roster_server.proving import (
    LONGEST_LINE,
    VERSION,
    is_proof,
    new_challenge,
    proof_of,
)

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 20.0
# In place of a worker's number: the number of nobody who could join.
_ONLOOKER = -1
_LONGEST_GREETING = 1024
_SOMETHING_ELSE = "but something else answers at its address: another program, or another version of mirrax"
_HOW_TO_SET = "Set the same MIRRAX_SECRET, or MIRRAX_SECRET_FILE, on all workers"


class Link:
    """A connection that may not be there yet.

    Attributes:
        problem: Why `open` has failed last.
        host: This machine's address, as the roster sees it.

    Args:
        address: Where the roster listens.
        secret: The job's secret; "" if there is none.
    """

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        self._address, self._secret = address, secret
        self._socket: socket.socket | None = None
        self._lines: BinaryIO | None = None
        self._first: bytes = b""
        self._sending = threading.Lock()
        self.problem, self.host = "", ""

    def open(self, worker: int, facts: dict[str, Any]) -> bool:
        """Connects, and says hello; false if nobody of ours is there yet.

        Raises:
            RuntimeError: If the roster has a different secret.
        """
        if not self._ask(worker, "hello", {"worker": worker, "facts": facts}):
            return False
        assert self._socket is not None
        self.host = self._socket.getsockname()[0]
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True

    def look(self) -> dict[str, Any] | None:
        """What the roster knows of all workers, without being one; None if it is not there.

        Raises:
            RuntimeError: If the roster has a different secret.
        """
        if not self._ask(_ONLOOKER, "look", None):
            return None
        self._close()
        return json.loads(self._first).get("job")

    def _ask(self, worker: int, kind: str, content: Any) -> bool:
        """Connects, proves the secret and says one thing; whether that was answered."""
        try:
            self._socket = socket.create_connection(self._address, _CONNECT_SECONDS)
        except OSError:
            self.problem = "which cannot be reached"
            return False
        self.problem = _SOMETHING_ELSE
        self._lines = self._socket.makefile("rb")
        try:
            greeting = json.loads(self._lines.readline(_LONGEST_GREETING))
            if greeting["roster"] != VERSION:
                raise ValueError
            self._prove(worker, greeting["challenge"])
            self._socket.settimeout(_ANSWER_SECONDS)
            self.send(kind, content)
            self._first = self._lines.readline()
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            self._first = b""
        if not self._first:
            self._close()
        return bool(self._first)

    def _prove(self, worker: int, theirs: str | None) -> None:
        """Shows the roster that this worker knows the secret, and has it shown by the roster."""
        if theirs is None and not self._secret:
            return
        me = "this process" if worker == _ONLOOKER else "this worker"
        if theirs is None or not self._secret:
            who = f"{me} has a secret, but worker 0"
            if theirs is not None:
                who = f"worker 0 has a secret, but {me}"
            raise self._refusal(f"{who} has none")
        own = new_challenge()
        challenges = theirs, own
        proof = proof_of(self._secret, "worker", worker, challenges)
        self.send("prove", {"worker": worker, "challenge": own, "proof": proof})
        assert self._lines is not None
        answer = json.loads(self._lines.readline(_LONGEST_GREETING))
        if not is_proof(
            answer.get("proved", ""), self._secret, "roster", worker, challenges
        ):
            raise self._refusal(f"worker 0 has a different secret from {me}")

    def _refusal(self, why: str) -> RuntimeError:
        self._close()
        host, port = self._address
        return RuntimeError(
            f"The roster at {host}:{port} is not that of this job: {why}. {_HOW_TO_SET}, and "
            "look for workers of another job."
        )

    def _close(self) -> None:
        assert self._socket is not None and self._lines is not None
        self._lines.close()
        self._socket.close()

    def send(self, kind: str, content: Any) -> None:
        """Sends a message; whether the connection still exists, `messages` tells.

        Raises:
            ValueError: If the roster would not take it.
        """
        data = json.dumps({kind: content}).encode() + b"\n"
        if len(data) > LONGEST_LINE:
            raise ValueError(
                f"The workers cannot exchange {len(data):,} bytes ({kind}) by the roster, "
                f"which takes {LONGEST_LINE:,}. Large values have to go another way."
            )
        try:
            with self._sending:
                assert self._socket is not None
                self._socket.sendall(data)
        except OSError:
            pass

    def messages(self) -> Iterator[tuple[str, Any]]:
        """What the roster says, until the connection ends."""
        assert self._lines is not None
        line, self._first = self._first, b""
        try:
            while line:
                ((kind, content),) = json.loads(line).items()
                yield kind, content
                line = self._lines.readline()
        except OSError:
            pass

    def forget(self) -> None:
        """In a process that was forked: the connection is the parent's."""
        if self._socket is not None:
            os.close(self._socket.detach())  # `close` would wait for the file

    def __str__(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"
