"""Frames: where variables live while a function is traced.

A traced function must not touch the arrays that variables hold. While it runs, reads and
writes go to the innermost frame; whoever traced the function turns the frame's reads into
arguments and its writes into results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mirrax._src.base.jax_compat import trace_state

if TYPE_CHECKING:
    from mirrax._src.state.variable import Variable


class RunEagerly(BaseException):
    """What is being traced has to run as plain Python instead; never reaches users.

    A BaseException, so that an `except Exception` of the traced code lets it pass.
    """


class Frame:
    """The variables as one traced function sees them.

    Attributes:
        is_local: Whether values are one replica's own arrays, or whole variables.
        is_spmd: Whether the traced code is one program for all replicas.
        is_staged: Whether a program is being traced; else code runs op by op.
        is_uneven: Whether other replicas' arrays may have other shapes.
        reads: The bound variables that were read, in order.
        writes: The latest value of each variable that was written.
        meshes: The meshes of the `run`s that were traced.
        created: Variables that came into being while the frame was active.
    """

    def __init__(
        self,
        values: Mapping[Variable, Any],
        *,
        is_local: bool,
        is_spmd: bool = False,
        is_uneven: bool = False,
        is_staged: bool = True,
        parent: Frame | None = None,
    ) -> None:
        self._values = values
        self._parent = parent
        self._trace = trace_state()
        self.is_local = is_local
        self.is_spmd = is_spmd
        self.is_uneven = is_uneven
        self.is_staged = is_staged
        self.reads: dict[Variable, None] = {}
        self.writes: dict[Variable, Any] = {}
        self.meshes: list[Any] = []
        self.created: list[Variable] = []

    def read(self, variable: Variable) -> Any:
        """The variable's value here."""
        if variable in self.writes:
            return self.writes[variable]
        if variable in self._values:
            self.reads[variable] = None
            return self._values[variable]
        if self._parent is not None and self._parent.is_local == self.is_local:
            return self._parent.read(variable)
        return variable.concrete(self.is_local)

    def peek(self, variable: Variable) -> Any:
        """The variable's value here, without counting as a read."""
        was_read = variable in self.reads
        value = self.read(variable)
        if not was_read:
            self.reads.pop(variable, None)
        return value

    def write(self, variable: Variable, value: Any) -> None:
        """Makes `value` what the rest of the traced function reads."""
        if trace_state() != self._trace:
            raise RuntimeError(
                f"Variable {variable.name!r} is assigned inside a function that JAX "
                "transforms on its own (the body of a `lax.scan`, `lax.cond`, `jax.jit`, "
                "`jax.grad`, ...), so the value would leak out of it. Return the value "
                "from that function and assign it outside, or use `mx.value_and_grad` "
                "in place of `jax.grad`."
            )
        self.writes[variable] = value

    def add_created(self, variable: Variable) -> None:
        """Notes a variable that was made while tracing."""
        self.created.append(variable)
        if self._parent is not None:
            self._parent.add_created(variable)
