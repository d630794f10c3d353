"""TensorFlow 2.0: several workers, each with its own part of the data.

    mirrax run --workers 2 --devices-per-worker 1 examples/older/r2_0_multi_worker.py

A recommender: users and films have vectors, whose product says how a user rates a film. The
ratings are made up (from a seed), with noise that nobody can predict, so that the best possible
error is known. Each worker keeps every n-th rating with `InputContext` and all workers take
every step together. Comments name what the program called in TensorFlow.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrax as mx

USERS, FILMS, FACTORS = 120, 80, 4
NOISE = (
    0.25  # of a rating: no prediction has a smaller error on ratings that are not known
)
TRAINING_RATINGS, GLOBAL_BATCH_SIZE = 6144, 256

Ratings = dict[str, Any]


def load_ratings() -> tuple[Ratings, Ratings]:
    """Ratings to train with, and others to test with."""
    rng = np.random.default_rng(0)
    tastes, kinds = (rng.normal(size=(n, FACTORS)) for n in (USERS, FILMS))
    pairs = rng.permutation(USERS * FILMS)
    user, film = np.divmod(pairs, FILMS)
    liking = np.sum(tastes[user] * kinds[film], axis=1) / np.sqrt(FACTORS)
    rating = liking + NOISE * rng.normal(size=len(pairs))
    arrays = {"user": user.astype("int32"), "film": film.astype("int32")}
    arrays["rating"] = rating.astype("float32")
    known = {name: array[:TRAINING_RATINGS] for name, array in arrays.items()}
    return known, {name: array[TRAINING_RATINGS:] for name, array in arrays.items()}


def dataset_fn(
    ratings: Ratings, input_context: mx.distribute.InputContext
) -> mx.data.Dataset:
    """This worker's part of the ratings, in batches for one replica."""
    batch_size = input_context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE)
    dataset = mx.data.Dataset.from_tensor_slices(ratings)  # tf.data.Dataset
    dataset = dataset.shard(
        input_context.num_input_pipelines, input_context.input_pipeline_id
    )
    return dataset.batch(batch_size)


class Model:  # two tf.keras.layers.Embedding
    """A vector for each user and for each film."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        users, films = (
            rng.normal(size=(n, FACTORS)).astype("float32") / 2 for n in (USERS, FILMS)
        )
        self.users = mx.Variable(users, name="users")
        self.films = mx.Variable(films, name="films")
        self.trainable_variables = [self.users, self.films]

    def __call__(self, ratings: Ratings) -> jax.Array:
        users, films = self.users[ratings["user"]], self.films[ratings["film"]]
        return jnp.sum(users * films, axis=1)


def train(strategy: mx.distribute.Strategy, epochs: int) -> tuple[list[float], float]:
    """The training loss of each epoch, and the error on ratings that were not known."""
    known, unknown = load_ratings()
    train_batches = strategy.experimental_distribute_datasets_from_function(
        lambda input_context: dataset_fn(known, input_context)
    )
    test_batches = strategy.experimental_distribute_datasets_from_function(
        lambda input_context: dataset_fn(unknown, input_context)
    )
    with strategy.scope():
        model = Model()
        optimizer = mx.train.Optimizer(optax.adam(0.03))  # tf.keras.optimizers.Adam

    @mx.function  # @tf.function
    def train_step(ratings: Ratings) -> jax.Array:
        def loss() -> jax.Array:  # with tf.GradientTape()
            errors = (model(ratings) - ratings["rating"]) ** 2
            return mx.nn.compute_average_loss(  # tf.nn.compute_average_loss
                errors, global_batch_size=GLOBAL_BATCH_SIZE
            )

        loss_value, gradients = mx.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss_value

    @mx.function  # @tf.function
    def test_step(ratings: Ratings) -> tuple[jax.Array, jax.Array]:
        errors = model(ratings) - ratings["rating"]
        return errors**2, jnp.ones_like(errors)

    is_chief = strategy.extended.should_checkpoint  # the others need not print the same
    losses = []
    for epoch in range(epochs):
        total, steps = 0.0, 0
        for batch in train_batches:
            per_replica = strategy.experimental_run_v2(train_step, args=(batch,))
            total += strategy.reduce(mx.distribute.ReduceOp.SUM, per_replica, axis=None)
            steps += 1
        losses.append(float(total / steps))
        if is_chief:
            print(f"epoch {epoch + 1}: loss {losses[-1]:.5f}", flush=True)

    squares, count = 0.0, 0.0
    for batch in test_batches:  # the last one has fewer ratings
        per_rating = strategy.experimental_run_v2(test_step, args=(batch,))
        sums = (strategy.reduce("SUM", each, axis=0) for each in per_rating)
        squares, count = map(jnp.add, (squares, count), sums)
    return losses, float(jnp.sqrt(squares / count))


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(arguments)
    # First of all, before anything uses JAX's devices.
    # tf.distribute.experimental.MultiWorkerMirroredStrategy
    strategy = mx.distribute.experimental.MultiWorkerMirroredStrategy(
        communication=mx.distribute.experimental.CollectiveCommunication.RING
    )
    _, error = train(strategy, options.epochs)
    print(
        f"{strategy.num_replicas_in_sync} replicas: error {error:.4f} on unknown ratings, "
        f"of which {NOISE} is noise.",
        flush=True,
    )
    return error


if __name__ == "__main__":
    main()
