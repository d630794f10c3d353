"""A worker's place in the roster: joining, agreeing, and hearing of who is lost."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mirrax._src.base.errors import UnavailableError
from mirrax._src.base.stacks import main_threads_line, main_threads_stack
from mirrax._src.cluster import launches
from mirrax._src.cluster.later import Later
from mirrax._src.cluster.link import Link
from mirrax._src.cluster.pace import Pace, describe_silence
from mirrax._src.cluster.reporting import LOST_EXIT_CODE, write_report
from mirrax._src.cluster.roster_server.describing import describe_worker
from mirrax._src.cluster.vitals import Vitals
from mirrax._src.cluster.watching import Watch

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.2
# What the roster gets from all workers in a second.
_MOST_STATUSES = 1000
_SOON_SECONDS = 0.02
_LAST_WORDS_SECONDS = 2.0
_LINE_SECONDS = 10.0
# What a process may still do once another worker is lost: see the error, and end.
_GRACE_SECONDS = 3.0
_UNWINDING_SECONDS = 30.0


def say(text: str) -> None:
    """A line for whoever watches the worker."""
    with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads any more
        print(f"mirrax: {text}", file=sys.stderr, flush=True)


@dataclass
class _Agreement:
    """A value that is being agreed on."""

    is_awaited: bool
    event: threading.Event = field(default_factory=threading.Event)
    values: list[Any] | None = None
    why: str = ""


class Roster:
    """This worker's connection to the roster.

    Args:
        address: Where the roster listens.
        worker: This worker's number.
        names: All workers, for messages.
        facts: What must be equal on all workers, and what they may want to know.
        heartbeat: The seconds of silence after which somebody counts as lost.
        step_timeout: The seconds that a worker may be behind the others.
        secret: What all workers of the job know; "" if there is no secret.
    """

    def __init__(
        self,
        address: tuple[str, int],
        worker: int,
        names: Sequence[str],
        facts: dict[str, Any],
        heartbeat: float,
        step_timeout: float,
        secret: str = "",
    ) -> None:
        self.worker, self.names = worker, tuple(names)
        self.failure: UnavailableError | None = None
        self.facts: list[dict[str, Any]] = []
        self.port, self.host = 0, ""
        self.steps = 0
        self.runs = 0
        self._link, self._own_facts = Link(address, secret), facts
        self._heartbeat, self.step_timeout = heartbeat, step_timeout
        self._changed = threading.Condition()
        self._missing: list[int] = []
        self._agreements: dict[str, _Agreement] = {}
        self._waiting: dict[str, list[int]] = {}
        self._statuses: dict[int, dict[str, Any]] = {}
        self._heard = time.monotonic()
        self._has_gone = self._has_left = self._was_raised = False
        self._is_failing = False
        self._later = Later()
        self._notes: dict[str, int] = {}
        self._ended: list[int] = []
        self._others = Watch(worker, self.names)
        self._pace, self._vitals = Pace(), Vitals()
        self._calls = 0
        self._stopping = False
        self._stop_at: int | None = None

    # Joining -------------------------------------------------------------------------

    def join(self, timeout: float) -> None:
        """Waits for all workers; every 10 s a line says who is missing.

        Raises:
            UnavailableError: If they have not come after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        next_line = time.monotonic() + _LINE_SECONDS
        while not self._link.open(self.worker, self._own_facts):
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{self._me()} has waited {timeout:g} s for {self.names[0]}, "
                    f"{self._link.problem} ({self._link}). Has it been started, and is its "
                    "address right?",
                    (0,),
                )
            if time.monotonic() > next_line:
                next_line += _LINE_SECONDS
                say(f"{self._me()} waits for {self.names[0]}, {self._link.problem}.")
            time.sleep(0.1)
        self.host = self._link.host
        self._vitals.start()
        for target in (self._listen, self._beat):
            threading.Thread(
                target=self._guarded, args=(target,), name="mirrax-roster", daemon=True
            ).start()
        with self._changed:
            while not self._has_gone:
                self.check()
                now = time.monotonic()
                if now > deadline:
                    missing = tuple(self._missing)
                    text = (
                        f"{self.names[self.worker]} has waited {timeout:g} s for "
                        f"{self._show(missing)}, which did not join. Start all workers of the "
                        "cluster, or correct their number."
                    )
                    self._link.send("gave_up", {"workers": missing, "text": text})
                    raise UnavailableError(text, missing)
                if now > next_line:
                    next_line += _LINE_SECONDS
                    say(f"{self._me()} waits for {self._show(self._missing)}.")
                self._changed.wait(min(1.0, max(0.05, next_line - now)))

    def _me(self) -> str:
        return f"{self.names[self.worker]} (this process, {os.getpid()})"

    def _describe(self, worker: int, is_start: bool = True) -> str:
        facts = self.facts[worker] if self.facts else {}
        address = self._own_facts["addresses"][worker]
        text = describe_worker(worker, address, facts, self._statuses.get(worker, {}))
        return text if is_start else text[:1].lower() + text[1:]

    def _show(self, workers: Sequence[int]) -> str:
        return ", ".join(self.names[k] for k in workers)

    # Talking -------------------------------------------------------------------------

    def _guarded(self, body: Callable[[], None]) -> None:
        """Runs a thread's body; without the thread this worker would be deaf or mute."""
        try:
            body()
        except Exception as error:
            say("".join(traceback.format_exception(error)))
            text = f"has an internal error in its monitor: {error!r}."
            self._accuse(self.worker, text)
            self._fail(UnavailableError(f"{self._me()} {text}", (self.worker,)))

    def _listen(self) -> None:
        for kind, content in self._link.messages():
            self._heard = time.monotonic()
            self._hear(kind, content)
        if not self._has_left and self.failure is None:
            text = (
                "The roster is gone: the process that monitors the workers, beside "
                f"{self._describe(0, is_start=False)}. It was killed, ran out of memory, or its "
                "machine is down. Whether that worker is still alive is unknown."
            )
            self._fail(UnavailableError(text))
            if self._has_gone and self.failure is not None:
                self._die()  # JAX is about to abort this process, which has no code

    def _hear(self, kind: str, content: Any) -> None:
        with self._changed:
            if kind == "missing":
                self._missing = content
            elif kind == "go":
                self.port = content["port"]
                self.facts = [
                    {**content["shared"], **each} for each in content["facts"]
                ]
                self.facts[0]["addresses"] = content["addresses"]
                # Worker 0 may know itself by another address than the others do.
                if self.worker == 0 and content["host"]:
                    self.host = content["host"]
                self._has_gone = True
            elif kind == "agreed":
                agreement = self._agreements.pop(content["name"], _Agreement(True))
                agreement.values = (
                    [content["same"]] * len(self.names)
                    if "same" in content
                    else content["values"]
                )
                agreement.why = content.get("why", "")
                agreement.event.set()
            elif kind == "stopping":
                # Answered here: the main thread may be in a step that waits for others.
                self._stopping = True
                self._link.send("reached", self._calls)
            elif kind == "note":
                self._notes.update(content)
            elif kind == "ended":
                self._ended += content
            elif kind == "stop_at":
                self._stop_at = content
            elif kind == "status":
                self._waiting = content["waiting"]
                news = {int(k): status for k, status in content["workers"].items()}
                self._statuses.update(news)
                self._watch(news)
            self._changed.notify_all()
        if kind == "failure":
            workers = tuple(content["workers"])
            self._fail(UnavailableError(content["text"], workers))
        elif kind == "say":
            say(content)

    def _beat(self) -> None:
        told_steps, told_at, looked = -1, 0.0, time.monotonic()
        pause, used = len(self.names) / _MOST_STATUSES, time.process_time()
        while not self._has_left:
            time.sleep(_LOOK_SECONDS)
            now, used_before, used = time.monotonic(), used, time.process_time()
            slept = now - looked
            if slept > _BEAT_SECONDS:  # this process, or the machine, was stopped
                self._heard += slept
            if slept > self._heartbeat / 2:
                silence = describe_silence(slept, used - used_before, self._heartbeat)
                say(f"{self._me()} {silence}")
            looked = now
            self._pace.look(now, self.steps, bool(self._waits_in()))
            is_news = self.steps != told_steps and now - told_at > pause
            if is_news or now - told_at > max(pause, _BEAT_SECONDS):
                told_steps, told_at = self.steps, now
                self._link.send("status", self._status())
            silence = time.monotonic() - self._heard
            if silence > self._heartbeat and self._has_gone:
                self._fail(
                    UnavailableError(
                        f"{self._describe(0)} has not answered for {silence:.0f} s: its machine "
                        "or the network to it is down.",
                        (0,),
                    )
                )

    def _status(self) -> dict[str, Any]:
        return {
            "step": self.steps,
            "launches": launches.last.count,
            "label": launches.last.label,
            "is_busy": launches.last.is_busy(),
            "mark": launches.last.last_mark,
            "doing": main_threads_line(),
            "waits_in": self._waits_in(),
            "rate": self._pace.steps_per_second(),
            "occupied": self._pace.occupied(),
            **self._vitals.last,
        }

    def _waits_in(self) -> str:
        """What this worker computes or waits for others in; "" if they may wait for it."""
        awaited = next(
            (n for n, a in list(self._agreements.items()) if a.is_awaited), ""
        )
        return awaited or (launches.last.label if launches.last.is_busy() else "")

    # Failing -------------------------------------------------------------------------

    def _fail(self, failure: UnavailableError) -> None:
        if self.failure is not None or self._has_left or self._is_failing:
            return
        with self._changed:
            self.failure = failure
            for agreement in self._agreements.values():
                agreement.event.set()
            self._changed.notify_all()
        self._later.call(_GRACE_SECONDS, self._end)

    def _end(self) -> None:
        """Ends the process if it is still there when it should have seen the error."""
        if self._was_raised:
            time.sleep(_UNWINDING_SECONDS)
        self._die("".join(main_threads_stack().format()))

    def _die(self, where: str = "") -> None:
        assert self.failure is not None
        self._exit_soon(LOST_EXIT_CODE)
        place = f" It was here:\n{where}" if where else ""
        say(f"{self.failure}\n{self._me()} cannot continue and exits.{place}")
        write_report(self.failure, where=where)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(LOST_EXIT_CODE)

    def _exit_soon(self, code: int) -> None:
        """Ends the process also if the last words cannot be written: a pipe may be full."""
        self._later.call(_LAST_WORDS_SECONDS, lambda: os._exit(code))

    def check(self) -> None:
        """Raises if a worker is lost."""
        if self.failure is not None:
            self.note_raised()
            raise UnavailableError(str(self.failure), self.failure.workers)

    def note_raised(self) -> None:
        """Gives the process time to end by itself: it has been told."""
        self._was_raised = True

    def wait_for_failure(self, seconds: float) -> bool:
        """Whether a worker is lost, or turns out to be within some seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.failure is not None, seconds)

    def _watch(self, statuses: dict[int, dict[str, Any]]) -> None:
        """Looks for workers that are behind this one, or do something else."""
        wrong, line = self._others.look(
            statuses, self._ended, self.steps, self.step_timeout
        )
        for worker, text in wrong:
            self._accuse(worker, text)
        if line:
            say(f"{self._me()} {line}")

    def accuse_ended(self) -> None:
        """Names a worker whose program is done, while this one needs it."""
        for worker in self._ended[:1]:
            self._accuse(*self._others.needs(worker, self.steps))

    def _accuse(self, worker: int, text: str) -> None:
        self._link.send("accuse", {"workers": [worker], "text": text})

    # Agreeing ------------------------------------------------------------------------

    def agree(
        self, name: str, value: Any, wanted: Callable[[], bool | None] | None = None
    ) -> list[Any]:
        """All workers' values; each has to ask by the same name.

        Args:
            name: What is agreed on.
            value: This worker's value.
            wanted: For what is agreed on ahead of time: whether somebody waits for it, or
                None if it is of no use any more.

        Raises:
            UnavailableError: If a worker is lost, or does not come in time.
        """
        self.check()
        is_soft = wanted is not None
        agreement = _Agreement(is_awaited=not is_soft)
        with self._changed:
            self._agreements[name] = agreement
        content = {"name": name, "value": value, "is_soft": is_soft}
        self._link.send("agree", {**content, "mark": launches.last.mark})
        start = looked = time.monotonic()
        next_line = start + _LINE_SECONDS
        while not agreement.event.wait(_SOON_SECONDS if is_soft else _LOOK_SECONDS):
            now = time.monotonic()
            if now - looked > _BEAT_SECONDS:  # this process was stopped
                start += now - looked
            looked = now
            need = wanted() if wanted is not None else True
            if need is None:
                self._link.send("withdraw", name)
                raise UnavailableError(f"No worker waits for {name} any more.")
            if not need:
                start, next_line = now, now + _LINE_SECONDS
                continue
            if now - start > self.step_timeout:
                missing = self._waiting.get(name, [])
                self._accuse(
                    missing[0] if missing else 0,
                    f"has not arrived for {now - start:.0f} s, while {self.names[self.worker]} "
                    f"waits for it ({name}).",
                )
                self.wait_for_failure(2 * _BEAT_SECONDS)
            elif now > next_line:
                next_line += _LINE_SECONDS
                missing = self._waiting.get(name, [])
                say(f"{self._me()} waits for {self._show(missing)} ({name}).")
        if agreement.values is None:
            self.check()
            raise UnavailableError(
                f"The workers did not agree on {name}: {agreement.why}. All workers have to "
                "leave their loops at the same step."
            )
        return agreement.values

    def announce(self, name: str, count: int) -> None:
        """Tells all workers that something has been done `count` times."""
        self._link.send("note", {name: count})

    def tell_saved(self, path: str) -> None:
        """Tells whoever looks at the job which checkpoint was written last."""
        self._link.send("saved", {"path": path, "step": self.steps})

    def wait_for_note(self, name: str, count: int, worker: int | None = None) -> None:
        """Waits until the first worker has announced that, or `worker`, of itself.

        Raises:
            UnavailableError: If a worker is lost, or it takes longer than `step_timeout`.
        """
        deadline = time.monotonic() + self.step_timeout
        key = name if worker is None else f"{name} {worker}"
        worker = worker or 0
        with self._changed:
            while self._notes.get(key, 0) < count:
                self.check()
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"{self._describe(worker)} has not {name} within "
                        f"{self.step_timeout:g} s, while {self._me()} waits for it.",
                        (worker,),
                    )
                self._changed.wait(_LOOK_SECONDS)

    # Stopping ------------------------------------------------------------------------

    def request_stop(self, reason: str) -> None:
        """Asks all workers to stop at the same step."""
        self._link.send("stop", reason)

    def should_stop(self) -> bool:
        """Whether to stop now; called once a step by all workers."""
        with self._changed:
            self._calls += 1
            if not self._stopping:
                return False
            while self._stop_at is None:  # a message there and back: nobody has to come
                self.check()
                self._changed.wait(0.5)
            return self._calls >= self._stop_at

    # Leaving -------------------------------------------------------------------------

    def tell_failed(self, reason: str, code: int, line: str) -> None:
        """Tells the others why this worker is about to end, and sees to it that it does.

        `line` is where it failed; "" if that is nowhere in the user's code.
        """
        if self._is_failing:
            return
        self._is_failing = True
        # What it said last may be a second old, and many steps.
        self._link.send("status", {**self._status(), "doing": line})
        self._link.send("failed", reason)
        self._later.call(_UNWINDING_SECONDS, lambda: self._end_failed(code))

    def _end_failed(self, code: int) -> None:
        self._exit_soon(code)
        alive = [t.name for t in threading.enumerate() if not t.daemon]
        say(
            f"{self._me()} has failed, but was kept alive by these threads: "
            f"{', '.join(alive)}."
        )
        os._exit(code)

    def leave(self) -> None:
        """Says that this worker's program is done."""
        self._vitals.stop()
        if self._has_left or self._is_failing:
            return
        while launches.last.is_busy() and self.failure is None:
            time.sleep(_LOOK_SECONDS / 20)
        if self.failure is None and launches.last.has_failed():
            self.wait_for_failure(_UNWINDING_SECONDS)
        if self.failure is not None and not self._was_raised:
            self._die()
        if self.failure is None:
            self._link.send("status", self._status())
            self._link.send("bye", {"runs": self.runs, "mark": launches.last.mark})
            with (
                self._changed
            ):  # it may have run different programs from those that ended before
                self._changed.wait_for(
                    lambda: self.failure is not None or self.worker in self._ended,
                    _BEAT_SECONDS,
                )
            if self.failure is not None:
                self._die()
            self._has_left = True

    def forget(self) -> None:
        """In a process that was forked: the connection is the parent's."""
        self._has_left = True
        self._link.forget()
