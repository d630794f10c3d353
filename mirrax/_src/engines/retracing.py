"""Why a function was traced again, in words."""

from __future__ import annotations

from typing import Any

from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.engines.arguments import Static


def explain_change(old: Any, new: Any) -> str:
    """What is different in the key of a trace (place, signature, shapes)."""
    if old is None or old[0] != new[0]:
        return "it runs under another strategy, or with other settings of JAX"
    signature, avals = new[1:]
    if old[1].tree != signature.tree:
        return f"the structure of the arguments changed from {old[1].tree} to {signature.tree}"
    paths = signature.paths()
    for path, before, now in zip(paths, old[1].kinds, signature.kinds):
        if before != now:
            return f"{path} changed from {_show_kind(before)} to {_show_kind(now)}"
    dynamic = [p for p, k in zip(paths, signature.kinds) if not isinstance(k, Static)]
    mesh = new[0][1] if isinstance(new[0], tuple) else None
    for path, layout, before, now in zip(dynamic, signature.layouts(), old[2], avals):
        if before != now:
            shown = [_show_shape(aval, layout, mesh) for aval in (before, now)]
            return f"{path} changed from {shown[0]} to {shown[1]}"
    return "the copies of a variable are now different on each replica, or no longer so"


def _show_shape(aval: Any, layout: Layout, mesh: ReplicaMesh | None) -> str:
    """An argument's dtype and shape, as one replica sees it."""
    shape = mesh.part_shape(layout, aval.shape) if mesh is not None else aval.shape
    weak = ", weakly typed" if aval.weak_type else ""
    return f"{aval.dtype.name}[{','.join(map(str, shape))}]{weak}"


def _show_kind(kind: Layout | Static) -> str:
    if isinstance(kind, Static):
        return repr(kind.value)
    return "a per-replica value" if kind.is_split else "an array or number"
