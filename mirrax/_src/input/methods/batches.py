"""The methods of `Dataset` that make one element of several, or several of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mirrax._src.base.hiding import all_brief
from mirrax._src.input.arguments import (
    check_arguments,
    checked_calls,
    integer,
    positive,
)
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.methods.base import Steps, check_callable, node_of
from mirrax._src.input.methods.bucketing import bucket_fns
from mirrax._src.input.structure import PyTree
from mirrax._src.input.transforms import batching
from mirrax._src.input.transforms.grouping import GroupByWindow
from mirrax._src.input.transforms.nesting import draw_entropy
from mirrax._src.input.transforms.windows import Window

if TYPE_CHECKING:
    from mirrax._src.input.dataset import Dataset


@all_brief
class Batches(Steps):
    """Several elements in one: batches, windows, groups."""

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """`batch_size` elements in one, along a new first axis.

        >>> list(mx.data.Dataset.range(5).batch(2))
        [array([0, 1]), array([2, 3]), array([4])]

        Args:
            batch_size: The elements in a batch.
            drop_remainder: Whether a last batch that is not full is left out.
            num_parallel_calls: Accepted; batches are made of many rows at once anyway.
            deterministic: Accepted; the order is always that of the elements.
            name: Unused, as in TensorFlow's eager mode.
        """
        size = positive(batch_size, "batch_size")
        is_parallel = checked_calls(num_parallel_calls) is not None
        return self._then(
            batching.Batch(self.node, size, bool(drop_remainder), is_parallel)
        )

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: PyTree = None,
        padding_values: PyTree = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """As `batch`, of elements whose lengths differ: shorter ones are filled up.

        >>> list(mx.data.Dataset.range(1, 4).map(lambda n: np.full(n, n)).padded_batch(3))
        [array([[1, 0, 0],
               [2, 2, 0],
               [3, 3, 3]])]

        Args:
            batch_size: The elements in a batch.
            padded_shapes: The shapes to fill up to; None for a length, or for all, stands
                for the longest in the batch.
            padding_values: What to fill up with; zero or the empty string if not given.
            drop_remainder: Whether a last batch that is not full is left out.
            name: Unused, as in TensorFlow's eager mode.
        """
        size = positive(batch_size, "batch_size")
        return self._then(
            batching.PaddedBatch(
                self.node, size, padded_shapes, padding_values, bool(drop_remainder)
            )
        )

    def unbatch(self, name: str | None = None) -> Dataset:
        """The rows of each element: the opposite of `batch`.

        >>> list(mx.data.Dataset.from_tensors([1, 2, 3]).unbatch())
        [np.int32(1), np.int32(2), np.int32(3)]
        """
        return self._then(batching.Unbatch(self.node))

    def rebatch(
        self,
        batch_size: int | Sequence[int],
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """The rows of batches in batches of another size.

        >>> list(mx.data.Dataset.range(7).batch(4).rebatch([2, 1]))
        [array([0, 1]), array([2]), array([3, 4]), array([5]), array([6])]

        Args:
            batch_size: The rows of a new batch, or several numbers that take turns.
            drop_remainder: Whether a last batch that is not full is left out.
            name: Unused, as in TensorFlow's eager mode.
        """
        given = np.asarray(batch_size)
        if given.ndim > 1:
            raise ValueError(
                f"`batch_size` must be an integer or a list of them, got {batch_size!r}."
            )
        sizes = tuple(integer(n, "batch_size") for n in given.ravel())
        if not sizes or min(sizes) < 0 or not max(sizes):
            raise ValueError(f"`batch_size` must be positive, got {batch_size!r}.")
        outline = self.node.outline()
        if outline is not None:
            batching.check_rows(outline)
        return self._then(batching.Rebatch(self.node, sizes, bool(drop_remainder)))

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Datasets of `size` successive elements each.

        >>> windows = mx.data.Dataset.range(5).window(3, shift=1, drop_remainder=True)
        >>> list(windows.flat_map(lambda window: window.batch(3)))
        [array([0, 1, 2]), array([1, 2, 3]), array([2, 3, 4])]

        Of elements that are tuples or dicts a window is a tuple or dict of datasets, one
        for each array; `Dataset.zip` puts them together again.

        Args:
            size: The elements of a window.
            shift: How many elements later the next window begins; `size` if not given.
            stride: The distance between two elements of a window.
            drop_remainder: Whether windows at the end that are not full are left out.
            name: Unused, as in TensorFlow's eager mode.
        """
        size = positive(size, "size")
        step = Window(
            self.node,
            size,
            size if shift is None else positive(shift, "shift"),
            positive(stride, "stride"),
            bool(drop_remainder),
            self._wrap,
        )
        return self._then(step)

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[..., Any],
        window_size: int | None = None,
        window_size_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Elements with the same key, `window_size` at a time, as `reduce_func` makes them.

        >>> odd_and_even = mx.data.Dataset.range(7).group_by_window(
        ...     key_func=lambda x: x % 2,
        ...     reduce_func=lambda key, window: window.batch(3),
        ...     window_size=3)
        >>> list(odd_and_even)
        [array([0, 2, 4]), array([1, 3, 5]), array([6])]

        Groups that are not full when the data ends come last, by their keys.

        Args:
            key_func: The key of an element, an integer.
            reduce_func: Makes a dataset of a key and a dataset of elements that have it.
            window_size: How many elements make a group.
            window_size_func: The same for each key, in place of `window_size`.
            name: Unused, as in TensorFlow's eager mode.
        """
        if (window_size is None) == (window_size_func is None):
            raise ValueError(
                "Give either `window_size` or `window_size_func`, got "
                f"{window_size!r} and {window_size_func!r}."
            )
        size_fn = window_size_func or _constant(integer(window_size, "window_size"))
        for fn in (key_func, reduce_func, size_fn):
            check_callable(fn, "group_by_window")
        check_arguments(key_func, self.node, "group_by_window")
        return self._then(self._grouped(key_func, reduce_func, size_fn))

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: PyTree = None,
        padding_values: PyTree = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Padded batches of elements of similar length.

        >>> lengths = mx.data.Dataset.from_tensor_slices([1, 4, 2, 3])
        >>> dataset = lengths.map(lambda n: np.full(n, n)).bucket_by_sequence_length(
        ...     len, bucket_boundaries=[3], bucket_batch_sizes=[2, 2])
        >>> for batch in dataset:
        ...     print(batch)
        [[1 0]
         [2 2]]
        [[4 4 4 4]
         [3 3 3 0]]

        Args:
            element_length_func: The length of an element.
            bucket_boundaries: Where a bucket ends and the next one begins: with [3, 6] the
                lengths 0 to 2, 3 to 5, and all others.
            bucket_batch_sizes: The batch size of each bucket, one more than boundaries.
            padded_shapes: As in `padded_batch`.
            padding_values: As in `padded_batch`.
            pad_to_bucket_boundary: Whether elements are filled up to the longest that their
                bucket may have, instead of the longest in the batch.
            no_padding: Whether elements are of equal length already.
            drop_remainder: Whether last batches that are not full are left out.
            name: Unused, as in TensorFlow's eager mode.
        """
        check_callable(element_length_func, "bucket_by_sequence_length")
        bucket, batches, size, spec = bucket_fns(
            element_length_func,
            [integer(n, "bucket_boundaries") for n in bucket_boundaries],
            [integer(n, "bucket_batch_sizes") for n in bucket_batch_sizes],
            (padded_shapes, padding_values),
            pad_to_bucket_boundary,
            no_padding,
            drop_remainder,
        )
        check_arguments(element_length_func, self.node, "bucket_by_sequence_length")
        return self._then(self._grouped(bucket, batches, size, spec))

    def _grouped(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[..., Any],
        size_func: Callable[..., Any],
        describes: Callable[..., PyTree] | None = None,
    ) -> GroupByWindow:
        return GroupByWindow(
            self.node,
            ElementFn(key_func, "group_by_window"),
            reduce_func,
            size_func,
            self._wrap,
            node_of,
            draw_entropy(),
            describes,
        )


def _constant(size: int) -> Callable[[Any], int]:
    return lambda key: size
