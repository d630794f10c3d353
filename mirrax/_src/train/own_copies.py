"""`OwnCopies`: a summed variable of which a checkpoint keeps what each replica has added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import PerReplica
from mirrax._src.state.on_read import SyncOnReadVariable
from mirrax._src.state.variable import Variable


@dataclass(frozen=True)
class OwnCopies:
    """A summed variable of which a checkpoint saves every copy, along a new first axis.

    On as many replicas each gets its own back, to the last bit. On more or fewer the first
    one gets the sum: shares of it would not add up again in integers, or to the last bit.
    """

    variable: Variable

    def take(self) -> np.ndarray:
        """All copies, of all workers."""
        copies = self._copies()
        mesh = self._mesh
        if mesh is None or not mesh.spans_workers:
            return np.stack([np.asarray(copy) for copy in copies])
        rows = [jnp.asarray(copy)[None] for copy in copies]
        value = PerReplica(rows, mesh.equal_shapes(rows[0]))
        strategy = self.variable.strategy
        return np.asarray(strategy.gather(value, axis=0))

    def put(self, copies: Any) -> None:
        """Restores what `take` gave."""
        variable = self.variable
        total = np.sum(copies, axis=0, dtype=copies.dtype)
        if not isinstance(variable, SyncOnReadVariable):
            variable.assign(total)
            return
        mesh = self._mesh
        assert mesh is not None
        others = [np.zeros_like(total)] * (mesh.size - 1)
        parts = copies if len(copies) == mesh.size else [total, *others]
        variable.assign_copies(PerReplica([parts[i] for i in mesh.local_ids]))

    @property
    def _mesh(self) -> ReplicaMesh | None:
        is_spread = isinstance(self.variable, SyncOnReadVariable)
        return self.variable.strategy.replica_mesh if is_spread else None

    def _copies(self) -> Any:
        if isinstance(self.variable, SyncOnReadVariable):
            return self.variable.copies().values
        return [self.variable.read_value()]
