"""Small models of NNX, and the same training on one device and on replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from helpers.engines import compile_if, per_replica

ROWS = 7
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, 3)).astype("float32")
Y = _random.normal(size=(ROWS, 1)).astype("float32")


class Net(nnx.Module):
    """Two linear layers; between them a BatchNorm and a dropout, if asked for."""

    def __init__(self, rngs: nnx.Rngs, norm: dict | None = None, rate: float = 0.0):
        self.first: Any = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs, **norm) if norm is not None else None
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        x = x if self.norm is None else self.norm(x)
        return self.last(self.dropout(jnp.tanh(x)))


class Training:
    """A model with its optimizer and metrics, and a step that changes all of them."""

    def __init__(self, **options: Any) -> None:
        self.model: Any = Net(nnx.Rngs(0), **options)
        transformation = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))
        if "norm" in options:
            # The gradient of a bias before it is zero but for rounding, which Adam amplifies.
            transformation = optax.sgd(0.1, momentum=0.9)
        self.optimizer = nnx.Optimizer(self.model, transformation, wrt=nnx.Param)
        self.metrics: Any = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    @property
    def objects(self) -> tuple[Any, Any, Any]:
        return self.model, self.optimizer, self.metrics

    def weights(self) -> dict[str, np.ndarray]:
        """All values of the model, by their paths."""
        return {
            "/".join(map(str, path)): np.asarray(value.get_value())
            for path, value in nnx.iter_graph(self.model)
            if isinstance(value, nnx.Param | nnx.BatchStat)
        }


def step(model: Any, optimizer: Any, metrics: Any, x: Any, y: Any) -> Any:
    """One step; returns this replica's share of the loss."""

    def loss(model: Any) -> Any:
        errors = (model(x) - y) ** 2
        return errors.sum() / ROWS, errors

    (value, errors), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    metrics.update(loss=errors)
    return value


def one_device(steps: int, **options: Any) -> Training:
    """What NNX alone comes to."""
    training = Training(**options)
    for _ in range(steps):
        step(*training.objects, X, Y)
    return training


def on_replicas(
    strategy: Any, steps: int, engine: str, style: str, cut: int = 4, **options: Any
) -> Training:
    """The same on two replicas, which get the rows before and after `cut`."""
    with strategy.scope():
        training = Training(**options)
    data = [per_replica(strategy, a[:cut], a[cut:]) for a in (X, Y)]

    def closing(x: Any, y: Any) -> Any:
        return step(*training.objects, x, y)

    is_closure = style == "closure"
    fn = compile_if(engine, closing if is_closure else step)
    args = data if is_closure else [*training.objects, *data]
    for _ in range(steps):
        strategy.run(fn, args)
    return training


def assert_close(mine: Any, theirs: Any, atol: float = 1e-6) -> None:
    """Compares two structures of arrays."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), mine, theirs
    )
