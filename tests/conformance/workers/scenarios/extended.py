"""StrategyExtended on many workers: reduce_to, broadcast_to, update (6.3, 12.10)."""

from itertools import product

import numpy as np

from ...scenarios import replicas
from . import scenario

MANY = ("two", "three", "two_by_two")
OPS = [("SUM",), ("MEAN",)]


@scenario("6.3", cases=OPS, clusters=MANY)
def reduce_to_a_variable(api, engine, op):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable([0.0, 0.0])
        value = api.of_replica(strategy, lambda i: [1.0 + i, 2.0])

        def step():
            return strategy.extended.reduce_to(op, value, destinations=variable)

        # A function of TensorFlow gives back only the first copy of what is mirrored.
        return api.local_results(strategy, api.compile_if(engine, step)())[:1]


@scenario("6.3", cases=OPS)
def reduce_to_a_value(api, op):
    strategy = api.multi_worker()
    with strategy.scope():
        value = api.of_replica(strategy, lambda i: 1.0 + i)
        reduced = strategy.extended.reduce_to(op, value, destinations=value)
    return api.local_results(strategy, reduced)


@scenario("6.3", cases=OPS)
def reduce_to_a_device(api, op):
    strategy = api.multi_worker()
    device = strategy.extended.worker_devices[0]
    with strategy.scope():
        value = api.of_replica(strategy, lambda i: 1.0 + i)
        return strategy.extended.reduce_to(op, value, destinations=device)


@scenario("6.3", cases=OPS)
def reduce_to_of_integers(api, op):
    strategy = api.multi_worker()
    with strategy.scope():
        value = api.of_replica(strategy, lambda i: 1 + 3 * i, "int32")
        return strategy.extended.reduce_to(op, value, value)


@scenario("6.3", cases=OPS, clusters=("two", "two_by_two"))
def reduce_to_of_a_plain_value(api, op):
    strategy = api.multi_worker()
    with strategy.scope():
        to = api.Variable(0.0)
        value = api.array(2.0 + api.worker)
        return api.attempt(lambda: strategy.extended.reduce_to(op, value, to))


@scenario("6.3", cases=OPS)
@scenario("6.3", cases=[("MEAN",)], clusters=("two_by_two",))
@scenario(
    "6.3",
    cases=[("SUM",)],
    clusters=("two_by_two",),
    differs="what is mirrored sums as n copies",
    expect=[[{"float32[]": 40.0}] * 2] * 2,
)
def reduce_to_of_what_is_mirrored_already(api, op):
    strategy = api.multi_worker()
    with strategy.scope():
        value = api.of_replica(strategy, lambda i: 1.0 + i)
        total = strategy.extended.reduce_to("SUM", value, value)
        again = api.attempt(lambda: strategy.extended.reduce_to(op, total, total))
    failed = isinstance(again, Exception)
    return again if failed else api.local_results(strategy, again)


@scenario("6.3", cases=[("MEAN",)])
@scenario(
    "6.3",
    cases=[("SUM",)],
    differs="what is mirrored sums as n copies",
    expect=[replicas(np.float32(6.0))] * 2,
)
def reduce_to_of_a_variable(api, op):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable(3.0)
        return api.attempt(lambda: strategy.extended.reduce_to(op, variable, variable))


@scenario("6.3", cases=OPS)
def batch_reduce_to(api, engine, op):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable(0.0)
        value = api.of_replica(strategy, lambda i: 1.0 + i)
        other = api.of_replica(strategy, lambda i: [1.0, 2.0 * i])

        def step():
            return strategy.extended.batch_reduce_to(
                op, [(value, variable), (other, variable)]
            )

        reduced = api.compile_if(engine, step)()
    return [api.local_results(strategy, each) for each in reduced]


@scenario("6.3", clusters=MANY)
def broadcast_to_a_variable(api):
    """Nothing is sent: each worker has its own value."""
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable(0.0)
        sent = strategy.extended.broadcast_to(api.array(1.0 + api.worker), variable)
    return api.local_results(strategy, sent)


DEVICES = "a worker's devices are destinations too"


