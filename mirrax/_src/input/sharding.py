"""Which worker reads what: the policies, and the plan that `explain()` shows."""

from __future__ import annotations

import dataclasses
from typing import Any

from mirrax._src.base.errors import warn_user
from mirrax._src.input.blocks import value_of
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.node import Node, Path, State, open_cursor, rebuild, walk
from mirrax._src.input.options import AutoShardPolicy, InputOptions
from mirrax._src.input.reading import FileReader
from mirrax._src.input.splitting import (
    ByBatch,
    ByRows,
    Dropping,
    Padding,
    Share,
    StepCursor,
    Whole,
    part_sizes,
    split_batch,
)
from mirrax._src.input.transforms.batching import Batch, PaddedBatch
from mirrax._src.input.transforms.buffering import Prefetch
from mirrax._src.input.transforms.nesting import Interleave
from mirrax._src.input.transforms.screening import AssertCardinality
from mirrax._src.input.transforms.selecting import Shard, ShardHint

_MOST_FILES_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one dataset is divided: for all workers the same, but for `share.worker`.

    Attributes:
        root: The pipeline of this worker.
        share: Its replicas among all.
        asked: The policy in the dataset's options.
        policy: The policy that is applied.
        reason: Why, if AUTO had to choose.
        rows: The rows of a full batch, if known.
        files: The files that this worker reads, if it reads files of its own.
        num_files: The files that all workers read.
        options: How the replicas are fed.
    """

    root: Node
    share: Share
    asked: AutoShardPolicy
    policy: AutoShardPolicy
    reason: str
    rows: int | None
    files: tuple[str, ...] | None
    num_files: int
    options: InputOptions

    @property
    def is_global(self) -> bool:
        """Whether a position means the same on all workers, however many there are."""
        return self.policy is AutoShardPolicy.DATA or self.share.num_workers == 1

    @property
    def is_by_rows(self) -> bool:
        """Whether the parts come from a stream of rows; else from one batch each."""
        return self.policy is not AutoShardPolicy.DATA and self.rows is not None

    def steps(self, path: Path, state: State) -> StepCursor:
        """A pass over this worker's steps."""
        share, rows = self.share, self.rows
        if share.num_replicas == 1:
            cursor: StepCursor = Whole(self.root, path, state, rows, self.is_by_rows)
        elif self.is_by_rows:
            assert rows is not None
            sizes = tuple(part_sizes(rows, share))
            cursor = ByRows(self.root, share, sizes).open(path, state)
        else:
            is_divided = self.policy is AutoShardPolicy.DATA
            cursor = ByBatch(self.root, share, is_divided, rows).open(path, state)
        if self.options.last_batch == "drop":
            return Dropping(cursor)
        if self.options.last_batch == "pad":
            return Padding(cursor, self.replica_rows)
        return cursor

    @property
    def replica_rows(self) -> int | None:
        """The most rows that a replica gets of a full batch."""
        return None if self.rows is None else -(-self.rows // self.share.num_replicas)

    def sizes_of(self, rows: int) -> list[int]:
        """The rows of each replica, over all workers, in a step of `rows` rows."""
        if not self.is_by_rows:
            parts = split_batch(rows, self.share.num_replicas)
            order = range(self.share.num_replicas)
            if self.policy is AutoShardPolicy.DATA:
                count = self.share.num_workers
                order = [i for w in range(count) for i in range(len(parts))[w::count]]
            return [parts[i].stop - parts[i].start for i in order]
        sizes = part_sizes(self.rows or 0, dataclasses.replace(self.share, worker=0))
        for i, size in enumerate(sizes):
            sizes[i] = min(size, rows)
            rows -= sizes[i]
        return sizes

    def explain(self) -> str:
        """The plan in words."""
        share = self.share
        lines = [
            f"steps:      {' -> '.join(n.describe() for n in walk(self.root))}",
            f"replicas:   {share.num_replicas} in all, {share.replicas_per_worker} on each of "
            f"{share.num_workers} worker(s); this is worker {share.worker}",
            f"policy:     {self.asked.name}"
            + (f" -> {self.policy.name}" if self.policy is not self.asked else "")
            + (f" ({self.reason})" if self.reason else ""),
            f"reads:      {self._reads()}",
        ]
        if share.num_replicas == 1:
            lines.append("batches:    as they are, to the one replica")
        elif self.rows is None:
            lines.append(
                "batches:    of any size, each split into equal parts, front replicas first"
            )
        else:
            sizes = ", ".join(map(str, self.sizes_of(self.rows)))
            what = "each batch" if not self.is_by_rows else "the rows, across batches,"
            lines.append(
                f"batches:    of {self.rows}: {what} split into {sizes} for replicas "
                f"0 to {share.num_replicas - 1}"
            )
        lines.append(f"last batch: {self._last()}")
        return "\n".join(lines)

    def _reads(self) -> str:
        share = self.share
        if self.files is not None:
            shown = ", ".join(self.files[:_MOST_FILES_SHOWN])
            more = len(self.files) - _MOST_FILES_SHOWN
            shown += f" and {more} more" if more > 0 else ""
            return f"{len(self.files)} of {self.num_files} files: {shown}"
        if self.policy is AutoShardPolicy.DATA and share.num_workers > 1:
            parts = range(share.num_replicas)[share.worker :: share.num_workers]
            return (
                "everything, and of each batch keeps the part(s) "
                f"{', '.join(map(str, parts))} of {share.num_replicas}"
            )
        if self.policy is AutoShardPolicy.HINT and share.num_workers > 1:
            return (
                f"shard {share.worker} of {share.num_workers}, where the dataset says"
            )
        return "everything"

    def _last(self) -> str:
        way = self.options.last_batch
        rows = last_rows(self.root)
        if way == "drop":
            return "left out unless it is full"
        size = f"{rows} rows" if rows else "what is left"
        if way == "pad":
            return (
                f"{size}, filled up with zeros to {self.replica_rows or 'the full'} rows a "
                "replica; the mask is true for real rows"
            )
        if self.share.num_replicas == 1:
            return f"exact: {size}, as it is"
        if rows is None:
            return "exact: what is left is split as it is; a replica may get no rows"
        if rows == self.rows:
            return "full, like all others"
        return f"exact: {size}, split into {', '.join(map(str, self.sizes_of(rows)))}"


def last_rows(root: Node) -> int | None:
    """The rows of the last batch, if they can be told."""
    while isinstance(root, Prefetch):
        root = root.input
    if not isinstance(root, Batch | PaddedBatch):
        return None
    size = root.input.cardinality()
    if size <= 0:
        return None
    return root.size if root.drop_remainder else (size - 1) % root.size + 1


def make_plan(dataset: Dataset, share: Share, options: InputOptions) -> Plan:
    """The plan for a dataset of global batches.

    Raises:
        ValueError: If the policy cannot be applied.
    """
    root = dataset.node
    while isinstance(root, Prefetch):  # batches are copied ahead to the devices anyway
        root = root.input
    asked = dataset.options().experimental_distribute.auto_shard_policy
    files = files_of(root)
    reads_files = any(getattr(n, "reads_files", False) for n in walk(root))
    policy, reason = _choose(asked, files, share.num_workers, reads_files)
    rows = root.batch_size()
    own = None
    if policy is AutoShardPolicy.FILE and files is not None:
        root = _shard_files(root, share) if share.num_workers > 1 else root
        own = files_of(root)
    elif policy is AutoShardPolicy.HINT:
        root = rebuild(
            root,
            lambda n: (
                Shard(n.input, share.num_workers, share.worker)
                if isinstance(n, ShardHint)
                else None
            ),
        )
    return Plan(
        root, share, asked, policy, reason, rows, own, len(files or ()), options
    )


def _choose(
    asked: AutoShardPolicy,
    files: tuple[str, ...] | None,
    num_workers: int,
    reads_files: bool,
) -> tuple[AutoShardPolicy, str]:
    found = len(files or ())
    if asked is AutoShardPolicy.AUTO:
        if files is None and num_workers == 1 and reads_files:
            return AutoShardPolicy.FILE, "TensorFlow reads its files"
        if files is None:
            return AutoShardPolicy.DATA, "it does not read files"
        if found >= num_workers:
            return AutoShardPolicy.FILE, f"{found} file(s) for {num_workers} worker(s)"
        reason = f"{found} file(s) are too few for {num_workers} workers"
        warn_user(
            f"The dataset reads {found} file(s), fewer than the {num_workers} workers, so it is "
            "divided by data: every worker reads all files and keeps its part of each batch. "
            "Write the data as more files, or set `auto_shard_policy` to DATA."
        )
        return AutoShardPolicy.DATA, reason
    if asked is AutoShardPolicy.FILE and num_workers > 1 and found < num_workers:
        raise ValueError(
            f"`auto_shard_policy` FILE gives every worker its own files, but there are "
            f"{num_workers} workers and {found} file(s). Write the data as at least "
            f"{num_workers} files, or use DATA or AUTO."
        )
    return asked, ""


def files_of(root: Node) -> tuple[str, ...] | None:
    """The files that a pipeline reads, in order; None if it reads none."""
    found: list[str] = []
    for step in walk(root):
        if isinstance(step, FileReader):
            found += step.files
        elif isinstance(step, Interleave) and _makes_readers(step):
            names = open_cursor(step.input, (0,))
            try:
                for name in names:
                    found.append(_text(name))
            finally:
                names.close()
    return tuple(found) if found else None


def _text(name: Any) -> str:
    value = value_of(name)
    return value.decode() if isinstance(value, bytes) else str(value)


def _makes_readers(step: Interleave) -> bool:
    """Whether the datasets of a `flat_map` or `interleave` read files, named by its input."""
    names = step.input.cardinality()
    if names <= 0:
        return False
    try:
        return any(isinstance(n, FileReader) for n in walk(step.first_inner()))
    except Exception:  # the pass itself will raise it, at its place
        return False


def _shard_files(root: Node, share: Share) -> Node:
    def change(step: Node) -> Node | None:
        if isinstance(step, FileReader):
            own = step.files[share.worker :: share.num_workers]
            return dataclasses.replace(step, files=own)
        if isinstance(step, Interleave) and _makes_readers(step):
            return dataclasses.replace(step, input=_shard_sources(step.input, share))
        if isinstance(step, AssertCardinality):  # which is true of all workers together
            return rebuild(step.input, change)
        return None

    return rebuild(root, change)


def _shard_sources(root: Node, share: Share) -> Node:
    """The pipeline with every source divided, before anything is shuffled."""
    return rebuild(
        root,
        lambda n: None if n.inputs() else Shard(n, share.num_workers, share.worker),
    )
