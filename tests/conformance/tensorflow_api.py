"""TensorFlow's side of `api`, on four logical CPU devices."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf

from .neutral import attempt, class_name, copies, fails  # noqa: F401

tf.get_logger().setLevel("ERROR")
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 4,
)

version = tf.__version__
distribute = tf.distribute
Variable = tf.Variable
VariableAggregation = tf.VariableAggregation
VariableSynchronization = tf.VariableSynchronization
ReduceOp = tf.distribute.ReduceOp
IndexedSlices = tf.IndexedSlices

sum = tf.reduce_sum
mean = tf.reduce_mean
matmul = tf.matmul
stack = tf.stack
concat = tf.concat
square = tf.square
cast = tf.cast


def mirrored(num_replicas, **kwargs):
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    return tf.distribute.MirroredStrategy(devices, **kwargs)


def one_device():
    return tf.distribute.OneDeviceStrategy("CPU:0")


def num_cpus():
    return len(tf.config.list_logical_devices("CPU"))


def array(values, dtype="float32"):
    return tf.constant(values, dtype)


def per_replica(strategy, *parts, dtype="float32"):
    return strategy.experimental_distribute_values_from_function(
        lambda context: array(parts[context.replica_id_in_sync_group], dtype)
    )


def gradient(fn, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = fn(x)
    return tape.gradient(y, x)


def variable_gradients(fn, variables):
    with tf.GradientTape() as tape:
        value = fn()
    return value, tape.gradient(value, variables)


def function(fn):
    return tf.function(fn, autograph=False)


def compile_if(engine, fn):
    return function(fn) if engine == "compiled" else fn
