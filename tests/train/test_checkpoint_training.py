"""Training that was interrupted goes on as if it had not been."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import both_engines, compile_if, mirrored, parts, per_replica

import mirrax as mx
from mirrax.train import Checkpoint, Optimizer, load_checkpoint

pytestmark = pytest.mark.slow

ADAM = optax.adam(optax.exponential_decay(0.1, 2, 0.7))


class Training:
    """Two variables, an optimizer, a metric, and steps with gradients that are known."""

    def __init__(
        self, n, engine="compiled", transformation=ADAM, built=False, **kwargs
    ):
        self.strategy = mirrored(n)
        with self.strategy.scope():
            self.w = mx.Variable(jnp.arange(3.0), name="w")
            self.b = mx.Variable(1.0, name="b")
            self.optimizer = Optimizer(transformation, **kwargs)
            self.mean = mx.metrics.Mean()
        if built:
            self.optimizer.build([self.w, self.b])
        self.checkpoint = Checkpoint(
            w=self.w, b=self.b, optimizer=self.optimizer, mean=self.mean
        )
        self._step = compile_if(engine, self._replica_step)

    def _replica_step(self, x):
        self.mean.update_state(x)
        gradients = jnp.sin(x * (1 + self.w)), jnp.cos(jnp.sum(x) * self.b)
        self.optimizer.apply_gradients(zip(gradients, (self.w, self.b)))

    def steps(self, first, last):
        n = self.strategy.num_replicas_in_sync
        for step in range(first, last):
            rows = np.random.default_rng(step).random((8, 3), "float32")
            x = [part.mean(0) for part in np.split(rows, n)]
            self.strategy.run(self._step, (per_replica(self.strategy, *x),))

    def all_bits(self):
        """Every copy of everything."""
        variables = [self.w, self.b, *self.optimizer.variables, *self.mean.variables]
        return [
            np.asarray(copy).tobytes()
            for v in variables
            for copy in self.strategy.experimental_local_results(v)
        ]


def uninterrupted(n, engine, last, **kwargs):
    training = Training(n, engine, **kwargs)
    training.steps(0, last)
    return training


@pytest.mark.parametrize(
    "n, built, engine",
    [
        (2, False, "eager"),
        (2, True, "compiled"),
        (2, False, "compiled"),
        (2, True, "eager"),
        (1, False, "compiled"),
    ],
)
def test_an_optimizer_goes_on_to_the_last_bit(n, built, engine, tmp_path):
    first = uninterrupted(n, engine, 3)
    path = first.checkpoint.save(tmp_path / "c")
    first.mean.reset_state()  # its copies come back as shares of their sum
    first.steps(3, 6)
    again = Training(n, engine, built=built)
    status = again.checkpoint.restore(path)
    assert status.missing == status.unused == []
    assert again.optimizer.iterations.numpy() == 3
    again.mean.reset_state()
    again.steps(3, 6)
    status.assert_consumed()
    assert again.all_bits() == first.all_bits()


@pytest.mark.parametrize("built", [True, False])
def test_an_optimizer_on_another_number_of_replicas(built, tmp_path):
    first = uninterrupted(2, "eager", 2)
    path = first.checkpoint.save(tmp_path / "c")
    for n in (1, 4):
        again = Training(n, "eager", built=built)
        again.checkpoint.restore(path)
        again.optimizer.build([again.w, again.b])
        for mine, saved in zip(again.optimizer.variables, first.optimizer.variables):
            assert parts(again.strategy, mine) == [saved.numpy().tolist()] * n
        np.testing.assert_allclose(again.mean.result(), first.mean.result(), 1e-6)


@both_engines
def test_every_copy_of_the_slots_is_restored_when_they_are_made(engine, tmp_path):
    """TensorFlow restores the first replica's only."""
    first = uninterrupted(2, engine, 2)
    path = first.checkpoint.save(tmp_path / "c")
    again = Training(4, engine)
    again.checkpoint.restore(path)
    assert again.optimizer.variables == [again.optimizer.iterations]
    again.steps(2, 3)
    for slot in again.optimizer.variables:
        copies = parts(again.strategy, slot)
        assert copies == [copies[0]] * 4
    assert again.optimizer.state[0].count.numpy() == 3


