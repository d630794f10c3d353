"""Corners of `reduce_to`, its relatives and `CrossDeviceOps`, each with TensorFlow's answer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.edges import (
    copies,
    devices,
    in_and_out,
    make,
    numbers,
    per,
    scope_if,
)
from helpers.engines import both_engines, compile_if, mirrored, replica_id

import mirrax as mx

PerReplica = mx.distribute.PerReplica
Mirrored = mx.distribute.Mirrored
Aggregation = mx.VariableAggregation
ON_READ = mx.VariableSynchronization.ON_READ


@pytest.fixture
def strategy():
    return mirrored(2)


@pytest.fixture
def other():
    """Two replicas on devices of their own."""
    return mx.MirroredStrategy(["CPU:2", "CPU:3"])


# `reduce_to` and its relatives ---------------------------------------------------------


@in_and_out
@pytest.mark.parametrize("device", ["CPU:0", "CPU:1", "CPU:3"])
def test_reduce_to_a_device(device, where, strategy):
    """A plain array on that device."""
    with scope_if(where, strategy):
        out = strategy.extended.reduce_to("SUM", per(1.0, 3.0), device)
    assert float(out) == 4.0
    assert isinstance(out, jax.Array)
    assert [d.id for d in out.devices()] == [int(device[-1])]


@in_and_out
def test_reduce_to_a_variable(where, strategy):
    v = make(strategy)
    with scope_if(where, strategy):
        out = strategy.extended.reduce_to("SUM", per(1.0, 3.0), v)
    assert isinstance(out, Mirrored)
    assert numbers(out.values) == [4.0, 4.0]
    assert devices(out) == [0, 1]
    assert copies(v) == [0.0, 0.0]


@in_and_out
def test_reduce_to_an_ordinary_variable(where, strategy):
    with scope_if("outside", strategy):
        ordinary = mx.Variable(0.0)
    with scope_if(where, strategy):
        out = strategy.extended.reduce_to("SUM", per(1.0, 3.0), ordinary)
    assert float(out) == 4.0


@in_and_out
def test_reduce_to_itself(where, strategy):
    value = per(1.0, 3.0)
    with scope_if(where, strategy):
        out = strategy.extended.reduce_to("MEAN", value, value)
    assert numbers(out.values) == [2.0, 2.0]


@in_and_out
@pytest.mark.parametrize("names", [["CPU:0", "CPU:1"], ["CPU:1"], ("CPU:2", "CPU:3")])
def test_reduce_to_a_list_of_devices(names, where, strategy):
    """TensorFlow takes no lists here; mirrax does, and puts a copy on each device."""
    with scope_if(where, strategy):
        out = strategy.extended.reduce_to("SUM", per(1.0, 3.0), names)
    assert float(out) == 4.0
    found = devices(out) if len(names) > 1 else [d.id for d in out.devices()]
    assert found == [int(name[-1]) for name in names]


@in_and_out
@pytest.mark.parametrize("to", ["CPU:0", "a variable"])
def test_reduce_to_of_a_nested_structure_reduces_each_part(to, where, strategy):
    target = make(strategy) if to == "a variable" else to
    value = {"a": per(1.0, 3.0), "b": [per(2.0, 4.0)]}
    with scope_if(where, strategy):
        out = strategy.extended.reduce_to("SUM", value, target)
        many = [per(1.0, 3.0), per(2.0, 4.0)]
        rows = strategy.extended.reduce_to("MEAN", many, target)
    assert float(out["a"]) == 4.0
    assert float(out["b"][0]) == 6.0
    assert isinstance(out["a"], Mirrored) == (to == "a variable")
    assert [float(row) for row in rows] == [2.0, 3.0]


@in_and_out
def test_batch_reduce_to(where, strategy):
    v = make(strategy)
    pairs = [(per(1.0, 3.0), "CPU:0"), (per(2.0, 4.0), v), (per(3.0, 5.0), "CPU:1")]
    with scope_if(where, strategy):
        out = strategy.extended.batch_reduce_to("SUM", pairs)
    assert [float(value) for value in out] == [4.0, 6.0, 8.0]
    assert isinstance(out[1], Mirrored)


@in_and_out
@pytest.mark.parametrize("value", [per, lambda *v: {"a": per(*v)}], ids=["one", "dict"])
def test_reduce_to_in_a_function(value, where, strategy):
    captured = value(1.0, 3.0)
    of_captured = mx.function(
        lambda: strategy.extended.reduce_to("SUM", captured, "CPU:0")
    )
    of_argument = mx.function(lambda x: strategy.extended.reduce_to("SUM", x, "CPU:0"))
    with scope_if(where, strategy):
        results = [of_captured(), of_argument(value(1.0, 3.0))]
    for out in results:
        assert float(out["a"] if isinstance(out, dict) else out) == 4.0


@in_and_out
def test_broadcast_to_in_and_out_of_a_function(where, strategy):
    v = make(strategy)
    with scope_if(where, strategy):
        out = strategy.extended.broadcast_to(jnp.float32(2.0), v)
        compiled = mx.function(
            lambda x: (
                strategy.extended.broadcast_to(x, v) * strategy.num_replicas_in_sync
            )
        )(2.0)
        one = strategy.extended.broadcast_to(jnp.float32(2.0), "CPU:1")
    assert numbers(out.values) == [2.0, 2.0]
    assert float(compiled) == 4.0
    assert [d.id for d in one.devices()] == [1]


@in_and_out
@both_engines
def test_update_in_and_out_of_a_scope(engine, where, strategy):
    v = make(strategy, 1.0)

    def f():
        strategy.extended.update(v, lambda copy, x: copy.assign_add(x), args=(6.0,))

    with scope_if(where, strategy):
        compile_if(engine, f)()
    assert copies(v) == [7.0, 7.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda s, v: s.extended.reduce_to("SUM", per(1.0, 3.0), "CPU:0"),
        lambda s, v: s.extended.batch_reduce_to("SUM", [(per(1.0, 3.0), "CPU:0")]),
        lambda s, v: s.extended.broadcast_to(jnp.float32(1.0), v),
        lambda s, v: s.extended.update(v, lambda copy: copy.assign(2.0)),
        lambda s, v: s.reduce("SUM", per(1.0, 3.0), axis=None),
        lambda s, v: s.gather(PerReplica([jnp.ones(1)] * 2), axis=0),
        lambda s, v: s.run(lambda: 1.0),
    ],
    ids=[
        "reduce_to",
        "batch_reduce_to",
        "broadcast_to",
        "update",
        "reduce",
        "gather",
        "run",
    ],
)
@both_engines
def test_methods_in_another_strategys_scope_are_an_error(engine, call, strategy, other):
    v = make(strategy)
    with other.scope(), pytest.raises(RuntimeError, match="scope"):
        compile_if(engine, lambda: call(strategy, v))()
    assert copies(v) == [0.0, 0.0]


ON_READS = pytest.mark.parametrize("aggregation", Aggregation)


def make_on_read(strategy: Any, aggregation: Any) -> Any:
    """Its copies are 1 and 3."""
    v = make(strategy, synchronization=ON_READ, aggregation=aggregation)
    strategy.run(lambda: v.assign(jnp.float32(1.0) + 2 * replica_id()))
    assert copies(v) == [1.0, 3.0]
    return v


OPS = pytest.mark.parametrize(
    "ops",
    [
        mx.distribute.ReductionToOneDevice,
        mx.distribute.NcclAllReduce,
        mx.distribute.HierarchicalCopyAllReduce,
    ],
)


@OPS
@in_and_out
@pytest.mark.parametrize("op, expected", [("SUM", 6.0), ("MEAN", 3.0)])
def test_cross_device_ops_reduce_a_mirrored_variable(
    op, expected, where, ops, strategy
):
    v = make(strategy, 3.0)
    with scope_if(where, strategy):
        out = ops().reduce(op, v, v)
        one = ops().reduce(op, v, "CPU:1")
    assert isinstance(out, Mirrored)
    assert numbers(out.values) == [expected, expected]
    assert float(one) == expected
    assert [d.id for d in one.devices()] == [1]


@OPS
@ON_READS
@in_and_out
def test_cross_device_ops_reduce_an_on_read_variable(where, aggregation, ops, strategy):
    """The copies are reduced by the operation that is asked for, not by the aggregation."""
    v = make_on_read(strategy, aggregation)
    with scope_if(where, strategy):
        assert numbers(ops().reduce("SUM", v, v).values) == [4.0, 4.0]
        assert numbers(ops().reduce("MEAN", v, v).values) == [2.0, 2.0]
    assert copies(v) == [1.0, 3.0]


@OPS
@in_and_out
def test_cross_device_ops_reduce_several_things(where, ops, strategy):
    v = make(strategy, 3.0)
    with scope_if(where, strategy):
        out = ops().batch_reduce("MEAN", [(v, v), (per(1.0, 3.0), "CPU:0")])
        to_variable = ops().reduce("SUM", per(1.0, 3.0), v)
    assert numbers(out[0].values) == [3.0, 3.0]
    assert float(out[1]) == 2.0
    assert numbers(to_variable.values) == [4.0, 4.0]


@ON_READS
@in_and_out
def test_reduce_to_of_an_on_read_variable(where, aggregation, strategy):
    v = make_on_read(strategy, aggregation)
    with scope_if(where, strategy):
        out = strategy.extended.reduce_to("SUM", v, v)
        assert float(strategy.reduce("SUM", v, axis=None)) == 4.0
        assert float(strategy.reduce("MEAN", v, axis=None)) == 2.0
    assert numbers(out.values) == [4.0, 4.0]


@in_and_out
@both_engines
def test_the_mean_of_a_mirrored_variable_is_its_value(engine, where, strategy):
    v = make(strategy, 3.0)
    with scope_if(where, strategy):
        mean = compile_if(engine, lambda: strategy.reduce("MEAN", v, axis=None) * 1.0)
        assert float(mean()) == 3.0
        assert float(strategy.extended.reduce_to("MEAN", v, v)) == 3.0
