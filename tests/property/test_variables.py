"""Random sequences of assignments, in replicas and outside, beside a NumPy model."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.engines import both_engines, mirrored, per_replica
from hypothesis import given
from hypothesis import strategies as st

import mirrax as mx

from . import numpy_model as model
from .examples import examples

STRATEGIES = {n: mirrored(n) for n in range(1, 5)}
METHODS = ["assign", "assign_add", "assign_sub"]
AGGREGATIONS = ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]

values = st.integers(0, 8).map(lambda k: k / 2)
steps = st.lists(
    st.tuples(
        st.sampled_from(["replicas", "across", "across, part by part"]),
        st.sampled_from(METHODS),
        st.lists(values, min_size=8, max_size=8),
    ),
    min_size=1,
    max_size=3,
)


def assert_close(mine, theirs):
    # A mean of three is a product with 1/3 in one place and a quotient in the other.
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


class Pair:
    """A mirrax variable and its model, which take the same steps."""

    def __init__(self, n, synchronization, aggregation, shape, dtype, engine):
        self.strategy = STRATEGIES[n]
        self.engine = engine
        start = np.ones(shape, dtype)
        with self.strategy.scope():
            self.variable = mx.Variable(
                start,
                synchronization=mx.VariableSynchronization[synchronization],
                aggregation=mx.VariableAggregation[aggregation],
            )
        self.model = model.Variable(start, n, synchronization, aggregation)
        self._functions = {}

    def take(self, where, method, numbers):
        n = len(self.model.copies)
        like = self.model.copies[0]
        parts = [np.full(like.shape, k).astype(like.dtype) for k in numbers[:n]]
        if where == "replicas":
            self.model.in_replicas(method, parts)
            function = self._function(method)
            self.strategy.run(function, (per_replica(self.strategy, *parts),))
            return
        is_apart = where == "across, part by part" and not self.model.is_on_read
        value = per_replica(self.strategy, *parts) if is_apart else parts[0]
        try:
            self.model.across(method, parts if is_apart else parts[0])
        except model.NotAllowed:
            with pytest.raises(ValueError, match="Variable 'Variable'"):
                getattr(self.variable, method)(value)
        else:
            getattr(self.variable, method)(value)

    def _function(self, method):
        if method not in self._functions:

            def fn(x):
                getattr(self.variable, method)(x)

            self._functions[method] = fn if self.engine == "eager" else mx.function(fn)
        return self._functions[method]

    def check(self):
        copies = self.strategy.experimental_local_results(self.variable)
        for mine, theirs in zip(copies, self.model.copies):
            assert mine.dtype == theirs.dtype
            assert_close(mine, theirs)
        inside = self.strategy.run(lambda: self.variable.read_value())
        for mine, theirs in zip(
            self.strategy.experimental_local_results(inside), self.model.copies
        ):
            assert_close(mine, theirs)
        try:
            expected = self.model.read()
        except model.NotAllowed:
            with pytest.raises(ValueError, match="aggregation NONE"):
                self.variable.read_value()
        else:
            assert_close(self.variable.read_value(), expected)
            with self.strategy.scope():
                assert_close(self.variable.numpy(), expected)


@both_engines
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@examples(25)
@given(
    n=st.integers(1, 4),
    aggregation=st.sampled_from(AGGREGATIONS),
    kind=st.sampled_from([((), "float32"), ((2,), "int32"), ((2,), "float32")]),
    steps=steps,
)
def test_assignments(engine, synchronization, n, aggregation, kind, steps):
    shape, dtype = kind
    dtype = "float32" if aggregation == "MEAN" else dtype
    pair = Pair(n, synchronization, aggregation, shape, dtype, engine)
    pair.check()
    for step in steps:
        pair.take(*step)
        pair.check()


@examples(15)
@given(
    n=st.integers(1, 3),
    kinds=st.lists(
        st.tuples(
            st.sampled_from(["ON_WRITE", "ON_READ"]),
            st.sampled_from(AGGREGATIONS[1:]),
        ),
        min_size=2,
        max_size=3,
    ),
    methods=st.lists(st.sampled_from(METHODS), min_size=3, max_size=3),
    numbers=st.lists(values, min_size=4, max_size=4),
)
def test_one_compiled_step_assigns_many_variables(n, kinds, methods, numbers):
    strategy = STRATEGIES[n]
    with strategy.scope():
        variables = [
            mx.Variable(
                [1.0, 1.0],
                synchronization=mx.VariableSynchronization[s],
                aggregation=mx.VariableAggregation[a],
            )
            for s, a in kinds
        ]
    models = [model.Variable(np.ones(2, np.float32), n, s, a) for s, a in kinds]
    parts = [np.full(2, k, np.float32) for k in numbers[:n]]

    @mx.function
    def step(x):
        for v, method in zip(variables, methods):
            getattr(v, method)(x)
            v.assign_add(x)

    for _ in range(2):
        strategy.run(step, (per_replica(strategy, *parts),))
        for v, m, method in zip(variables, models, methods):
            m.in_replicas(method, parts)
            m.in_replicas("assign_add", parts)
            for mine, theirs in zip(strategy.experimental_local_results(v), m.copies):
                assert_close(mine, theirs)
            assert_close(v.read_value(), m.read())


@pytest.mark.parametrize("is_compiled", [False, True])
@examples(15)
@given(
    n=st.integers(1, 4),
    synchronization=st.sampled_from(["ON_WRITE", "ON_READ"]),
    aggregation=st.sampled_from(AGGREGATIONS[1:]),
    method=st.sampled_from(METHODS),
    numbers=st.lists(values, min_size=4, max_size=4),
)
def test_cross_replica_code_around_run(
    is_compiled, n, synchronization, aggregation, method, numbers
):
    strategy = STRATEGIES[n]
    start = np.ones(2, np.float32)
    with strategy.scope():
        v = mx.Variable(
            start,
            synchronization=mx.VariableSynchronization[synchronization],
            aggregation=mx.VariableAggregation[aggregation],
        )
    expected = model.Variable(start, n, synchronization, aggregation)
    parts = [np.full(2, k, np.float32) for k in numbers[:n]]

    def step(x):
        with strategy.scope():
            before = v.read_value()
        strategy.run(lambda x: getattr(v, method)(x, read_value=False), (x,))
        after = v.read_value()
        v.assign(after * 0.5)
        return before, after

    step = mx.function(step) if is_compiled else step
    for _ in range(2):
        before, after = step(per_replica(strategy, *parts))
        assert_close(before, expected.read())
        expected.in_replicas(method, parts)
        assert_close(after, expected.read())
        expected.across("assign", expected.read() * np.float32(0.5))
        copies = strategy.experimental_local_results(v)
        for mine, theirs in zip(copies, expected.copies):
            assert_close(mine, theirs)
