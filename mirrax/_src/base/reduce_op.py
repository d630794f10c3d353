"""How replicas' values become one: `ReduceOp`, and how variables ask for it."""

from __future__ import annotations

import enum


class ReduceOp(enum.Enum):
    """How values of several replicas are combined.

    >>> mx.distribute.ReduceOp("sum")
    <ReduceOp.SUM: 'SUM'>
    """

    __module__ = "mirrax.distribute"
    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise ValueError(
            f"`reduce_op` must be ReduceOp.SUM, ReduceOp.MEAN or one of their names, "
            f"got {value!r}."
        )

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """The reduction that a variable's aggregation stands for."""
        if aggregation not in (VariableAggregation.SUM, VariableAggregation.MEAN):
            raise ValueError(
                f"{aggregation} is not a reduction; only SUM and MEAN are."
            )
        return ReduceOp[aggregation.name]


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought together."""

    __module__ = "mirrax"
    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the replicas' values for one variable are combined."""

    __module__ = "mirrax"
    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
    ONLY_FIRST_TOWER = 3
