"""Many small arrays travel as few."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.hlo import last_programs

import mirrax as mx
from mirrax._src.collectives import packing
from mirrax._src.collectives.packing import BETWEEN_TWO, PackLimits, plan_packs

EXPERIMENTAL = mx.distribute.experimental


def arrays(*sizes: int, dtype: str = "float32") -> list[jax.Array]:
    return [jnp.ones(size, dtype) for size in sizes]


def test_small_arrays_share_a_pack_and_large_ones_travel_alone() -> None:
    packs = plan_packs(arrays(10, 100_000, 20, 30), PackLimits())
    assert packs == [[0, 2, 3], [1]]


def test_dtypes_do_not_mix() -> None:
    mixed = [*arrays(1, 2), *arrays(3, 4, dtype="int32"), *arrays(5)]
    assert plan_packs(mixed, PackLimits()) == [[0, 1, 4], [2, 3]]


def test_a_pack_is_full_by_bytes_or_by_number() -> None:
    assert plan_packs(arrays(5, 5, 5), PackLimits(pack_bytes=40)) == [[0, 1], [2]]
    assert plan_packs(arrays(5, 5, 5), PackLimits(pack_arrays=2)) == [[0, 1], [2]]


def compiled_text(strategy: mx.MirroredStrategy, fn, value) -> str:
    """What XLA compiled for `fn` on all replicas."""
    step = mx.function(fn)
    strategy.run(step, args=(value,))
    (program,) = last_programs(step).values()
    return program.lower([leaf for leaf in jax.tree.leaves(value)]).compile().as_text()


def all_reduces(text: str) -> int:
    return sum(
        " all-reduce(" in line or " all-reduce-start(" in line
        for line in text.splitlines()
    )


def reduce_with(options=None):
    return lambda xs: mx.get_replica_context().all_reduce("sum", xs, options)


VALUES = [jnp.ones(100) for _ in range(10)]


@pytest.mark.parametrize(
    "num_packs,expected", [(0, 10), (1, 1), (2, 2), (5, 5)], ids=lambda n: f"{n}"
)
def test_num_packs_is_seen_in_the_program(num_packs, expected) -> None:
    ops = mx.distribute.NcclAllReduce(num_packs=num_packs)
    strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"], ops)
    # XLA may join all-reduces of its own accord, so count what mirrax asks for.
    step = mx.function(reduce_with())
    result = strategy.run(step, args=(VALUES,))
    np.testing.assert_array_equal(result[3], np.full(100, 2))
    (program,) = last_programs(step).values()
    text = program.lower(VALUES).as_text()
    assert text.count("stablehlo.all_reduce") == expected


def test_bytes_per_pack_is_seen_in_the_program(two_cpus) -> None:
    options = EXPERIMENTAL.CommunicationOptions(bytes_per_pack=800)
    step = mx.function(reduce_with(options))
    two_cpus.run(step, args=(VALUES,))
    (program,) = last_programs(step).values()
    assert program.lower(VALUES).as_text().count("stablehlo.all_reduce") == 5


def test_options_are_checked() -> None:
    make = EXPERIMENTAL.CommunicationOptions
    assert (
        make(implementation="ring").implementation
        is EXPERIMENTAL.CollectiveCommunication.RING
    )
    with pytest.raises(ValueError, match="bytes_per_pack"):
        make(bytes_per_pack=-1)
    with pytest.raises(ValueError, match="timeout_seconds"):
        make(timeout_seconds=0)
    with pytest.raises(ValueError, match="AUTO, RING or NCCL"):
        make(implementation="carrier pigeon")
    with pytest.raises(ValueError, match="num_packs"):
        mx.distribute.NcclAllReduce(num_packs=-1)


def test_packed_results_are_those_of_single_arrays(two_cpus) -> None:
    rng = np.random.default_rng(0)
    shapes = [(), (3,), (2, 5), (0,), (300, 100), (7, 1, 2)]
    parts = [[rng.normal(size=s).astype("float32") for s in shapes] for _ in range(2)]
    value = [mx.distribute.PerReplica(both) for both in zip(*parts)]
    for fn in (reduce_with(), mx.function(reduce_with())):
        result = two_cpus.run(fn, args=(value,))
        for out, a, b in zip(result, *parts):
            np.testing.assert_allclose(out, a + b, rtol=1e-6)


@pytest.mark.parametrize("has_one_thread", [True, False])
def test_packs_between_workers_however_they_are_written(
    monkeypatch, has_one_thread
) -> None:
    monkeypatch.setattr(packing, "has_one_thread", lambda: has_one_thread)
    shapes = [(), (3,), (300, 100), (0,), (7, 1, 2)]
    given = [jnp.full(shape, i + 1.0) for i, shape in enumerate(shapes)]

    def double(arrays):
        return packing.reduce_packed(arrays, BETWEEN_TWO, lambda a: a * 2)

    for array, result in zip(given, jax.jit(double)(given)):
        np.testing.assert_array_equal(result, array * 2)
    text = jax.jit(double).lower(given).as_text()
    assert ("dynamic_update_slice" in text) != has_one_thread
    assert text.count("stablehlo.multiply") == 1  # all that is not empty in one pack
