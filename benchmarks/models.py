"""The models that are trained: two MLPs, a CNN, a transformer, many small variables.

Plain functions on a flat list of arrays, so that every way of training them computes
the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Arrays = Sequence[jax.Array]


@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        shapes: The shapes of the parameters.
        losses: From parameters, inputs and labels to one loss for each example.
        input_shape: The shape of one example.
        label_shape: The shape of one example's labels.
        num_classes: Labels, and inputs that are tokens, are below this.
        batch_size: Examples in a global batch.
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    losses: Callable[[Arrays, jax.Array, jax.Array], jax.Array]
    input_shape: tuple[int, ...]
    label_shape: tuple[int, ...] = ()
    num_classes: int = 10
    has_tokens: bool = False
    batch_size: int = 256

    def make_parameters(self) -> list[np.ndarray]:
        """Parameters: the same ones every time."""
        rng = np.random.default_rng(0)
        return [
            (rng.standard_normal(s) / np.sqrt(max(1, np.prod(s[:-1])))).astype("f")
            if len(s) > 1
            else np.zeros(s, "f")
            for s in self.shapes
        ]

    def make_batch(self, seed: int = 1, size: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Random inputs and labels."""
        rng = np.random.default_rng(seed)
        size = size or self.batch_size
        labels = rng.integers(self.num_classes, size=(size, *self.label_shape))
        if self.has_tokens:
            inputs = rng.integers(self.num_classes, size=(size, *self.input_shape))
            return inputs.astype("i4"), labels.astype("i4")
        inputs = rng.standard_normal((size, *self.input_shape), dtype="f")
        return inputs, labels.astype("i4")


def mlp(*sizes: int) -> Model:
    """A multilayer perceptron, relu between the layers."""
    pairs = zip(sizes, sizes[1:])
    shapes = [shape for n, m in pairs for shape in ((n, m), (m,))]

    return Model("MLP " + "-".join(map(str, sizes)), shapes, mlp_losses, (sizes[0],))


def mlp_losses(params: Arrays, x: jax.Array, y: jax.Array) -> jax.Array:
    for w, b in zip(params[:-2:2], params[1:-2:2]):
        x = jax.nn.relu(x @ w + b)
    return _cross_entropy(x @ params[-2] + params[-1], y)


def cnn() -> Model:
    """Two convolutions and a dense layer on 28x28 pictures."""
    shapes = [(3, 3, 1, 16), (16,), (3, 3, 16, 32), (32,), (14 * 14 * 32, 10), (10,)]

    def convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def losses(params: Arrays, x: jax.Array, y: jax.Array) -> jax.Array:
        k1, b1, k2, b2, w, b = params
        x = jax.nn.relu(convolve(x, k1, 1) + b1)
        x = jax.nn.relu(convolve(x, k2, 2) + b2)
        return _cross_entropy(x.reshape(len(x), -1) @ w + b, y)

    return Model("CNN", shapes, losses, (28, 28, 1), batch_size=64)


def transformer(
    layers: int = 2, width: int = 128, heads: int = 4, length: int = 64, words: int = 64
) -> Model:
    """A small causal transformer that predicts each token's successor."""
    per_layer = [
        *((width,), (width,)),
        *((width, 3 * width), (width, width)),
        *((width,), (width,)),
        *((width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    ]
    shapes = [(words, width), (length, width), *per_layer * layers, (width, words)]

    def attend(x: jax.Array, w_qkv: jax.Array, w_out: jax.Array) -> jax.Array:
        n = len(x)
        qkv = (x @ w_qkv).reshape(n, length, 3, heads, width // heads)
        q, k, v = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(width // heads)
        scores = jnp.where(np.tri(length, dtype=bool), scores, -1e9)
        mixed = jax.nn.softmax(scores) @ v
        return mixed.swapaxes(1, 2).reshape(n, length, width) @ w_out

    def losses(params: Arrays, x: jax.Array, y: jax.Array) -> jax.Array:
        embedding, positions, *rest, head = params
        x = embedding[x] + positions
        for i in range(layers):
            g1, b1, w_qkv, w_out, g2, b2, w1, c1, w2, c2 = rest[10 * i : 10 * (i + 1)]
            x = x + attend(_normalize(x, g1, b1), w_qkv, w_out)
            x = x + jax.nn.gelu(_normalize(x, g2, b2) @ w1 + c1) @ w2 + c2
        return _cross_entropy(x @ head, y).mean(-1)

    return Model(
        "transformer",
        shapes,
        losses,
        (length,),
        (length,),
        words,
        has_tokens=True,
        batch_size=16,
    )


def small_variables(count: int, size: int = 32) -> Model:
    """`count` vectors of `size` numbers, drawn towards the inputs."""

    shapes = [(size,)] * count
    return Model(f"{count} variables", shapes, vector_losses, (size,), batch_size=16)


def vector_losses(params: Arrays, x: jax.Array, y: jax.Array) -> jax.Array:
    return sum((jnp.sum((x - p) ** 2, axis=-1) for p in params), start=0.0 * y)


def losses_named(model: str) -> Callable[[Arrays, jax.Array, jax.Array], jax.Array]:
    """The losses of one of the loops that `peers.py` names."""
    other = {"variables": vector_losses, "transformer": transformer().losses}
    return other.get(model, mlp_losses)


def _normalize(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + gain) + bias


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


MODELS = {
    "large": mlp(784, 1024, 1024, 10),
    "small": mlp(784, 128, 128, 10),
    "cnn": cnn(),
    "transformer": transformer(),
}
