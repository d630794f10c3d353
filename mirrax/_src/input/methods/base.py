"""What the methods of datasets build on."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from mirrax._src.input.node import Node
from mirrax._src.input.options import Options
from mirrax._src.input.structure import Nested

if TYPE_CHECKING:
    from mirrax._src.input.dataset import Dataset


class Steps(Nested):
    """A pipeline and its options.

    Attributes:
        node: The last step.
    """

    _wrap: ClassVar[Any]  # the class `Dataset`

    node: Node
    _options: Options

    def __iter__(self) -> Any:
        raise NotImplementedError

    def _then(self, node: Node) -> Dataset:
        return self._wrap(node, self._options)


def merged_options(datasets: Iterable[Steps]) -> Options:
    """The options of datasets that become one; of two choices the later one counts."""
    return functools.reduce(Options.merge, (each._options for each in datasets))


def node_of(result: Any, what: str) -> Node:
    """The last step of the dataset that a user's function returned."""
    if not isinstance(result, Steps):
        raise TypeError(
            f"The function of `{what}` must return a dataset, got {type(result).__name__}."
        )
    return result.node


def check_callable(fn: Any, what: str) -> None:
    """Raises if a user gave something else than a function."""
    if not callable(fn):
        raise TypeError(f"`{what}` needs a function, got {fn!r}.")
