"""Random sequences of operations on two workers of two replicas, beside a NumPy model."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import per_replica
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property import numpy_model as model
from property.examples import IS_THOROUGH, examples

import mirrax as mx

from .comparing import Pool, view

N = 4
METHODS = ["assign", "assign_add", "assign_sub"]
KINDS = [
    ("ON_WRITE", "NONE", "float32"),
    ("ON_WRITE", "SUM", "float32"),
    ("ON_WRITE", "SUM", "int32"),
    ("ON_WRITE", "MEAN", "float32"),
    ("ON_WRITE", "ONLY_FIRST_REPLICA", "int32"),
    ("ON_READ", "SUM", "float32"),
    ("ON_READ", "MEAN", "float32"),
]

numbers = st.lists(st.integers(0, 8), min_size=N, max_size=N)
lengths = st.one_of(
    st.sampled_from([[2] * N, [0] * N, [0, 0, 2, 2], [2, 0, 0, 0]]),
    st.lists(st.sampled_from([0, 1, 2]), min_size=N, max_size=N),
)
operations = st.one_of(
    st.tuples(
        st.just("assign"),
        st.integers(0, len(KINDS) - 1),
        st.sampled_from(["replicas", "across", "part by part"]),
        st.sampled_from(METHODS),
        numbers,
    ),
    st.tuples(
        st.just("reduce"),
        lengths,
        st.sampled_from(["SUM", "MEAN"]),
        st.sampled_from([0, -1, (0,)]),
        numbers,
    ),
    st.tuples(st.just("gather"), lengths, numbers),
    st.tuples(st.just("all_reduce"), st.sampled_from(["SUM", "MEAN"]), numbers),
    st.tuples(st.just("step"), lengths, numbers),
    st.just(("read",)),
)
programs = st.lists(operations, min_size=2, max_size=6)


def rows_of(lengths: list[int], numbers: list[int]) -> list[np.ndarray]:
    """A row for each replica: halves, whose sums are exact."""
    return [np.full(n, k / 2, "float32") for n, k in zip(lengths, numbers)]


class Expected:
    """What the operations give, one array for each replica."""

    def __init__(self) -> None:
        self.variables = [model.Variable(np.ones(2, d), N, s, a) for s, a, d in KINDS]

    def read(self) -> list[Any]:
        return [[np.asarray(c) for c in v.copies] for v in self.variables]

    def assign(self, i, where, method, numbers) -> Any:
        variable = self.variables[i]
        parts = [np.full(2, k).astype(variable.dtype) for k in numbers]
        if where == "replicas":
            variable.in_replicas(method, parts)
            return None
        is_apart = where == "part by part" and not variable.is_on_read
        try:
            variable.across(method, parts if is_apart else parts[0])
        except model.NotAllowed:
            return "not allowed"
        return None

    def reduce(self, lengths, op, axis, numbers) -> Any:
        return model.reduce(op, rows_of(lengths, numbers), axis)

    def gather(self, lengths, numbers) -> Any:
        return model.gather(rows_of(lengths, numbers), 0)

    def all_reduce(self, op, numbers) -> Any:
        parts = [np.full(3, k / 2, "float32") for k in numbers]
        return [model.reduce(op, parts, None)] * N

    def step(self, lengths, numbers) -> Any:
        """A step of a loss over a batch that may be uneven."""
        parts = rows_of(lengths, numbers)
        total = np.float32(sum(part.sum() for part in parts))
        self.variables[1].in_replicas(
            "assign_add", [np.full(2, p.sum()) for p in parts]
        )
        return [part + total for part in parts]


class Found:
    """The same by mirrax: compiled, or compiled and eager in turn."""

    def __init__(self, strategy: Any, engine: str) -> None:
        self.strategy, self.engine = strategy, engine
        with strategy.scope():
            self.variables = [
                mx.Variable(
                    np.ones(2, dtype),
                    synchronization=mx.VariableSynchronization[synchronization],
                    aggregation=mx.VariableAggregation[aggregation],
                )
                for synchronization, aggregation, dtype in KINDS
            ]
        self._functions: dict[Any, Any] = {}
        self._calls = 0

    def start(self) -> None:
        """All variables as at the start."""

        def reset() -> None:
            for v in self.variables:
                one = jnp.ones(2, v.dtype)
                # Each replica has its own part in the sum.
                is_summed = v.aggregation is mx.VariableAggregation.SUM
                is_on_read = v.synchronization is mx.VariableSynchronization.ON_READ
                v.assign(
                    (one / N).astype(v.dtype) if is_summed and not is_on_read else one
                )

        self.strategy.run(reset)
        for v in self.variables:
            if v.synchronization is mx.VariableSynchronization.ON_WRITE:
                v.assign(jnp.ones(2, v.dtype))

    def read(self) -> list[Any]:
        return self.variables

    def assign(self, i, where, method, numbers) -> Any:
        variable = self.variables[i]
        parts = [np.full(2, k).astype(variable.dtype) for k in numbers]
        if where == "replicas":

            def fn(x: Any) -> None:
                getattr(variable, method)(x)

            self._run(("assign", i, method), fn, parts)
            return None
        is_on_read = variable.synchronization is mx.VariableSynchronization.ON_READ
        is_apart = where == "part by part" and not is_on_read
        value = per_replica(self.strategy, *parts) if is_apart else parts[0]
        try:
            getattr(variable, method)(value)
        except ValueError:
            return "not allowed"
        return None

    def reduce(self, lengths, op, axis, numbers) -> Any:
        x = self._run("double", lambda x: x * 1, rows_of(lengths, numbers))
        return self.strategy.reduce(op, x, axis=axis)

    def gather(self, lengths, numbers) -> Any:
        x = per_replica(self.strategy, *rows_of(lengths, numbers))
        return self.strategy.gather(x, axis=0)

    def all_reduce(self, op, numbers) -> Any:
        parts = [np.full(3, k / 2, "float32") for k in numbers]
        return self._run(
            ("all_reduce", op),
            lambda x: mx.get_replica_context().all_reduce(op, x),
            parts,
        )

    def step(self, lengths, numbers) -> Any:
        def fn(x: Any) -> Any:
            total = mx.get_replica_context().all_reduce("SUM", jnp.sum(x))
            self.variables[1].assign_add(jnp.full(2, jnp.sum(x)))
            return x + total

        return self._run("step", fn, rows_of(lengths, numbers))

    def _run(self, key: Any, fn: Any, parts: list[np.ndarray]) -> Any:
        self._calls += 1
        if self.engine == "compiled" or self._calls % 2:
            fn = self._functions.setdefault(key, mx.function(fn))
        return self.strategy.run(fn, (per_replica(self.strategy, *parts),))


def perform(strategy: Any, engine: str, batch: list[list[Any]]) -> list[list[Any]]:
    """What each operation of each program gives on this worker, and all variables then."""
    found = Found(strategy, engine)
    results = []
    for program in batch:
        found.start()
        outcomes = [
            view(strategy, getattr(found, name)(*arguments))
            for name, *arguments in program
        ]
        results.append([*outcomes, view(strategy, found.read())])
    return results


def assert_close(found: Any, wanted: Any, worker: int) -> None:
    """A worker has its own two of what all replicas have."""
    if isinstance(wanted, list) and isinstance(wanted[0], list):
        for mine, theirs in zip(found, wanted):
            assert_close(mine, theirs, worker)
    elif isinstance(wanted, list):
        own = wanted[2 * worker : 2 * worker + 2]
        assert len(found.parts) == len(own)
        for mine, theirs in zip(found.parts, own):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    elif isinstance(wanted, np.ndarray | np.generic):
        assert np.shape(found) == np.shape(wanted)
        expected: Any = wanted
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert found == wanted


@pytest.mark.parametrize("engine", ["compiled", "in turn"])
@settings(
    examples(4 if IS_THOROUGH else 2),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batch=st.lists(programs, min_size=12, max_size=12))
def test_any_sequence(two_by_two: Pool, engine: str, batch) -> None:
    results = two_by_two.run(perform, engine, batch)
    for i, program in enumerate(batch):
        expected = Expected()
        wanted = [getattr(expected, name)(*args) for name, *args in program]
        for worker, own in enumerate(results):
            for step, mine, theirs in zip(
                [*program, "at the end"], own[i], [*wanted, expected.read()]
            ):
                try:
                    assert_close(mine, theirs, worker)
                except AssertionError as error:
                    error.add_note(f"worker {worker}, {step} of {program}")
                    raise
