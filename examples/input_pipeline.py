"""An input pipeline: record files, decoding, augmentation, batches, and replicas.

    python examples/input_pipeline.py --replicas 4 --epochs 6

It writes scikit-learn's digits into eight TFRecord files of `tf.train.Example`s, without
TensorFlow, and trains from them: files are read interleaved, records are parsed and shuffled,
images are moved by a pixel, batches are made and split over the replicas while the step
before still runs. `explain()` shows the plan; with several workers each reads files of its own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mirrax as mx

BATCH = 128
FEATURES = {
    "image": mx.io.FixedLenFeature([8, 8], "float32"),
    "label": mx.io.FixedLenFeature([], "int64"),
}


def write_files(directory: str, files: int = 8) -> int:
    """Writes the training images, file by file; how many there are."""
    digits: Any = load_digits()
    images = (digits.images[:1437] / 16).astype("float32")
    for i in range(files):
        path = os.path.join(directory, f"digits-{i}-of-{files}.tfrecord")
        with mx.io.TFRecordWriter(path) as writer:
            for image, label in zip(images[i::files], digits.target[i:1437:files]):
                example = {"image": image.ravel(), "label": np.int64(label)}
                writer.write(mx.io.encode_example(example))
    return len(images)


def move(image: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moves the image by at most one pixel, by numbers that its own content decides."""
    rng = np.random.default_rng(image.view(np.uint32).sum())
    down, right = rng.integers(-1, 2, 2)
    return np.roll(image, (down, right), axis=(0, 1)), label.astype("int32")


def make_dataset(directory: str) -> mx.data.Dataset:
    """Batches of images that are read from all files in turn."""
    files = mx.data.Dataset.list_files(f"{directory}/*.tfrecord", seed=0)
    records = files.interleave(mx.data.TFRecordDataset, cycle_length=4)
    return (
        records.map(lambda record: mx.io.parse_single_example(record, FEATURES))
        .map(lambda found: (found["image"], found["label"]))
        .shuffle(1437, seed=0)
        .map(move, num_parallel_calls=2)
        .batch(BATCH)
    )


def train(strategy: mx.MirroredStrategy, directory: str, epochs: int) -> float:
    """The accuracy on images that were never seen."""
    batches = strategy.experimental_distribute_dataset(make_dataset(directory))
    batches.explain()
    rng = np.random.default_rng(0)
    with strategy.scope():
        w1 = mx.Variable(rng.normal(size=(64, 128)).astype("float32") / 8)
        w2 = mx.Variable(rng.normal(size=(128, 10)).astype("float32") / 8)
        optimizer = mx.train.Optimizer(optax.adam(1e-2))
        loss = mx.metrics.Mean()

    def predict(images: Any) -> jax.Array:
        return jax.nn.relu(images.reshape(len(images), 64) @ w1) @ w2

    @mx.function
    def train_step(images: jax.Array, labels: jax.Array) -> None:
        def loss_fn() -> tuple[jax.Array, jax.Array]:
            logits = predict(images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return mx.nn.compute_average_loss(losses), losses

        (_, losses), gradients = mx.value_and_grad(loss_fn, [w1, w2], has_aux=True)()
        optimizer.apply_gradients(zip(gradients, [w1, w2]))
        loss.update_state(losses)

    for epoch in range(1, epochs + 1):
        loss.reset_state()
        for batch in batches:
            strategy.run(train_step, args=batch)
        print(f"epoch {epoch}: loss {loss.result():.4f}")

    digits: Any = load_digits()
    found = jnp.argmax(predict(jnp.float32(digits.images[1437:] / 16)), axis=1)
    return float(jnp.mean(found == digits.target[1437:]))


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    with tempfile.TemporaryDirectory() as directory:
        count = write_files(directory)
        print(f"{count} images in {len(os.listdir(directory))} files")
        accuracy = train(mx.MirroredStrategy(), directory, options.epochs)
    print(f"{accuracy:.1%} of the test images are right.")
    return accuracy


if __name__ == "__main__":
    main()
