"""Distributed values: made, taken apart, gathered (3.1-3.3, 3.5, 3.6, 12.6)."""

import numpy as np

from . import scenario


@scenario("3.1", "12.11")
def class_of_a_per_replica_value(api):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 2.0)
    return api.class_name(value)


@scenario("3.1", "12.11")
def repr_of_a_per_replica_value_starts_with_its_class(api):
    value = api.per_replica(api.mirrored(2), 1.0, 2.0)
    lines = repr(value).splitlines()
    return [lines[0], lines[1].split(":")[0], lines[2].split(":")[0], lines[-1]]


@scenario("3.1")
def distributed_values_is_the_class_of_them_all(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0)
    kind = api.distribute.DistributedValues
    return [
        isinstance(api.per_replica(strategy, 1.0, 2.0), kind),
        isinstance(variable, kind),
        isinstance(api.array(1.0), kind),
    ]


@scenario("3.1")
def values_of_a_per_replica_value_are_a_tuple(api):
    value = api.per_replica(api.mirrored(2), 1.0, 2.0)
    return [api.class_name(value.values), value.values]


@scenario("3.2")
def local_results_of_a_per_replica_value(api):
    strategy = api.mirrored(2)
    results = strategy.experimental_local_results(api.per_replica(strategy, 1.0, 2.0))
    return [api.class_name(results), results]


@scenario("3.2")
def local_results_of_a_plain_value(api):
    strategy = api.mirrored(2)
    array = api.array([1.0, 2.0])
    return [
        strategy.experimental_local_results(array),
        strategy.experimental_local_results(3),
        strategy.experimental_local_results("text"),
        strategy.experimental_local_results(None),
    ]


@scenario("3.2")
def local_results_of_a_structure(api):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 2.0)
    results = strategy.experimental_local_results([value, 3])
    return [api.class_name(results), len(results), results]


@scenario("3.2")
def local_results_of_a_mirrored_variable(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable([1.0, 2.0])
    return [api.copies(part) for part in strategy.experimental_local_results(variable)]


@scenario("3.2")
def local_results_with_one_replica(api):
    strategy = api.mirrored(1)
    value = strategy.run(lambda: api.array(1.0))
    return strategy.experimental_local_results(value)


@scenario("3.2")
def local_results_of_the_default_strategy(api):
    return api.distribute.get_strategy().experimental_local_results(api.array(1.0))


@scenario("3.3")
def values_from_a_function(api, engine):
    strategy = api.mirrored(2)

    def value_fn(context):
        return api.array(context.replica_id_in_sync_group * 10.0)

    return api.compile_if(
        engine, lambda: strategy.experimental_distribute_values_from_function(value_fn)
    )()


@scenario("3.3")
def value_context(api):
    strategy = api.mirrored(2)
    seen = []

    def value_fn(context):
        seen.append([context.replica_id_in_sync_group, context.num_replicas_in_sync])
        return api.array(0.0)

    strategy.experimental_distribute_values_from_function(value_fn)
    return seen


@scenario("3.3")
def value_context_can_be_made_by_hand(api):
    context = api.distribute.experimental.ValueContext(3, 8)
    default = api.distribute.experimental.ValueContext()
    return [
        [context.replica_id_in_sync_group, context.num_replicas_in_sync],
        [default.replica_id_in_sync_group, default.num_replicas_in_sync],
    ]


@scenario("3.3")
def values_from_a_function_of_python_values(api):
    strategy = api.mirrored(2)
    distribute = strategy.experimental_distribute_values_from_function
    return [
        distribute(lambda context: context.replica_id_in_sync_group),
        distribute(lambda context: 7),
        distribute(lambda context: f"replica {context.replica_id_in_sync_group}"),
    ]


@scenario("3.3")
def values_from_a_function_of_structures(api):
    strategy = api.mirrored(2)

    def value_fn(context):
        x = api.array([1.0 + context.replica_id_in_sync_group])
        return {"a": x, "b": (x, 3)}

    return strategy.experimental_distribute_values_from_function(value_fn)


@scenario("3.3")
def values_from_a_function_with_one_replica(api):
    strategies = api.mirrored(1), api.one_device(), api.distribute.get_strategy()

    def value_fn(context):
        return api.array([context.replica_id_in_sync_group, 5], "int32")

    return [
        each.experimental_distribute_values_from_function(value_fn)
        for each in strategies
    ]


@scenario("3.5")
def gather_along_the_first_axis(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [[1, 2]], [[3, 4]], dtype="int32")
    return api.compile_if(engine, lambda: strategy.gather(value, axis=0))()


@scenario("3.5")
def gather_along_the_second_axis(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [[1.0, 2.0]], [[3.0, 4.0]])
    return api.compile_if(engine, lambda: strategy.gather(value, axis=1))()


@scenario("3.5", "12.6", "5.6")
def gather_of_uneven_values(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [[1.0], [2.0]], [[3.0]])
    return api.compile_if(engine, lambda: strategy.gather(value, axis=0))()


@scenario("12.6")
def gather_of_values_uneven_in_another_axis(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [[1.0, 2.0]], [[3.0]])
    return api.fails(api.compile_if(engine, lambda: strategy.gather(value, axis=0)))


@scenario("3.5")
def gather_of_an_empty_part(api, engine):
    strategy = api.mirrored(2)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: api.array([1.0, 2.0])[
            : 2 - 2 * context.replica_id_in_sync_group
        ]
    )
    return api.compile_if(engine, lambda: strategy.gather(value, axis=0))()


