"""TensorFlow's side of `api`, on four logical CPU devices."""

import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from types import SimpleNamespace

import tensorflow as tf

from .neutral import *  # noqa: F403

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

compute_average_loss = tf.nn.compute_average_loss
scale_regularization_loss = tf.nn.scale_regularization_loss
Mean = tf.keras.metrics.Mean
Sum = tf.keras.metrics.Sum
Accuracy = tf.keras.metrics.Accuracy
SparseCategoricalAccuracy = tf.keras.metrics.SparseCategoricalAccuracy
Checkpoint = tf.train.Checkpoint
CheckpointManager = tf.train.CheckpointManager
latest_checkpoint = tf.train.latest_checkpoint
ExponentialMovingAverage = tf.train.ExponentialMovingAverage
ClusterSpec = tf.train.ClusterSpec

data = tf.data
errors = tf.errors
io = tf.io
TensorSpec = tf.TensorSpec
int64, float32, string = tf.int64, tf.float32, tf.string


def _refuse(x, condition):
    """`x`, or an error where the condition is true."""
    with tf.control_dependencies([tf.debugging.Assert(~condition, [x])]):
        return tf.identity(x)


# For functions that a dataset calls: there mirrax has NumPy.
ops = SimpleNamespace(
    cast=tf.cast,
    constant=tf.constant,
    fill=tf.fill,
    sum=tf.reduce_sum,
    size=tf.size,
    number=tf.strings.to_number,
    decode=tf.io.decode_raw,
    append=lambda x, y: tf.concat([x, [y]], 0),
    length=lambda x: tf.shape(x)[0],
    refuse=_refuse,
)


def mirrored(num_replicas, **kwargs):
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    return tf.distribute.MirroredStrategy(devices, **kwargs)


def mirrored_v1(num_replicas):
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    return tf.compat.v1.distribute.MirroredStrategy(devices)


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


def rows(value):
    """The rows of a sparse or ragged value; the values if it is one row."""
    if isinstance(value, tf.SparseTensor) and value.shape.rank == 1:
        return plain(value.values)  # noqa: F405
    if isinstance(value, tf.SparseTensor):
        value = tf.RaggedTensor.from_sparse(value)
    return plain(value.to_list() if hasattr(value, "to_list") else value)  # noqa: F405


def gradient(fn, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = fn(x)
    return tape.gradient(y, x)


def variable_gradients(fn, variables):
    with tf.GradientTape() as tape:
        value = fn()
    return value, tape.gradient(value, variables)


def sgd(learning_rate, momentum=0.0, nesterov=False, **kwargs):
    return tf.keras.optimizers.SGD(learning_rate, momentum, nesterov, **kwargs)


def adam(learning_rate):
    return tf.keras.optimizers.Adam(learning_rate, epsilon=1e-7)


def exponential_decay(initial, steps, rate):
    return tf.keras.optimizers.schedules.ExponentialDecay(initial, steps, rate)


def build(strategy, optimizer, variables):
    """Makes the slots; at a first compiled step Keras would fill only the first copy."""
    with strategy.scope():
        optimizer.build(variables)


def averages_of_values(average, make_strategy, steps):
    """The average of a tensor after each step, which takes a graph."""
    with tf.Graph().as_default(), v1().Session() as session:
        with make_strategy().scope():
            given = v1().placeholder(tf.float32, ())
            value = tf.identity(given)
            update = average.apply([value])
        session.run(v1().global_variables_initializer())
        found = []
        for step in steps:
            session.run(update, {given: step})
            found.append(session.run(average.average(value)))
        return found


def metric_variables(metric):
    return [variable.value for variable in metric.variables]


def trackable(metric):
    """A metric as an attribute of a checkpoint: Keras' own cannot be one."""
    return metric_variables(metric)


def function(fn, **kwargs):
    return tf.function(fn, autograph=False, **kwargs)


def function_with_loop(fn):
    return tf.function(fn, autograph=True)


def compile_if(engine, fn):
    return function(fn) if engine == "compiled" else fn


def v1():
    """The names of TensorFlow 1."""
    return tf.compat.v1


def deprecations(fn, times):
    """What each call of `fn` is warned of, in the log: once for each name."""
    logger, listener, messages = tf.get_logger(), logging.Handler(), []
    listener.emit = lambda record: messages[-1].append(record.getMessage())
    logger.handlers = [listener]
    logger.setLevel("WARNING")
    for _ in range(times):
        messages.append([])
        fn()
    return [[each for each in call if "is deprecated" in each] for call in messages]


def loops(make_strategy, make_dataset, make_step, iterations, initial, times):
    """The outputs of a loop of steps that runs several times, which takes a graph."""

    def step(context, element):
        made(context, element)
        return tf.no_op()

    with tf.Graph().as_default(), v1().Session() as session:
        strategy = make_strategy()
        made = make_step(strategy)
        iterator = strategy.make_dataset_iterator(make_dataset())
        run = strategy.extended.experimental_run_steps_on_iterator
        with strategy.scope():
            outputs = run(step, iterator, iterations, initial).last_step_outputs
        session.run(iterator.initialize())
        return [attempt(lambda: session.run(outputs)) for _ in range(times)]  # noqa: F405
