"""Notices `optax.sgd(variable)`, which would keep today's value as the learning rate for ever."""

from __future__ import annotations

import sys
from types import FrameType

_MAKER = "scale_by_learning_rate"
_LATER = (
    "init_fn",
    "update_fn",
)  # of `optax.inject_hyperparams`, which makes it each time


def check_not_frozen(name: str) -> None:
    """Raises if an operator of the variable `name` is called by Optax, to keep the result."""
    frame = _outside(sys._getframe(1))
    if frame is None or frame.f_code.co_name != _MAKER or not _is_optax(frame):
        return
    above: FrameType | None = frame
    while above is not None and _is_optax(above):
        if above.f_code.co_name in _LATER:
            return
        above = above.f_back
    raise ValueError(
        f"Variable {name!r} is given to an optimizer of Optax as its learning rate, which would "
        "read it now and never again. Make the optimizer by name, "
        f"`mx.train.Optimizer('sgd', learning_rate=variable)`, or give Optax a schedule, "
        "`optax.sgd(lambda count: variable)`: both read it in each step."
    )


def _outside(frame: FrameType | None) -> FrameType | None:
    """The nearest frame that is not mirrax's."""
    while frame is not None and _module(frame).startswith("mirrax."):
        frame = frame.f_back
    return frame


def _is_optax(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] == "optax"


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