@scenario(
    "6.3",
    differs=DEVICES,
    expect=[[{"float32[]": 1.0}], [{"float32[]": 2.0}]],
)
@scenario(
    "6.3",
    clusters=("two_by_two",),
    differs=DEVICES,
    expect=[[{"float32[]": 1.0}] * 2, [{"float32[]": 2.0}] * 2],
)
def broadcast_to_the_workers_devices(api):
    strategy = api.multi_worker()
    with strategy.scope():
        devices = strategy.extended.worker_devices
        sent = api.attempt(
            lambda: strategy.extended.broadcast_to(api.array(1.0 + api.worker), devices)
        )
    failed = isinstance(sent, Exception)
    return sent if failed else api.local_results(strategy, sent)


@scenario("6.3", "12.10", clusters=("two", "two_by_two"))
def update_with_a_plain_argument(api, engine):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable([1.0, 2.0])

        def step():
            strategy.extended.update(
                variable, lambda v, x: v.assign_add(x), args=(api.array([1.0, 1.0]),)
            )

        api.compile_if(engine, step)()
    return api.copies(variable)


@scenario("6.3", "12.10", clusters=("two", "two_by_two"))
def update_with_the_workers_own_argument(api, engine):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable(1.0)
        own = api.array(10.0 * api.worker)

        def step():
            strategy.extended.update(
                variable, lambda v, x: v.assign_add(x), args=(own,)
            )

        api.compile_if(engine, step)()
    return api.copies(variable)


@scenario("6.3", "12.7", clusters=("two", "two_by_two"))
def update_with_a_per_replica_argument(api, engine):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable(10.0)
    value = api.of_replica(strategy, lambda i: 1.0 + i)

    def step():
        strategy.extended.update(
            variable, lambda v, x: v.assign_sub(x), kwargs={"x": value}
        )

    with strategy.scope():
        api.compile_if(engine, step)()
    return api.copies(variable)


@scenario("6.3", "12.10", cases=[("group",), ("no group",)])
def result_of_update(api, group):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable(10.0)
        value = api.of_replica(strategy, lambda i: 1.0 + i)
        result = strategy.extended.update(
            variable, lambda v, x: v + x, args=(value,), group=group == "group"
        )
    parts = result if isinstance(result, tuple) else (result,)
    return [api.class_name(result) == "tuple", [api.brief(part) for part in parts]]


@scenario("12.10", clusters=("two", "two_by_two"))
def how_often_update_calls_its_function(api):
    strategy = api.multi_worker()
    seen = []
    with strategy.scope():
        variable = api.Variable(10.0)
        strategy.extended.update(variable, lambda v: seen.append(v))
    return [part is own for part, own in zip(seen, variable.values, strict=True)]


@scenario("12.10")
def assign_inside_update_does_not_aggregate(api):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable(1.0, aggregation=api.VariableAggregation.SUM)
        own = api.array(2.0 + api.worker)
        strategy.extended.update(variable, lambda v: v.assign_add(own))
    return api.copies(variable)


@scenario("12.10", clusters=("two", "two_by_two"))
def update_in_replica_context(api, engine):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable(1.0)

    def replica_fn(x):
        strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(x,))
        return variable * 1.0

    value = api.of_replica(strategy, lambda i: 10.0 * (1 + i))
    result = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return [api.local_results(strategy, result), api.copies(variable)]


@scenario("6.3", clusters=("two", "two_by_two"))
def update_non_slot(api):
    strategy = api.multi_worker()
    calls = []
    with strategy.scope():
        variable = api.Variable(1.0)
        devices = strategy.extended.non_slot_devices([variable])

        def fn(x):
            calls.append(1)
            return x * 2.0

        own = api.array(3.0 + api.worker)
        result = strategy.extended.update_non_slot(devices, fn, args=(own,))
        parts = strategy.extended.update_non_slot(devices, fn, args=(own,), group=False)
    return [len(calls), api.local_results(strategy, result), api.brief(list(parts))]


@scenario("6.3", clusters=("two", "two_by_two"))
def call_for_each_replica(api, engine):
    strategy = api.multi_worker()

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return x + api.cast(context.replica_id_in_sync_group, "float32")

    fn = api.compile_if(engine, replica_fn)
    with strategy.scope():
        result = strategy.extended.call_for_each_replica(fn, args=(api.array(10.0),))
    return api.local_results(strategy, result)


@scenario("6.3", cases=product(("ON_WRITE", "ON_READ")))
def value_container(api, synchronization):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable(
            1.0,
            synchronization=getattr(api.VariableSynchronization, synchronization),
            aggregation=api.VariableAggregation.SUM,
        )
    container = strategy.extended.value_container
    return [[container(part) is variable for part in variable.values], container(3.0)]
