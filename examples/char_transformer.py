"""A small transformer learns, character by character, to write like Python's manual.

    python examples/char_transformer.py --replicas 4 --steps 500
    python examples/char_transformer.py --accumulate 8 --steps 100

Each update takes the mean gradient of `--accumulate` batches; between replicas gradients
travel only then. The text comes with Python: `help("assert")` shows a part of it.
"""

from __future__ import annotations

import argparse
import re
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrax as mx

# Without indentation, tables and lines below titles.
TEXT = re.sub(r"[ |*=+-]{2,}", " ", "".join(topics.values()))
ALPHABET = sorted(set(TEXT))
BATCH, LENGTH = 32, 64
WIDTH, HEADS, BLOCKS = 64, 4, 2


class Transformer:
    """Predicts the character that comes next, for each place in a text."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.variables: list[mx.Variable] = []

        def normal(*shape: int) -> mx.Variable:
            values = rng.normal(scale=1 / np.sqrt(shape[0]), size=shape)
            self.variables.append(mx.Variable(values.astype("float32")))
            return self.variables[-1]

        self.characters = normal(len(ALPHABET), WIDTH)
        self.positions = normal(LENGTH, WIDTH)
        self.blocks = [
            (
                normal(WIDTH, 3 * WIDTH),
                normal(WIDTH, WIDTH),
                normal(WIDTH, 4 * WIDTH),
                normal(4 * WIDTH, WIDTH),
            )
            for _ in range(BLOCKS)
        ]
        self.output = normal(WIDTH, len(ALPHABET))

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.characters[text] + self.positions
        for attend, mix, up, down in self.blocks:
            parts = jnp.split(normalize(x) @ attend, 3, axis=-1)
            heads = [part.reshape(*text.shape, HEADS, -1) for part in parts]
            attended = jax.nn.dot_product_attention(*heads, is_causal=True)
            x += attended.reshape(x.shape) @ mix
            x += jax.nn.gelu(normalize(x) @ up) @ down
        return normalize(x) @ self.output


def normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def make_dataset(text: np.ndarray) -> mx.data.Dataset:
    """Batches of pieces of `text`, each with the same piece one character further on."""
    count = len(text) // (LENGTH + 1)
    pieces = text[: count * (LENGTH + 1)].reshape(count, LENGTH + 1)
    dataset = mx.data.Dataset.from_tensor_slices((pieces[:, :-1], pieces[:, 1:]))
    return dataset.shuffle(count, seed=0).batch(BATCH, drop_remainder=True).repeat()


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--steps", type=int, default=400, help="updates of the weights")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per update")
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    strategy = mx.MirroredStrategy()  # all accelerators, or the CPUs

    text = np.array([ALPHABET.index(character) for character in TEXT])
    batches = iter(strategy.experimental_distribute_dataset(make_dataset(text)))
    schedule = optax.warmup_cosine_decay_schedule(
        0, 1e-2, warmup_steps=options.steps // 10, decay_steps=options.steps
    )
    with strategy.scope():
        model = Transformer(np.random.default_rng(0))
        optimizer = mx.train.Optimizer(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)),
            gradient_accumulation_steps=options.accumulate,
        )
        loss = mx.metrics.Mean()

    @mx.function
    def train_step(text: jax.Array, following: jax.Array) -> None:
        def loss_fn() -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model(text), following
            ).mean(axis=-1)
            loss.update_state(losses)
            return mx.nn.compute_average_loss(losses)

        gradients = mx.grad(loss_fn, model.variables)()
        optimizer.apply_gradients(zip(gradients, model.variables))

    @mx.function
    def next_character(text: jax.Array, place: int) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), place)
        return jax.random.categorical(key, model(text)[-1] / 0.7)

    last = 0.0
    for step in range(1, options.steps + 1):
        for _ in range(options.accumulate):
            strategy.run(train_step, args=next(batches))
        if step % 20 == 0 or step == options.steps:
            last = float(loss.result())
            loss.reset_state()
            print(f"step {step}: loss {last:.3f}, rate {schedule(step):.5f}")

    written = text[:LENGTH]
    while len(written) < 300:
        character = next_character(written[-LENGTH:], len(written))
        written = np.append(written, character)
    print("".join(ALPHABET[i] for i in written))
    return last


if __name__ == "__main__":
    main()
