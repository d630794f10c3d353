"""TensorFlow's tutorial on a custom loop with MultiWorkerMirroredStrategy, line by line.

    mirrax run --workers 2 examples/multi_worker/main.py

Each worker runs this program with a `TF_CONFIG` of its own. Names and order are those of
https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl, so read them side by
side; comments say where this one differs. Kill it whenever you like: started again with the
same `--directory` it ends with the same weights, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os

import jax
import mnist
import optax

import mirrax as mx

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--per-worker-batch-size", type=int, default=64)
parser.add_argument("--directory", help="where checkpoints are kept")
options = parser.parse_args()

per_worker_batch_size = options.per_worker_batch_size
tf_config = json.loads(os.environ.get("TF_CONFIG", '{"cluster": {"worker": ["me"]}}'))
num_workers = len(tf_config["cluster"]["worker"])
global_batch_size = per_worker_batch_size * num_workers

num_epochs = options.epochs
num_steps_per_epoch = 14

# The tutorial's `_is_chief`, `_get_temp_dir` and `write_filepath` have nothing to do here: all
# workers save into one directory, and only the first one of them writes.
checkpoint_dir = options.directory or f"multi-worker-checkpoints/{num_workers}"

# First of all, before anything uses JAX's devices.
strategy = mx.distribute.MultiWorkerMirroredStrategy()

with strategy.scope():
    multi_worker_model = mnist.build_cnn_model()

    multi_worker_dataset = strategy.distribute_datasets_from_function(
        lambda input_context: mnist.dataset_fn(global_batch_size, input_context)
    )
    optimizer = mx.train.Optimizer(optax.rmsprop(learning_rate=0.001))
    train_accuracy = mx.metrics.SparseCategoricalAccuracy(name="train_accuracy")


@mx.function
def train_step(iterator: mx.distribute.DistributedIterator) -> jax.Array:
    """A step of all replicas of all workers; the loss of the global batch."""

    def step_fn(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, y = inputs

        def compute_loss() -> tuple[jax.Array, jax.Array]:  # in place of a tape
            predictions = multi_worker_model(x)
            per_batch_loss = optax.softmax_cross_entropy_with_integer_labels(
                predictions, y
            )
            loss = mx.nn.compute_average_loss(
                per_batch_loss, global_batch_size=global_batch_size
            )
            return loss, predictions

        (loss, predictions), grads = mx.value_and_grad(
            compute_loss, multi_worker_model.trainable_variables, has_aux=True
        )()
        optimizer.apply_gradients(zip(grads, multi_worker_model.trainable_variables))
        train_accuracy.update_state(y, predictions)
        return loss

    per_replica_losses = strategy.run(step_fn, args=(next(iterator),))
    return strategy.reduce(mx.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


epoch = mx.Variable(initial_value=0, name="epoch")
step_in_epoch = mx.Variable(initial_value=0, name="step_in_epoch")
# One for all epochs, because it is saved as well: who goes on meets the images in the same
# order. So is the optimizer.
iterator = iter(multi_worker_dataset)

checkpoint = mx.train.Checkpoint(
    model=multi_worker_model,
    optimizer=optimizer,
    epoch=epoch,
    step_in_epoch=step_in_epoch,
    iterator=iterator,
)
checkpoint_manager = mx.train.CheckpointManager(
    checkpoint, directory=checkpoint_dir, max_to_keep=1
)

latest_checkpoint = mx.train.latest_checkpoint(checkpoint_dir)
if latest_checkpoint:
    checkpoint.restore(latest_checkpoint)
    print(f"Restored {latest_checkpoint}.")

while epoch.numpy() < num_epochs:
    total_loss = 0.0
    num_batches = 0

    while step_in_epoch.numpy() < num_steps_per_epoch:
        total_loss += train_step(iterator)
        num_batches += 1
        step_in_epoch.assign_add(1)

    train_loss = total_loss / num_batches
    print(
        f"Epoch: {epoch.numpy()}, accuracy: {train_accuracy.result():f}, "
        f"train_loss: {train_loss:f}."
    )
    train_accuracy.reset_state()

    # Counted before it is saved; else an epoch without steps would follow a restore.
    epoch.assign_add(1)
    step_in_epoch.assign(0)
    checkpoint_manager.save()

checkpoint_manager.sync()  # `save` returns while a thread still writes
