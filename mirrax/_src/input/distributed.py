"""`DistributedDataset`: batches on the devices of all replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mirrax._src.base import context
from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.hiding import all_brief, hides
from mirrax._src.base.jax_compat import outside_traces
from mirrax._src.base.logical import takes_all_cores
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.specs import PerReplicaSpec
from mirrax._src.input.background import Ahead
from mirrax._src.input.delivery import Delivery
from mirrax._src.input.iterators import IteratorBase, Passes
from mirrax._src.input.node import INFINITE, UNKNOWN, Cursor, Node, Path, State, walk
from mirrax._src.input.options import InputOptions
from mirrax._src.input.sharding import Plan
from mirrax._src.input.splitting import Share, StepCursor, StepsOf
from mirrax._src.input.structure import PyTree, TensorSpec, leaves_of, map_leaves
from mirrax._src.input.together import Schedule, Together, schedule_of

BY_BATCH = "by batch"
_IN_TURN = "by `dataset_fn`"  # not split: each replica takes a batch of its own

_ENDS = {
    "exact": "a replica without a batch gets an empty one, or the step is left out where all "
    "shapes are fixed",
    "drop": "a step is left out unless every replica has a full batch",
    "pad": "filled up with zeros to the rows of a full one; the mask is true for real rows",
}


@all_brief
@hides(
    "in_turn",
    "input_options",
    "is_global",
    "mesh",
    "of_plan",
    "passes",
    "roots",
    "schedule",
    "share",
    "split",
    "steps_of",
)
class DistributedDataset:
    """A dataset whose elements are on the devices of the replicas.

    Made by `strategy.experimental_distribute_dataset` and
    `strategy.distribute_datasets_from_function`. Iterate over it as often as you like; each
    batch is copied to the devices in the background while the one before is used.
    """

    __module__ = "mirrax.distribute"

    def __init__(
        self,
        roots: tuple[Node, ...],
        steps_of: StepsOf,
        share: Share,
        mesh: ReplicaMesh | None,
        options: InputOptions,
        explanation: Callable[[], str],
        split: str,
        is_global: bool,
    ) -> None:
        self.roots = roots
        self.steps_of = steps_of
        self.share = share
        self.input_options = options
        self.is_global = is_global
        self.mesh = mesh
        self._explanation = explanation
        self.split = split
        self.passes = Passes()

    @classmethod
    def of_plan(cls, plan: Plan, mesh: ReplicaMesh | None) -> DistributedDataset:
        """The dataset of global batches that `plan` divides."""
        return cls(
            (plan.root,),
            plan.steps,
            plan.share,
            mesh,
            plan.options,
            plan.explain,
            "by rows" if plan.is_by_rows else BY_BATCH,
            plan.is_global,
        )

    @classmethod
    def in_turn(
        cls,
        roots: tuple[Node, ...],
        steps_of: StepsOf,
        share: Share,
        mesh: ReplicaMesh | None,
        options: InputOptions,
    ) -> DistributedDataset:
        """The batches of `dataset_fn`'s datasets, one for each replica."""

        def explain() -> str:
            return "\n".join(
                [
                    f"steps:      {' -> '.join(n.describe() for n in walk(roots[0]))}",
                    f"replicas:   {share.num_replicas} in all, {share.replicas_per_worker} on "
                    f"each of {share.num_workers} worker(s); this is worker {share.worker}",
                    "policy:     none: `dataset_fn` divides the data itself",
                    "batches:    as they are; the replicas take turns at one dataset"
                    if len(roots) == 1
                    else "batches:    as they are; each replica has a dataset of its own",
                    f"last batch: {_ENDS[options.last_batch]}",
                ]
            )

        return cls(
            roots,
            steps_of,
            share,
            mesh,
            options,
            explain,
            _IN_TURN,
            share.num_workers == 1,
        )

    def __iter__(self) -> DistributedIterator:
        _check_place("iter")
        return DistributedIterator(self)

    @property
    def element_spec(self) -> PyTree:
        """The specs of an element: `PerReplicaSpec`s, or plain ones for a single replica."""
        spec = self.roots[0].spec()
        count = self.share.num_replicas
        if self.split != _IN_TURN:
            spec = map_leaves(self._part_spec, spec)
        elif self.share.num_workers > 1:  # one that ends early gets empty batches
            spec = map_leaves(_any_rows, spec)
        if self.input_options.last_batch == "pad":
            rows = {s.shape[0] for s in leaves_of(spec) if s.shape}
            mask = TensorSpec((rows.pop() if len(rows) == 1 else None,), "bool")
            spec = (spec, mask)
        if count == 1:
            return spec
        local = self.share.replicas_per_worker
        return map_leaves(lambda s: PerReplicaSpec(*[s] * local), spec)

    def _part_spec(self, spec: TensorSpec) -> TensorSpec:
        count = self.share.num_replicas
        if not spec.shape or count == 1:
            return spec
        rows, rest = spec.shape[0], spec.shape[1:]
        is_even = rows is not None and not rows % count and self.share.num_workers == 1
        return TensorSpec(
            (rows // count if is_even and rows else None, *rest), spec.dtype
        )

    def reduce(
        self, initial_state: PyTree, reduce_fn: Callable[[PyTree, Any], PyTree]
    ) -> PyTree:
        """The last state, from `state = reduce_fn(state, element)` for each element.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> dataset = strategy.experimental_distribute_dataset(
        ...     mx.data.Dataset.range(8).batch(4)
        ... )
        >>> print(dataset.reduce(0, lambda s, x: s + strategy.reduce("SUM", x, axis=0)))
        28
        """
        return functools.reduce(reduce_fn, self, initial_state)

    @property
    def cardinality(self) -> int:
        """The number of elements of the dataset that was distributed, as far as known."""
        sizes = [root.cardinality() for root in self.roots]
        if self.split == _IN_TURN and len(sizes) == 1 and sizes[0] > 0:
            return -(-sizes[0] // self.share.replicas_per_worker)
        return max(sizes)

    def schedule(self) -> Schedule | None:
        """This worker's steps in a pass, where they are known and of equal parts."""
        rows = self.roots[0].batch_size()
        is_plain = self.input_options.last_batch == "exact" and len(self.roots) == 1
        if rows is None or not is_plain or self.split == BY_BATCH:
            return None
        if self.split != _IN_TURN:
            if rows % self.share.num_replicas:
                return None
            rows //= self.share.num_replicas
        return schedule_of(self.roots[0], self.share.replicas_per_worker, rows)

    def explain(self) -> str:
        """Prints and returns the plan: who reads what, in which sizes, and how it ends.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> dataset = mx.data.Dataset.range(11).batch(8)
        >>> _ = strategy.experimental_distribute_dataset(dataset).explain()
        steps:      range(0, 11, 1) -> batch(8)
        replicas:   2 in all, 2 on each of 1 worker(s); this is worker 0
        policy:     AUTO -> DATA (it does not read files)
        reads:      everything
        batches:    of 8: each batch split into 4, 4 for replicas 0 to 1
        last batch: exact: 3 rows, split into 2, 1
        """
        text = self._explanation()
        print(text)
        return text

    def __getattr__(self, name: str) -> Any:
        if name in _TRANSFORMATIONS:
            raise AttributeError(
                f"A distributed dataset cannot be transformed further: call `.{name}(...)` on "
                "the dataset before it is distributed."
            )
        raise AttributeError(f"DistributedDataset has no attribute {name!r}.")

    def __repr__(self) -> str:
        size = {INFINITE: "infinite", UNKNOWN: "unknown"}.get(self.cardinality)
        return (
            f"<mx.distribute.DistributedDataset {self.roots[0].describe()} over "
            f"{self.share.num_replicas} replicas, length {size or self.cardinality}>"
        )


def _any_rows(spec: TensorSpec) -> TensorSpec:
    shape = (None, *spec.shape[1:]) if spec.shape else spec.shape
    return TensorSpec(shape, spec.dtype)


_TRANSFORMATIONS = frozenset(
    """map filter batch padded_batch unbatch shuffle repeat take skip shard cache concatenate
    enumerate interleave flat_map prefetch with_options apply reduce as_numpy_iterator zip
    window rebatch scan take_while unique ignore_errors group_by_window snapshot save
    bucket_by_sequence_length rejection_resample get_single_element
    """.split()
)


@all_brief
class DistributedIterator(IteratorBase):
    """A pass over a distributed dataset; `get_state` and `set_state` save and restore it."""

    __module__ = "mirrax.distribute"

    def __init__(self, dataset: DistributedDataset) -> None:
        share = dataset.share
        facts = {
            "kind": "mirrax.distribute.DistributedIterator",
            "split": dataset.split,
            "is_global": dataset.is_global,
            "workers": [share.num_workers, share.worker],
        }
        super().__init__(dataset.roots, dataset.passes, facts)
        self._dataset = dataset

    def _begin(self, path: Path, state: State) -> Cursor:
        dataset, options = self._dataset, self._dataset.input_options
        own = dataset.steps_of(path, state)
        mesh = dataset.mesh
        steps: Cursor = own
        if mesh is not None and mesh.spans_workers:
            steps = self._together(own, mesh, state)
        delivery = Delivery(dataset.mesh, bool(options.experimental_fetch_to_device))
        size = options.experimental_per_replica_buffer_size
        if not size:
            return _Now(steps, delivery)
        # Whoever asks for more than the default gets it.
        is_busy = mesh is not None and takes_all_cores(mesh.local_devices)
        return Ahead(steps, size, delivery, "input", if_slow=size == 1 and is_busy)

    def _together(self, steps: StepCursor, mesh: ReplicaMesh, state: State) -> Together:
        dataset = self._dataset
        # The rest of a pass that was begun may be of any length.
        schedule = dataset.schedule() if state is None else None
        is_dealt = dataset.split == BY_BATCH and dataset.is_global
        spec = dataset.roots[0].spec()
        return Together(steps, mesh, dataset.share, spec, is_dealt, schedule)

    @property
    def is_global(self) -> bool:
        """Whether its state is the same on all workers."""
        return self._dataset.is_global

    @property
    def element_spec(self) -> PyTree:
        """The specs of an element."""
        return self._dataset.element_spec

    def __next__(self) -> PyTree:
        _check_place("next")
        return self._next()

    def _check_facts(self, state: dict[str, Any]) -> None:
        """Where the order is global the number of workers and replicas may be another one."""
        there, here = state["workers"], self._facts["workers"]
        is_global = state["is_global"] and self._facts["is_global"]
        if not is_global and there != here:
            raise ValueError(
                f"The state is worker {there[1]}'s of {there[0]}, and this is worker {here[1]} "
                f"of {here[0]}. Each worker read data of its own, so the position means nothing "
                "to another number of workers; with the policy DATA it does."
            )
        if state["split"] != self._facts["split"]:
            raise ValueError(
                f"The state was saved where data is split {state['split']}, and here it is "
                f"split {self._facts['split']}. Use the same `auto_shard_policy`."
            )

    def __repr__(self) -> str:
        return f"<mx.distribute.DistributedIterator over {self._dataset!r}>"


class _Now(Cursor):
    """Delivers when asked, without a thread."""

    def __init__(self, steps: Cursor, delivery: Delivery) -> None:
        self._steps, self._delivery = steps, delivery

    def __next__(self) -> PyTree:
        return self._delivery(next(self._steps))

    def state(self) -> Any:
        return self._steps.state()

    def close(self) -> None:
        self._steps.close()


def _check_place(what: str) -> None:
    """A batch that a traced function took would become a constant of its program."""
    here = context.current()
    if here.replica is not None and not context.is_default():
        raise ValueError(
            f"`{what}` of a distributed dataset is called inside a replica function. Take the "
            "batch outside, and pass it to `strategy.run`."
        )
    if here.frame is not None:
        raise RunEagerly("a function that takes batches of a distributed dataset")
    if not outside_traces():
        raise RuntimeError(
            f"`{what}` of a distributed dataset is called inside a JAX transformation (jit, "
            "grad, ...), which would use the same batch every time. Use `mx.function`, or take "
            "the batch outside."
        )