@scenario("12.6")
def gather_of_a_plain_value(api, engine):
    strategy = api.mirrored(2)
    value = api.array([[1.0, 2.0]])
    return api.compile_if(engine, lambda: strategy.gather(value, axis=0))()


@scenario("3.5")
def gather_of_scalars(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 2.0)
    return api.compile_if(engine, lambda: strategy.gather(value, axis=0))()


@scenario(
    "3.5",
    differs="negative axes count from the end, as everywhere in JAX",
    expect=np.array([[1, 2]], "float32"),
)
def gather_along_a_negative_axis(api):
    strategy = api.mirrored(2)
    return strategy.gather(api.per_replica(strategy, [[1.0]], [[2.0]]), axis=-1)


@scenario("3.5")
def gather_along_an_axis_that_is_not_there(api):
    strategy = api.mirrored(2)
    return strategy.gather(api.per_replica(strategy, [1.0], [2.0]), axis=1)


@scenario(
    "3.5",
    differs="every part of a structure is gathered; TensorFlow keeps replica 0 only",
    expect={"a": np.float32([1.0, 2.0]), "b": [np.float32([1.0, 2.0])]},
)
def gather_of_a_structure(api):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [1.0], [2.0])
    return strategy.gather({"a": value, "b": [value]}, axis=0)


@scenario(
    "3.5",
    differs="bools gather like other arrays",
    expect=np.array([True, False, True, True]),
)
def gather_of_bools(api):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [True, False], [True, True], dtype="bool")
    return strategy.gather(value, axis=0)


@scenario("3.5")
def gather_with_one_replica(api):
    strategies = api.mirrored(1), api.one_device(), api.distribute.get_strategy()
    return [each.gather(api.array([1.0, 2.0]), axis=0) for each in strategies]


@scenario("3.5", "12.3")
def gather_inside_a_replica_function(api):
    strategy = api.mirrored(2)
    return strategy.run(lambda: strategy.gather(api.array([1.0]), axis=0))


@scenario("3.6")
def all_reduced_output_is_equal_on_all_replicas(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(x):
        return api.distribute.get_replica_context().all_reduce("SUM", x)

    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    result = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return strategy.experimental_local_results(result)


@scenario("3.6")
def all_reduced_output_goes_into_the_next_run(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(x):
        return api.distribute.get_replica_context().all_reduce("SUM", x)

    value = api.per_replica(strategy, 1.0, 3.0)
    total = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    next_fn = api.compile_if(engine, lambda x, total: x / total)
    return strategy.run(next_fn, args=(value, total))
