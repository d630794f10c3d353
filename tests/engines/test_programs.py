"""What is compiled: few all-reduces, each algorithm its own program, memory reused."""

from __future__ import annotations

import contextlib
import gc
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import all_sum, mirrored, parts, per_replica, replica_id
from helpers.hlo import arrays_in, compiled_text, count, replica_groups

import mirrax as mx
from mirrax._src.state.variable import Variable

SMALL, LARGE = 10, 64 * 1024 // 4  # a large array has 64 KiB


def text_of(strategy, fn, *args):
    function = mx.function(fn)
    strategy.run(function, args)
    return compiled_text(function, strategy, *args)


def reduce_text(strategy, sizes, options=None, dtype="float32"):
    arrays = [jnp.ones(size, dtype) for size in sizes]

    def replica_fn(arrays):
        scaled = [a * (replica_id() + 1).astype(a.dtype) for a in arrays]
        return mx.get_replica_context().all_reduce("SUM", scaled, options)

    return text_of(strategy, replica_fn, arrays)


# Packing -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 8])
def test_many_small_arrays_travel_as_one(n):
    assert arrays_in(reduce_text(mirrored(n), [SMALL] * 20), "all-reduce") == 1


def test_large_arrays_travel_alone():
    text = reduce_text(mirrored(2), [SMALL, LARGE, SMALL, LARGE, SMALL])
    assert arrays_in(text, "all-reduce") == 3
    assert f"f32[{3 * SMALL}]" in text


def test_each_dtype_has_its_own_pack():
    strategy = mirrored(2)
    arrays = [jnp.ones(SMALL, d) for d in ("float32", "int32", "float32", "int32")]
    text = text_of(strategy, lambda x: all_sum([a * 2 for a in x]), arrays)
    assert arrays_in(text, "all-reduce") == 2


@pytest.mark.slow
def test_a_pack_does_not_grow_without_end():
    # Of 60,000 bytes each, 17 of which are one of 1 MiB.
    assert arrays_in(reduce_text(mirrored(2), [15_000] * 20), "all-reduce") == 2


def test_the_gradients_of_a_training_step_travel_as_one():
    strategy = mirrored(2)
    with strategy.scope():
        weights = [mx.Variable(jnp.ones(5)) for _ in range(12)]

    def step(x):
        gradients = mx.grad(lambda: sum(jnp.sum(w * w) * x for w in weights), weights)()
        for w, g in zip(weights, all_sum(gradients)):
            w.assign_sub(0.25 * g)

    x = per_replica(strategy, 1.0, 1.0)
    assert arrays_in(text_of(strategy, step, x), "all-reduce") == 1
    assert weights[0].numpy().tolist() == [0.0] * 5


@pytest.mark.parametrize(
    "ops, expected",
    [
        (mx.distribute.NcclAllReduce(num_packs=0), 6),
        (mx.distribute.NcclAllReduce(num_packs=1), 1),
        (mx.distribute.NcclAllReduce(num_packs=2), 2),
        (mx.distribute.NcclAllReduce(num_packs=3), 3),
    ],
    ids=repr,
)
def test_the_number_of_packs_can_be_chosen(ops, expected):
    strategy = mirrored(2, cross_device_ops=ops)
    assert arrays_in(reduce_text(strategy, [SMALL] * 6), "all-reduce") == expected


@pytest.mark.parametrize("bytes_per_pack, expected", [(80, 3), (4000, 1), (1, 6)])
def test_the_size_of_packs_can_be_chosen(bytes_per_pack, expected):
    options = mx.distribute.experimental.CommunicationOptions(
        bytes_per_pack=bytes_per_pack
    )
    text = reduce_text(mirrored(2), [SMALL] * 6, options)
    assert arrays_in(text, "all-reduce") == expected


def test_what_replicas_do_alone_needs_no_all_reduce():
    strategy = mirrored(4)
    with strategy.scope():
        v = mx.Variable(jnp.ones(3))

    def replica_fn(x):
        loss, gradient = mx.value_and_grad(lambda: jnp.sum(v * x), v)()
        return loss, gradient

    text = text_of(strategy, replica_fn, per_replica(strategy, 1.0, 2.0, 3.0, 4.0))
    for operation in ("all-reduce", "all-gather", "collective-permute", "all-to-all"):
        assert count(text, operation) == 0


def test_an_all_gather_is_one_operation():
    strategy = mirrored(4)
    text = text_of(
        strategy,
        lambda x: mx.get_replica_context().all_gather(x, axis=0),
        per_replica(strategy, *np.ones((4, 2))),
    )
    assert count(text, "all-gather") == 1


# Algorithms ----------------------------------------------------------------------------

ALGORITHMS = {
    "nccl": mx.distribute.NcclAllReduce(),
    "hierarchical": mx.distribute.HierarchicalCopyAllReduce(),
    "one device": mx.distribute.ReductionToOneDevice(),
    "another device": mx.distribute.ReductionToOneDevice(reduce_to_device="CPU:1"),
}
algorithms = pytest.mark.parametrize("name", ALGORITHMS)


@pytest.mark.slow
@algorithms
@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_algorithms_give_the_same_sums(name, n):
    strategy = mirrored(n, cross_device_ops=ALGORITHMS[name])
    x = per_replica(strategy, *([i + 1.0, 10.0 * i] for i in range(n)))
    expected = [n * (n + 1) / 2, 10.0 * n * (n - 1) / 2]
    for fn in (all_sum, mx.function(all_sum)):
        out = strategy.run(fn, (x,))
        assert isinstance(out, mx.distribute.Mirrored)
        assert parts(strategy, out) == [expected] * n
    assert strategy.reduce("SUM", x, axis=None).tolist() == expected
    mean = strategy.reduce("MEAN", x, axis=None)
    np.testing.assert_allclose(mean, np.array(expected) / n, rtol=1e-6)


