"""The process that knows all workers: who has joined, who is alive, what they agree on.

The first worker starts it beside itself as a program of its own (`python roster_server.py`),
because it has to outlive that worker: when JAX's coordination service ends with the process
that it lives in, JAX aborts every other worker before anything can be explained. So it also
hosts that service. It needs no JAX beside the service and starts in 0.2 s.

Messages are lines of JSON, each an object with one key that says what it is. From workers:

    hello   who it is, and facts that must be equal on all workers
    status  where it is, once a second
    agree   a value for an agreement, by name; `withdraw` that it is not wanted any more
    stop    that all should stop; `reached` is the answer to `stopping`
    accuse  that another worker does not do what it should; `gave_up` that one did not join
    note    that something has been done so often; passed on to all
    failed  that it ends, and why; `bye` if its program is done

To workers:

    missing who has not joined yet
    go      all have joined: everybody's facts, the port of JAX's service
    status  everybody's, once a second
    agreed  everybody's values
    stopping, stop_at  the two halves of agreeing on the step to stop at
    ended   a worker whose program is done
    failure the first worker that is lost, and how
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from typing import Any

GREETING = b'{"roster": 1}\n'
_GONE_WHILE_JOINING = "Worker 0 ended while the others were joining."
_BEAT_SECONDS = 1.0
_LINGER_SECONDS = 60.0
_MOST_GIVEN_UP = 1000
LONGEST_LINE = 16 * 1024 * 1024
# JAX's own watch over workers would abort them; ours comes first, and explains.
_NEVER_SECONDS = 7 * 24 * 3600


class Member:
    """One worker, as the roster sees it."""

    def __init__(self, writer: asyncio.StreamWriter, facts: dict[str, Any]) -> None:
        self.writer = writer
        self.facts = facts
        self.status: dict[str, Any] = {}
        self.heard = time.monotonic()
        self.has_ended = False

    def tell(self, kind: str, content: Any) -> None:
        if not self.writer.is_closing():
            self.writer.write(json.dumps({kind: content}).encode() + b"\n")


class Roster:
    """All workers, and what they have said."""

    def __init__(self, addresses: list[str], heartbeat: float, host: str) -> None:
        self.addresses = addresses
        self.heartbeat = heartbeat
        self.host = host
        self.members: dict[int, Member] = {}
        self.has_started = False
        self.failure: dict[str, Any] | None = None
        self.agreements: dict[str, dict[int, Any]] = {}
        self.soft: set[str] = set()
        self.given_up: dict[str, str] = {}
        self.marks: dict[str, dict[int, list[Any]]] = {}
        self.last_marks: dict[int, list[Any]] = {}
        self.stopping: dict[int, int] | None = None
        self.stop_at: int | None = None
        self.is_done = asyncio.Event()
        self.service: Any = None

    # Joining -------------------------------------------------------------------------

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One connection, from its first line to its end."""
        worker: int | None = None
        writer.write(GREETING)
        try:
            first = json.loads(await asyncio.wait_for(reader.readline(), 60))
            worker = self.join(first["hello"], writer)
            while worker is not None and (line := await reader.readline()):
                self.hear(worker, json.loads(line))
        except ValueError as error:
            if worker is not None:
                self.refuse(worker, error)
        except Exception:
            pass  # nobody of ours, or a connection that broke: as if it had ended
        finally:
            if worker is not None:
                self.leave(worker, writer)
            with contextlib.suppress(OSError):
                writer.close()

    def join(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> int | None:
        worker, facts = int(hello["worker"]), dict(hello["facts"])
        member = Member(writer, facts)
        if worker not in range(len(self.addresses)):
            raise ValueError  # nobody of ours
        problem = self.problem_with(worker, facts)
        if self.failure is not None:
            member.tell("failure", self.failure)
        elif problem and (self.has_started or worker in self.members):
            member.tell("failure", {"workers": [worker], "text": problem})
        elif problem:
            self.fail([worker], problem)
            member.tell("failure", self.failure)
        else:
            self.members[worker] = member
            self.tell_missing()
            self.start_if_complete()
            return worker
        return None

    def problem_with(self, worker: int, facts: dict[str, Any]) -> str:
        """Why a worker cannot join; "" if it can."""
        if facts["addresses"][1:] != self.addresses[1:]:
            return (
                f"Worker {worker} was told of other workers than worker 0: "
                f"{', '.join(facts['addresses'])} there, {', '.join(self.addresses)} here. "
                "Give all workers the same cluster, and end those of an earlier job."
            )
        if worker in self.members:
            return (
                f"There are two workers {worker}: another process has joined as this one. "
                "Give every worker its own index."
            )
        return ""

    def tell_missing(self) -> None:
        if not self.has_started:
            missing = [k for k in range(len(self.addresses)) if k not in self.members]
            self.tell_all("missing", missing)

    def start_if_complete(self) -> None:
        if self.has_started or len(self.members) < len(self.addresses):
            return
        self.has_started = True
        try:
            port = self.start_service()
        except Exception as error:
            self.fail([0], f"JAX's coordination service does not start: {error}")
            return
        members = [self.members[k] for k in range(len(self.addresses))]
        facts = [m.facts for m in members]
        host = members[-1].writer.get_extra_info("sockname")[0]
        self.tell_all("go", {"port": port, "host": host, "facts": facts})

    def start_service(self) -> int:
        """JAX's coordination service, on a port of its own."""
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

        start: Any = _jax.get_distributed_runtime_service  # pyright: ignore
        for attempt in range(5):
            with socket.create_server((self.host, 0)) as probe:
                port = probe.getsockname()[1]
            try:
                self.service = start(
                    f"{self.host or '[::]'}:{port}",
                    len(self.addresses),
                    heartbeat_timeout=_NEVER_SECONDS,
                    shutdown_timeout=1,
                )
                return port
            except Exception:  # somebody has taken the port in between
                if attempt == 4:
                    raise
        raise AssertionError

    # Listening -----------------------------------------------------------------------

    def hear(self, worker: int, message: dict[str, Any]) -> None:
        ((kind, content),) = message.items()
        member = self.members[worker]
        member.heard = time.monotonic()
        if kind == "status":
            member.status = content
        elif kind == "agree":
            if content["is_soft"]:
                self.soft.add(content["name"])
            self.collect(worker, content["name"], content["value"], content["mark"])
        elif kind == "withdraw":
            self.answer_none(content, f"worker {worker} has left it")
        elif kind == "stop":
            if self.stopping is None:
                self.stopping = {}
                self.tell_all("stopping", content)
        elif kind == "reached":
            assert self.stopping is not None
            self.stopping[worker] = content
            self.stop_if_all_reached()
        elif kind == "note":
            self.tell_all("note", content)
        elif kind == "gave_up":
            self.fail(content["workers"], content["text"])
        elif kind == "accuse":
            who = self.describe(content["workers"][0])
            self.fail(content["workers"], f"{who} {content['text']}")
        elif kind == "failed":
            self.fail([worker], f"{self.describe(worker)} has failed: {content}")
        elif kind == "bye":
            member.has_ended = True
            self.last_marks[worker] = content
            self.compare(self.last_marks)
            self.tell_all("ended", worker)
            self.stop_if_all_reached()
            for name in list(self.agreements):
                self.check_possible(name)

    def refuse(self, worker: int, error: ValueError) -> None:
        """Fails because of a line that cannot be read, and says so."""
        is_json = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
        what = "that is not JSON" if is_json else f"of more than {LONGEST_LINE} bytes"
        text = f"the roster has refused a line {what}. This is a fault in mirrax."
        self.fail([worker], f"{self.describe(worker)} has failed: {text}")

    def stop_if_all_reached(self) -> None:
        """Tells the step to stop at: one that nobody has come to yet."""
        reached = self.stopping or {}
        ended = {k for k, m in self.members.items() if m.has_ended}
        is_open = reached and self.stop_at is None
        if is_open and len(reached.keys() | ended) == len(self.addresses):
            self.stop_at = max(reached.values()) + 1
            self.tell_all("stop_at", self.stop_at)

    def collect(self, worker: int, name: str, value: Any, mark: list[Any]) -> None:
        if name in self.given_up:
            why = self.given_up[name]
            answer = {"name": name, "values": None, "why": why}
            self.members[worker].tell("agreed", answer)
            return
        values = self.agreements.setdefault(name, {})
        values[worker] = value
        marks = self.marks.setdefault(name, {})
        marks[worker] = mark
        if len(values) == len(self.addresses):
            self.compare(self.marks.pop(name))
            del self.agreements[name]
            self.soft.discard(name)
            self.tell_all(
                "agreed", {"name": name, "values": [values[k] for k in sorted(values)]}
            )
        else:
            self.check_possible(name)

    def answer_none(self, name: str, why: str) -> None:
        """Ends an agreement ahead of time that will not come about, also for who comes later."""
        self.given_up[name] = why
        if len(self.given_up) > _MOST_GIVEN_UP:
            del self.given_up[next(iter(self.given_up))]
        self.agreements.pop(name, None)
        self.marks.pop(name, None)
        self.soft.discard(name)
        self.tell_all("agreed", {"name": name, "values": None, "why": why})

    def compare(self, marks: dict[int, list[Any]]) -> None:
        """Fails if workers that have started as many programs have started others."""
        first, (count, checksum, label) = next(iter(marks.items()))
        for k, mark in marks.items():
            if mark[0] == count and mark[1] != checksum:
                self.fail(
                    [k],
                    f"{self.describe(k)} has run other programs than worker {first}: {mark[2]} "
                    f"there, {label} on worker {first}, or before them (program {count}). All "
                    "workers have to take the same steps with the same shapes and dtypes.",
                )

    def check_possible(self, name: str) -> None:
        """Fails an agreement that a worker whose program is done will never join."""
        values = self.agreements[name]
        ended = [k for k, m in self.members.items() if m.has_ended and k not in values]
        if ended and name in self.soft:
            self.answer_none(name, f"worker {ended[0]} has ended its program")
        elif ended:
            self.fail(
                ended,
                f"{self.describe(ended[0])} has ended its program, while {self.names(values)} "
                f"wait for it ({name}). All workers have to take the same steps.",
            )

    def leave(self, worker: int, writer: asyncio.StreamWriter) -> None:
        member = self.members.get(worker)
        if member is None or member.writer is not writer:
            return
        if not self.has_started:
            del self.members[worker]
            if worker == 0:
                self.fail([0], _GONE_WHILE_JOINING)
            self.tell_missing()
        elif not member.has_ended:
            who = self.describe(worker)
            self.fail(
                [worker],
                f"{who} has failed: its process is gone (killed, or out of memory).",
            )
        others = (m for m in self.members.values() if m is not member)
        if all(m.writer.is_closing() for m in others):
            self.is_done.set()

    # Watching ------------------------------------------------------------------------

    async def beat(self) -> None:
        """Tells everybody everybody's status, and looks for who is silent."""
        looked = time.monotonic()
        while not self.is_done.is_set():
            await asyncio.sleep(_BEAT_SECONDS)
            overslept = time.monotonic() - looked - _BEAT_SECONDS
            if overslept > _BEAT_SECONDS:  # this process, or the machine, was stopped
                for member in self.members.values():
                    member.heard += overslept
            looked = time.monotonic()
            if not self.has_started:
                self.tell_missing()
                continue
            now = time.monotonic()
            statuses = [self.members[k].status for k in range(len(self.addresses))]
            waiting = {
                name: [k for k in self.members if k not in values]
                for name, values in self.agreements.items()
            }
            self.tell_all("status", {"workers": statuses, "waiting": waiting})
            silent = [
                k
                for k, m in self.members.items()
                if not m.writer.is_closing()
                and not m.has_ended
                and now - m.heard > self.heartbeat
            ]
            if self.failure is not None and all(
                m.writer.is_closing() or now - m.heard > self.heartbeat
                for m in self.members.values()
            ):
                self.is_done.set()  # nobody is there to be told any more
            if silent:
                self.fail(
                    silent,
                    f"{self.describe(silent[0])} has not answered for {self.heartbeat:g} s: it is "
                    "stopped, or its machine or the network is gone, or one call has kept "
                    "Python busy for as long (then raise `heartbeat`).",
                )

    def fail(self, workers: list[int], text: str) -> None:
        """Tells everybody of the first failure; what follows from it is no news."""
        if self.failure is None:
            self.failure = {"workers": workers, "text": text}
            self.tell_all("failure", self.failure)
            # Not for ever for a worker that is stopped, or beyond a network that is gone.
            asyncio.get_running_loop().call_later(_LINGER_SECONDS, self.is_done.set)

    def describe(self, worker: int) -> str:
        member = self.members[worker]
        return describe_worker(
            worker, self.addresses[worker], member.facts, member.status
        )

    def names(self, workers: Any) -> str:
        return ", ".join(f"worker {k}" for k in sorted(workers))

    def tell_all(self, kind: str, content: Any) -> None:
        for member in self.members.values():
            member.tell(kind, content)


def describe_worker(
    worker: int, address: str, facts: dict[str, Any], status: dict[str, Any]
) -> str:
    """A worker for messages: where it is, what it last did, and where its log is."""
    parts = [address, *([facts["process"]] if "process" in facts else [])]
    if status.get("step"):
        parts.append(f"last at step {status['step']}")
    if status.get("doing"):
        parts.append(f"in {status['doing']}")
    if facts.get("log"):
        parts.append(f"its log is {facts['log']}")
    name = facts.get("name") or f"worker {worker}"
    return f"{name.capitalize()} ({', '.join(parts)})"


async def main() -> None:
    """Serves until all workers have gone. Its input says for whom, its output that it is ready."""
    config = json.loads(sys.stdin.readline())
    host, port = config["host"], config["port"]
    roster = Roster(config["addresses"], config["heartbeat"], host)
    try:
        server = await asyncio.start_server(
            roster.serve, host or None, port, limit=LONGEST_LINE
        )
    except OSError as error:
        print(json.dumps({"error": os.strerror(error.errno or 0)}), flush=True)
        return
    with contextlib.suppress(BrokenPipeError):  # gone already; its input has ended, too
        port = server.sockets[0].getsockname()[1]
        print(json.dumps({"ready": port}), flush=True)
    beating = asyncio.create_task(roster.beat())
    parent = asyncio.create_task(_parent_ends(roster))
    await roster.is_done.wait()
    beating.cancel()
    parent.cancel()
    server.close()
    os._exit(0)  # JAX's service would wait for workers that are gone


async def _parent_ends(roster: Roster) -> None:
    """Ends when the worker that started this is gone and nobody else is there to serve."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await reader.read()
    if not roster.has_started:
        roster.fail([0], _GONE_WHILE_JOINING)
    while not all(m.writer.is_closing() for m in roster.members.values()):
        await asyncio.sleep(_BEAT_SECONDS)
    roster.is_done.set()


if __name__ == "__main__":
    asyncio.run(main())
