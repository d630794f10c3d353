"""The methods of `Dataset` that choose elements and their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mirrax._src.base.hiding import all_brief
from mirrax._src.input.arguments import integer, positive
from mirrax._src.input.methods.base import Steps, check_callable, merged_options
from mirrax._src.input.methods.resampling import resample
from mirrax._src.input.node import UNKNOWN
from mirrax._src.input.options import SHARD_HINT
from mirrax._src.input.transforms import selecting
from mirrax._src.input.transforms.nesting import draw_entropy
from mirrax._src.input.transforms.screening import (
    IgnoreErrors,
    Unique,
    check_comparable,
    keep_going,
)
from mirrax._src.input.transforms.shuffling import Shuffle

if TYPE_CHECKING:
    from mirrax._src.input.dataset import Dataset


@all_brief
class Order(Steps):
    """Which elements, how often, in which order."""

    def shuffle(
        self,
        buffer_size: int | None,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """The elements in a random order.

        A buffer holds the next `buffer_size` elements, one of which is drawn at a time; for
        a perfect shuffle it must hold all of them (None: all, whatever their number).

        Args:
            buffer_size: The size of the buffer.
            seed: With the same seed a program meets the same orders again.
            reshuffle_each_iteration: Whether every pass has another order (None: yes).
            name: Unused, as in TensorFlow's eager mode.
        """
        if buffer_size is not None and buffer_size != UNKNOWN:
            buffer_size = positive(buffer_size, "buffer_size")
        else:
            buffer_size = None
        if seed is not None:
            seed = integer(seed, "seed")
        return self._then(
            Shuffle(
                self.node,
                buffer_size,
                seed,
                reshuffle_each_iteration is not False,
                draw_entropy(),
            )
        )

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """The elements `count` times; without end if it is None or -1.

        >>> list(mx.data.Dataset.range(2).repeat(2))
        [np.int64(0), np.int64(1), np.int64(0), np.int64(1)]
        """
        return self._then(
            selecting.Repeat(
                self.node, -1 if count is None else integer(count, "count")
            )
        )

    def take(self, count: int, name: str | None = None) -> Dataset:
        """The first `count` elements; all if it is -1.

        >>> list(mx.data.Dataset.range(9).take(2))
        [np.int64(0), np.int64(1)]
        """
        return self._then(selecting.Take(self.node, integer(count, "count")))

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """All but the first `count` elements; none if it is -1.

        >>> list(mx.data.Dataset.range(4).skip(2))
        [np.int64(2), np.int64(3)]
        """
        return self._then(selecting.Skip(self.node, integer(count, "count")))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Every `num_shards`-th element, from number `index` on.

        >>> list(mx.data.Dataset.range(7).shard(3, 1))
        [np.int64(1), np.int64(4)]
        """
        num_shards = integer(num_shards, "num_shards")
        index = integer(index, "index")
        if num_shards == SHARD_HINT:
            return self._then(selecting.ShardHint(self.node))
        if num_shards < 1:
            raise ValueError(f"`num_shards` must be positive, got {num_shards}.")
        if not 0 <= index < num_shards:
            raise ValueError(
                f"`index` must be from 0 to {num_shards - 1} for {num_shards} shards, got "
                f"{index}."
            )
        return self._then(selecting.Shard(self.node, num_shards, index))

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """The elements of this dataset, then those of `dataset`.

        Raises:
            TypeError: If their elements differ in structure or dtype.
        """
        if not isinstance(dataset, Steps):
            raise TypeError(f"`concatenate` takes a dataset, got {dataset!r}.")
        mine, other = self.node.outline(), dataset.node.outline()
        if mine is not None and other is not None:
            selecting.check_alike(mine, other)
        both = selecting.Concatenate((self.node, dataset.node))
        return self._wrap(both, merged_options((self, dataset)))

    def unique(self, name: str | None = None) -> Dataset:
        """Each element once, where it is met first.

        >>> list(mx.data.Dataset.from_tensor_slices([3, 1, 3, 2, 1]).unique())
        [np.int32(3), np.int32(1), np.int32(2)]

        All elements that were met are kept in memory.

        Raises:
            TypeError: If elements are not of int32, int64 or strings.
        """
        outline = self.node.outline()
        if outline is not None:
            check_comparable(outline)
        return self._then(Unique(self.node))

    def ignore_errors(
        self, log_warning: bool = False, name: str | None = None
    ) -> Dataset:
        """The elements that can be made: those that raise an error are left out.

        >>> texts = mx.data.Dataset.from_tensor_slices(["1", "x", "2"])
        >>> list(texts.map(lambda text: int(text)).ignore_errors())
        [np.int32(1), np.int32(2)]

        Args:
            log_warning: Whether each error is shown as a warning.
            name: Unused, as in TensorFlow's eager mode.
        """
        step = IgnoreErrors(keep_going(self.node), bool(log_warning))
        return self._then(step)

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Any,
        initial_dist: Any = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Pairs of a class and an element, some left out so that classes are distributed.

        >>> dataset = mx.data.Dataset.range(6).rejection_resample(
        ...     lambda x: x % 2, target_dist=[0.0, 1.0], initial_dist=[0.5, 0.5])
        >>> list(dataset.map(lambda kind, x: x))
        [np.int64(1), np.int64(3), np.int64(5)]

        Args:
            class_func: The class of an element, an integer from 0 on.
            target_dist: The share that each class shall have.
            initial_dist: The share that each class has in the data; estimated on the way if
                it is not given.
            seed: With the same seed a program drops the same elements again.
            name: Unused, as in TensorFlow's eager mode.
        """
        check_callable(class_func, "rejection_resample")
        this = self._then(self.node)
        return resample(this, class_func, target_dist, initial_dist, seed)
