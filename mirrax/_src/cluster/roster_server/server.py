"""All workers as the roster knows them, and what follows from what they say."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from .connection import Connection, line_of
from .describing import describe_difference, describe_worker
from .jax_service import start_service
from .slowness import Slowness

_GONE_WHILE_JOINING = "Worker 0 ended while the others were joining."
_BEAT_SECONDS = 1.0
_SOON_SECONDS = 0.02
_LINGER_SECONDS = 60.0
_MOST_GIVEN_UP = 1000
_MOST_MARKS = 256
# Of many workers that are missing or behind, so many are named.
_MOST_NAMED = 16


class Member:
    """One worker, as the roster sees it."""

    def __init__(self, connection: Connection, facts: dict[str, Any]) -> None:
        self.connection = connection
        self.facts = facts
        self.status: dict[str, Any] = {}
        self.heard = time.monotonic()


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
        self.history: dict[int, dict[int, list[Any]]] = {}
        self.ended: dict[int, dict[str, Any]] = {}
        self.newly_ended: list[int] = []
        self.planned: set[Any] = set()
        self.stopping: dict[int, int] | None = None
        self.stop_at: int | None = None
        self.is_done = asyncio.Event()
        self.saved: dict[str, Any] | None = None
        self.slowness = Slowness(time.monotonic())
        self.service: Any = None

    # Joining -------------------------------------------------------------------------

    def join(self, worker: int, facts: dict[str, Any], connection: Connection) -> bool:
        """Whether it is one of the workers now; if not, it has been told why."""
        if worker not in range(len(self.addresses)):
            return False
        problem = self.problem_with(worker, facts)
        if self.failure is None and problem and not self.has_started:
            if worker not in self.members:
                self.fail([worker], problem)
        if self.failure is not None:
            connection.tell("failure", self.failure)
        elif problem:
            connection.tell("failure", {"workers": [worker], "text": problem})
        else:
            self.members[worker] = Member(connection, facts)
            self.soon(self.tell_missing)
            self.start_if_complete()
            return True
        return False

    def problem_with(self, worker: int, facts: dict[str, Any]) -> str:
        """Why a worker cannot join; "" if it can."""
        if facts["addresses"][1:] != self.addresses[1:]:
            return (
                f"Worker {worker} has a different list of workers from worker 0: "
                f"{', '.join(facts['addresses'])} there, {', '.join(self.addresses)} on "
                "worker 0. Give all workers the same cluster, and end those of earlier jobs."
            )
        if worker in self.members:
            return (
                f"Two processes have joined as worker {worker}. Give every worker its own "
                "index."
            )
        return ""

    def tell_missing(self) -> None:
        if not self.has_started:
            missing = [k for k in range(len(self.addresses)) if k not in self.members]
            self.tell_all("missing", missing[:_MOST_NAMED])

    def start_if_complete(self) -> None:
        if self.has_started or len(self.members) < len(self.addresses):
            return
        self.has_started = True
        try:
            port = self.start_service()
        except Exception as error:
            self.fail([0], f"JAX's coordination service cannot be started: {error}")
            return
        members = [self.members[k] for k in range(len(self.addresses))]
        addresses = members[0].facts["addresses"]
        own = [{k: v for k, v in m.facts.items() if k != "addresses"} for m in members]
        # Most facts are the same everywhere; a thousand times a thousand are too many.
        shared = {
            k: v for k, v in own[0].items() if all(each.get(k) == v for each in own)
        }
        facts = [{k: v for k, v in f.items() if k not in shared} for f in own]
        host = members[-1].connection.transport.get_extra_info("sockname")[0]
        self.tell_all(
            "go",
            {
                "port": port,
                "host": host,
                "addresses": addresses,
                "shared": shared,
                "facts": facts,
            },
        )

    def start_service(self) -> int:
        """JAX's coordination service, on a port of its own."""
        self.service, port = start_service(self.host, len(self.addresses))
        return port

    # Listening -----------------------------------------------------------------------

    def hear(self, worker: int, kind: str, content: Any) -> None:
        """Acts on a message of a worker."""
        member = self.members[worker]
        member.heard = time.monotonic()
        if kind == "status":
            member.status = content
            if content.get("mark"):
                self.compare_with_history(worker, content["mark"])
        elif kind == "agree":
            if content["is_soft"]:
                self.soft.add(content["name"])
            self.collect(worker, content["name"], content["value"], content["mark"])
        elif kind == "withdraw":
            self.answer_none(content, f"worker {worker} gave it up")
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
        elif kind == "saved":
            self.saved = {**content, "seconds": time.monotonic()}
        elif kind == "gave_up":
            self.fail(content["workers"], content["text"])
        elif kind == "accuse":
            who = self.describe(content["workers"][0])
            self.fail(content["workers"], f"{who} {content['text']}")
        elif kind == "failed":
            self.fail([worker], f"{self.describe(worker)} has failed: {content}")
        elif kind == "bye":
            self.end(worker, content)

    def end(self, worker: int, ran: dict[str, Any]) -> None:
        """Notes that a worker's program is done, and what it has run."""
        for other, theirs in list(self.ended.items())[:1]:  # which is like all others
            self.compare_ends(worker, ran, other, theirs)
        self.ended[worker] = ran
        self.newly_ended.append(worker)
        self.soon(self.tell_ended)
        self.stop_if_all_reached()
        for name in list(self.agreements):
            self.check_possible(name)

    def compare_ends(
        self, worker: int, ran: dict[str, Any], other: int, theirs: dict[str, Any]
    ) -> None:
        """Fails if two workers whose programs are done have not done the same."""
        counts = {
            "calls of `run`": (ran["runs"], theirs["runs"]),
            "programs over all devices": (ran["mark"][0], theirs["mark"][0]),
        }
        for what, (here, there) in counts.items():
            if here != there:
                self.fail(
                    [worker],
                    f"{self.describe(worker)} ended after {here} {what}, but worker {other} "
                    f"after {there}: their variables may differ. All workers have to take the "
                    "same steps.",
                )
        self.compare({other: theirs["mark"], worker: ran["mark"]})

    def tell_ended(self) -> None:
        self.tell_all("ended", self.newly_ended)
        self.newly_ended = []

    def refuse(self, worker: int, what: str) -> None:
        """Fails because of a line of a worker's that cannot be read."""
        text = f"the roster refused a message {what}. This is a bug in mirrax."
        self.fail([worker], f"{self.describe(worker)} has failed: {text}")

    def stop_if_all_reached(self) -> None:
        """Tells the step to stop at: one that nobody has come to yet."""
        reached = self.stopping or {}
        is_open = reached and self.stop_at is None
        size = len(self.addresses)
        if is_open and len(reached) + len(self.ended) >= size:
            if len(reached.keys() | self.ended.keys()) == size:
                self.stop_at = max(reached.values()) + 1
                self.tell_all("stop_at", self.stop_at)

    def collect(self, worker: int, name: str, value: Any, mark: list[Any]) -> None:
        if name in self.given_up:
            why = self.given_up[name]
            answer = {"name": name, "values": None, "why": why}
            self.members[worker].connection.tell("agreed", answer)
            return
        values = self.agreements.setdefault(name, {})
        values[worker] = value
        marks = self.marks.setdefault(name, {})
        marks[worker] = mark
        if len(values) == len(self.addresses):
            self.compare(self.marks.pop(name))
            del self.agreements[name]
            self.soft.discard(name)
            self.tell_agreed(name, [values[k] for k in range(len(self.addresses))])
        elif self.ended:
            self.check_possible(name)

    def tell_agreed(self, name: str, values: list[Any]) -> None:
        """Tells all values; where all are the same, which they often are, only one."""
        told = f'"same": {(first := json.dumps(values[0]))}'
        if any(value is not values[0] for value in values):  # not from the same line
            every = json.dumps(values)
            if every != f"[{', '.join([first] * len(values))}]":  # 1 is not 1.0
                told = f'"values": {every}'
        line = f'{{"agreed": {{"name": {json.dumps(name)}, {told}}}}}\n'.encode()
        for member in self.members.values():
            member.connection.send(line)

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
                me = f"worker {first}"
                what = describe_difference(count, mark[2], label, me)
                self.fail([k], f"{self.describe(k)} {what}")

    def compare_with_history(self, worker: int, mark: list[Any]) -> None:
        """Compares with what another worker had run when it had run as many programs."""
        known = self.history.setdefault(mark[0], {worker: mark})
        if worker not in known:
            self.compare({**known, worker: mark})
        if len(self.history) > _MOST_MARKS:
            del self.history[next(iter(self.history))]

    def check_possible(self, name: str) -> None:
        """Fails an agreement that a worker whose program is done will never join."""
        values = self.agreements[name]
        ended = [k for k in self.ended if k not in values]
        if ended and name in self.soft:
            self.answer_none(name, f"worker {ended[0]} has ended its program")
        elif ended:
            self.fail(
                ended,
                f"{self.describe(ended[0])} has ended its program, while {self.names(values)} "
                f"wait for it ({name}). All workers have to take the same steps.",
            )

    def leave(self, worker: int, connection: Connection) -> None:
        """Notes that a worker's connection has ended."""
        member = self.members.get(worker)
        if member is None or member.connection is not connection:
            return
        if not self.has_started:
            del self.members[worker]
            if worker == 0:
                self.fail([0], _GONE_WHILE_JOINING)
            self.soon(self.tell_missing)
        elif worker not in self.ended:
            who = self.describe(worker)
            self.fail(
                [worker],
                f"{who} has failed: its process is gone (killed, or out of memory).",
            )
        is_over = self.has_started or self.failure is not None
        if is_over and self.are_all_gone():
            self.is_done.set()

    def are_all_gone(self) -> bool:
        return all(m.connection.is_closed for m in self.members.values())

    async def parent_ended(self) -> None:
        """Notes that the process is gone that had started this one."""
        if not self.has_started:
            self.fail([0], _GONE_WHILE_JOINING)
        while not self.are_all_gone():
            await asyncio.sleep(_BEAT_SECONDS)
        self.is_done.set()

    # Watching ------------------------------------------------------------------------

    async def beat(self) -> None:
        """Tells who is behind, and looks for who is silent."""
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
            waiting = {
                name: [k for k in self.members if k not in values][:_MOST_NAMED]
                for name, values in self.agreements.items()
            }
            statuses = {k: self.members[k].status for k in self.notable()}
            self.tell_all("status", {"workers": statuses, "waiting": waiting})
            self.look_for_silent()
            self.look_for_slowest()

    def notable(self) -> list[int]:
        """The first worker, and those that have started the fewest programs: others wait for them.

        Of many that run the same one is enough.
        """
        counts = {
            k: (m.status["launches"], m.status["label"])
            for k, m in self.members.items()
            if "launches" in m.status
        }
        if len(counts) <= _MOST_NAMED:
            return sorted({0, *counts})
        fewest = min(counts.values())[0]
        chosen = {at: k for k, at in counts.items() if at[0] == fewest}
        return sorted({0, *list(chosen.values())[:_MOST_NAMED]})

    def look_for_silent(self) -> None:
        now = time.monotonic()
        late = [k for k, m in self.members.items() if now - m.heard > self.heartbeat]
        silent = [
            k
            for k in late
            if not self.members[k].connection.is_closed and k not in self.ended
        ]
        if self.failure is not None and all(
            k in late or m.connection.is_closed for k, m in self.members.items()
        ):
            self.is_done.set()  # nobody is there to be told any more
        if silent:
            self.fail(
                silent,
                f"{self.describe(silent[0])} has not answered for {self.heartbeat:g} s: it is "
                "suspended, its machine or the network is down, or one call has kept Python "
                "busy for that long (then raise `heartbeat`).",
            )

    def look_for_slowest(self) -> None:
        statuses = {
            k: m.status for k, m in self.members.items() if "occupied" in m.status
        }
        if len(statuses) < len(self.addresses) or self.ended:
            return
        if found := self.slowness.look(time.monotonic(), statuses):
            worker, share = found
            self.members[0].connection.tell(
                "say",
                f"{self.describe(worker)} is the slowest: the others wait for it for "
                f"{share:.0%} of each step.",
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
        line = line_of(kind, content)
        for member in self.members.values():
            member.connection.send(line)

    def soon(self, tell: Callable[[], None]) -> None:
        """Has all workers told in a moment: one message for many that would say the same."""
        if tell.__name__ not in self.planned:
            self.planned.add(tell.__name__)
            loop = asyncio.get_running_loop()
            loop.call_later(_SOON_SECONDS, self.tell_planned, tell)

    def tell_planned(self, tell: Callable[[], None]) -> None:
        self.planned.discard(tell.__name__)
        tell()
