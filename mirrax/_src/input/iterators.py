"""`Iterator`: what `iter(dataset)` gives. It can be saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mirrax._src.base import context
from mirrax._src.base.errors import OutOfRangeError, RunEagerly, hide_own_frames
from mirrax._src.base.hiding import all_brief, hides
from mirrax._src.input.blocks import value_of
from mirrax._src.input.node import Cursor, Node, Path, State, open_cursor, walk
from mirrax._src.input.structure import PyTree, spec_of


class Optional:
    """A value that may be missing, from `iterator.get_next_as_optional()`.

    >>> mx.data.experimental.Optional.from_value(3).get_value()
    3
    """

    __module__ = "mirrax.data.experimental"

    def __init__(self, *value: Any, find_spec: Callable[[], PyTree]) -> None:
        self._value, self._find_spec = value, find_spec

    @staticmethod
    def from_value(value: PyTree) -> Optional:
        """An optional with this value."""
        return Optional(value, find_spec=lambda: spec_of(value))

    @staticmethod
    def empty(element_spec: PyTree) -> Optional:
        """An optional without a value, in the place of one that `element_spec` describes."""
        return Optional(find_spec=lambda: element_spec)

    @property
    def element_spec(self) -> PyTree:
        """The specs of the value."""
        return self._find_spec()

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
                "There is no value: the data has ended. Check `has_value()` first."
            )
        return self._value[0]

    def __repr__(self) -> str:
        return f"Optional({', '.join(map(repr, self._value))})"


_KEYS = ("steps", "entropy", "path", "position")


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


@all_brief
@hides("is_global", "restart")
class IteratorBase:
    """What iterators of datasets and of distributed datasets share.

    Args:
        roots: The pipelines that are passed over.
        passes: Numbers the passes.
        facts: What a state says of its dataset, beside the steps.
    """

    def __init__(
        self, roots: Sequence[Node], passes: Passes, facts: dict[str, Any]
    ) -> None:
        self._roots, self._passes, self._facts = roots, passes, facts
        self._path = (passes.start(),)
        self._start: Any = None
        self._opened: Cursor | None = None
        self._is_closed = False

    def _begin(self, path: Path, state: State) -> Cursor:
        """Begins a pass."""
        raise NotImplementedError

    @property
    def element_spec(self) -> PyTree:
        """The specs of an element."""
        raise NotImplementedError

    def _next(self) -> Any:
        """The next element of the pass, which begins when it is first needed."""
        if self._is_closed:
            raise StopIteration
        if self._opened is None:
            # Cursors that hold threads end them when they are no longer used.
            self._opened = self._begin(self._path, self._start)
        try:
            return next(self._opened)
        except StopIteration:
            self.close()
            raise

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
                f"The data has ended: this {type(self).__name__} has no next element."
            ) from None

    def get_next_as_optional(self) -> Optional:
        """The next element, or an `Optional` without a value at the end of the data."""
        try:
            return Optional(next(self), find_spec=lambda: self.element_spec)
        except StopIteration:
            return Optional(find_spec=lambda: self.element_spec)

    def get_state(self) -> dict[str, Any]:
        """Where the pass is: plain numbers, strings, lists and dicts, ready for JSON.

        What has been read ahead does not count: a restored iterator reads it again.
        """
        return {
            **self._facts,
            **describe_steps(self._roots),
            "path": list(self._path),
            "position": self._opened.state() if self._opened else self._start,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where another iterator over the same pipeline was.

        Raises:
            ValueError: If the state is another pipeline's.
        """
        is_whole = isinstance(state, dict) and state.keys() >= {*self._facts, *_KEYS}
        if not is_whole or state["kind"] != self._facts["kind"]:
            raise ValueError(
                f"This is not the state of such an iterator: {state!r}. Pass what `get_state()` of "
                "an iterator over the same pipeline returned."
            )
        self._check_facts(state)
        adopt(self._roots, state)
        self.close()
        self._path = tuple(state["path"])
        self._passes.resume(self._path[0])
        self._start, self._is_closed = state["position"], False

    def _check_facts(self, state: dict[str, Any]) -> None:
        """Raises if the state was saved where a position means something else."""

    def close(self) -> None:
        """Ends the pass: its threads and files."""
        if self._opened is not None:
            self._start = self._opened.state()
            self._opened.close()
        self._opened, self._is_closed = None, True

    def restart(self) -> None:
        """Begins a new pass; one that nothing was taken from is new."""
        if self._opened is not None or self._is_closed or self._start is not None:
            self.close()
            self._path = (self._passes.start(),)
            self._start, self._is_closed = None, False


@all_brief
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
        super().__init__([node], passes, {"kind": "mirrax.data.Iterator"})

    def _begin(self, path: Path, state: State) -> Cursor:
        return open_cursor(self._roots[0], path, state)

    @property
    def element_spec(self) -> PyTree:
        """The specs of an element."""
        return self._roots[0].spec()

    def __next__(self) -> PyTree:
        if context.current().frame is not None:
            # An element that a traced function took would become a constant of its program.
            raise RunEagerly("a function that takes elements of a dataset")
        try:
            return value_of(self._next())
        except Exception as error:
            hide_own_frames(error)
            raise

    def __repr__(self) -> str:
        return f"<mx.data.Iterator over {self._roots[0].describe()}>"


def _drawing(roots: Sequence[Node]) -> list[Any]:
    """The steps for which a seed was drawn because they may be given none."""
    return [n for root in roots for n in walk(root) if hasattr(n, "entropy")]


def describe_steps(roots: Sequence[Node]) -> dict[str, Any]:
    """What a state says of its pipelines: the steps, and the seeds that were drawn."""
    return {
        "steps": [n.describe() for root in roots for n in walk(root)],
        "entropy": [n.entropy for n in _drawing(roots)],
    }


def adopt(roots: Sequence[Node], state: Any) -> None:
    """Gives the steps of pipelines the seeds of the state that is restored to them."""
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
