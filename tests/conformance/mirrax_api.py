"""mirrax's side of `api`."""

import jax
import jax.numpy as jnp

import mirrax as mx

from .neutral import attempt, class_name, copies, fails  # noqa: F401

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


def mirrored(num_replicas, **kwargs):
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    return mx.distribute.MirroredStrategy(devices, **kwargs)


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


def gradient(fn, x):
    return jax.grad(fn)(x)


def variable_gradients(fn, variables):
    return mx.value_and_grad(fn, variables)()


def function(fn):
    return mx.function(fn)


def compile_if(engine, fn):
    return function(fn) if engine == "compiled" else fn
