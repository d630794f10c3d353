"""What is wrong with a loop of steps, and where: the error says it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mirrax as mx

from .towers import (
    MEAN,
    SUM,
    batches,
    eagerly,
    numbers,
    older_names,
    parts,
    tower,
    towers,
)

pytestmark = older_names

MultiStepContext = mx.contrib.distribute.MultiStepContext


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


@pytest.mark.parametrize("iterations", [1.5, "2", None, True])
def test_iterations_have_to_be_a_number(iterations: Any) -> None:
    distribution = towers(2)
    with pytest.raises(TypeError, match="`iterations` must be a number, got"):
        distribution.run_steps_on_dataset(
            lambda context, x: None, batches(distribution, numbers(8)), iterations
        )


@pytest.mark.parametrize(
    ("fn", "iterator", "message"),
    [
        (5, iter([1.0]), "`fn` must be a function of a context, got 5"),
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
    with pytest.raises(RuntimeError, match="`run_op` is available only after the loop"):
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
