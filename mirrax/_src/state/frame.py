"""Frames: where variables live while a function is traced or differentiated.

A traced function must not touch the arrays that variables hold. While it runs, reads and
writes go to the innermost frame; whoever traced the function turns the frame's reads into
arguments and its writes into results.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mirrax._src.base.errors import warn_user
from mirrax._src.base.jax_compat import fresh_traces, is_staging, trace_state
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.protocols import Mode
from mirrax._src.base.values import PerReplica

if TYPE_CHECKING:
    from mirrax._src.state.variable import Variable


_numbers = itertools.count(1)
_WARN_AFTER = 20  # stale reads

# How often plain Python has read a variable, by its number, inside a function that JAX traces,
# and so JAX may have kept a trace with the variable's value in it.
_stale_reads: Counter[int] = Counter()

# The numbers of the eager frames that are active.
_seats: set[int] = set()
_seating = threading.Lock()


class Frame:
    """The variables as one traced function sees them."""

    def __init__(
        self, values: Mapping[Variable, Any], mode: Mode, parent: Frame | None = None
    ) -> None:
        self._values = values
        self._parent = parent
        self._trace = trace_state()
        self._caches = contextlib.ExitStack()
        self._read_deeper: set[int] = set()
        self.mode = mode
        self.reads: dict[Variable, None] = {}  # of those in `values`, in order
        self.writes: dict[Variable, Any] = {}  # the latest value of each
        # Of those that replicas have assigned together: whether all have the same now.
        self.agreed: dict[Variable, bool] = {}
        self.meshes: list[ReplicaMesh] = []  # of the `run`s that were traced
        self.runs = 0  # how many of those are steps, and not updates
        self.created: list[Variable] = []  # while the frame was active

    def __enter__(self) -> Frame:
        if self.mode.is_traced:
            self._forget_traces()
        else:
            # Plain Python keeps what JAX has compiled for single operations, unless a trace
            # in there has a variable's old value, or one of another frame that is active.
            with _seating:
                seat = next(i for i in itertools.count() if i not in _seats)
                _seats.add(seat)
            self._caches.callback(_seats.discard, seat)
            traces = ("eager", seat, _stale_reads.total())
            self._caches.enter_context(fresh_traces(traces))
        return self

    def __exit__(self, *error: Any) -> None:
        self._caches.close()

    def _forget_traces(self) -> None:
        self._caches.enter_context(fresh_traces(next(_numbers)))

    def is_innermost(self) -> bool:
        """Whether the code that runs now belongs to no trace inside this one."""
        return trace_state() == self._trace

    def read(self, variable: Variable) -> Any:
        """The variable's value here."""
        value = self.look_up(variable, counts=True)
        if trace_state() != self._trace:
            self._read_deeper.add(variable.number)
            if not self.mode.is_traced and is_staging():
                _note_stale(variable)
        return value

    def look_up(self, variable: Variable, counts: bool = False) -> Any:
        """The variable's value here; `counts` as a read, or just to see it."""
        if variable in self.writes:
            return self.writes[variable]
        if variable in self._values:
            if counts:
                self.reads[variable] = None
            return self._values[variable]
        is_local = self.mode.is_local
        if self._parent is not None and self._parent.mode.is_local == is_local:
            return self._parent.look_up(variable, counts)
        if self.mode.is_program and not any(variable is v for v in self.created):
            raise RuntimeError(
                f"Variable {variable.name!r} does not belong to the strategy that "
                "runs this compiled function. Make it in the scope of this strategy, or "
                "pass its value as an argument."
            )
        return variable.concrete(is_local)

    def is_agreed(self, variable: Variable) -> bool:
        """Whether all replicas have the same value of `variable` here."""
        if variable in self.writes:
            return self.agreed.get(variable, False)
        if self._parent is not None:
            return self._parent.is_agreed(variable)
        return not isinstance(variable.stored, PerReplica)

    def write(
        self, variable: Variable, value: Any, is_agreed: bool | None = None
    ) -> None:
        """Makes `value` what the rest of the traced function reads.

        Eager replicas say with `is_agreed` that they assign it together, and whether all
        have the same.
        """
        if trace_state() != self._trace:
            raise RuntimeError(
                f"Variable {variable.name!r} is assigned inside a function that JAX "
                "transforms on its own (the body of a `lax.scan`, `lax.cond`, `jax.jit`, "
                "`jax.grad`, ...), so the value would leak out of it. Return the value "
                "from that function and assign it outside, or use `mx.value_and_grad` "
                "in place of `jax.grad`."
            )
        self.writes[variable] = value
        if is_agreed is not None or variable in self.agreed:
            self.agreed[variable] = bool(is_agreed)
        if variable.number in self._read_deeper:
            # The body of a loop has seen the old value; it must be traced again.
            self._read_deeper.clear()
            self._forget_traces()

    def add_created(self, variable: Variable) -> None:
        """Notes a variable that was made while tracing."""
        self.created.append(variable)
        if self._parent is not None:
            self._parent.add_created(variable)


def _note_stale(variable: Variable) -> None:
    """Has JAX trace anew next time, because its trace now has a value of `variable`."""
    _stale_reads[variable.number] += 1
    if _stale_reads[variable.number] == _WARN_AFTER:
        warn_user(
            f"Variable {variable.name!r} is read inside a function that JAX traces (the body "
            "of a `lax.scan`, `jax.checkpoint`, ...), in code that runs as plain Python. JAX "
            "would keep its value, so everything is compiled again in each step, which is "
            "slow and takes memory. Wrap the step in `mx.function`, or read the variable "
            "outside that function."
        )
