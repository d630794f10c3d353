"""`OwnCopies`: a summed variable of which a checkpoint keeps what each replica has added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

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
        """All copies."""
        return np.stack([np.asarray(copy) for copy in self._copies()])

    def put(self, copies: Any) -> None:
        """Restores what `take` gave."""
        variable = self.variable
        total = np.sum(copies, axis=0, dtype=copies.dtype)
        if not isinstance(variable, SyncOnReadVariable):
            variable.assign(total)
            return
        count = len(self._copies())
        others = [np.zeros_like(total)] * (count - 1)
        parts = copies if len(copies) == count else [total, *others]
        variable.assign_copies(PerReplica(list(parts)))

    def _copies(self) -> Any:
        if isinstance(self.variable, SyncOnReadVariable):
            return self.variable.copies().values
        return [self.variable.read_value()]
