"""Keras' `fit` on several replicas: the numbers of one device."""

from __future__ import annotations

import contextlib
import functools
import os
import re

import jax
import numpy as np
import pytest
from helpers.engines import mirrored

import mirrax as mx
from interop import libraries
from interop.keras_models import (
    data,
    double_precision,
    exact_model,
    farthest,
    train,
    usual_model,
)

keras = libraries.keras()
with mirrored(2).scope():
    from mirrax._src.integrations.keras.training import Step
layers = keras.layers
IS_THOROUGH = bool(os.environ.get("MIRRAX_THOROUGH"))
COUNTS = range(1, 41) if IS_THOROUGH else (1, 7, 13, 18, 33)


@functools.cache
def exact_alone(rows):
    return train(exact_model(), *data(rows))


@functools.cache
def usual_alone(**options):
    return train(usual_model(), *data(dtype="float32"), **options)


def made_in(strategy, make, *args):
    with strategy.scope():
        return make(*args)


# The numbers of one device -----------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", COUNTS)
def test_any_number_of_rows(rows, replicas):
    if not IS_THOROUGH and rows % 3 != replicas % 3 and rows != 13:
        pytest.skip("all of them with MIRRAX_THOROUGH")
    with double_precision():
        model = made_in(mirrored(replicas), exact_model)
        assert farthest(train(model, *data(rows)), exact_alone(rows)) < 1e-12


@pytest.mark.parametrize("replicas", [2, 4])
def test_batch_norm_dropout_and_adam(replicas):
    model = made_in(mirrored(replicas), usual_model)
    rows = data(dtype="float32")
    assert farthest(train(model, *rows), usual_alone()) < 1e-4


def test_each_device_has_its_rows_and_activations_stay_there():
    """13 rows on 4 devices: convolutions of 4 rows."""
    strategy = mirrored(4)
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Input((8, 8, 3)),
                layers.Conv2D(4, 3),
                layers.ReLU(),
                layers.Conv2D(5, 3),
                layers.GlobalAveragePooling2D(),
                layers.Dense(2),
            ]
        )
        model.compile("sgd", "mse")
    x, y = np.ones((13, 8, 8, 3), "float32"), np.ones((13, 2), "float32")
    model.train_on_batch(x, y)
    with strategy.scope():
        from mirrax._src.integrations.keras import training

        step = training.Step(model.train_step, strategy)
        names = ("trainable", "non_trainable", "optimizer", "metrics")
        state = model._get_jax_state(**{f"{n}_variables": True for n in names})
        text = str(step.program.lower(state, *step.placed((x, y))).compile().as_text())
    shapes = [
        tuple(map(int, m[1].split(",")))
        for m in re.finditer(r"f32\[([\d,]+)\]\S* convolution\(", text)
    ]
    assert shapes and all(4 in shape and 13 not in shape for shape in shapes), shapes
    gathered = re.findall(r"f32\[([\d,]*)\]\S* all-gather\(", text)
    assert not gathered, gathered


# Ways to train -----------------------------------------------------------------------------


def test_steps_per_execution_weights_and_validation():
    def make():
        model = usual_model()
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
            steps_per_execution=3,
        )
        return model

    x = data(37, "float32")[0]
    y = np.arange(37) % 3
    options = {
        "class_weight": {0: 2.0, 1: 0.5},
        "validation_split": 0.3,
        "shuffle": True,
    }
    found = []
    for model in (make(), made_in(mirrored(3), make)):
        keras.utils.set_random_seed(4)
        history = model.fit(x, y, batch_size=5, epochs=2, verbose=0, **options).history
        found.append([history, model.get_weights(), model.predict(x, verbose=0)])
    assert farthest(*found) < 1e-4


def test_on_batch_methods():
    x, y = data(7, "float32")
    weight = np.linspace(0, 1, 7)
    found = []
    for model in (usual_model(), made_in(mirrored(2), usual_model)):
        keras.utils.set_random_seed(4)
        losses = [model.train_on_batch(x, y, sample_weight=weight) for _ in range(3)]
        found.append([losses, model.test_on_batch(x, y), model.predict_on_batch(x)])
    assert farthest(*found) < 1e-4


