"""Optimizers, metrics and random streams of Flax NNX where there are several replicas."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import optax
from flax import nnx

from mirrax._src.base import context
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.values import ReplicaValues, is_leaf
from mirrax._src.engines.function import Function
from mirrax._src.integrations.nnx_variables import (
    current_scope,
    raw_value,
    replace_name,
    spread_replica,
)
from mirrax._src.state.mirrored import MirroredVariable
from mirrax._src.train.optimizer import Optimizer

# Of an optimizer in a scope, by its transformation: the update that all replicas do together.
_compiled: weakref.WeakKeyDictionary[Optimizer, Function] = weakref.WeakKeyDictionary()


def _make_optimizer(self: Any, model: Any, tx: Any, **kwargs: Any) -> None:
    if current_scope() is not None:
        tx = tx if isinstance(tx, Optimizer) else Optimizer(tx)
        if tx.gradient_accumulation_steps > 1:
            raise ValueError(
                "An `nnx.Optimizer` keeps one state for all replicas, and "
                f"`gradient_accumulation_steps={tx.gradient_accumulation_steps}` of "
                "`mx.train.Optimizer` needs one for each. Use "
                "`optax.MultiSteps`, or train with `mx.train.Optimizer` itself."
            )
        _compiled[tx] = Function(_update_in_replica)
        if tx.shard_state:
            begin = tx.begin_in_scope  # arrays, of which NNX makes variables
            raw = optax.GradientTransformationExtraArgs(begin, tx.update)  # pyright: ignore[reportArgumentType]
            _make_optimizer_plain(self, model, raw, **kwargs)
            self.tx = tx
            _mark_slots(self.opt_state)
            return
    _make_optimizer_plain(self, model, tx, **kwargs)


def _mark_slots(state: Any) -> None:
    for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        held = raw_value.held(leaf) if isinstance(leaf, nnx.Variable) else None
        if isinstance(held, MirroredVariable):
            held.is_slot = True


def _update_in_replica(
    optimizer: Any, model: Any, grads: Any, aggregate: bool, extra: dict[str, Any]
) -> Any:
    return _update_plain(optimizer, model, grads, aggregate=aggregate, **extra)


def _update(self: Any, model: Any, *grads: Any, **extra: Any) -> Any:
    """`nnx.Optimizer.update`, where several replicas call it or bring their gradients."""
    here = context.current()
    compiled = _compiled.get(self.tx) if isinstance(self.tx, Optimizer) else None
    if compiled is None or len(grads) != 1:
        if spread_replica() is not None:  # before anything has changed
            raw_value.check_own(self.step, here)
        return _update_plain(self, model, *grads, **extra)
    replica = here.replica
    aggregate = extra.pop("aggregate", replica is not None)
    given = jax.tree.leaves((grads, extra), is_leaf=is_leaf)
    if any(isinstance(leaf, ReplicaValues) for leaf in given):
        owner = raw_value.held(self.step).strategy
        return owner.run(compiled, (self, model, *grads, True, extra))
    is_alone = replica is None or here.strategy.num_replicas_in_sync == 1
    if here.frame is not None or is_alone:
        return _update_plain(self, model, *grads, aggregate=aggregate, **extra)

    meeting: Any = replica

    def merge(strategy: StrategyLike, *given: Any) -> Any:
        grads, extra = meeting.rejoined(given)
        return strategy.run(compiled, (self, model, grads, aggregate, extra))

    return meeting.merge("nnx.Optimizer.update", merge, (*grads, extra))


def _update_welford(self: Any, **kwargs: Any) -> None:
    if spread_replica() is not None:
        raise NotImplementedError(
            "`nnx.metrics.Welford` cannot be updated in several replicas: what they hold does "
            "not add up to that of all examples. Use `nnx.metrics.Average`, of the values and "
            "of their squares; or update it outside `run`."
        )
    _update_welford_plain(self, **kwargs)


def _reseed(node: Any, /, **streams: Any) -> None:
    if spread_replica() is not None:
        raise RuntimeError(
            "`nnx.reseed` is called in a replica. The replicas' keys are made from one key, "
            "which only code outside `run` can change: call it there."
        )
    _reseed_plain(node, **streams)


_make_optimizer_plain = nnx.Optimizer.__init__
_update_plain = nnx.Optimizer.update
_update_welford_plain = nnx.metrics.Welford.update
_reseed_plain = nnx.reseed

replace_name(nnx.Optimizer, "__init__", _make_optimizer)
replace_name(nnx.Optimizer, "update", _update)
replace_name(nnx.metrics.Welford, "update", _update_welford)
replace_name(nnx, "reseed", _reseed)
