"""TensorFlow 2.4, `compat.v1`: what an Estimator did with a `model_fn`, step by step.

    python examples/older/compat_v1_estimator.py --replicas 2 --steps 160

A `model_fn` describes a model for training and for evaluation, once for each replica. The
Estimator below trains it with many steps in one program (`experimental_run_steps_on_iterator`)
and evaluates it with sums that each replica keeps for itself. It predicts the progress of
diabetes (scikit-learn's bundled table of 442 patients). Comments name what the program called
in TensorFlow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_diabetes

import mirrax as mx

GLOBAL_BATCH_SIZE, STEPS_PER_RUN = 36, 10
TRAINING_ROWS = 360

Features = dict[str, Any]


class ModeKeys:  # tf.estimator.ModeKeys
    TRAIN, EVAL = "train", "eval"


@dataclass
class EstimatorSpec:  # tf.estimator.EstimatorSpec
    """What a `model_fn` says of one batch; `train_op` takes the step."""

    loss: jax.Array
    train_op: Callable[[], None] | None = None


@dataclass
class RunConfig:  # tf.estimator.RunConfig
    """Where an Estimator runs."""

    train_distribute: mx.compat.v1.distribute.Strategy
    session_config: mx.compat.v1.ConfigProto


class Regression:  # tf.feature_column and tf.compat.v1.layers.dense
    """The variables of the model, and the sums of its evaluation."""

    def __init__(self) -> None:
        self.weights = mx.compat.v1.Variable(jnp.zeros(10), name="weights")
        self.offset = mx.compat.v1.Variable(jnp.zeros(()), name="offset")
        self.global_step = mx.compat.v1.Variable(  # get_or_create_global_step
            0, aggregation=mx.compat.v1.VariableAggregation.ONLY_FIRST_REPLICA
        )
        self.errors, self.variation, self.rows = (self._sum() for _ in range(3))
        self.variables = [self.weights, self.offset]

    @staticmethod
    def _sum() -> mx.Variable:  # tf.compat.v1.metrics
        return mx.compat.v1.Variable(
            0.0,
            synchronization=mx.compat.v1.VariableSynchronization.ON_READ,
            aggregation=mx.compat.v1.VariableAggregation.SUM,
        )


def model_fn(
    model: Regression, features: Features, labels: jax.Array, mode: str
) -> EstimatorSpec:
    """The model on a replica's part of a batch."""

    def compute_loss() -> tuple[jax.Array, jax.Array]:
        errors = (features["measures"] @ model.weights + model.offset - labels) ** 2
        # tf.compat.v1.losses.mean_squared_error; `get_loss_reduction` is SUM, so that the
        # losses of replicas have to add up to that of the batch.
        return jnp.sum(errors) / GLOBAL_BATCH_SIZE, errors

    if mode == ModeKeys.EVAL:
        _, errors = compute_loss()
        model.errors.assign_add(jnp.sum(errors))
        model.variation.assign_add(jnp.sum(labels**2))
        model.rows.assign_add(float(len(labels)))
        return EstimatorSpec(jnp.mean(errors))

    (loss, _), gradients = mx.value_and_grad(
        compute_loss, model.variables, has_aux=True
    )()

    def train_op() -> None:  # GradientDescentOptimizer(0.1).minimize(loss, global_step)
        context = mx.compat.v1.distribute.get_replica_context()
        assert context is not None
        reduction = mx.compat.v1.distribute.get_loss_reduction()
        reduced = context.all_reduce(reduction, gradients)
        for variable, gradient in zip(model.variables, reduced):
            variable.assign_sub(0.1 * gradient)
        model.global_step.assign_add(1)

    return EstimatorSpec(loss, train_op)


