"""Where eager replicas meet: one thread a replica, one running at a time.

The caller's thread hands the baton to replica 0, gets it back when that replica meets the
others or ends, then hands it to replica 1, and so on. When all have arrived it does what
they asked for and starts the next round. A failure of one replica wakes all the others.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mirrax._src.base.errors import sentence


class _Abandoned(BaseException):
    """Unwinds a replica whose run has failed elsewhere; never reaches users."""


@dataclass(frozen=True)
class Request:
    """What a replica asks for when it arrives: something done once for all replicas."""

    what: str  # the name to show, such as `merge_call`
    detail: str  # what has to be equal on all replicas, such as the reduction
    where: str  # the user's line that asked
    # Given every replica's payload, returns every replica's answer.
    act: Callable[[list[Any]], Sequence[Any]]
    payload: Any


class _Replica(threading.Thread):
    """One replica's thread and what it is doing."""

    def __init__(
        self, body: Callable[[], Any], name: str, rejoin: threading.Semaphore
    ) -> None:
        run = contextvars.copy_context().run
        super().__init__(target=run, args=(self._main, body), name=name, daemon=True)
        self._rejoin = rejoin
        self._go = threading.Semaphore(0)
        self._abandoned = False
        self.request: Request | None = None
        self.answer: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False

    def _main(self, body: Callable[[], Any]) -> None:
        self._go.acquire()
        try:
            if not self._abandoned:
                self.result = body()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.is_done = True
            self._rejoin.release()

    def step(self) -> None:
        """Lets the replica run until it meets the others or ends."""
        self.request = None
        self._go.release()
        self._rejoin.acquire()

    def meet(self, request: Request) -> Any:
        """Called on the replica's thread: waits until the request is answered."""
        if threading.current_thread() is not self:
            raise RuntimeError(
                f"`{request.what}` ({request.where}) of a replica is called from outside of "
                "it: its run has ended, or this is another thread. Ask for "
                "`mx.distribute.get_replica_context()` where you use it."
            )
        if not self._abandoned:  # else a `finally` of the unwinding replica asks again
            self.request = request
            self._rejoin.release()
            self._go.acquire()
        if self._abandoned:
            raise _Abandoned
        return self.answer

    def abandon(self) -> None:
        """Unwinds the replica if it is still waiting, or where it waits next."""
        self._abandoned = True
        self._go.release()


class Meeting:
    """Runs one function per replica, with meeting points between them."""

    def __init__(self, describe: Callable[[int], str]) -> None:
        self._describe = describe
        self._replicas: list[_Replica] = []

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """The bodies' results, in order; raises what a body does, with a note whose it is."""
        rejoin = threading.Semaphore(0)
        self._replicas = [
            _Replica(body, f"mirrax {self._describe(i)}", rejoin)
            for i, body in enumerate(bodies)
        ]
        try:
            for replica in self._replicas:
                replica.start()
            while True:
                for i, replica in enumerate(self._replicas):
                    replica.step()
                    if replica.error is not None:
                        replica.error.add_note(f"Raised in {self._describe(i)}.")
                        raise replica.error
                if all(replica.is_done for replica in self._replicas):
                    return [replica.result for replica in self._replicas]
                requests = self._same_requests()
                answers = requests[0].act([request.payload for request in requests])
                for replica, answer in zip(self._replicas, answers):
                    replica.answer = answer
        finally:
            self._unwind()

    def _unwind(self) -> None:
        """Ends all replicas, one after another; at once if that is interrupted, too."""
        try:
            for replica in self._replicas:
                replica.abandon()
                if replica.is_alive():
                    replica.join()
        except BaseException:
            for replica in self._replicas:
                replica.abandon()
            raise

    def meet(self, index: int, request: Request) -> Any:
        """Called by replica `index`: the answer to its request."""
        return self._replicas[index].meet(request)

    def _same_requests(self) -> list[Request]:
        """Every replica's request; raises unless all ask for the same."""
        asking = {i: r.request for i, r in enumerate(self._replicas) if r.request}
        waiting, first = next(iter(asking.items()))
        for i, replica in enumerate(self._replicas):
            if replica.is_done:
                raise RuntimeError(
                    f"{sentence(self._describe(i))} returned while "
                    f"{self._describe(waiting)} waits in `{first.what}` ({first.where}).\n"
                    f"Every replica has to call `{first.what}` equally often; look for an "
                    "`if` that depends on the replica id."
                )
        for i, request in asking.items():
            if request.what != first.what:
                raise RuntimeError(
                    f"{sentence(self._describe(i))} called `{request.what}` "
                    f"({request.where}) while {self._describe(0)} waits in `{first.what}` "
                    f"({first.where}).\nEvery replica has to make the same calls in the "
                    "same order; look for an `if` that depends on the replica id."
                )
            if request.detail != first.detail:
                raise ValueError(
                    f"Replicas call `{first.what}` ({first.where}) differently:\n"
                    f"  {self._describe(0)}: {first.detail}\n"
                    f"  {self._describe(i)}: {request.detail}\n"
                    "Every replica has to make the same call; look for an `if` that depends "
                    "on the replica id."
                )
        return list(asking.values())
