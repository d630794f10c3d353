"""The methods of `Dataset` that call a function of each element."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mirrax._src.base.hiding import all_brief
from mirrax._src.input.arguments import check_arguments, checked_calls, integer
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.methods.base import Steps, check_callable, node_of
from mirrax._src.input.node import Node, rebuild
from mirrax._src.input.options import AUTOTUNE, Options
from mirrax._src.input.structure import PyTree, spec_of, to_element
from mirrax._src.input.transforms import selecting
from mirrax._src.input.transforms.elementwise import Filter, Map
from mirrax._src.input.transforms.folding import Scan
from mirrax._src.input.transforms.nesting import Interleave, draw_entropy
from mirrax._src.input.transforms.pairing import Enumerate
from mirrax._src.input.transforms.parallel import num_calls
from mirrax._src.input.transforms.screening import TakeWhile

if TYPE_CHECKING:
    from mirrax._src.input.dataset import Dataset


@all_brief
class Elements(Steps):
    """What is done with each element."""

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        use_unbounded_threadpool: bool = False,
        name: str | None = None,
        *,
        workers: str = "threads",
    ) -> Dataset:
        """`map_func` of each element.

        >>> pairs = mx.data.Dataset.from_tensor_slices(([1, 2], [10, 20]))
        >>> list(pairs.map(lambda x, y: x + y))
        [np.int32(11), np.int32(22)]

        The parts of a tuple are separate arguments. A function of NumPy's element-wise
        operations that uses nothing else is called with many rows at once.

        Args:
            map_func: The function. It gets NumPy arrays and may return arrays, JAX's too.
            num_parallel_calls: How many calls at a time; `AUTOTUNE` for as many as the
                machine has cores. None: one after the other.
            deterministic: Whether parallel results keep the order of the elements.
            synchronous: True is the same as `num_parallel_calls=None`.
            use_unbounded_threadpool: Accepted; every `map` has threads of its own anyway.
            name: Unused, as in TensorFlow's eager mode.
            workers: "threads", or "processes" for functions that keep Python busy; as many
                as the machine has cores if `num_parallel_calls` does not say.
        """
        check_callable(map_func, "map")
        if workers not in ("threads", "processes"):
            raise ValueError(
                f'`workers` must be "threads" or "processes", got {workers!r}.'
            )
        if synchronous and num_parallel_calls is not None:
            raise ValueError(
                "`synchronous=True` cannot be combined with `num_parallel_calls`, which is "
                f"{num_parallel_calls!r}."
            )
        calls = checked_calls(num_parallel_calls)
        if calls is None and workers == "processes":
            calls = AUTOTUNE
        check_arguments(map_func, self.node, "map")
        step = Map(self.node, ElementFn(map_func, "map"), calls, deterministic, workers)
        return self._then(with_choices(step, self._options) or step)

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """The elements for which `predicate` returns true.

        >>> list(mx.data.Dataset.range(6).filter(lambda x: x % 3 == 0))
        [np.int64(0), np.int64(3)]
        """
        check_callable(predicate, "filter")
        check_arguments(predicate, self.node, "filter")
        return self._then(Filter(self.node, ElementFn(predicate, "filter")))

    def take_while(
        self, predicate: Callable[..., Any], name: str | None = None
    ) -> Dataset:
        """The elements before the first for which `predicate` returns false.

        >>> list(mx.data.Dataset.range(9).take_while(lambda x: x * x < 5))
        [np.int64(0), np.int64(1), np.int64(2)]
        """
        check_callable(predicate, "take_while")
        check_arguments(predicate, self.node, "take_while")
        return self._then(TakeWhile(self.node, ElementFn(predicate, "take_while")))

    def scan(
        self,
        initial_state: PyTree,
        scan_func: Callable[..., Any],
        name: str | None = None,
    ) -> Dataset:
        """What `scan_func(state, element)` gives as `(new_state, result)`: the results.

        >>> totals = mx.data.Dataset.range(5).scan(
        ...     np.int64(0), lambda total, x: (total + x, total + x))
        >>> list(totals)
        [np.int64(0), np.int64(1), np.int64(3), np.int64(6), np.int64(10)]

        Each pass begins with `initial_state`. A state keeps its structure and dtypes. It is
        part of what an iterator's `get_state` returns, so keep it small.

        Args:
            initial_state: The state for the first element.
            scan_func: The function; an element that is a tuple is one argument.
            name: Unused, as in TensorFlow's eager mode.
        """
        check_callable(scan_func, "scan")
        initial = to_element(initial_state)
        return self._then(Scan(self.node, initial, ElementFn(scan_func, "scan")))

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Pairs of a number, from `start` on, and an element.

        >>> list(mx.data.Dataset.from_tensor_slices(["a", "b"]).enumerate(start=1))
        [(np.int64(1), b'a'), (np.int64(2), b'b')]
        """
        return self._then(Enumerate(self.node, integer(start, "start")))

    def flat_map(
        self, map_func: Callable[..., Any], name: str | None = None
    ) -> Dataset:
        """The elements of the datasets that `map_func` makes of each element, in order.

        >>> list(mx.data.Dataset.range(3).flat_map(mx.data.Dataset.range))
        [np.int64(0), np.int64(0), np.int64(1)]
        """
        return self._interleaved(map_func, "flat_map", 1, 1, 0)

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """As `flat_map`, with elements of several datasets in turn.

        Args:
            map_func: Makes a dataset of an element, for example of a file's name.
            cycle_length: How many datasets take turns; as many as the machine has cores
                if it is not given.
            block_length: The elements that a dataset gives in its turn.
            num_parallel_calls: With any number each dataset is read ahead in a thread.
            deterministic: Accepted; the order is always that of the turns.
            name: Unused, as in TensorFlow's eager mode.
        """
        calls = checked_calls(num_parallel_calls)
        cycle = AUTOTUNE if cycle_length is None else cycle_length
        if cycle == AUTOTUNE:
            cycle = num_calls(calls or AUTOTUNE)
        block = 1 if block_length is None else block_length
        if cycle < 1 or block < 1:
            raise ValueError(
                "`cycle_length` and `block_length` must be positive, got "
                f"{cycle_length} and {block_length}."
            )
        if calls is not None and calls > cycle:
            raise ValueError(
                f"`num_parallel_calls` ({calls}) cannot exceed `cycle_length` ({cycle})."
            )
        ahead = 0 if calls is None else max(2, block)
        return self._interleaved(map_func, "interleave", cycle, block, ahead)

    def _interleaved(
        self,
        map_func: Callable[..., Any],
        label: str,
        cycle: int,
        block: int,
        ahead: int,
    ) -> Dataset:
        check_callable(map_func, label)
        check_arguments(map_func, self.node, label)
        fn = ElementFn(map_func, label)
        return self._then(
            Interleave(
                self.node, fn, node_of, cycle, block, ahead, draw_entropy(), label
            )
        )

    def reduce(
        self,
        initial_state: PyTree,
        reduce_func: Callable[..., Any],
        name: str | None = None,
    ) -> PyTree:
        """`reduce_func(state, element)` over all elements, from `initial_state` on.

        >>> mx.data.Dataset.range(5).reduce(np.int64(0), lambda total, x: total + x)
        np.int64(10)
        """
        state = to_element(initial_state)
        spec = spec_of(state)
        for element in self:
            state = to_element(reduce_func(state, element))
            selecting.check_alike(spec, spec_of(state), "The state of `reduce`")
        return state


def with_choices(step: Node, options: Options) -> Node | None:
    """A step that leaves a choice to the options, with the choice made."""
    if not isinstance(step, Map):
        return None
    calls, in_order = step.num_parallel_calls, step.deterministic
    if calls == AUTOTUNE:
        calls = options.threading.private_threadpool_size or calls
    if in_order is None:
        in_order = options.deterministic
    if (calls, in_order) == (step.num_parallel_calls, step.deterministic):
        return None
    step = dataclasses.replace(step, num_parallel_calls=calls, deterministic=in_order)
    return dataclasses.replace(
        step, input=rebuild(step.input, lambda n: with_choices(n, options))
    )
