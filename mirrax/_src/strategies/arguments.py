"""What methods of a strategy take, or tell the functions that they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunOptions:
    """Options of `run`. They steer TPU compilation in TensorFlow; only the defaults exist here."""

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None

    def __post_init__(self) -> None:
        if tuple(vars(self).values()) != (True, False, None):  # the defaults
            raise ValueError(
                "RunOptions other than the defaults change how TensorFlow compiles for TPUs "
                f"and have no meaning here; leave `options` out. Got {self!r}."
            )


@dataclass(frozen=True)
class ValueContext:
    """What `value_fn` is told about the replica it makes a value for."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


RunOptions.__module__ = "mirrax.distribute"
ValueContext.__module__ = "mirrax.distribute.experimental"


def checked_run(fn: Any, args: Any, options: Any) -> tuple[Any, ...]:
    """The `args` of a `run`, which raises for what it does not take."""
    if not callable(fn):
        raise TypeError(f"`run` needs a function, got {fn!r}.")
    if not isinstance(args, tuple | list):
        raise ValueError(
            f"`args` must be a tuple or list of positional arguments, got {type(args).__name__}; "
            "a single argument is written `args=(x,)`."
        )
    if options is not None and not isinstance(options, RunOptions):
        raise TypeError(f"`options` must be a RunOptions, got {options!r}.")
    return tuple(args)
