"""`run_steps_on_dataset` and its `MultiStepContext`: a compiled loop with named outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import mirrax as mx

from .towers import (
    MEAN,
    NONE,
    ON_READ,
    ONLY_FIRST_TOWER,
    SUM,
    Counter,
    all_sizes,
    batches,
    eagerly,
    numbers,
    older_names,
    parts,
    tower_id,
    towers,
)

pytestmark = older_names

MultiStepContext = mx.contrib.distribute.MultiStepContext


# Outputs --------------------------------------------------------------------------------


@eagerly
@all_sizes
def test_outputs_of_the_last_step(n: int, run_eagerly: None) -> None:
    distribution = towers(n)

    def tower_fn(context, x):
        context.set_last_step_output("tower_sum", x, aggregation=SUM)
        context.set_last_step_output("tower_mean", x * 10, aggregation=MEAN)
        context.set_last_step_output("first", x, aggregation=ONLY_FIRST_TOWER)
        context.set_non_tensor_output("foo", "bar")
        return x + 0.5

    def step_fn(context, x):
        assert isinstance(context, MultiStepContext)
        assert mx.contrib.get_cross_tower_context() is distribution
        y = distribution.call_for_each_tower(tower_fn, context, x)
        context.set_last_step_output("cross_mean", y, aggregation=MEAN)
        context.set_last_step_output("cross_first", y, aggregation=ONLY_FIRST_TOWER)
        context.set_last_step_output("none", y, aggregation=NONE)
        context.set_last_step_output("default", y)
        context.set_non_tensor_output("step", ("a", 1))
        return distribution.group(y)

    with distribution.scope():
        context = distribution.run_steps_on_dataset(
            step_fn, batches(distribution, numbers(5 * n)), iterations=3
        )
    assert isinstance(context, MultiStepContext)
    last = numbers(5 * n)[2 * n : 3 * n]  # what the towers saw in the third step
    outputs = context.last_step_outputs
    scalars = {
        "tower_sum": last.sum(),
        "tower_mean": 10 * last.mean(),
        "first": last[0],
        "cross_mean": last.mean() + 0.5,
        "cross_first": last[0] + 0.5,
    }
    assert set(outputs) == {*scalars, "none", "default"}
    for name, value in scalars.items():
        assert parts(distribution, outputs[name]) == [pytest.approx(value)], name
    for name in ("none", "default"):
        assert parts(distribution, outputs[name]) == (last + 0.5).tolist()
    assert context.non_tensor_outputs == {"foo": ["bar"], "step": ("a", 1)}


def test_run_op_takes_the_next_steps() -> None:
    distribution, traces = towers(2), Counter()
    with distribution.scope():
        v = mx.Variable(0.0, aggregation=SUM)

    def step_fn(context, x):
        traces.note()
        y = distribution.call_for_each_tower(lambda x: v.assign_add(x).read_value(), x)
        context.set_last_step_output("v", y, aggregation=MEAN)

    with distribution.scope():
        iterator = batches(distribution, numbers(13))
        context = distribution.run_steps_on_dataset(step_fn, iterator, iterations=2)
        assert float(context.last_step_outputs["v"]) == float(v) == 6.0
        assert context.run_op() is None
        assert float(context.last_step_outputs["v"]) == float(v) == 28.0
    context.run_op()  # also outside the scope
    assert float(context.last_step_outputs["v"]) == float(v) == 66.0
    with pytest.raises(mx.errors.OutOfRangeError, match="after 0 of 2 steps"):
        context.run_op()
    assert float(context.last_step_outputs["v"]) == 66.0
    assert traces.count <= 2


def test_outputs_of_any_structure() -> None:
    distribution = towers(2)

    def tower_fn(context, x):
        tree = {"a": [x, (x * 2, None)]}
        context.set_last_step_output("tower", tree, aggregation=SUM)
        return tree

    def step_fn(context, x):
        tree = distribution.call_for_each_tower(tower_fn, context, x)
        context.set_last_step_output("tree", tree)
        context.set_last_step_output("sums", tree, aggregation=SUM)
        context.set_last_step_output("plain", {"number": 2.5, "name": "text"})

    outputs = distribution.run_steps_on_dataset(
        step_fn, batches(distribution, numbers(4)), 2
    ).last_step_outputs
    assert parts(distribution, outputs["tree"]["a"][0]) == [2.0, 3.0]
    assert parts(distribution, outputs["tree"]["a"][1][0]) == [4.0, 6.0]
    for name in ("tower", "sums"):
        assert outputs[name]["a"][1][1] is None
        assert float(outputs[name]["a"][0]) == 5.0
        assert float(outputs[name]["a"][1][0]) == 10.0
    assert outputs["plain"]["name"] == "text"
    assert float(outputs["plain"]["number"]) == 2.5


def test_the_same_name_again_wins() -> None:
    distribution = towers(2)

    def step_fn(context, x):
        context.set_last_step_output("x", x, aggregation=SUM)
        context.set_last_step_output("x", x, aggregation=MEAN)
        context.set_non_tensor_output("y", 1)
        context.set_non_tensor_output("y", 2)

    context = distribution.run_steps_on_dataset(
        step_fn, batches(distribution, numbers(4)), 2
    )
    assert float(context.last_step_outputs["x"]) == 2.5
    assert context.non_tensor_outputs == {"y": 2}


@all_sizes
def test_outputs_that_differ_between_towers_are_listed(n: int) -> None:
    distribution = towers(n)
    mx.config.run_functions_eagerly(True)
    try:
        context = distribution.run_steps_on_dataset(
            lambda context, x: distribution.call_for_each_tower(
                lambda c: c.set_non_tensor_output("name", f"tower {tower_id()}"),
                context,
            ),
            batches(distribution, numbers(2 * n)),
        )
    finally:
        mx.config.run_functions_eagerly(False)
    names = [f"tower {i}" for i in range(n)]
    assert context.non_tensor_outputs == {"name": names}


def test_eager_steps_are_the_users_own_functions() -> None:
    distribution = towers(2)

    def seen_by(scale: float) -> list[float]:
        seen: list[float] = []

        def tower_fn(x):
            seen.append(float(x) * scale)

        def step_fn(context, x):
            seen.append(-1.0)
            distribution.call_for_each_tower(tower_fn, x)

        distribution.run_steps_on_dataset(step_fn, batches(distribution, numbers(4)), 2)
        return seen

    mx.config.run_functions_eagerly(True)
    try:
        assert seen_by(1.0) == [-1.0, 0.0, 1.0, -1.0, 2.0, 3.0]
        assert seen_by(2.0) == [-1.0, 0.0, 2.0, -1.0, 4.0, 6.0]
    finally:
        mx.config.run_functions_eagerly(False)


def test_outputs_of_earlier_rounds_stay_as_they_were() -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(0.0, aggregation=SUM)

    def step_fn(context, x):
        y = distribution.call_for_each_tower(lambda x: v.assign_add(x).read_value(), x)
        context.set_last_step_output("y", y)
        context.set_last_step_output("v", v.read_value())

    context = distribution.run_steps_on_dataset(
        step_fn, batches(distribution, numbers(8)), 2
    )
    before = context.last_step_outputs
    context.run_op()
    assert [parts(distribution, before[name])[0] for name in ("y", "v")] == [6.0, 6.0]
    after = context.last_step_outputs
    assert [parts(distribution, after[name])[0] for name in ("y", "v")] == [28.0, 28.0]


def test_a_step_without_outputs() -> None:
    distribution = towers(2)
    context = distribution.run_steps_on_dataset(
        lambda context, x: None, batches(distribution, numbers(4)), 2
    )
    assert context.last_step_outputs == context.non_tensor_outputs == {}


def test_what_a_step_has_set_so_far_can_be_seen() -> None:
    distribution, seen = towers(2), []

    def step_fn(context, x):
        context.set_last_step_output("a", 1.0)
        seen.append(set(context.last_step_outputs))
        context.set_last_step_output("b", 2.0)

    distribution.run_steps_on_dataset(step_fn, batches(distribution, numbers(2)))
    assert seen[0] == {"a"}


@eagerly
def test_random_keys_are_outputs_too(run_eagerly: None) -> None:
    distribution, key = towers(2), jax.random.key(3)

    def step_fn(context, x):
        context.set_last_step_output("step", key)
        distribution.call_for_each_tower(
            lambda c: c.set_last_step_output("tower", key, ONLY_FIRST_TOWER), context
        )

    outputs = distribution.run_steps_on_dataset(
        step_fn, batches(distribution, numbers(4)), 2
    ).last_step_outputs
    for found in outputs.values():
        assert jax.random.uniform(found) == jax.random.uniform(key)


@eagerly
@pytest.mark.parametrize("n", [1, 3])
def test_everything_between_towers_works_inside_a_step(
    n: int, run_eagerly: None
) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(1.0)
        local = mx.Variable(2.0, synchronization=ON_READ, aggregation=MEAN)

    def step_fn(context, x):
        total, mean = (
            distribution.batch_reduce(SUM, [(x, x)])[0],
            distribution.reduce(MEAN, x, v),
        )
        distribution.update(v, lambda v, t: v.assign_add(t), total)
        devices = distribution.non_slot_devices([v])
        found = {
            "mean": mean,
            "v": distribution.read_var(v),
            "local": distribution.read_var(local),
            "broadcast": distribution.broadcast(jnp.float32(3)),
            "index": distribution.call_for_each_tower(
                lambda i: i + tower_id(), distribution.worker_device_index
            ),
            "non_slot": distribution.update_non_slot(devices, lambda: jnp.float32(4)),
            "unwrapped": sum(distribution.unwrap(x)),
        }
        assert distribution.value_container(distribution.unwrap(v)[0]) is v
        for name, value in found.items():
            context.set_last_step_output(name, value)

    outputs = distribution.run_steps_on_dataset(
        step_fn, batches(distribution, numbers(2 * n)), 2
    ).last_step_outputs
    last = numbers(2 * n)[n:]
    found = {name: parts(distribution, x) for name, x in outputs.items()}
    assert found["index"] == [2 * i for i in range(n)]
    firsts = {name: values[0] for name, values in found.items() if name != "index"}
    assert firsts == {
        "mean": last.mean(),
        "v": 1 + numbers(2 * n).sum(),
        "local": 2.0,
        "broadcast": 3.0,
        "non_slot": 4.0,
        "unwrapped": last.sum(),
    }


@eagerly
@pytest.mark.parametrize("n", [1, 2])
def test_a_map_inside_a_step(n: int, run_eagerly: None) -> None:
    distribution = towers(n)

    def step_fn(context, x):
        mapped = distribution.map(
            [jnp.float32(i) for i in range(10)], lambda x, y: x * y, 2
        )
        context.set_last_step_output("sum", distribution.reduce(SUM, mapped, "CPU:0"))

    context = distribution.run_steps_on_dataset(
        step_fn, batches(distribution, numbers(2 * n)), 2
    )
    assert parts(distribution, context.last_step_outputs["sum"])[0] == 90.0


# Inputs ---------------------------------------------------------------------------------


@eagerly
@pytest.mark.parametrize("n", [1, 3])
def test_a_tuple_is_passed_as_several_arguments(n: int, run_eagerly: None) -> None:
    distribution = towers(n)

    def step_fn(context, x, y):
        z = distribution.call_for_each_tower(lambda x, y: x * y, x, y)
        context.set_last_step_output("z", z)

    context = distribution.run_steps_on_dataset(
        step_fn, batches(distribution, numbers(2 * n), numbers(2 * n) + 1), 2
    )
    wanted = (numbers(2 * n) * (numbers(2 * n) + 1))[n:]
    assert parts(distribution, context.last_step_outputs["z"]) == wanted.tolist()


def test_other_structures_are_one_argument() -> None:
    distribution = towers(2)
    rows = {"x": numbers(4), "y": (numbers(4), numbers(4) * 2)}
    iterator = distribution.distribute_dataset(
        lambda: mx.data.Dataset.from_tensor_slices(rows)
    ).make_one_shot_iterator()

    def step_fn(context, element):
        context.set_last_step_output("x", element["x"])
        context.set_last_step_output("y", element["y"][1], aggregation=SUM)

    outputs = distribution.run_steps_on_dataset(step_fn, iterator, 2).last_step_outputs
    assert parts(distribution, outputs["x"]) == [2.0, 3.0]
    assert float(outputs["y"]) == 10.0


def test_one_iteration_by_default() -> None:
    distribution = towers(2)
    iterator = batches(distribution, numbers(6))
    distribution.run_steps_on_dataset(lambda context, x: None, iterator)
    assert parts(distribution, next(iterator)) == [2.0, 3.0]


def test_batches_of_different_sizes() -> None:
    distribution = towers(2)

    def dataset_fn():
        return mx.data.Dataset.from_tensor_slices(numbers(7)).batch(2)

    with distribution.scope():
        total = mx.Variable(0.0, aggregation=SUM)

    def tower_fn(x):
        total.assign_add(jnp.sum(x))
        return jnp.sum(x)

    def step_fn(context, x):
        y = distribution.call_for_each_tower(tower_fn, x)
        context.set_last_step_output("sum", y, aggregation=SUM)

    context = distribution.run_steps_on_dataset(
        step_fn, distribution.distribute_dataset(dataset_fn).make_one_shot_iterator(), 2
    )
    assert float(context.last_step_outputs["sum"]) == 4 + 5 + 6
    assert float(total) == 21.0


# Initial values -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_no_iterations_give_the_initial_values(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        v = mx.Variable(0.0)
    iterator = batches(distribution, numbers(2 * n))

    def step_fn(context, x):
        v.assign_add(1.0)
        context.set_last_step_output("loss", 2.0)

    context = distribution.run_steps_on_dataset(step_fn, iterator, 0, {"loss": 1e7})
    assert context.last_step_outputs == {"loss": 1e7}
    for none in (0, -1):
        context = distribution.run_steps_on_dataset(step_fn, iterator, none)
        assert context.last_step_outputs == {}
    assert float(v) == 0.0
    assert parts(distribution, next(iterator)) == list(range(n))


@eagerly
def test_initial_values_that_do_not_fit(run_eagerly: None) -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(0.0)

    def step_fn(context, x):
        v.assign_add(1.0)
        context.set_last_step_output("a", x, aggregation=SUM)

    def run(initial: dict[str, float]) -> float:
        context = distribution.run_steps_on_dataset(
            step_fn, batches(distribution, numbers(4)), 2, initial
        )
        return float(context.last_step_outputs["a"])

    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"has \['a', 'b'\], but the step sets .*'a'"
        ):
            run({"a": 0.0, "b": 0.0})
    v.assign(0.0)  # plain Python takes a step before it knows
    assert run({"a": 0.0}) == 5.0
    assert float(v) == 2.0
    with pytest.raises(ValueError, match=r"has \[\], but the step sets .*'a'"):
        run({})
    assert float(v) == 2.0 or mx.config.functions_run_eagerly()


def test_run_op_sees_what_the_step_closes_over_now() -> None:
    distribution = towers(2)
    rate = jnp.float32(1)

    def step_fn(context, x):
        y = distribution.call_for_each_tower(jnp.multiply, x, rate)
        context.set_last_step_output("y", y, aggregation=SUM)

    context = distribution.run_steps_on_dataset(
        step_fn, batches(distribution, numbers(8)), 2
    )
    assert float(context.last_step_outputs["y"]) == 5.0
    rate = jnp.float32(10)
    context.run_op()
    assert float(context.last_step_outputs["y"]) == 130.0
