"""`Iterator`: what `iter(dataset)` gives. It can be saved and restored."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from mirrax._src.base import context
from mirrax._src.base.errors import OutOfRangeError
from mirrax._src.input.blocks import value_of
from mirrax._src.input.node import Cursor, Node, open_cursor, walk
from mirrax._src.input.structure import PyTree
from mirrax._src.state.frame import RunEagerly


class Optional:
    """A value that may be missing, from `iterator.get_next_as_optional()`."""

    __module__ = "mirrax.data.experimental"

    def __init__(self, *value: Any) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Whether there is a value: False past the end of the data."""
        return bool(self._value)

    def get_value(self) -> Any:
        """The value.

        Raises:
            ValueError: If there is none.
        """
        if not self._value:
            raise ValueError(
                "There is no value: the data has ended. Ask `has_value()` first."
            )
        return self._value[0]

    def __repr__(self) -> str:
        return f"Optional({', '.join(map(repr, self._value))})"


class IteratorBase:
    """What iterators of datasets and of distributed datasets share."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError

    def get_next(self) -> Any:
        """The next element.

        Raises:
            mx.errors.OutOfRangeError: Past the end of the data.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                "The data has ended: there is no next element."
            ) from None

    def get_next_as_optional(self) -> Optional:
        """The next element, or an `Optional` without a value at the end of the data."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()


def _drawing(roots: Sequence[Node]) -> list[Any]:
    """The steps for which a seed was drawn because they may be given none."""
    return [n for root in roots for n in walk(root) if hasattr(n, "entropy")]


def describe_steps(roots: Sequence[Node]) -> dict[str, Any]:
    """What a state says of its pipelines: the steps, and the seeds that were drawn."""
    return {
        "steps": [n.describe() for root in roots for n in walk(root)],
        "entropy": [n.entropy for n in _drawing(roots)],
    }


def check_kind(state: Any, kind: str) -> None:
    """Raises if `state` is not what `get_state()` of such an iterator returns."""
    if not isinstance(state, dict) or state.get("kind") != kind:
        raise ValueError(
            f"This is no state of such an iterator: {state!r}. Pass what `get_state()` of an "
            "iterator over the same pipeline returned."
        )


def adopt(roots: Sequence[Node], state: Any, kind: str) -> None:
    """Gives the steps of pipelines the seeds of the state that is restored to them."""
    check_kind(state, kind)
    steps = describe_steps(roots)["steps"]
    if steps != state["steps"]:
        raise ValueError(
            "The state was saved from another pipeline:\n"
            f"  saved: {' -> '.join(state['steps'])}\n  this:  {' -> '.join(steps)}\n"
            "Restore it to an iterator over the same steps."
        )
    if describe_steps(roots)["entropy"] == state["entropy"]:
        return
    for step, entropy in zip(_drawing(roots), state["entropy"]):
        step.entropy = entropy
    for root in roots:
        for step in walk(root):
            step.forget()


class Passes:
    """Numbers for the passes over a dataset; a restored pass is followed by the next one."""

    def __init__(self) -> None:
        self._next = 0

    def start(self) -> int:
        self._next += 1
        return self._next - 1

    def resume(self, number: int) -> None:
        """Goes on as if pass `number` had just been started."""
        self._next = number + 1


class Iterator(IteratorBase):
    """A pass over a dataset: elements as NumPy arrays, and a state to go on from.

    >>> iterator = iter(mx.data.Dataset.range(5))
    >>> next(iterator), next(iterator)
    (np.int64(0), np.int64(1))
    >>> state = iterator.get_state()
    >>> again = iter(mx.data.Dataset.range(5))
    >>> again.set_state(state)
    >>> next(again)
    np.int64(2)
    """

    __module__ = "mirrax.data"

    def __init__(self, node: Node, passes: Passes) -> None:
        self._node, self._passes = node, passes
        self._path = (passes.start(),)
        self._start: Any = None
        self._opened: Cursor | None = None
        self._is_closed = False

    @property
    def _cursor(self) -> Cursor:
        """The pass, which begins when it is first needed."""
        if self._opened is None:
            self._opened = open_cursor(self._node, self._path, self._start)
            self._closer = weakref.finalize(self, self._opened.close)
        return self._opened

    @property
    def element_spec(self) -> PyTree:
        """The specs of an element."""
        return self._node.spec()

    def __next__(self) -> PyTree:
        if context.current().frame is not None:
            # An element that a traced function took would become a constant of its program.
            raise RunEagerly("a function that takes elements of a dataset")
        if self._is_closed:
            raise StopIteration
        try:
            return value_of(next(self._cursor))
        except StopIteration:
            self.close()
            raise

    def get_state(self) -> dict[str, Any]:
        """Where the pass is: plain numbers, strings, lists and dicts, ready for JSON."""
        return {
            "kind": "mirrax.data.Iterator",
            **describe_steps([self._node]),
            "path": list(self._path),
            "position": self._opened.state() if self._opened else self._start,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where another iterator over the same pipeline was.

        Raises:
            ValueError: If the state is another pipeline's.
        """
        adopt([self._node], state, "mirrax.data.Iterator")
        self.close()
        self._path = tuple(state["path"])
        self._passes.resume(self._path[0])
        self._start, self._is_closed = state["position"], False

    def close(self) -> None:
        """Ends the pass: its threads and files."""
        if self._opened is not None:
            self._start = self._opened.state()
            self._closer()
        self._opened, self._is_closed = None, True

    def __repr__(self) -> str:
        return f"<mx.data.Iterator over {self._node.describe()}>"
