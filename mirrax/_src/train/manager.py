"""`mx.train.CheckpointManager`: the checkpoints of one training, of which it keeps some."""

from __future__ import annotations

import operator
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mirrax._src.base.errors import DataLossError, warn_user
from mirrax._src.base.hiding import all_brief
from mirrax._src.cluster.runtime import Cluster, current_cluster
from mirrax._src.state.variable import Variable
from mirrax._src.train import storage
from mirrax._src.train.checkpoint import (
    Checkpoint,
    CheckpointOptions,
    find_checkpoints,
    newest_sound,
    waiting,
)
from mirrax._src.train.storage import Contents
from mirrax._src.train.writer import wait_for_saves


@all_brief
class CheckpointManager:
    """Saves checkpoints into a directory, deletes old ones, and finds the last sound one.

    >>> checkpoint, directory = mx.train.Checkpoint(v=mx.Variable(1.0)), tempfile.mkdtemp()
    >>> manager = mx.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
    >>> for _ in range(3):
    ...     path = manager.save()
    >>> [os.path.basename(path) for path in manager.checkpoints]
    ['ckpt-2', 'ckpt-3']
    >>> os.path.basename(manager.restore_or_initialize())
    'ckpt-3'

    Args:
        checkpoint: What to save.
        directory: Where to; it is made when it is needed.
        max_to_keep: How many checkpoints are kept, the newest ones; None keeps all.
        keep_checkpoint_every_n_hours: Of those that would be deleted, one in so many hours
            is never deleted.
        checkpoint_name: Their common name; a number follows.
        step_counter: The variable that counts steps, for `checkpoint_interval`.
        checkpoint_interval: The least number of steps between two checkpoints; `save` does
            nothing in between.
        init_fn: What `restore_or_initialize` calls if there is no checkpoint.
    """

    __module__ = "mirrax.train"

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Variable | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                f"`checkpoint` must be an mx.train.Checkpoint, got {checkpoint!r}."
            )
        if max_to_keep is not None and not hasattr(max_to_keep, "__index__"):
            raise TypeError(
                f"`max_to_keep` must be an integer, or None for all, got {max_to_keep!r}."
            )
        if max_to_keep is not None and operator.index(max_to_keep) < 1:
            raise ValueError(
                f"`max_to_keep` must be at least 1, or None for all, got {max_to_keep}."
            )
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError(
                f"`checkpoint_interval={checkpoint_interval}` counts steps, so it needs a "
                "`step_counter`: a variable such as `optimizer.iterations`."
            )
        if (
            keep_checkpoint_every_n_hours is not None
            and keep_checkpoint_every_n_hours < 0
        ):
            raise ValueError(
                "`keep_checkpoint_every_n_hours` must not be negative, got "
                f"{keep_checkpoint_every_n_hours}."
            )
        if not checkpoint_name or os.path.basename(checkpoint_name) != checkpoint_name:
            raise ValueError(
                f"`checkpoint_name` must be the name of a file, got {checkpoint_name!r}."
            )
        self._checkpoint = checkpoint
        self._directory = os.fspath(directory)
        self._place = Path(directory).absolute()
        self._max_to_keep = max_to_keep
        self._keep_seconds = (keep_checkpoint_every_n_hours or 0) * 3600
        self._keeps_some = keep_checkpoint_every_n_hours is not None
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._init_fn = init_fn
        self._last_step: int | None = None
        self._is_first_save = True
        wait_for_saves()
        found = [c for c in find_checkpoints(self._place) if self._is_own(c)]
        kept = [c.saved_at for c in found if storage.is_kept(c.path)]
        oldest = min((c.saved_at for c in found), default=time.time())
        self._last_kept = max(kept, default=oldest)
        self._found = [c for c in found if not storage.is_kept(c.path)]

    def _is_own(self, contents: Contents) -> bool:
        return bool(
            re.fullmatch(f"{re.escape(self._name)}--?[0-9]+", contents.path.name)
        )

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Where checkpoints are."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """The least number of steps between two checkpoints."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints that are managed, oldest first.

        Waits for a checkpoint that is being written.
        """
        self._look()
        return [self._path(contents) for contents in self._found]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint that is not damaged, or None.

        Waits for a checkpoint that is being written.
        """
        self._look()
        newest = newest_sound(self._found)
        return None if newest is None else self._path(newest)

    def _look(self) -> None:
        """Waits for what is being written; what another worker writes is on the disk."""
        wait_for_saves()
        if not _is_first_worker():
            found = [c for c in find_checkpoints(self._place) if self._is_own(c)]
            self._found = [c for c in found if not storage.is_kept(c.path)]

    def _path(self, contents: Contents) -> str:
        return os.path.join(self._directory, contents.path.name)

    def save(
        self,
        checkpoint_number: Any = None,
        check_interval: bool = True,
        options: CheckpointOptions | None = None,
        *,
        wait: bool = False,
    ) -> str | None:
        """Saves, and when that is on the disk deletes what is too old.

        Args:
            checkpoint_number: The number in the name; by default saves are counted.
            check_interval: Whether to do nothing where `checkpoint_interval` says so.
            options: How to save.
            wait: Whether to return only when the checkpoint is on the disk.

        Returns:
            The path, or None if nothing was saved.
        """
        step = None if self._step_counter is None else _number(self._step_counter)
        if check_interval and not self._is_due(step):
            return None
        if self._is_first_save and _is_first_worker():
            storage.remove_leftovers(self._place)
        self._is_first_save = False
        number = (
            _number(self._checkpoint.save_counter) + 1
            if checkpoint_number is None
            else _number(checkpoint_number)
        )
        name = f"{self._name}-{number}"
        path = str(self._place / name)
        self._checkpoint.save_as(path, waiting(options, wait), self._note)
        self._last_step = step
        return os.path.join(self._directory, name)

    def _is_due(self, step: int | None) -> bool:
        if self._interval is None or self._last_step is None or step is None:
            return True
        return step - self._last_step >= self._interval

    def _note(self, contents: Contents) -> None:
        """A checkpoint is on the disk: deletes what is too old. Called by the thread."""
        self._found = [c for c in self._found if c.path != contents.path]
        self._found.append(contents)
        while self._max_to_keep is not None and len(self._found) > self._max_to_keep:
            old = self._found.pop(0)
            if (
                self._keeps_some
                and old.saved_at - self._last_kept >= self._keep_seconds
            ):
                storage.keep(old.path)
                self._last_kept = old.saved_at
            else:
                storage.remove(old.path)

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint that is not damaged, or calls `init_fn`.

        Returns:
            The path that was restored, or None.
        """
        self._look()
        cluster = current_cluster()
        if cluster is not None:
            return self._restore_together(cluster)
        for contents in reversed(self._found):
            try:
                self._checkpoint.restore(contents.path).warn_if_partial()
            except (DataLossError, FileNotFoundError) as error:
                warn_user(str(error))
                continue
            if self._step_counter is not None:
                self._last_step = _number(self._step_counter)
            return self._path(contents)
        if self._init_fn is not None:
            self._init_fn()
        return None

    def _restore_together(self, cluster: Cluster) -> str | None:
        """All workers restore what the first one finds to be the newest."""
        newest = newest_sound(self._found) if cluster.worker == 0 else None
        own = None if newest is None else newest.path.name
        name = cluster.agree("the newest checkpoint", own)[0]
        if name is None:
            if self._init_fn is not None:
                self._init_fn()
            return None
        self._checkpoint.restore(self._place / name).warn_if_partial()
        if self._step_counter is not None:
            self._last_step = _number(self._step_counter)
        return os.path.join(self._directory, name)

    def sync(self) -> None:
        """Waits until everything that was saved is on the disk.

        Raises:
            OSError: If it could not be written.
        """
        self._checkpoint.sync()

    def __repr__(self) -> str:
        return f"<mx.train.CheckpointManager of {self._directory}>"


def _is_first_worker() -> bool:
    cluster = current_cluster()
    return cluster is None or cluster.worker == 0


def _number(value: Any) -> int:
    return operator.index(value.numpy() if isinstance(value, Variable) else value)
