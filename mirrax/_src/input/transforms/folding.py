"""A state that travels along the elements: `scan`."""

from __future__ import annotations

import base64
from typing import Any

from mirrax._src.input.blocks import value_of
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.encoding import decode, encode
from mirrax._src.input.node import Cursor, Node, Path, State, node, open_cursor
from mirrax._src.input.sources import static_rows_of
from mirrax._src.input.structure import (
    PyTree,
    spec_of,
    to_element,
    tuple_for_list,
)
from mirrax._src.input.transforms.elementwise import spec_of_results
from mirrax._src.input.transforms.selecting import check_alike


@node
class Scan(Node):
    """What `fn` makes of each element and of the state that the one before has left."""

    input: Node
    initial: PyTree
    fn: ElementFn

    def open(self, path: Path, state: State = None) -> Cursor:
        inner, scanned = state or (None, None)
        return _ScanCursor(self, open_cursor(self.input, path, inner), scanned)

    is_described = False

    def cardinality(self) -> int:
        return self.input.cardinality()

    def spec(self) -> PyTree:
        scanned = self.initial

        def call(element: PyTree) -> PyTree:
            nonlocal scanned
            scanned, result = self.call(scanned, element)
            return result

        return spec_of_results(self.input, call)

    def batch_size(self) -> int | None:
        return static_rows_of(self)

    def call(self, scanned: PyTree, element: PyTree) -> tuple[PyTree, PyTree]:
        """The next state and the result for an element."""
        try:
            pair = self.fn.fn(scanned, element)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(
                    "The function of `scan` must return a pair of the new state and a "
                    f"result, got {pair!r}."
                )
            result = to_element(tuple_for_list(pair[1]))
            return to_element(tuple_for_list(pair[0])), result
        except Exception as error:
            self.fn.explain(error, element)
            raise

    def describe(self) -> str:
        return f"scan({self.fn!r})"


class _ScanCursor(Cursor):
    """Its state holds the scanned one: only the elements before could bring it back."""

    def __init__(self, scan: Scan, inner: Cursor, scanned: str | None) -> None:
        self._scan, self._inner = scan, inner
        self._spec = spec_of(scan.initial)
        self._scanned = scan.initial
        if scanned is not None:
            self._scanned = decode(base64.b64decode(scanned), self._spec)

    def __next__(self) -> Any:
        scanned, result = self._scan.call(self._scanned, value_of(next(self._inner)))
        check_alike(self._spec, spec_of(scanned), "The state of `scan`")
        self._scanned = scanned
        return result

    def state(self) -> State:
        scanned = base64.b64encode(encode(self._scanned)).decode()
        return [self._inner.state(), scanned]

    def close(self) -> None:
        self._inner.close()
