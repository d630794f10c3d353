"""`run_steps_on_dataset` and its `MultiStepContext`: a compiled loop with named outputs."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrax as mx
from mirrax._src.engines.program import Program

from .towers import (
    MEAN,
    NONE,
    ON_READ,
    ONLY_FIRST_TOWER,
    SUM,
    all_sizes,
    batches,
    older_names,
    parts,
    tower,
    tower_id,
    towers,
)

pytestmark = older_names

MultiStepContext = mx.contrib.distribute.MultiStepContext
eagerly = pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eager"])


@pytest.fixture
def run_eagerly(eagerly: bool):
    """Functions run as plain Python, or as they do by default."""
    mx.config.run_functions_eagerly(eagerly)
    yield
    mx.config.run_functions_eagerly(False)


def numbers(count: int) -> np.ndarray:
    return np.arange(count, dtype="float32")


class Counter:
    """How often a function has been traced."""

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> None:
        self.count += 1


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
    assert (
        distribution.run_steps_on_dataset(step_fn, iterator, 0).last_step_outputs == {}
    )
    assert float(v) == 0.0
    assert parts(distribution, next(iterator)) == list(range(n))


def test_initial_values_that_do_not_fit() -> None:
    distribution = towers(2)
    with pytest.raises(ValueError, match=r"has \['a', 'b'\], but the step sets .*'a'"):
        distribution.run_steps_on_dataset(
            lambda context, x: context.set_last_step_output("a", x),
            batches(distribution, numbers(4)),
            initial_loop_values={"a": 0.0, "b": 0.0},
        )


# The library's own tests ----------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_training_with_outputs_of_all_kinds(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        kernel, bias = mx.Variable([[0.0]]), mx.Variable([0.0])
        optimizer = mx.train.Optimizer(optax.sgd(0.2 / n))

    def model_fn(context, x):
        def loss_fn():
            return jnp.sum((x @ kernel + bias - 1.0) ** 2)

        loss, gradients = mx.value_and_grad(loss_fn, [kernel, bias])()
        optimizer.apply_gradients(zip(gradients, [kernel, bias]))
        context.set_last_step_output("tower_loss_agg", loss, aggregation=MEAN)
        context.set_non_tensor_output("foo", "bar")
        return None, loss

    def step_fn(context, x):
        train_op, loss = distribution.call_for_each_tower(
            model_fn, context, x, run_concurrently=False
        )
        context.set_last_step_output("cross_tower_loss_agg", loss, aggregation=MEAN)
        context.set_last_step_output("cross_tower_loss_noagg", loss)
        return distribution.group(train_op)

    with distribution.scope():
        rows = np.ones((40 * n, 1, 1), "float32")
        iterator = batches(distribution, rows)
        initial = {
            "tower_loss_agg": jnp.float32(1e7),
            "cross_tower_loss_agg": jnp.float32(1e7),
            "cross_tower_loss_noagg": distribution.unwrap(distribution.broadcast(1e7)),
        }
        assert len(initial["cross_tower_loss_noagg"]) == n
        distribution.initialize()
        losses = []
        for _ in range(5):
            context = distribution.run_steps_on_dataset(step_fn, iterator, 2, initial)
            outputs = context.last_step_outputs
            assert context.non_tensor_outputs == {"foo": ["bar"]}
            assert set(outputs) == set(initial)
            aggregated = distribution.unwrap(outputs["cross_tower_loss_agg"])
            assert len(aggregated) == 1 and aggregated[0].dtype == jnp.float32
            apart = outputs["cross_tower_loss_noagg"]
            assert len(distribution.unwrap(apart)) == n
            reduced = distribution.reduce(MEAN, apart, "/device:CPU:0")
            np.testing.assert_allclose(reduced, aggregated[0], rtol=1e-6)
            np.testing.assert_allclose(outputs["tower_loss_agg"], aggregated[0], 1e-6)
            losses.append(float(aggregated[0]))
        distribution.finalize()
    # Both weights move by 0.4 of the error in a step, so that it shrinks to a fifth.
    np.testing.assert_allclose(losses, [0.04 * 0.0016**k for k in range(5)], 1e-3, 1e-9)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@all_sizes
def test_a_sum_or_a_mean_of_losses(n: int, reduction: str) -> None:
    distribution = towers(n)
    x, y = np.asarray([[2.0], [7.0]]), np.asarray([[6.0], [21.0]])
    with distribution.scope():
        w = mx.Variable([[2.0]])
        optimizer = mx.train.Optimizer(optax.sgd(0.2))

    def model_fn(x, y):
        def loss_fn():
            errors = (x @ w - y) ** 2
            if reduction == "sum":
                return jnp.sum(errors)
            return jnp.mean(errors) / tower().num_towers

        optimizer.apply_gradients([(mx.grad(loss_fn, w)(), w)])

    def dataset_fn():
        data = mx.data.Dataset.from_tensor_slices((x, y)).repeat().batch(2)
        return data.take(n)

    with distribution.scope():
        distribution.run_steps_on_dataset(
            lambda context, x, y: distribution.call_for_each_tower(model_fn, x, y),
            distribution.distribute_dataset(dataset_fn).make_one_shot_iterator(),
        )
    expected = 2 + 21.2 * n if reduction == "sum" else 2 + 10.6
    np.testing.assert_allclose(parts(distribution, w), [[[expected]]] * n, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_moving_means_see_the_mean_over_all_towers(n: int) -> None:
    distribution, momentum = towers(n), 0.9
    rng = np.random.default_rng(0)
    rows = rng.normal(3.0, 1.0, (4 * n, 4, 2)).astype("float32")
    with distribution.scope():
        moving = mx.Variable(np.zeros(2, "float32"), aggregation=MEAN)

    def model_fn(x):
        moving.assign(moving * momentum + jnp.mean(x, axis=0) * (1 - momentum))

    expected = np.zeros(2)
    iterator = batches(distribution, rows)
    for k in range(2):
        distribution.run_steps_on_dataset(
            lambda context, x: distribution.call_for_each_tower(model_fn, x),
            iterator,
            2,
        )
        for step in range(2 * k, 2 * k + 2):
            sample = rows[step * n : (step + 1) * n].mean(axis=(0, 1))
            expected = expected * momentum + sample * (1 - momentum)
        for copy in parts(distribution, moving):
            np.testing.assert_allclose(copy, expected, rtol=1e-5)


# The same as single steps, in one dispatch ----------------------------------------------


@all_sizes
def test_variables_and_outputs_are_those_of_single_steps(n: int) -> None:
    distribution = towers(n)

    def run(rounds: list[int]) -> tuple[Any, Any]:
        with distribution.scope():
            total = mx.Variable(np.zeros(2, "float32"), aggregation=SUM)
            local = mx.Variable(1.0, synchronization=ON_READ, aggregation=SUM)
            own = mx.Variable(1.0)
        ordinary = mx.Variable(0)
        made: list[mx.Variable] = []

        def tower_fn(x):
            if not made:
                made.append(mx.Variable(5.0))
            total.assign_add(x)
            local.assign_add(jnp.sum(x) + tower_id())
            own.assign(own * 2 + tower_id())
            made[0].assign_add(own)
            return total.read_value() * local

        def step_fn(context, x):
            ordinary.assign_add(1)
            context.set_last_step_output(
                "y", distribution.call_for_each_tower(tower_fn, x)
            )

        iterator = batches(
            distribution, np.arange(24.0 * n, dtype="float32").reshape(-1, 2)
        )
        outputs = None
        for count in rounds:
            outputs = distribution.run_steps_on_dataset(
                step_fn, iterator, count
            ).last_step_outputs["y"]
        variables = (total, local, own, made[0])
        assert int(ordinary) == sum(rounds)
        return [parts(distribution, v) for v in variables], parts(distribution, outputs)

    assert run([6]) == run([1] * 6) == run([2, 4])


def test_many_steps_are_one_dispatch_and_one_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distribution, traces, started = towers(2), Counter(), []
    launch = Program._launch

    def note(self: Program, *args: Any) -> Any:
        started.append(self)
        return launch(self, *args)

    monkeypatch.setattr(Program, "_launch", note)
    with distribution.scope():
        v = mx.Variable(0.0, aggregation=SUM)
    iterator = batches(distribution, np.ones(200, "float32"))

    def run_round(scale: float) -> Any:
        def tower_fn(context, x):
            traces.note()
            v.assign_add(scale * x)
            context.set_last_step_output("v", v.read_value(), aggregation=MEAN)

        def step_fn(context, x):
            distribution.call_for_each_tower(tower_fn, context, x)

        return distribution.run_steps_on_dataset(step_fn, iterator, 20)

    run_round(2.0)
    first = traces.count
    started.clear()
    for _ in range(2):  # functions that are defined anew
        context = run_round(2.0)
    context.run_op()
    assert traces.count == first <= 3
    assert len(started) == 3 and len(set(map(id, started))) == 1
    assert float(context.last_step_outputs["v"]) == float(v) == 4 * 80


def test_the_program_is_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    distribution, texts = towers(2), []
    launch = Program._launch

    def note(self: Program, *args: Any) -> Any:
        texts.append(self._jitted.lower(*args).compile().as_text())
        return launch(self, *args)

    monkeypatch.setattr(Program, "_launch", note)

    def step_fn(context, x):
        context.set_last_step_output("x", x, aggregation=SUM)

    distribution.run_steps_on_dataset(
        step_fn, batches(distribution, np.ones(40, "float32")), 10
    )
    assert len(texts) == 1 and len(re.findall(r" while\(", texts[0])) == 1


# Errors ---------------------------------------------------------------------------------


def test_data_that_ends_within_the_loop() -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(0.0, aggregation=SUM)

    def step_fn(context, x):
        distribution.call_for_each_tower(v.assign_add, x)

    iterator = batches(distribution, np.ones(6, "float32"))
    with pytest.raises(mx.errors.OutOfRangeError, match="after 3 of 5 steps"):
        distribution.run_steps_on_dataset(step_fn, iterator, 5)
    assert float(v) == 6.0
    with pytest.raises(mx.errors.OutOfRangeError, match="after 0 of 1 steps"):
        distribution.run_steps_on_dataset(step_fn, iterator)


@pytest.mark.parametrize("iterations", [-1, 1.5, "2", None, True])
def test_iterations_have_to_be_a_number(iterations: Any) -> None:
    distribution = towers(2)
    with pytest.raises((ValueError, TypeError), match="`iterations` must be"):
        distribution.run_steps_on_dataset(
            lambda context, x: None, batches(distribution, numbers(8)), iterations
        )


@pytest.mark.parametrize(
    ("fn", "iterator", "message"),
    [
        (5, iter([1.0]), "needs a function, got 5"),
        (lambda context, x: None, [1.0], r"got list; pass `iter\(dataset\)`"),
        (lambda context: None, iter([1.0]), "positional argument"),
        (lambda context, x: None, iter([(1.0, 2.0)]), "positional argument"),
    ],
)
def test_wrong_arguments(fn: Any, iterator: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        towers(2).run_steps_on_dataset(fn, iterator)


def test_a_dataset_is_no_iterator() -> None:
    distribution = towers(2)
    dataset: Any = distribution.distribute_dataset(lambda: mx.data.Dataset.range(4))
    with pytest.raises(TypeError, match="TowerDataset; pass"):
        distribution.run_steps_on_dataset(lambda context, x: None, dataset)


@eagerly
@pytest.mark.parametrize("n", [1, 2])
def test_a_tower_has_to_say_how_its_output_is_combined(
    n: int, run_eagerly: None
) -> None:
    distribution = towers(n)

    def tower_fn(context, x):
        context.set_last_step_output("loss", x)

    with pytest.raises(ValueError, match="'loss'.*aggregation=mx.VariableAggregation"):
        distribution.run_steps_on_dataset(
            lambda context, x: distribution.call_for_each_tower(tower_fn, context, x),
            batches(distribution, numbers(4)),
        )


def test_outputs_that_cannot_be_combined() -> None:
    distribution = towers(2)

    def run(output: Any, aggregation: Any) -> None:
        distribution.run_steps_on_dataset(
            lambda context, x: context.set_last_step_output("a", output, aggregation),
            batches(distribution, numbers(4)),
        )

    with pytest.raises(ValueError, match="must be a VariableAggregation, .*got 'sum'"):
        run(1.0, "sum")
    with pytest.raises(ValueError, match="which is not distributed"):
        run(5.0, SUM)


@pytest.mark.parametrize("n", [1, 2])
def test_an_array_is_no_output_that_is_no_array(n: int) -> None:
    distribution = towers(n)
    with pytest.raises(ValueError, match="'x' is an array.*`set_last_step_output`"):
        distribution.run_steps_on_dataset(
            lambda context, x: context.set_non_tensor_output("x", x),
            batches(distribution, numbers(4)),
        )
    with pytest.raises(ValueError, match="'x' is an array.*`set_last_step_output`"):
        distribution.run_steps_on_dataset(
            lambda context, x: distribution.call_for_each_tower(
                lambda c, x: c.set_non_tensor_output("x", x), context, x
            ),
            batches(distribution, numbers(4)),
        )


@pytest.mark.parametrize("place", ["step", "tower", "merge_fn"])
def test_an_exception_in_a_step_comes_out_as_itself(place: str) -> None:
    distribution = towers(2)
    with distribution.scope():
        v = mx.Variable(1.0)

    def fail(*args):
        raise ZeroDivisionError("on purpose")

    def step_fn(context, x):
        v.assign_add(1.0)
        if place == "step":
            fail()
        distribution.call_for_each_tower(
            fail if place == "tower" else lambda: tower().merge_call(fail)
        )

    iterator = batches(distribution, numbers(8))
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        distribution.run_steps_on_dataset(step_fn, iterator, 2)
    assert parts(distribution, v) == [1.0, 1.0]
    context = distribution.run_steps_on_dataset(
        lambda context, x: context.set_last_step_output("x", x, SUM), iterator
    )
    assert float(context.last_step_outputs["x"]) > 0


def test_where_it_can_be_called() -> None:
    distribution, other = towers(2), towers(2)

    def run():
        distribution.run_steps_on_dataset(lambda context, x: None, iter([1.0]))

    with other.scope(), pytest.raises(RuntimeError, match="different strategies"):
        run()
    with pytest.raises(RuntimeError, match="inside a replica function"):
        distribution.call_for_each_tower(run)
    with pytest.raises(RuntimeError, match="a compiled loop of its own"):
        mx.function(run)()
    run()  # the scope is entered for it


def test_a_context_of_nothing_has_nothing_to_run() -> None:
    context = MultiStepContext()
    assert context.last_step_outputs == context.non_tensor_outputs == {}
    with pytest.raises(RuntimeError, match="`run_op` is there when the loop"):
        context.run_op()


@eagerly
def test_one_device(run_eagerly: None) -> None:
    distribution = mx.contrib.distribute.OneDeviceStrategy("CPU:1")
    with distribution.scope():
        v = mx.Variable(0.0)

    def tower_fn(context, x):
        context.set_last_step_output("v", v.assign_add(x).read_value(), MEAN)

    context = distribution.run_steps_on_dataset(
        lambda context, x: distribution.call_for_each_tower(tower_fn, context, x),
        batches(distribution, numbers(6)),
        3,
    )
    assert float(context.last_step_outputs["v"]) == 3.0
    context.run_op()
    assert float(context.last_step_outputs["v"]) == float(v) == 15.0