def test_nccl_compiles_to_one_all_reduce_of_everybody():
    text = reduce_text(mirrored(4), [SMALL])
    assert replica_groups(text) == [[[0, 1, 2, 3]]]
    assert count(text, "collective-permute") == 0


@pytest.mark.parametrize(
    "n, within, across",
    [
        (4, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (6, [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_hierarchical_copy_compiles_to_two_levels(n, within, across):
    strategy = mirrored(n, cross_device_ops=ALGORITHMS["hierarchical"])
    text = reduce_text(strategy, [SMALL])
    assert sorted(replica_groups(text), key=len) == sorted([within, across], key=len)
    assert count(text, "all-reduce") == 2


@pytest.mark.parametrize("name", ["one device", "another device"])
def test_reduction_to_one_device_compiles_to_copies(name):
    strategy = mirrored(4, cross_device_ops=ALGORITHMS[name])
    text = reduce_text(strategy, [SMALL])
    assert count(text, "all-reduce") == 0
    assert count(text, "collective-permute") == 6, "three there and three back"


def test_an_accumulation_function_of_ones_own():
    seen = []

    def largest(parts):
        seen.append(len(parts))
        total = parts[0]
        for part in parts[1:]:
            total = jnp.maximum(total, part)
        return total

    ops = mx.distribute.ReductionToOneDevice(accumulation_fn=largest)
    strategy = mirrored(3, cross_device_ops=ops)
    x = per_replica(strategy, 5.0, 9.0, 7.0)
    for fn in (all_sum, mx.function(all_sum)):
        assert parts(strategy, strategy.run(fn, (x,))) == [9.0] * 3
    assert set(seen) == {3}


@algorithms
def test_small_arrays_are_packed_by_algorithms_that_pack(name):
    strategy = mirrored(2, cross_device_ops=ALGORITHMS[name])
    single = reduce_text(strategy, [SMALL])
    many = reduce_text(strategy, [SMALL] * 5)
    for operation in ("all-reduce", "collective-permute"):
        assert arrays_in(many, operation) == arrays_in(single, operation)


# Memory --------------------------------------------------------------------------------


def test_written_variables_alias_their_inputs():
    strategy = mirrored(2)
    with strategy.scope():
        v, w, constant = (mx.Variable(jnp.ones(100)) for _ in range(3))

    def step():
        v.assign_add(constant)
        w.assign_sub(constant)

    text = text_of(strategy, step)
    assert text.splitlines()[0].count("-alias)") == 2


def test_a_variable_that_is_assigned_its_own_value_is_only_read():
    strategy = mirrored(2)
    with strategy.scope():
        v, rate = mx.Variable(jnp.ones(100)), mx.Variable(0.5)

    def step():
        v.assign_sub(rate * v)
        rate.assign(rate.read_value())

    text = text_of(strategy, step)
    assert text.splitlines()[0].count("-alias)") == 1
    assert "->f32[100]" in text.splitlines()[0]
    rate.assign(0.25)
    strategy.run(mx.function(step))
    np.testing.assert_array_equal(v.numpy(), np.full(100, 0.375))
    assert rate.numpy() == 0.25


def test_a_step_neither_writes_nor_copies_the_learning_rate():
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(jnp.ones(100))
        optimizer = mx.train.Optimizer("sgd", learning_rate=0.5, momentum=0.9)

    def step():
        optimizer.apply_gradients([(jnp.ones(100), v)])

    text = text_of(strategy, step)
    # The variable, its slot, and two counts of steps.
    assert text.splitlines()[0].count("-alias)") == 4
    optimizer.learning_rate = 0.0
    before = v.numpy()
    strategy.run(mx.function(step))
    np.testing.assert_array_equal(v.numpy(), before)


def test_donated_arguments_alias_their_outputs():
    strategy = mirrored(2)
    state = strategy.replicate([jnp.ones(100), jnp.ones(100)])
    function = mx.function(lambda s: [x + 1 for x in s], donate_argnums=0)
    state = strategy.run(function, (state,))
    text = compiled_text(function, strategy, state)
    assert text.splitlines()[0].count("-alias)") == 2


def test_variables_that_are_not_used_are_not_in_the_program():
    strategy = mirrored(2)
    with strategy.scope():
        used = mx.Variable(jnp.ones(7))
        unused = mx.Variable(jnp.ones(1234))
    text = text_of(strategy, lambda: used * 2)
    assert "f32[7]" in text
    assert "1234" not in text
    assert unused.shape == (1234,)


@contextlib.contextmanager
def interrupted_at(line, function):
    """Raises KeyboardInterrupt before so many lines of `function` have run."""
    left = [line]

    def trace(frame, event, _):
        if frame.f_code is not function.__code__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    gc.disable()  # what another test has left moves variables when it is collected
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()


def test_a_step_updates_what_an_interrupted_assignment_has_left():
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(jnp.zeros(3))
    step = mx.function(lambda: v.assign_add(jnp.ones(3)))
    strategy.run(step)
    interrupts = 0
    for line in range(20):
        with contextlib.suppress(KeyboardInterrupt):
            interrupts += 1
            with interrupted_at(line, Variable.move_to):
                v.assign(jnp.full(3, 100.0))
            interrupts -= 1
        before = v.numpy()
        strategy.run(step)
        np.testing.assert_array_equal(v.numpy(), before + 1, err_msg=str(line))
    assert interrupts >= 5