class Doubling(keras.Model):
    """A `train_step` of the user's own: the loss is doubled."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        trainable, rest, optimizer, metrics = state
        x, y = data

        def loss(weights):
            prediction, new = self.stateless_call(weights, rest, x)
            return 2 * self.compute_loss(x, y, prediction), new

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, gradients, trainable
        )
        return {"loss": value}, (trainable, rest, optimizer, metrics)


def test_a_train_step_of_ones_own_in_a_model_that_builds_itself_late():
    def make():
        keras.utils.set_random_seed(0)
        model = Doubling()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    x, y = data(13, "float32")
    found = []
    for model in (make(), made_in(mirrored(4), make)):
        keras.utils.set_random_seed(1)
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
        found.append([history, model.get_weights()])
    assert farthest(*found) < 1e-6


def test_batches_are_on_all_devices_before_their_step_begins(monkeypatch):
    """Where there are accelerators Keras puts each batch on the first one, a step ahead."""
    strategy = mirrored(2)
    model = made_in(strategy, usual_model)
    x, y = data(7, "float32")
    seen = []
    placed = Step.placed

    def spy(self, batch):
        leaves = jax.tree.leaves(batch)
        seen.append({getattr(x, "sharding", type(x)) for x in leaves})
        return placed(self, batch)

    monkeypatch.setattr(Step, "placed", spy)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    model.evaluate(x, y, batch_size=4, verbose=0)
    model.predict(x, batch_size=4, verbose=0)
    model.train_on_batch(x, y)
    ahead, waiting = {strategy.replica_mesh.split}, {np.ndarray}
    assert seen == [ahead, waiting] * 3 + [waiting]


def test_run_eagerly(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # puts batches ahead

    def make():
        model = usual_model()
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    x, y = data(7, "float32")
    found = [
        train(model, x, y, batch_size=4)
        for model in (make(), made_in(mirrored(2), make))
    ]
    assert farthest(*found) < 1e-4


def test_callbacks_see_and_change_the_model():
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.get_weights()[0].copy())
            self.model.optimizer.learning_rate = 0.0

    model = made_in(mirrored(2), usual_model)
    x, y = data(16, "float32")
    stop = keras.callbacks.EarlyStopping("loss", patience=0)
    model.fit(x, y, epochs=5, verbose=0, callbacks=[Look(), stop])
    assert len(seen) < 5
    np.testing.assert_array_equal(seen[0], seen[1])


def test_compiled_in_the_scope_though_made_outside():
    model = usual_model()
    with mirrored(2).scope():
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    assert farthest(train(model, *data(dtype="float32")), usual_alone()) < 1e-4
    assert len(model.layers[0].kernel._value.devices()) == 1
    held = vars(model.layers[0].kernel)["_value"]
    assert isinstance(held, mx.distribute.MirroredVariable)


def test_optimizer_and_metrics_made_outside_are_taken_over():
    optimizer, metric = keras.optimizers.Adam(0.01), keras.metrics.MeanAbsoluteError()
    with mirrored(2).scope():
        model = usual_model()
        model.compile(optimizer, "mse", metrics=[metric])
    found, expected = train(model, *data(dtype="float32")), usual_alone()
    assert farthest(found[1:], expected[1:]) < 1e-4
    held = [vars(v)["_value"] for v in (*metric.variables, *optimizer.variables)]
    assert all(isinstance(each, mx.Variable) for each in held)


def test_fitted_alone_and_then_in_a_scope():
    rows, found = data(dtype="float32"), []
    for scope in (contextlib.nullcontext(), mirrored(2).scope()):
        model = usual_model()
        model.fit(*rows, verbose=0, shuffle=False)
        with scope:
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        found.append(train(model, *rows))
    assert farthest(*found) < 1e-4


def test_synchronized_batch_norm_is_accepted_and_saved(tmp_path):
    with mirrored(2).scope():
        model = keras.Sequential(
            [layers.Input((6,)), layers.BatchNormalization(synchronized=True)]
        )
        model.compile("sgd", "mse")
    x = data(5, "float32")[0]
    model.fit(x, x, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.layers[0].synchronized is True
    found, expected = (each.predict(x, verbose=0) for each in (again, model))
    np.testing.assert_allclose(found, expected, atol=1e-6)


# What is read ------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        x, y = data(dtype="float32")
        return x[16 * i :][:16], y[16 * i :][:16]


def generator():
    while True:
        yield from (Batches()[i] for i in range(3))


def tf_data():
    tf = libraries.tensorflow()
    return tf.data.Dataset.from_tensor_slices(data(dtype="float32")).batch(16)


def torch_loader():
    torch = libraries.torch()
    tensors = map(torch.from_numpy, data(dtype="float32"))
    dataset = torch.utils.data.TensorDataset(*tensors)
    return torch.utils.data.DataLoader(dataset, batch_size=16)


def mx_data():
    return mx.data.Dataset.from_tensor_slices(data(dtype="float32")).batch(16)


@pytest.mark.filterwarnings("ignore:.*super.*__init__")  # of `PyDataset`
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Batches, {}),
        (generator, {"steps_per_epoch": 3}),
        (tf_data, {}),
        (torch_loader, {}),
        (mx_data, {}),
    ],
)
def test_every_source(make, options):
    source = make()
    model = made_in(mirrored(3), usual_model)
    found = train(model, source, shuffle=False, **options)
    assert farthest(found, usual_alone(shuffle=False)) < 1e-4


def test_class_weights_of_a_dataset():
    """In the precision of Keras, as for arrays."""
    weights = {0: 0.1, 2: 0.7}
    with double_precision():
        dataset = mx.data.Dataset.from_tensor_slices(data()).batch(16)
        model = made_in(mirrored(2), exact_model)
        found = train(model, dataset, class_weight=weights)
        alone = train(exact_model(), *data(), shuffle=False, class_weight=weights)
        assert farthest(found, alone) < 1e-12


def test_every_epoch_is_one_pass_over_a_dataset():
    """Also in a model that looks at a batch before, to build itself."""
    dataset = mx.data.Dataset.range(6).shuffle(6, seed=3).batch(2)
    passes = [[x.tolist() for x in dataset] for _ in range(3)]
    assert passes[0] != passes[1]
    seen = []

    class Note(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            jax.debug.callback(lambda x: seen.append(x.tolist()), x, ordered=False)
            return self.dense(keras.ops.cast(x, "float32")[:, None])

    with mirrored(1).scope():
        model = Note()
        model.compile("sgd", "mse", run_eagerly=True)
    dataset = mx.data.Dataset.range(6).shuffle(6, seed=3).batch(2)
    model.fit(dataset.map(lambda x: (x, x)), epochs=3, verbose=0)
    jax.effects_barrier()
    assert [seen[i : i + 3] for i in (0, 3, 6)] == passes
