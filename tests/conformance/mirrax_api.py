"""mirrax's side of `api`."""

import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrax as mx
from mirrax._src.base import errors as _errors
from mirrax.distribute.cluster_resolver import ClusterSpec  # noqa: F401

from . import neutral
from .neutral import *  # noqa: F403

distribute = mx.distribute
Variable = mx.Variable
VariableAggregation = mx.VariableAggregation
VariableSynchronization = mx.VariableSynchronization
ReduceOp = mx.distribute.ReduceOp
IndexedSlices = mx.IndexedSlices


sum = jnp.sum
mean = jnp.mean
matmul = jnp.matmul
square = jnp.square
stack = jnp.stack
concat = jnp.concatenate
cast = jnp.asarray


def _refuse(x, condition):
    """`x`, or an error where the condition is true."""
    if condition:
        raise ValueError(x)
    return x


# For functions that a dataset calls: its elements are NumPy's.
ops = SimpleNamespace(
    cast=lambda x, dtype: np.asarray(x).astype(dtype),
    constant=lambda x: np.asarray(jnp.asarray(x)),
    fill=np.full,
    sum=lambda x: np.sum(x, dtype=x.dtype),
    size=np.size,
    number=lambda x: np.float32(x),
    decode=np.frombuffer,
    append=lambda x, y: np.append(x, y),
    length=len,
    refuse=_refuse,
)
int64, float32, string = "int64", "float32", "string"


def __getattr__(name):
    """The newer names, once mirrax has them."""
    if name in ("data", "errors", "io", "TensorSpec"):
        return getattr(mx, name)
    if name in ("compute_average_loss", "scale_regularization_loss"):
        return getattr(mx.nn, name)
    if name in ("Mean", "Sum", "Accuracy", "SparseCategoricalAccuracy"):
        return getattr(mx.metrics, name)
    if name in ("Checkpoint", "CheckpointManager", "latest_checkpoint"):
        return getattr(mx.train, name)
    if name == "ExponentialMovingAverage":
        return mx.train.ExponentialMovingAverage
    raise AttributeError(name)


def mirrored(num_replicas, **kwargs):
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    return mx.distribute.MirroredStrategy(devices, **kwargs)


def mirrored_v1(num_replicas):
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    return mx.compat.v1.distribute.MirroredStrategy(devices)


def one_device():
    return mx.distribute.OneDeviceStrategy("CPU:0")


def num_cpus():
    return len(mx.config.list_logical_devices("CPU"))


def array(values, dtype="float32"):
    return jnp.asarray(values, jax.dtypes.canonicalize_dtype(dtype))


def per_replica(strategy, *parts, dtype="float32"):
    return strategy.experimental_distribute_values_from_function(
        lambda context: array(parts[context.replica_id_in_sync_group], dtype)
    )


def rows(value):
    """The rows of a ragged value; the values if it is one row."""
    return plain(value.to_list() if hasattr(value, "to_list") else value)  # noqa: F405


def gradient(fn, x):
    return jax.grad(fn)(x)


def variable_gradients(fn, variables):
    return mx.value_and_grad(fn, variables)()


@contextmanager
def directory():
    """As neutral.py's, but not removed while checkpoints are still written into it."""
    with neutral.directory() as path:
        try:
            yield path
        finally:
            mx.train.Checkpoint().sync()


def sgd(learning_rate, momentum=0.0, nesterov=False, global_clipnorm=None, **kwargs):
    transformation = optax.sgd(learning_rate, momentum or None, nesterov)
    if global_clipnorm is not None:
        clip = optax.clip_by_global_norm(global_clipnorm)
        transformation = optax.chain(clip, transformation)
    return mx.train.Optimizer(transformation, **kwargs)


def adam(learning_rate):
    return mx.train.Optimizer(optax.adam(learning_rate, eps=1e-7))


def exponential_decay(initial, steps, rate):
    return optax.exponential_decay(initial, steps, rate)


def build(strategy, optimizer, variables):
    optimizer.build(variables)


def averages_of_values(average, make_strategy, steps):
    """The average of an array after each step, whose value is in `steps`."""
    found = []
    with make_strategy().scope():
        for step in steps:
            value = array(step)
            average.apply([value])
            found.append(average.average(value).numpy())
    return found


def metric_variables(metric):
    return list(metric.variables)


def trackable(metric):
    return metric


def function(fn, **kwargs):
    return mx.function(fn, **kwargs)


def function_with_loop(fn):
    return mx.function(fn)


def compile_if(engine, fn):
    return function(fn) if engine == "compiled" else fn


def v1():
    """The names of TensorFlow 1."""
    return mx.compat.v1


def deprecations(fn, times):
    """What each call of `fn` is warned of, as if mirrax had not warned of it yet."""
    messages = []
    with mock.patch.object(_errors, "_warned", set()):
        for _ in range(times):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fn()
            messages.append([str(each.message) for each in caught])
    return messages


def loops(make_strategy, make_dataset, make_step, iterations, initial, times):
    """The outputs of a loop of steps that runs several times."""
    strategy = make_strategy()
    iterator = strategy.make_dataset_iterator(make_dataset())
    run = strategy.extended.experimental_run_steps_on_iterator
    context = run(make_step(strategy), iterator, iterations, initial)

    def again():
        context.run_op()
        return context.last_step_outputs

    return [context.last_step_outputs, *(attempt(again) for _ in range(times - 1))]  # noqa: F405


@contextmanager
def loops_of(engine):
    """How the block runs loops of steps: step by step, or as one program."""
    mx.config.run_functions_eagerly(engine == "eager")
    try:
        yield
    finally:
        mx.config.run_functions_eagerly(False)