def test_an_optimizer_restored_and_saved_before_it_is_built_loses_nothing(tmp_path):
    first = uninterrupted(2, "compiled", 3)
    path = first.checkpoint.save(tmp_path / "c")
    between = Training(2)
    between.checkpoint.restore(path)
    second = between.checkpoint.save(tmp_path / "c")
    assert load_checkpoint(second).keys() == load_checkpoint(path).keys()
    again = Training(2)
    again.checkpoint.restore(second).assert_existing_objects_matched()
    first.mean.reset_state()
    again.mean.reset_state()
    first.steps(3, 5)
    again.steps(3, 5)
    assert again.all_bits() == first.all_bits()


def test_an_unbuilt_optimizer_that_is_restored_twice_takes_the_last(tmp_path):
    first = uninterrupted(1, "eager", 1)
    early = first.checkpoint.save(tmp_path / "c")
    first.steps(1, 3)
    late = first.checkpoint.save(tmp_path / "c")
    again = Training(1, "eager")
    again.checkpoint.restore(late)
    again.checkpoint.restore(early)
    again.optimizer.build([again.w, again.b])
    assert again.optimizer.state[0].count.numpy() == 1
    again.checkpoint.restore(late).assert_consumed()
    assert again.optimizer.state[0].count.numpy() == 3
    assert again.all_bits() == first.all_bits()


@pytest.mark.parametrize("value", [jnp.ones(2), jnp.ones(3, "float16")])
def test_slots_of_another_shape_or_dtype_are_refused_when_they_are_made(
    value, tmp_path
):
    first = uninterrupted(1, "eager", 1)
    path = Checkpoint(optimizer=first.optimizer).write(tmp_path / "c")
    optimizer = Optimizer(ADAM)
    Checkpoint(optimizer=optimizer).read(path).expect_partial()
    w, b = mx.Variable(value, name="w"), mx.Variable(1.0, name="b")
    with pytest.raises(ValueError, match="0/mu/w is float32 of shape"):
        optimizer.build([w, b])


def test_an_optimizer_that_was_saved_before_it_was_built(tmp_path):
    first = Training(2)
    path = first.checkpoint.save(tmp_path / "c")
    again = Training(2)
    again.checkpoint.restore(path).assert_consumed()
    first.steps(0, 2)
    again.steps(0, 2)
    assert again.all_bits() == first.all_bits()
    built = Training(2, built=True)
    status = built.checkpoint.restore(path).expect_partial()
    assert "optimizer/state/0/mu/w" in status.missing


def test_a_learning_rate_that_was_changed_by_hand(tmp_path):
    transformation = optax.inject_hyperparams(optax.sgd)(0.5)
    first = uninterrupted(2, "compiled", 1, transformation=transformation)
    first.optimizer.state.hyperparams["learning_rate"].assign(0.125)
    path = first.checkpoint.save(tmp_path / "c")
    again = Training(2, transformation=transformation)
    again.checkpoint.restore(path)
    again.steps(1, 2)
    assert again.optimizer.state.hyperparams["learning_rate"].numpy() == 0.125


# Gradient accumulation ------------------------------------------------------------------


@pytest.mark.parametrize(
    "built, engine",
    [
        (True, "eager"),
        (False, "compiled"),
        (True, "compiled"),
        (False, "eager"),
    ],
)
def test_half_way_to_an_update_to_the_last_bit(built, engine, tmp_path):
    first = uninterrupted(2, engine, 4, gradient_accumulation_steps=3)
    path = first.checkpoint.save(tmp_path / "c")
    first.mean.reset_state()
    first.steps(4, 7)
    again = Training(2, engine, built=built, gradient_accumulation_steps=3)
    again.checkpoint.restore(path)
    assert again.optimizer.iterations.numpy() == 1
    again.mean.reset_state()
    again.steps(4, 7)
    assert again.all_bits() == first.all_bits()
    assert again.optimizer.iterations.numpy() == 2


@pytest.mark.parametrize("built, n", [(True, 1), (True, 4), (False, 3)])
def test_half_way_to_an_update_on_another_number_of_replicas(built, n, tmp_path):
    first = uninterrupted(2, "eager", 2, gradient_accumulation_steps=3)
    path = first.checkpoint.save(tmp_path / "c")
    again = Training(n, "eager", built=built, gradient_accumulation_steps=3)
    again.checkpoint.restore(path)
    again.optimizer.build([again.w, again.b])
    sums = again.optimizer.state.accumulated, first.optimizer.state.accumulated
    for mine, saved in zip(sums[0].values(), sums[1].values()):
        np.testing.assert_allclose(mine.numpy(), saved.numpy(), 1e-6)
        assert len(parts(again.strategy, mine)) == n
    assert again.optimizer.state.micro_step.numpy() == 2


