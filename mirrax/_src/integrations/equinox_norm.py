"""Equinox: its BatchNorm averages means, which is wrong over unequal parts; that is an error."""

from __future__ import annotations

import functools
from typing import Any

import equinox  # pyright: ignore[reportMissingImports]

from mirrax._src.base import context
from mirrax._src.base.mesh import AXIS_NAME

_call_plain = equinox.nn.BatchNorm.__call__


@functools.wraps(_call_plain)
def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    names = (
        self.axis_name if isinstance(self.axis_name, list | tuple) else [self.axis_name]
    )
    if AXIS_NAME in names and context.is_uneven(context.current()):
        raise NotImplementedError(
            f"`equinox.nn.BatchNorm` over the axis {AXIS_NAME!r} averages the means of replicas, "
            "which is not the mean of all rows where replicas have unequal numbers of them. Drop "
            "or pad the last batch (`InputOptions(last_batch=...)`), or leave "
            f"{AXIS_NAME!r} out of `axis_name`."
        )
    return _call_plain(self, *args, **kwargs)


equinox.nn.BatchNorm.__call__ = _call
