"""All sums of a step between two workers are one message."""

from __future__ import annotations

from typing import Any

import numpy as np

from .comparing import Pool


def train(strategy: Any) -> tuple[list[np.ndarray], int]:
    """What two steps give, and how many messages each of them sends."""
    import numpy as np

    import mirrax as mx
    from mirrax._src.engines.arguments import sort_arguments
    from mirrax._src.state.foreign import settings

    rng = np.random.default_rng(0)
    shapes = [(30, 600), (600,), (600, 600), (600,), (600, 4)]  # small and over a MiB
    with strategy.scope():
        weights = [mx.Variable(rng.normal(0, 0.1, s).astype("f")) for s in shapes]
        seen = mx.metrics.Mean()

    def step(x: Any) -> Any:
        def loss_fn() -> Any:
            w1, b1, w2, b2, w3 = [w.read_value() for w in weights]
            return ((((x @ w1 + b1) @ w2 + b2) @ w3) ** 2).mean()

        loss, gradients = mx.value_and_grad(loss_fn, weights)()
        replica = mx.distribute.get_replica_context()
        for weight, gradient in zip(weights, replica.all_reduce("mean", gradients)):
            weight.assign_sub(0.01 * gradient)
        seen.update_state(loss)
        return loss

    @mx.function
    def whole(x: Any) -> Any:
        losses = strategy.run(step, args=(x,))
        return strategy.reduce("mean", losses, axis=None), seen.result()

    rows = mx.data.Dataset.from_tensor_slices(rng.normal(size=(8, 30)).astype("f"))
    x = next(iter(strategy.experimental_distribute_dataset(rows.batch(8))))
    losses = [np.asarray(value) for _ in range(2) for value in whole(x)]
    (program,) = whole._recent[settings.token].values()
    text = program.lower(sort_arguments((x,), {}, strategy.replica_mesh).arrays)
    names = "stablehlo.all_reduce", "stablehlo.all_gather"
    count = sum(text.as_text().count(f'"{name}"') for name in names)
    return [*losses, *(np.asarray(w.numpy()) for w in weights)], count


def test_gradients_loss_and_metric_are_one_message(two_by_one: Pool, two_cpus) -> None:
    (first, count), (second, _) = two_by_one.run(train)
    expected, in_process = train(two_cpus)
    assert count == 1
    assert in_process == 3  # arrays from 64 KiB on travel alone there
    for one, other, alone in zip(first, second, expected):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, alone, rtol=1e-5, atol=1e-7)