# Metrics --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, n",
    [
        ("Mean", 1),
        ("Mean", 2),
        ("Mean", 3),
        ("Sum", 3),
        ("SparseCategoricalAccuracy", 1),
    ],
)
def test_a_metric_on_another_number_of_replicas(kind, n, tmp_path):
    def make(n):
        with mirrored(n).scope():
            return getattr(mx.metrics, kind)()

    def update(metric):
        strategy = metric.total.strategy
        n = strategy.num_replicas_in_sync
        args = [np.arange(6.0, dtype="float32").reshape(6, 1)]
        if kind == "SparseCategoricalAccuracy":
            args = [np.arange(6) % 3, np.eye(6, 3, dtype="float32")]
        cut = [per_replica(strategy, *np.split(a, n)) for a in args]
        strategy.run(metric.update_state, cut)

    first = make(2)
    update(first)
    path = Checkpoint(metric=first).save(tmp_path / "c")
    again = make(n)
    Checkpoint(metric=again).restore(path).assert_consumed()
    np.testing.assert_allclose(again.result(), first.result(), 1e-6)
    update(first)
    update(again)
    np.testing.assert_allclose(again.result(), first.result(), 1e-6)


# Iterators ------------------------------------------------------------------------------


def pipeline():
    return mx.data.Dataset.range(40).map(lambda x: x * 3).shuffle(8, seed=3).batch(4)


@pytest.mark.parametrize("read", [0, 1, 4, 10])
def test_a_dataset_iterator_goes_on_with_the_next_batch(read, tmp_path):
    iterator = iter(pipeline())
    for _ in range(read):
        next(iterator)
    path = Checkpoint(iterator=iterator).save(tmp_path / "c")
    rest = [batch.tolist() for batch in iterator]
    assert len(rest) == 10 - read
    again = iter(pipeline())
    next(again)
    Checkpoint(iterator=again).restore(path).assert_consumed()
    assert [batch.tolist() for batch in again] == rest


@pytest.mark.parametrize("read", [0, 3])
def test_a_distributed_iterator_goes_on_with_the_next_batch(read, tmp_path):
    strategy = mirrored(2)

    def batches():
        return iter(strategy.experimental_distribute_dataset(pipeline()))

    iterator = batches()
    for _ in range(read):
        next(iterator)
    checkpoint = Checkpoint(iterator=iterator, v=mx.Variable(1.0))
    path = checkpoint.save(tmp_path / "c")
    rest = [parts(strategy, batch) for batch in iterator]
    assert len(rest) == 10 - read
    again = batches()
    Checkpoint(iterator=again, v=mx.Variable(0.0)).restore(path).assert_consumed()
    assert [parts(strategy, batch) for batch in again] == rest


def test_saving_does_not_disturb_an_iterator(tmp_path):
    iterator = iter(pipeline())
    checkpoint = Checkpoint(iterator=iterator)
    seen = []
    for batch in iterator:
        seen.append(batch.tolist())
        checkpoint.write(tmp_path / "c")
    assert seen == [batch.tolist() for batch in pipeline()]


def test_a_whole_training_that_is_interrupted(tmp_path):
    """Weights, optimizer, metric, data and a pytree together, to the last bit."""

    def make():
        training = Training(2)
        training.checkpoint.iterator = iter(
            training.strategy.experimental_distribute_dataset(
                mx.data.Dataset.from_tensor_slices(
                    np.random.default_rng(0).random((40, 3), "float32")
                )
                .shuffle(40, seed=1)
                .batch(4)
            )
        )
        training.checkpoint.average = jnp.zeros(3)
        return training

    def train(training, count):
        for _ in range(count):
            batch = next(training.checkpoint.iterator)
            row = training.strategy.run(mx.function(lambda x: jnp.mean(x, 0)), (batch,))
            training.strategy.run(training._step, (row,))
            average = training.checkpoint.average
            training.checkpoint.average = 0.9 * average + 0.1 * training.w.read_value()

    first = make()
    train(first, 3)
    path = first.checkpoint.save(tmp_path / "c")
    train(first, 4)
    again = make()
    again.checkpoint.restore(path)
    train(again, 4)
    np.testing.assert_allclose(again.mean.result(), first.mean.result(), 1e-6)
    first.mean.reset_state()
    again.mean.reset_state()
    assert again.all_bits() == first.all_bits()
    assert jax.device_get(again.checkpoint.average).tobytes() == (
        jax.device_get(first.checkpoint.average).tobytes()
    )
    first.checkpoint.iterator.close()
    again.checkpoint.iterator.close()