class Estimator:  # tf.estimator.Estimator
    """Trains and evaluates a `model_fn` on all replicas."""

    def __init__(self, model_fn: Callable[..., EstimatorSpec], config: RunConfig):
        self.model_fn, self.config = model_fn, config
        self.strategy = config.train_distribute
        with self.strategy.scope():
            self.model = Regression()

    def train(self, input_fn: Callable[[], mx.data.Dataset], steps: int) -> list[float]:
        """The loss of the last step of each run of steps."""
        strategy = self.strategy
        iterator = strategy.make_dataset_iterator(input_fn())
        iterator.initialize()  # after_create_session

        def tower_fn(inputs: tuple[Features, jax.Array]) -> jax.Array:
            spec = self.model_fn(self.model, *inputs, mode=ModeKeys.TRAIN)
            assert spec.train_op is not None
            spec.train_op()
            return spec.loss

        def step_fn(context: Any, inputs: Any) -> None:
            losses = strategy.extended.call_for_each_replica(tower_fn, args=(inputs,))
            reduction = mx.compat.v1.distribute.get_loss_reduction()
            context.set_last_step_output(
                name="loss", output=losses, reduce_op=reduction
            )

        history = []
        for _ in range(steps // STEPS_PER_RUN):
            context = strategy.extended.experimental_run_steps_on_iterator(
                step_fn,
                iterator,
                iterations=STEPS_PER_RUN,
                initial_loop_values={"loss": jnp.float32(0)},
            )
            # session.run([context.run_op, context.last_step_outputs])
            history.append(float(context.last_step_outputs["loss"]))
            print(f"step {int(self.model.global_step)}: loss {history[-1]:.5f}")
        return history

    def evaluate(self, input_fn: Callable[[], mx.data.Dataset]) -> dict[str, float]:
        """The mean error, and how much of the variation is explained."""
        model, strategy = self.model, self.strategy
        for total in (model.errors, model.variation, model.rows):
            total.assign(0.0)  # tf.compat.v1.local_variables_initializer

        @mx.function
        def eval_step(inputs: tuple[Features, jax.Array]) -> jax.Array:
            return self.model_fn(model, *inputs, mode=ModeKeys.EVAL).loss

        iterator = strategy.make_dataset_iterator(input_fn())
        iterator.initialize()
        while True:
            try:
                strategy.experimental_run(eval_step, iterator)
            except mx.errors.OutOfRangeError:  # tf.errors.OutOfRangeError
                break
        errors, rows = float(model.errors), float(model.rows)
        return {
            "average_loss": errors / rows,
            "explained": 1 - errors / float(model.variation),
            "rows": rows,
        }


def load_arrays() -> tuple[Features, np.ndarray]:
    """Measures and the progress of the disease, both scaled, of all patients."""
    table: Any = load_diabetes()
    order = np.random.default_rng(1).permutation(len(table.target))
    measures = table.data[order] * np.sqrt(len(order))
    progress = (table.target[order] - table.target.mean()) / table.target.std()
    return {"measures": measures.astype("float32")}, progress.astype("float32")


def train(
    strategy: mx.compat.v1.distribute.Strategy, epochs: int
) -> tuple[list[float], float]:
    """The losses after every ten steps, and how much of the variation is explained."""
    features, labels = load_arrays()

    def rows(part: slice) -> mx.data.Dataset:
        picked = {name: array[part] for name, array in features.items()}
        return strategy.experimental_make_numpy_dataset(
            (picked, labels[part]), session=None
        )

    def train_input_fn() -> mx.data.Dataset:
        dataset = rows(slice(TRAINING_ROWS)).shuffle(TRAINING_ROWS, seed=0)
        return dataset.repeat().batch(GLOBAL_BATCH_SIZE)

    def eval_input_fn() -> mx.data.Dataset:  # 82 rows: the last batch has 10
        return rows(slice(TRAINING_ROWS, None)).batch(GLOBAL_BATCH_SIZE)

    # tf.compat.v1.ConfigProto(allow_soft_placement=True)
    config = mx.compat.v1.ConfigProto(allow_soft_placement=True)
    session_config = strategy.update_config_proto(config)
    estimator = Estimator(model_fn, RunConfig(strategy, session_config))
    losses = estimator.train(train_input_fn, steps=epochs * STEPS_PER_RUN)
    found = estimator.evaluate(eval_input_fn)
    print(f"average_loss {found['average_loss']:.5f} of {found['rows']:.0f} rows")
    return losses, found["explained"]


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    # tf.compat.v1.distribute.MirroredStrategy()
    strategy = mx.compat.v1.distribute.MirroredStrategy()
    _, explained = train(strategy, options.steps // STEPS_PER_RUN)
    print(f"{explained:.1%} of the variation is explained.")
    return explained


if __name__ == "__main__":
    main()
