"""A user's function of an element, and what has been found out about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from mirrax._src.input.blocks import Block, CannotVectorise
from mirrax._src.input.purity import is_pure
from mirrax._src.input.structure import PyTree, show, to_element, tuple_for_list
from mirrax._src.input.vectorise import vectorise


@dataclasses.dataclass(eq=False)
class ElementFn:
    """The function that was given to `what`, a transformation."""

    fn: Callable[..., Any]
    what: str
    may_vectorise: bool | None = None  # None: not tried yet
    pools: dict[int, Any] = dataclasses.field(default_factory=dict)  # of processes

    def __call__(self, element: PyTree) -> PyTree:
        """The function's result as an element."""
        try:
            return to_element(tuple_for_list(self.raw(element)))
        except Exception as error:
            self.explain(error, element)
            raise

    def explain(self, error: Exception, element: PyTree) -> None:
        """Has an error of the function say where it was."""
        if isinstance(error, StopIteration):
            raise RuntimeError(f"{self!r}, given to `{self.what}`, stopped.") from error
        error.add_note(f"In `{self.what}` of {self!r} on an element {show(element)}.")

    def raw(self, element: PyTree) -> Any:
        """What the function returns; the parts of a tuple are its arguments."""
        return self.fn(*element) if type(element) is tuple else self.fn(element)

    def of_rows(self) -> Callable[[PyTree], PyTree]:
        """The function of many rows at once."""
        return vectorise(self.raw)

    def can_vectorise(self, sample: Block) -> bool:
        """Whether many rows at once will do, tried on two of them; known for good then."""
        if self.may_vectorise is None and len(sample):
            self.may_vectorise = is_pure(self.fn)
            try:
                if self.may_vectorise:
                    self.of_rows()(sample[:2].value())
            except (CannotVectorise, ValueError):  # the latter: rows that differ
                self.may_vectorise = False
        return bool(self.may_vectorise)

    def __repr__(self) -> str:
        return getattr(self.fn, "__qualname__", repr(self.fn))
