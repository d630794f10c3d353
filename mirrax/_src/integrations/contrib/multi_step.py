"""`MultiStepContext` as TensorFlow 1.11 had it: aggregations in place of reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import VariableAggregation
from mirrax._src.base.values import PyTree, is_leaf
from mirrax._src.integrations import loops
from mirrax._src.integrations.contrib.cross_tower_ops import reduce_op_of


class MultiStepContext(loops.MultiStepContext):
    """What a step of `run_steps_on_dataset` is given, and what the call returns.

    Attributes:
        run_op: Runs the same number of steps again, on the next elements.
    """

    __module__ = "mirrax.contrib.distribute"
    unpacks = True
    _example_of_combining = "aggregation=mx.VariableAggregation.MEAN"

    def set_last_step_output(
        self,
        name: str,
        output: PyTree,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        """Makes `output` of the last step a result of the loop.

        Args:
            name: Its name in `last_step_outputs`.
            output: A value of this step; in a tower, of this tower.
            aggregation: How the towers' values become one. Needed in a tower; with `NONE`
                the value stays as it is.
        """
        is_none = aggregation is VariableAggregation.NONE
        self._set_output(name, output, None if is_none else aggregation)

    def _combined(self, strategy: StrategyLike, op: Any, output: PyTree) -> PyTree:
        if op is VariableAggregation.ONLY_FIRST_TOWER:
            return jax.tree.map(strategy.first_part, output, is_leaf=is_leaf)
        return super()._combined(strategy, op and reduce_op_of(op), output)

    def _parts(self, strategy: StrategyLike, value: Any) -> Sequence[Any]:
        return list(super()._parts(strategy, value))
