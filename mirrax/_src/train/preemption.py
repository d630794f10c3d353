"""`mx.train.PreemptionCheckpointHandler`: a machine that is taken away costs no steps."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mirrax._src.base.errors import warn_user
from mirrax._src.cluster.resolvers import ClusterResolver
from mirrax._src.cluster.runtime import current_cluster
from mirrax._src.train.checkpoint import Checkpoint
from mirrax._src.train.manager import CheckpointManager

EXIT_CODE = 42
_POLL_SECONDS = 1.0
_COUNT = "checkpointed_runs"


@dataclass(frozen=True)
class TerminationConfig:
    """How a preemption is noticed and what happens then.

    Args:
        termination_watcher_fn: Returns whether the machine will be taken away; it is asked
            every second. The default is to wait for SIGTERM.
        exit_fn: Ends the program; the default is `sys.exit(42)`.
        grace_period: The seconds between the signal and the end of the machine. Training
            then goes on after the first save, and saves again just before the end.
        save_fn: Saves; the default is the manager's `save`.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None


TerminationConfig.__module__ = "mirrax.train"


class PreemptionCheckpointHandler:
    """Saves at the end of the step in which SIGTERM arrives, and exits with code 42.

        with mx.train.PreemptionCheckpointHandler(None, manager) as handler:  # restores
            while handler.total_run_calls < steps:
                handler.run(train_step, next(iterator))

    It restores the newest checkpoint when it is made, so that the next start goes on where
    the last one stopped: `total_run_calls` is saved with the rest. After the block, or after
    `close`, SIGTERM does what it did before.

    Args:
        cluster_resolver: `strategy.cluster_resolver`; of several workers all stop at the same
            step, whichever of them is told to.
        checkpoint_or_checkpoint_manager: What to save and where to.
        checkpoint_dir: The directory, if a `Checkpoint` is given.
        termination_config: How a preemption is noticed and what happens then.
    """

    __module__ = "mirrax.train"

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        if not isinstance(cluster_resolver, ClusterResolver | None):
            raise TypeError(
                "`cluster_resolver` must be that of the strategy, or None, got "
                f"{cluster_resolver!r}."
            )
        self._cluster = current_cluster()
        manager = checkpoint_or_checkpoint_manager
        if isinstance(manager, Checkpoint):
            if checkpoint_dir is None:
                raise ValueError(
                    "`checkpoint_dir` is needed with a Checkpoint, to know where to save: "
                    f"{manager!r}."
                )
            manager = CheckpointManager(manager, checkpoint_dir, max_to_keep=1)
        elif not isinstance(manager, CheckpointManager):
            raise TypeError(
                "A PreemptionCheckpointHandler needs a Checkpoint or a CheckpointManager, got "
                f"{manager!r}."
            )
        elif checkpoint_dir is not None:
            raise ValueError(
                "`checkpoint_dir` is for a Checkpoint; a CheckpointManager has its own: "
                f"{manager.directory}."
            )
        self._manager = manager
        self._config = termination_config or TerminationConfig()
        self._signalled_at: float | None = None
        self._has_saved = self._is_done = False
        self._run_seconds = 0.0
        self._own_runs = 0
        if not hasattr(manager.checkpoint, _COUNT):
            setattr(manager.checkpoint, _COUNT, 0)
        manager.restore_or_initialize()
        self._runs: int = getattr(manager.checkpoint, _COUNT)
        self._stop = threading.Event()
        self._has_signal = False
        self._previous: Any = None
        self._watch()

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _watch(self) -> None:
        if self._config.termination_watcher_fn is not None:
            threading.Thread(
                target=self._poll, name="mirrax-preemption", daemon=True
            ).start()
        elif threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "A PreemptionCheckpointHandler waits for a signal, so it must be made in the "
                f"main thread, not in {threading.current_thread().name!r}; or give it a "
                "`termination_watcher_fn`."
            )
        else:
            self._previous = signal.signal(signal.SIGTERM, self._notice)
            self._has_signal = True

    def _poll(self) -> None:
        watch = self._config.termination_watcher_fn
        assert watch is not None
        while not self._stop.is_set():
            try:
                if watch():
                    self._notice()
                    return
            except Exception as error:  # a server that does not answer, say
                warn_user(
                    f"`termination_watcher_fn` failed and is asked again: {error!r}"
                )
            self._stop.wait(_POLL_SECONDS)

    def _notice(self, *signal_and_frame: Any) -> None:
        if self._cluster is not None:
            # On a thread, because the signal may have come while a message was being sent.
            ask = threading.Thread(
                target=self._cluster.request_stop, args=("SIGTERM",), daemon=True
            )
            ask.start()
        elif self._signalled_at is None:
            self._signalled_at = time.monotonic()

    @property
    def total_run_calls(self) -> int:
        """How often `run` has been called, earlier starts included."""
        return self._runs

    def run(
        self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any
    ):
        """Calls the function; if a preemption was noticed, then saves and exits."""
        self._save_if_preempted()
        started = time.monotonic()
        result = distributed_train_function(*args, **kwargs)
        self._count()
        self._run_seconds += time.monotonic() - started
        self._save_if_preempted()
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """For loops that do not use `run`: call it at the end of each step.

        Args:
            *args: Passed on to the manager's `save`.
            **kwargs: Passed on to the manager's `save`.
        """
        self._count()
        self._save_if_preempted(*args, **kwargs)

    def _count(self) -> None:
        self._runs += 1
        self._own_runs += 1
        # Saved with the rest, whoever saves.
        setattr(self._manager.checkpoint, _COUNT, self._runs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """A block of code after which a preemption that was noticed is acted on."""
        yield
        self._save_if_preempted()

    def _save_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        is_told = self._cluster is not None and self._cluster.should_stop()
        if is_told and self._signalled_at is None:
            self._signalled_at = time.monotonic()
        if self._signalled_at is None or self._is_done:
            return
        grace = self._config.grace_period or 0
        # Time enough for a few more steps and the last save.
        reserve = 6 * self._run_seconds / max(self._own_runs, 1)
        is_last = time.monotonic() - self._signalled_at >= grace - reserve
        if self._cluster is not None:
            is_last = self._cluster.agree("the end of the grace period", is_last)[0]
        if self._has_saved and not is_last:
            return
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        else:
            self._manager.save(*args, **{"check_interval": False, **kwargs})
        self._manager.sync()
        self._has_saved = True
        if is_last:
            self._is_done = True  # also if `exit_fn` returns
            self.close()
            (self._config.exit_fn or _exit)()

    def close(self) -> None:
        """Stops watching; SIGTERM does what it did before."""
        self._stop.set()
        is_main = threading.current_thread() is threading.main_thread()
        if self._has_signal and is_main:
            self._has_signal = False
            # A handler that was made later may have taken over.
            if signal.getsignal(signal.SIGTERM) == self._notice:
                signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)


def _exit() -> None:
    if threading.current_thread() is threading.main_thread():
        sys.exit(EXIT_CODE)
    # In another thread that would end the thread alone; all is on the disk.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)
