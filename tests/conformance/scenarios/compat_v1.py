"""compat.v1: iterators, experimental_run, many steps, older names (10.1, 10.3)."""

from collections import namedtuple

import numpy as np

from . import scenario

REPLICAS = [("1",), ("2",), ("3",), ("4",)]
KINDS = [("1",), ("2",), ("4",), ("one_device",)]
Pair = namedtuple("Pair", ["x", "y"])


def distribute(api):
    return api.v1().distribute


def make(api, kind):
    """A strategy with that many replicas, on one device, or for many workers."""
    if kind == "multi_worker":
        return distribute(api).experimental.MultiWorkerMirroredStrategy()
    if kind == "one_device":
        return distribute(api).OneDeviceStrategy("CPU:0")
    devices = [f"CPU:{index}" for index in range(int(kind))]
    return distribute(api).MirroredStrategy(devices)


def _range(api, n, batch, **kwargs):
    return api.data.Dataset.range(n).batch(batch, **kwargs)


def _floats(api, n, batch):
    numbers = np.arange(n, dtype="float32")
    return api.data.Dataset.from_tensor_slices(numbers).batch(batch)


def _drain(api, strategy, iterator, limit=20):
    """All steps, and what ends them."""
    results = []
    for _ in range(limit):
        batch = api.attempt(iterator.get_next)
        if isinstance(batch, Exception):
            return [*results, batch]
        results.append(api.local_results(strategy, batch))
    return results


# Names -------------------------------------------------------------------------------

SHARED = """
CrossDeviceOps HierarchicalCopyAllReduce InputContext InputReplicationMode NcclAllReduce
ReduceOp ReductionToOneDevice RunOptions experimental_set_strategy get_replica_context
get_strategy has_strategy in_cross_replica_context
""".split()
OWN = """
MirroredStrategy OneDeviceStrategy ReplicaContext Strategy StrategyExtended
cluster_resolver experimental get_loss_reduction
""".split()
METHODS = """
distribute_datasets_from_function experimental_distribute_dataset
experimental_local_results experimental_make_numpy_dataset experimental_run
make_dataset_iterator make_input_fn_iterator reduce run scope update_config_proto
""".split()
EXTENDED = """
batch_reduce_to broadcast_to call_for_each_replica colocate_vars_with
experimental_make_numpy_dataset experimental_run_steps_on_iterator non_slot_devices
read_var reduce_to update update_non_slot value_container variable_created_in_scope
""".split()
RESOLVERS = """
ClusterResolver KubernetesClusterResolver SimpleClusterResolver SlurmClusterResolver
TFConfigClusterResolver
""".split()


@scenario("10.1")
def names_of_v1(api):
    v1, main = distribute(api), api.distribute
    return {
        "own": [hasattr(v1, name) for name in OWN],
        "shared": {name: getattr(v1, name) is getattr(main, name) for name in SHARED},
        "resolvers": [hasattr(v1.cluster_resolver, name) for name in RESOLVERS],
    }


@scenario("10.1")
def names_of_v1_experimental(api):
    experimental = distribute(api).experimental
    implementation = experimental.CollectiveCommunication
    return [
        [each.name for each in implementation],
        implementation is experimental.CommunicationImplementation,
        experimental.CommunicationOptions(bytes_per_pack=10).bytes_per_pack,
        isinstance(experimental.MultiWorkerMirroredStrategy, type),
    ]


@scenario("10.1")
def parameters_of_v1(api):
    v1 = distribute(api)
    return {
        "MirroredStrategy": api.parameters(v1.MirroredStrategy.__init__),
        "OneDeviceStrategy": api.parameters(v1.OneDeviceStrategy.__init__),
        "methods": {
            name: api.parameters(getattr(v1.MirroredStrategy, name)) for name in METHODS
        },
        "extended": {
            name: list(api.parameters(getattr(v1.StrategyExtended, name)))
            for name in EXTENDED
        },
    }


@scenario("10.1")
def members_of_the_enumerations(api):
    v1 = distribute(api)
    return [
        [each.name for each in v1.InputReplicationMode],
        [each.name for each in v1.ReduceOp],
        [each.name for each in api.v1().VariableAggregation],
        [each.name for each in api.v1().VariableSynchronization],
    ]


@scenario("10.1")
def the_first_tower_is_the_first_replica(api):
    aggregation = api.v1().VariableAggregation
    return aggregation.ONLY_FIRST_TOWER is aggregation.ONLY_FIRST_REPLICA


@scenario("10.1", cases=KINDS)
def classes_of_a_strategy(api, kind):
    v1, strategy = distribute(api), make(api, kind)
    return [
        isinstance(strategy, v1.Strategy),
        isinstance(strategy, v1.MirroredStrategy),
        isinstance(strategy, v1.OneDeviceStrategy),
        isinstance(strategy.extended, v1.StrategyExtended),
        isinstance(strategy.extended, api.distribute.StrategyExtended),
        strategy.cluster_resolver,
        strategy.num_replicas_in_sync,
    ]


@scenario("10.1")
def main_strategies_are_not_of_v1(api):
    v1 = distribute(api)
    strategies = [api.mirrored(2), api.one_device(), api.distribute.get_strategy()]
    return [isinstance(strategy, v1.Strategy) for strategy in strategies]


@scenario(
    "10.1",
    cases=KINDS,
    differs="what takes a strategy takes one of v1, too",
    expect=True,
)
def strategies_of_v1_are_strategies(api, kind):
    return isinstance(make(api, kind), api.distribute.Strategy)


@scenario("10.1", "1.2")
def devices_by_default(api):
    strategies = [
        distribute(api).MirroredStrategy(),
        distribute(api).MirroredStrategy([]),
        distribute(api).MirroredStrategy(devices=["CPU:1"], cross_device_ops=None),
    ]
    return [each.num_replicas_in_sync == api.num_cpus() for each in strategies[:2]] + [
        [str(device) for device in strategies[2].extended.worker_devices]
    ]


@scenario("10.1", cases=[("ReductionToOneDevice",), ("HierarchicalCopyAllReduce",)])
def cross_device_ops_of_v1(api, engine, name):
    v1 = distribute(api)
    ops = getattr(v1, name)()
    strategy = v1.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)

    def replica_fn():
        context = v1.get_replica_context()
        return context.all_reduce("SUM", api.array([1.0, 2.0]))

    return strategy.run(api.compile_if(engine, replica_fn))


@scenario("10.1", "1.2")
def a_multi_worker_strategy_of_v1(api, engine):
    strategy = make(api, "multi_worker")
    iterator = strategy.make_dataset_iterator(_floats(api, 8, 4))
    replica_fn = api.compile_if(engine, lambda x: x * 2.0)
    config = api.v1().ConfigProto()
    return [
        isinstance(strategy, distribute(api).Strategy),
        strategy.num_replicas_in_sync,
        strategy.cluster_resolver is None,
        api.local_results(strategy, strategy.experimental_run(replica_fn, iterator)),
        strategy.reduce("SUM", strategy.run(lambda: api.array(3.0))),
        strategy.update_config_proto(config) is config,
        strategy.update_config_proto(config).isolate_session_state,
    ]


@scenario("10.1")
def one_device_needs_its_device(api):
    return api.attempt(distribute(api).OneDeviceStrategy)


# get_loss_reduction and update_config_proto ------------------------------------------


@scenario("10.1", cases=KINDS)
def loss_reduction(api, kind):
    v1, strategy = distribute(api), make(api, kind)
    with strategy.scope():
        in_scope = v1.get_loss_reduction()
        inside = strategy.run(v1.get_loss_reduction)
    return [v1.get_loss_reduction(), in_scope, inside]


@scenario("10.1")
def loss_reduction_under_the_main_strategies(api):
    results = []
    for strategy in (api.mirrored(2), api.one_device()):
        with strategy.scope():
            results.append(distribute(api).get_loss_reduction())
    return results


@scenario("10.1", cases=KINDS)
def a_config_is_copied(api, kind):
    strategy = make(api, kind)
    config = api.v1().ConfigProto(allow_soft_placement=True, device_count={"CPU": 2})
    config.gpu_options.allow_growth = True
    updated = strategy.update_config_proto(config)
    result = [
        updated is config,
        api.class_name(updated),
        updated.allow_soft_placement,
        updated.gpu_options.allow_growth,
        updated.device_count["CPU"],
        updated.isolate_session_state,
        config.isolate_session_state,
        updated == config,
        strategy.update_config_proto(updated) == updated,
    ]
    updated.gpu_options.allow_growth = False
    updated.device_count["CPU"] = 3
    return [*result, config.gpu_options.allow_growth, config.device_count["CPU"]]


@scenario("10.1", cases=KINDS)
def a_default_config(api, kind):
    config = api.v1().ConfigProto()
    updated = make(api, kind).update_config_proto(config)
    return [config == api.v1().ConfigProto(), updated == config]


@scenario("10.1")
def no_config_at_all(api):
    strategy = make(api, "2")
    wrong = (None, {"allow_soft_placement": True}, "config", 5)
    return [api.fails(lambda w=w: strategy.update_config_proto(w)) for w in wrong]


# experimental_run --------------------------------------------------------------------

MAPS = {
    "single": lambda x: x,
    "tuple": lambda x: (x, x * 10),
    "tuple_of_one": lambda x: (x,),
    "namedtuple": lambda x: Pair(x, x * 10),
    "dict": lambda x: {"x": x, "y": x * 10},
    "nested": lambda x: ((x, {"y": x * 10}), x + 1),
}


def _mapped(api, name, n=8, batch=4):
    numbers = api.data.Dataset.from_tensor_slices(np.arange(n, dtype="float32"))
    return numbers.map(MAPS[name]).batch(batch)


@scenario("10.1", "5.10", cases=[(n, name) for (n,) in KINDS for name in MAPS])
def function_gets_the_element_as_one_argument(api, engine, kind, name):
    strategy = make(api, kind)
    iterator = strategy.make_dataset_iterator(_mapped(api, name))
    numbers_of_arguments = set()

    def replica_fn(*args):
        numbers_of_arguments.add(len(args))
        return args[0]

    replica_fn = api.compile_if(engine, replica_fn)
    result = strategy.experimental_run(replica_fn, iterator)
    again = strategy.experimental_run(fn=replica_fn, input_iterator=iterator)
    return [
        sorted(numbers_of_arguments),
        api.local_results(strategy, result),
        api.local_results(strategy, again),
    ]


@scenario("10.1", cases=KINDS)
def experimental_run_without_an_iterator(api, engine, kind):
    strategy = make(api, kind)

    def replica_fn():
        context = distribute(api).get_replica_context()
        return api.cast(context.replica_id_in_sync_group, "int32") * 10

    replica_fn = api.compile_if(engine, replica_fn)
    return [
        strategy.experimental_run(replica_fn),
        strategy.experimental_run(replica_fn, None),
        strategy.experimental_run(replica_fn, input_iterator=None),
    ]


@scenario("10.1", cases=REPLICAS)
def experimental_run_until_the_data_ends(api, engine, count):
    strategy = make(api, count)
    iterator = strategy.make_dataset_iterator(_floats(api, 10, 4))
    iterator.initialize()
    replica_fn = api.compile_if(engine, lambda x: api.sum(x))

    def step():
        result = strategy.experimental_run(replica_fn, iterator)
        return strategy.reduce("SUM", result)

    results = [step(), step(), step(), api.attempt(step), api.attempt(step)]
    iterator.initialize()
    return [*results, step()]


@scenario("10.1", cases=REPLICAS)
def experimental_run_of_a_function_iterator(api, engine, count):
    strategy = make(api, count)
    iterator = strategy.make_input_fn_iterator(lambda context: _floats(api, 16, 2))
    replica_fn = api.compile_if(engine, lambda x: x * 2.0)

    def step():
        result = strategy.experimental_run(replica_fn, iterator)
        return api.local_results(strategy, result)

    return [step(), step(), api.attempt(step)]


@scenario("10.1", cases=REPLICAS)
def experimental_run_inside_a_compiled_caller(api, engine, count):
    strategy = make(api, count)
    iterator = strategy.make_dataset_iterator(_floats(api, 10, 4))

    def step():
        result = strategy.experimental_run(lambda x: api.sum(x), iterator)
        return strategy.reduce("SUM", result)

    step = api.compile_if(engine, step)
    results = [step(), step(), step(), api.attempt(step)]
    iterator.initialize()
    return [*results, step()]


@scenario("10.1")
def iterator_is_an_argument_of_a_compiled_caller(api, engine):
    strategy = make(api, "2")
    iterator = strategy.make_dataset_iterator(_floats(api, 8, 4))

    def step(it):
        result = strategy.experimental_run(lambda x: api.sum(x), it)
        return strategy.reduce("SUM", result)

    step = api.compile_if(engine, step)
    return [step(iterator), step(iterator), api.fails(lambda: step(iterator))]


@scenario("10.1", cases=KINDS)
def experimental_run_counts_in_a_variable(api, engine, kind):
    strategy = make(api, kind)
    with strategy.scope():
        total = api.Variable(1.0, aggregation=api.VariableAggregation.SUM)
    iterator = strategy.make_dataset_iterator(_floats(api, 6, 4))

    def replica_fn(x):
        total.assign_add(api.sum(x))

    replica_fn = api.compile_if(engine, replica_fn)
    for _ in range(2):
        strategy.experimental_run(replica_fn, iterator)
    return api.copies(total)


@scenario("10.1", cases=REPLICAS)
def experimental_run_reduces_over_replicas(api, engine, count):
    strategy = make(api, count)
    iterator = strategy.make_dataset_iterator(_floats(api, 12, 12))

    def replica_fn(x):
        context = distribute(api).get_replica_context()
        return context.all_reduce("SUM", api.sum(x))

    result = strategy.experimental_run(api.compile_if(engine, replica_fn), iterator)
    return api.local_results(strategy, result)


OUTPUTS = {
    "none": lambda api: None,
    "dict": lambda api: {"a": api.array(1.0), "b": (api.array([2.0]), None)},
    "number": lambda api: 3.0,
    "text": lambda api: "text",
}


@scenario("10.1", cases=[(n, name) for n in ("1", "2") for name in OUTPUTS])
def outputs_of_experimental_run(api, count, name):
    return make(api, count).experimental_run(lambda: OUTPUTS[name](api))


@scenario("10.1")
def contexts_of_experimental_run(api):
    v1, strategy = distribute(api), make(api, "2")

    def replica_fn():
        context = v1.get_replica_context()
        return (
            v1.in_cross_replica_context(),
            v1.has_strategy(),
            v1.get_strategy() is strategy,
            context.strategy is strategy,
            context.num_replicas_in_sync,
        )

    return [strategy.experimental_run(replica_fn), v1.has_strategy()]


@scenario("10.1")
def other_iterators_of_experimental_run(api):
    strategy = make(api, "2")
    distributed = strategy.experimental_distribute_dataset(_floats(api, 4, 4))
    of_function = strategy.distribute_datasets_from_function(
        lambda context: _floats(api, 4, 2)
    )
    return [
        strategy.experimental_run(lambda x: x * 2.0, iter(distributed)),
        strategy.experimental_run(lambda x: x * 2.0, iter(of_function)),
    ]


@scenario("10.1", cases=[("number",), ("list",), ("dataset",), ("distributed",)])
def experimental_run_needs_an_iterator(api, kind):
    strategy = make(api, "2")
    iterator = {
        "number": lambda: 5,
        "list": lambda: [1.0, 2.0],
        "dataset": lambda: _floats(api, 4, 2),
        "distributed": lambda: strategy.experimental_distribute_dataset(
            _floats(api, 4, 2)
        ),
    }[kind]()
    return api.fails(lambda: strategy.experimental_run(lambda x: x, iterator))


@scenario("10.1")
def functions_that_do_not_fit(api):
    strategy = make(api, "2")
    iterator = strategy.make_dataset_iterator(_floats(api, 4, 2))
    return [
        api.attempt(lambda: strategy.experimental_run(lambda x: x)),
        api.attempt(lambda: strategy.experimental_run(lambda: 1.0, iterator)),
        api.attempt(lambda: strategy.experimental_run(5)),
        api.attempt(lambda: strategy.experimental_run(lambda: {}["key"])),
        strategy.experimental_run(lambda: 1.0),
    ]


@scenario("10.1")
def experimental_run_inside_a_replica(api):
    strategy = make(api, "2")
    return api.attempt(
        lambda: strategy.run(lambda: strategy.experimental_run(lambda: 1.0))
    )


# Iterators over datasets -------------------------------------------------------------

SIZES = ((8, 4), (10, 4), (7, 3), (6, 6), (5, 1), (9, 5), (3, 8), (0, 4), (1, 1))


@scenario(
    "10.1",
    "12.12",
    cases=[
        (*kind, remainder)
        for kind in [*REPLICAS, ("one_device",)]
        for remainder in ("keep", "drop")
    ],
)
def batches_of_a_dataset_iterator(api, kind, remainder):
    strategy = make(api, kind)

    def drained(n, batch):
        dataset = _range(api, n, batch, drop_remainder=remainder == "drop")
        iterator = strategy.make_dataset_iterator(dataset)
        return [api.spec(iterator), _drain(api, strategy, iterator)]

    return {f"{n} by {batch}": drained(n, batch) for n, batch in SIZES}


@scenario("10.1", cases=[(n, name) for (n,) in REPLICAS for name in MAPS])
def structures_of_a_dataset_iterator(api, count, name):
    strategy = make(api, count)
    iterator = strategy.make_dataset_iterator(_mapped(api, name, 6, 4))
    return [api.spec(iterator), _drain(api, strategy, iterator)]


@scenario("10.1", cases=KINDS)
def initialize_goes_back_to_the_start(api, kind):
    strategy = make(api, kind)
    iterator = strategy.make_dataset_iterator(_range(api, 12, 4))

    def take():
        return api.local_results(strategy, iterator.get_next())

    first = [take(), take()]
    said = iterator.initialize()
    second = [take(), iterator.initialize(), iterator.initialize(), take()]
    return [first, said, second, _drain(api, strategy, iterator), said]


@scenario("10.1", cases=KINDS)
def the_end_stays_the_end_until_initialize(api, kind):
    strategy = make(api, kind)
    iterator = strategy.make_dataset_iterator(_range(api, 4, 4))
    iterator.get_next()
    ends = [api.attempt(iterator.get_next) for _ in range(2)]
    ends += [api.attempt(lambda: next(iterator)), next(iterator, "nothing")]
    ends += [list(iterator), api.attempt(iterator.get_next)]
    iterator.initialize()
    return [ends, api.steps(strategy, iterator), api.steps(strategy, iterator)]


@scenario("10.1", cases=KINDS)
def an_iterator_of_v1_in_a_loop(api, kind):
    strategy = make(api, kind)
    iterator = strategy.make_dataset_iterator(_range(api, 10, 4))
    first = api.local_results(strategy, next(iterator))
    return [iter(iterator) is iterator, first, api.steps(strategy, iterator)]


@scenario("10.1", cases=[("1",), ("2",), ("3",)])
def optional_of_an_iterator_of_v1(api, count):
    strategy = make(api, count)
    iterator = strategy.make_dataset_iterator(_range(api, 5, 4))
    results = []
    for _ in range(3):
        optional = iterator.get_next_as_optional()
        results.append(bool(optional.has_value()))
        if results[-1]:
            results.append(api.local_results(strategy, optional.get_value()))
    return results


@scenario("10.1")
def an_iterator_of_v1_is_a_distributed_iterator(api):
    strategy = make(api, "2")
    dataset = _range(api, 4, 2)
    return [
        isinstance(each, api.distribute.DistributedIterator)
        for each in (
            strategy.make_dataset_iterator(dataset),
            strategy.make_input_fn_iterator(lambda context: dataset),
        )
    ]


@scenario("10.1")
def get_next_takes_a_name(api):
    strategy = make(api, "2")
    iterator = strategy.make_dataset_iterator(_range(api, 8, 4))
    return [iterator.get_next("name"), iterator.get_next(None)]


@scenario("10.1")
def reading_the_initializer(api):
    strategy = make(api, "2")
    iterator = strategy.make_dataset_iterator(_range(api, 8, 4))
    first = iterator.get_next()
    return [first, iterator.initializer, iterator.get_next()]


@scenario("10.1", cases=[("1",), ("2",)])
def two_iterators_over_one_dataset(api, count):
    strategy = make(api, count)
    dataset = _range(api, 8, 4)
    one, other = (strategy.make_dataset_iterator(dataset) for _ in range(2))
    taken = [one.get_next(), other.get_next(), one.get_next()]
    one.initialize()
    taken += [other.get_next(), one.get_next()]
    return [api.local_results(strategy, batch) for batch in taken]


@scenario("10.1")
def a_shuffled_dataset_is_shuffled_anew(api):
    strategy = make(api, "2")
    dataset = api.data.Dataset.range(50).shuffle(50, seed=1).batch(50)
    iterator = strategy.make_dataset_iterator(dataset)
    orders = []
    for _ in range(2):
        iterator.initialize()
        batch = strategy.experimental_local_results(iterator.get_next())
        orders.append([number for part in batch for number in api.plain(part)])
    return [sorted(orders[0]) == sorted(orders[1]), orders[0] == orders[1]]


@scenario("10.1", cases=[("1",), ("2",)])
def an_infinite_dataset(api, count):
    strategy = make(api, count)
    iterator = strategy.make_dataset_iterator(_range(api, 5, 4).repeat())
    return [api.local_results(strategy, iterator.get_next()) for _ in range(5)]


@scenario("10.1")
def get_next_of_v1_inside_a_replica(api):
    strategy = make(api, "2")
    iterator = strategy.make_dataset_iterator(_range(api, 8, 4))
    return [
        api.attempt(lambda: strategy.run(iterator.get_next)),
        api.local_results(strategy, iterator.get_next()),
    ]


@scenario("10.1")
def what_a_dataset_iterator_cannot_take(api):
    strategy = make(api, "2")
    distributed = strategy.experimental_distribute_dataset(_range(api, 4, 2))
    wrong = (5, None, distributed, api.data.Dataset.range(4))
    return [
        api.fails(lambda w=w: strategy.make_dataset_iterator(w).get_next())
        for w in wrong
    ]


@scenario("10.1")
def a_dataset_iterator_inside_a_scope(api):
    strategy = make(api, "2")
    with strategy.scope():
        iterator = strategy.make_dataset_iterator(_range(api, 4, 4))
        inside = strategy.experimental_run(lambda x: x * 2, iterator)
    iterator.initialize()
    return [inside, strategy.experimental_run(lambda x: x * 2, iterator)]


# Iterators over what a function gives ------------------------------------------------

FUNCTION_SIZES = ((8, 2), (7, 2), (5, 1), (1, 1), (0, 1), (3, 4), (12, 1))


@scenario(
    "10.1",
    "12.14",
    cases=[
        (*kind, remainder)
        for kind in [*REPLICAS, ("one_device",)]
        for remainder in ("keep", "drop")
    ],
)
def batches_of_a_function_iterator(api, kind, remainder):
    strategy = make(api, kind)

    def drained(n, batch):
        dataset = _range(api, n, batch, drop_remainder=remainder == "drop")
        iterator = strategy.make_input_fn_iterator(lambda context: dataset)
        return _drain(api, strategy, iterator)

    return {f"{n} by {batch}": drained(n, batch) for n, batch in FUNCTION_SIZES}


@scenario("10.1", cases=REPLICAS)
def unbatched_elements_of_a_function_iterator(api, count):
    strategy = make(api, count)
    iterator = strategy.make_input_fn_iterator(
        lambda context: api.data.Dataset.range(6)
    )
    return _drain(api, strategy, iterator)


@scenario("10.1", cases=[(n, name) for (n,) in REPLICAS for name in MAPS])
def structures_of_a_function_iterator(api, count, name):
    strategy = make(api, count)
    iterator = strategy.make_input_fn_iterator(
        lambda context: _mapped(api, name, 30, context.get_per_replica_batch_size(12))
    )
    return _drain(api, strategy, iterator)


@scenario("10.1", cases=KINDS)
def context_of_an_input_function(api, kind):
    strategy = make(api, kind)
    calls = []

    def input_fn(context):
        calls.append(
            [
                api.class_name(context),
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.num_replicas_in_sync,
                context.get_per_replica_batch_size(12),
                api.attempt(lambda: context.get_per_replica_batch_size(13)),
            ]
        )
        return _range(api, 24, 3)

    iterator = strategy.make_input_fn_iterator(input_fn)
    made = len(calls)
    first = api.local_results(strategy, iterator.get_next())
    iterator.initialize()
    again = api.local_results(strategy, iterator.get_next())
    return [made, first, again, calls]


@scenario("10.1", cases=KINDS)
def a_function_iterator_in_a_loop(api, kind):
    strategy = make(api, kind)
    iterator = strategy.make_input_fn_iterator(lambda context: _range(api, 12, 2))
    first = api.local_results(strategy, next(iterator))
    rest = api.steps(strategy, iterator)
    ends = [api.attempt(lambda: next(iterator)), api.attempt(iterator.get_next)]
    iterator.initialize()
    return [iter(iterator) is iterator, first, rest, ends, next(iterator)]


@scenario("10.1", cases=KINDS)
def the_input_function_of_the_page(api, engine, kind):
    strategy = make(api, kind)

    def input_fn(context):
        batch_size = context.get_per_replica_batch_size(8)
        dataset = api.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)

    replica_fn = api.compile_if(engine, lambda x: x * 2.0)
    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(input_fn)
        result = strategy.experimental_run(replica_fn, iterator)
    return api.local_results(strategy, result)


@scenario(
    "10.1",
    cases=[("1",), ("2",)],
    differs="an input function gives a dataset; a callable is none",
    expect=ValueError,
)
def an_input_function_that_gives_a_callable(api, count):
    strategy = make(api, count)
    iterator = strategy.make_input_fn_iterator(lambda context: lambda: api.array([1.0]))
    return [api.local_results(strategy, iterator.get_next()) for _ in range(2)]


@scenario(
    "10.1",
    cases=[
        (kind, mode)
        for kind in ("2", "one_device")
        for mode in ("PER_REPLICA", "text", "none", "number")
    ],
)
def replication_modes_that_are_not_supported(api, kind, mode):
    strategy = make(api, kind)
    modes = {
        "PER_REPLICA": distribute(api).InputReplicationMode.PER_REPLICA,
        "text": "PER_NOTHING",
        "none": None,
        "number": 5,
    }
    return api.attempt(
        lambda: strategy.make_input_fn_iterator(
            lambda context: _range(api, 4, 2), replication_mode=modes[mode]
        )
    )


@scenario("10.1", cases=KINDS)
def the_replication_mode_that_is(api, kind):
    strategy = make(api, kind)
    mode = distribute(api).InputReplicationMode.PER_WORKER
    iterator = strategy.make_input_fn_iterator(lambda context: _range(api, 8, 2), mode)
    return api.local_results(strategy, iterator.get_next())


@scenario("10.1", cases=[("none",), ("number",), ("text",)])
def what_an_input_function_cannot_give(api, kind):
    strategy = make(api, "2")
    wrong = {"none": None, "number": 5, "text": "text"}[kind]
    return api.attempt(lambda: strategy.make_input_fn_iterator(lambda context: wrong))


@scenario(
    "10.1",
    differs="a list of batches is a dataset, as in `distribute_datasets_from_function`",
    expect=[{"float32[2]": [1.0, 2.0]}, {"float32[2]": [3.0, 4.0]}],
)
def an_input_function_that_gives_a_list(api):
    strategy = make(api, "2")
    batches = [np.float32([1, 2]), np.float32([3, 4])]
    iterator = strategy.make_input_fn_iterator(lambda context: batches)
    return api.local_results(strategy, iterator.get_next())


@scenario("10.1")
def what_cannot_be_an_input_function(api):
    strategy = make(api, "2")
    dataset = _range(api, 4, 2)
    return [
        api.attempt(lambda: strategy.make_input_fn_iterator(lambda: dataset)),
        api.attempt(lambda: strategy.make_input_fn_iterator(dataset)),
        api.attempt(lambda: strategy.make_input_fn_iterator(None)),
        api.attempt(lambda: strategy.make_input_fn_iterator(lambda c: {}["key"])),
    ]


@scenario("10.1")
def iterators_cannot_be_made_inside_a_replica(api):
    strategy = make(api, "2")
    dataset = _range(api, 4, 2)
    return [
        api.attempt(
            lambda: strategy.run(
                lambda: strategy.make_input_fn_iterator(lambda context: dataset)
            )
        ),
        api.attempt(
            lambda: strategy.run(
                lambda: strategy.experimental_make_numpy_dataset(np.arange(2))
            )
        ),
    ]


# experimental_make_numpy_dataset -----------------------------------------------------

ARRAYS = {
    "vector": lambda: np.arange(4, dtype="float32"),
    "doubles": lambda: np.arange(4.0),
    "matrix": lambda: np.arange(6, dtype="int32").reshape(3, 2),
    "empty": lambda: np.zeros((0, 2), "float32"),
    "bools": lambda: np.array([True, False]),
    "bytes": lambda: np.array([1, 2], "int8"),
    "halves": lambda: np.array([1, 2], "float16"),
    "tuple": lambda: (np.float32([1, 2]), np.int32([3, 4])),
    "namedtuple": lambda: Pair(np.float32([1, 2]), np.int32([3, 4])),
    "dict": lambda: {"a": np.arange(3), "b": np.arange(6.0).reshape(3, 2)},
    "nested": lambda: (np.float32([1, 2]), {"b": (np.int32([3, 4]),)}),
    "list_of_arrays": lambda: [np.float32([1, 2]), np.float32([3, 4])],
    "list_inside": lambda: (np.int32([0, 1]), [np.float32([1, 2]), np.float32([3, 4])]),
}


@scenario(
    "10.1", "7.5", cases=[(k, name) for k in ("2", "one_device") for name in ARRAYS]
)
def numpy_dataset_of_v1(api, kind, name):
    strategy = make(api, kind)
    makers = [strategy, strategy.extended]
    datasets = [m.experimental_make_numpy_dataset(ARRAYS[name]()) for m in makers]
    return [
        [api.spec(each), api.elements(each), int(each.cardinality())]
        for each in datasets
    ]


@scenario("10.1")
def numpy_datasets_need_no_session(api):
    strategy = make(api, "2")
    array = np.arange(3)
    return [
        api.numbers(strategy.experimental_make_numpy_dataset(array, None)),
        api.numbers(strategy.experimental_make_numpy_dataset(array, session=None)),
        api.numbers(
            strategy.extended.experimental_make_numpy_dataset(
                numpy_input=array, session=None
            )
        ),
    ]


@scenario("10.1", differs="there are no sessions", expect=ValueError)
def numpy_datasets_with_a_session(api):
    strategy = make(api, "2")
    dataset = strategy.experimental_make_numpy_dataset(np.arange(3), session=object())
    return api.numbers(dataset)


@scenario("10.1")
def numpy_dataset_has_its_own_copy(api):
    strategy = make(api, "2")
    array = np.arange(3)
    dataset = strategy.experimental_make_numpy_dataset(array)
    array[0] = 9
    return api.numbers(dataset)


@scenario(
    "10.1", cases=[("number",), ("scalar",), ("none",), ("unequal",), ("ragged",)]
)
def numpy_dataset_of_what_has_no_rows(api, name):
    strategy = make(api, "2")
    value = {
        "number": 5,
        "scalar": np.float32(3.0),
        "none": None,
        "unequal": (np.arange(3), np.arange(2)),
        "ragged": [np.arange(3), np.arange(2)],
    }[name]
    return api.fails(
        lambda: api.elements(strategy.experimental_make_numpy_dataset(value))
    )


@scenario("10.1", cases=REPLICAS)
def numpy_dataset_in_experimental_run(api, engine, count):
    strategy = make(api, count)
    inputs = (np.arange(12, dtype="float32"), np.arange(12, dtype="int32"))
    dataset = strategy.experimental_make_numpy_dataset(inputs).batch(8)
    iterator = strategy.make_dataset_iterator(dataset)
    replica_fn = api.compile_if(engine, lambda pair: pair[0] * 2.0)
    results = [strategy.experimental_run(replica_fn, iterator) for _ in range(2)]
    return [
        [api.local_results(strategy, each), strategy.reduce("MEAN", each, axis=0)]
        for each in results
    ]


# What v1 shares with the main strategies ---------------------------------------------


@scenario(
    "10.1", "12.5", cases=[(*kind, op) for kind in KINDS for op in ("SUM", "MEAN")]
)
def reduce_of_v1_needs_no_axis(api, engine, kind, op):
    strategy = make(api, kind)

    def replica_fn():
        context = distribute(api).get_replica_context()
        replica = api.cast(context.replica_id_in_sync_group, "float32")
        return api.array([[1.0, 2.0], [3.0, 4.0]]) * (replica + 1.0)

    value = strategy.run(api.compile_if(engine, replica_fn))
    return [
        strategy.reduce(op, value),
        strategy.reduce(distribute(api).ReduceOp[op], value, None),
        strategy.reduce(op.lower(), value, 0),
        strategy.reduce(op, value, axis=1),
        strategy.reduce(op, {"a": value, "b": [value]}),
    ]


@scenario("10.1", cases=KINDS)
def reduce_of_v1_of_plain_values(api, kind):
    strategy = make(api, kind)
    return [
        api.attempt(lambda: strategy.reduce("SUM", api.array(1.0))),
        api.attempt(lambda: strategy.reduce("MEAN", api.array(1.0))),
        api.attempt(lambda: strategy.reduce("MAX", api.array(1.0))),
    ]


@scenario("10.1")
def reduce_of_v1_of_uneven_values(api):
    strategy = make(api, "2")
    batch = next(iter(strategy.experimental_distribute_dataset(_floats(api, 3, 4))))
    return [
        api.fails(lambda: strategy.reduce("SUM", batch)),
        strategy.reduce("SUM", batch, axis=0),
        strategy.reduce("MEAN", batch, axis=0),
    ]


@scenario("10.1", cases=KINDS)
def run_of_v1(api, engine, kind):
    strategy = make(api, kind)
    fn = api.compile_if(engine, lambda x, *, y: {"sum": x + y, "pair": (x, y)})
    result = strategy.run(fn, args=(api.array(1.0),), kwargs={"y": api.array([2.0])})
    with strategy.scope():
        inside = strategy.run(fn, (api.array(1.0),), {"y": api.array([2.0])}, None)
    return [result, inside]


@scenario("10.1", cases=KINDS)
def run_options_of_v1(api, kind):
    strategy = make(api, kind)
    options = distribute(api).RunOptions()
    return strategy.run(lambda: api.array(1.0), options=options)


@scenario("10.1", cases=KINDS)
def contexts_of_v1(api, kind):
    v1, strategy = distribute(api), make(api, kind)

    def here():
        return [
            v1.has_strategy(),
            v1.in_cross_replica_context(),
            v1.get_strategy() is strategy,
            v1.get_replica_context() is None,
        ]

    outside = here()
    with strategy.scope() as entered:
        inside = here()
        with strategy.scope():
            twice = here()
    replica = strategy.run(lambda: tuple(here()))
    return [outside, entered is strategy, inside, twice, replica, here()]


@scenario("10.1")
def scopes_of_two_generations_do_not_mix(api):
    main, old = api.mirrored(2), make(api, "2")

    def nested(one, other):
        with one.scope(), other.scope():
            pass

    return [
        api.attempt(lambda: nested(main, old)),
        api.attempt(lambda: nested(old, main)),
        api.attempt(lambda: nested(old, make(api, "2"))),
        nested(old, old),
    ]


@scenario("10.1")
def set_strategy_of_v1(api):
    v1, strategy = distribute(api), make(api, "2")
    v1.experimental_set_strategy(strategy)
    try:
        inside = [v1.get_strategy() is strategy, api.distribute.has_strategy()]
    finally:
        v1.experimental_set_strategy(None)
    return [inside, v1.has_strategy()]


@scenario("10.1", cases=KINDS)
def merge_call_gets_the_strategy_of_v1(api, kind):
    v1, strategy = distribute(api), make(api, kind)

    def merge_fn(merging, value):
        return [merging is strategy, merging.reduce("SUM", value)]

    def replica_fn():
        context = v1.get_replica_context()
        replica = api.cast(context.replica_id_in_sync_group, "float32")
        return context.merge_call(merge_fn, args=(replica + 1.0,))

    return strategy.run(replica_fn)


@scenario("10.1", cases=KINDS)
def variables_of_v1(api, kind):
    strategy = make(api, kind)
    old = api.v1()
    with strategy.scope():
        plain = old.Variable(1.0)
        named = old.Variable([1.0, 2.0], trainable=False, name="named", dtype="float32")
        first = old.Variable(1.0, aggregation=old.VariableAggregation.ONLY_FIRST_TOWER)
        local = old.Variable(
            1.0,
            synchronization=old.VariableSynchronization.ON_READ,
            aggregation=old.VariableAggregation.SUM,
        )
    return [
        [plain.trainable, named.trainable, first.trainable, local.trainable],
        [api.copies(each) for each in (plain, named, first, local)],
        [strategy.extended.variable_created_in_scope(each) for each in (plain, local)],
        first.aggregation,
    ]


@scenario("10.1")
def class_names_of_variables_of_v1(api):
    with make(api, "2").scope():
        mirrored = api.v1().Variable(1.0)
        on_read = api.v1().Variable(
            1.0, synchronization=api.VariableSynchronization.ON_READ
        )
    return [api.class_name(mirrored), api.class_name(on_read)]


@scenario("10.1", cases=KINDS)
def aggregations_of_v1(api, engine, kind):
    strategy = make(api, kind)
    old = api.v1()
    results = {}
    for name in ("SUM", "MEAN", "ONLY_FIRST_TOWER"):
        with strategy.scope():
            variable = old.Variable(
                10.0, aggregation=getattr(old.VariableAggregation, name)
            )

        def replica_fn(variable=variable):
            context = distribute(api).get_replica_context()
            replica = api.cast(context.replica_id_in_sync_group, "float32")
            variable.assign_add(replica + 1.0)

        strategy.run(api.compile_if(engine, replica_fn))
        results[name] = api.copies(variable)
    return results


@scenario("10.1", cases=REPLICAS)
def distributed_datasets_of_v1(api, count):
    strategy = make(api, count)
    distributed = strategy.experimental_distribute_dataset(_range(api, 10, 4))
    of_function = strategy.distribute_datasets_from_function(
        lambda context: _range(api, 10, context.get_per_replica_batch_size(12))
    )
    return [
        [api.spec(each), api.steps(strategy, each)]
        for each in (distributed, of_function)
    ]


@scenario("10.1", cases=KINDS)
def local_results_of_v1(api, kind):
    strategy = make(api, kind)
    value = strategy.run(lambda: api.array(1.0))
    with strategy.scope():
        variable = api.Variable(3.0)
    results = strategy.experimental_local_results
    return [
        api.class_name(results(value)),
        api.local_results(strategy, value),
        results(5),
        len(results(variable)),
    ]


@scenario("10.1", cases=KINDS)
def training_as_in_version_1(api, engine, kind):
    """The whole of it: input, step, loss reduction, update, for three steps."""
    strategy = make(api, kind)
    with strategy.scope():
        weight = api.Variable(0.0, aggregation=api.VariableAggregation.MEAN)
    inputs = (np.float32([1, 2, 3, 4]), np.float32([2, 4, 6, 8]))
    dataset = strategy.experimental_make_numpy_dataset(inputs).repeat().batch(4)
    iterator = strategy.make_dataset_iterator(dataset)
    iterator.initialize()

    def replica_fn(batch):
        x, y = batch

        def loss():
            return api.sum(api.square(weight * x - y)) / 4.0

        value, (gradient,) = api.variable_gradients(loss, [weight])
        context = distribute(api).get_replica_context()
        weight.assign_sub(0.05 * context.all_reduce("SUM", gradient))
        return value

    replica_fn = api.compile_if(engine, replica_fn)
    losses = []
    for _ in range(3):
        per_replica = strategy.experimental_run(replica_fn, iterator)
        losses.append(
            strategy.reduce(distribute(api).get_loss_reduction(), per_replica)
        )
    return [losses, api.copies(weight)]


# extended ----------------------------------------------------------------------------


@scenario("10.1", "6.3", cases=KINDS)
def facts_about_a_strategy_of_v1(api, kind):
    extended = make(api, kind).extended
    return {
        "between_graph": extended.experimental_between_graph,
        "should_init": extended.experimental_should_init,
        "should_checkpoint": extended.should_checkpoint,
        "should_save_summary": extended.should_save_summary,
        "static_shapes": extended.experimental_require_static_shapes,
        "worker_devices": list(extended.worker_devices),
        "parameter_devices": list(extended.parameter_devices),
        "non_slot_devices": list(extended.non_slot_devices(None)),
    }


@scenario("10.1", "6.3", cases=KINDS)
def reading_variables_of_v1(api, kind):
    strategy = make(api, kind)
    with strategy.scope():
        mirrored = api.Variable(3.0)
        on_read = api.Variable(
            1.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.SUM,
        )
    extended = strategy.extended
    tensor = api.array(1.0)
    return [
        extended.read_var(mirrored),
        extended.read_var(on_read),
        strategy.run(lambda: extended.read_var(mirrored)),
        extended.value_container(mirrored) is mirrored,
        extended.value_container(tensor) is tensor,
        [extended.variable_created_in_scope(each) for each in (mirrored, on_read)],
    ]


@scenario("10.1", "6.3", cases=KINDS)
def call_for_each_replica_of_v1(api, engine, kind):
    strategy = make(api, kind)
    extended = strategy.extended

    def replica_fn(x, scale=1.0):
        context = distribute(api).get_replica_context()
        replica = api.cast(context.replica_id_in_sync_group, "float32")
        return (x + replica) * scale

    fn = api.compile_if(engine, replica_fn)
    iterator = strategy.make_dataset_iterator(_floats(api, 4, 4))
    return [
        extended.call_for_each_replica(fn, args=(api.array(1.0),)),
        extended.call_for_each_replica(fn, (api.array(1.0),), {"scale": 10.0}),
        extended.call_for_each_replica(fn, args=(iterator.get_next(),)),
    ]


@scenario("10.1", "6.3")
def call_for_each_replica_inside_a_replica(api):
    strategy = make(api, "2")
    return api.attempt(
        lambda: strategy.run(
            lambda: strategy.extended.call_for_each_replica(lambda: 1.0)
        )
    )


@scenario("10.1", "6.3", cases=[("1",), ("2",), ("4",)])
def reductions_and_updates_by_extended_of_v1(api, count):
    strategy = make(api, count)
    extended = strategy.extended
    with strategy.scope():
        variable = api.Variable(1.0)

    def replica_fn():
        context = distribute(api).get_replica_context()
        return api.cast(context.replica_id_in_sync_group, "float32") + 1.0

    value = strategy.run(replica_fn)
    with strategy.scope():
        total = extended.reduce_to("SUM", value, destinations=variable)
        pairs = [(value, variable), (value, variable)]
        batch = extended.batch_reduce_to("MEAN", pairs)
        copies = extended.broadcast_to(api.array(5.0), destinations=variable)
        extended.update(variable, lambda v, x: v.assign_add(x), args=(total,))
    return [
        api.local_results(strategy, total),
        [api.local_results(strategy, each) for each in batch],
        api.local_results(strategy, copies),
        api.copies(variable),
    ]


# Many steps --------------------------------------------------------------------------


def run_steps(api, strategy, fn, iterations=2, initial=None, engine="compiled"):
    """What many steps give, and what they leave of twelve numbers."""
    iterator = strategy.make_dataset_iterator(_floats(api, 12, 4))
    with api.loops_of(engine):
        context = strategy.extended.experimental_run_steps_on_iterator(
            fn, iterator, iterations, initial_loop_values=initial
        )
    outputs = context.last_step_outputs
    return [
        {name: api.local_results(strategy, each) for name, each in outputs.items()},
        context.non_tensor_outputs,
        api.steps(strategy, iterator),
    ]


def outputs_of_replicas(api, strategy, reduce_op, engine="eager"):
    """A step that sums on each replica and hands that over from outside of them."""
    replica_fn = api.compile_if(engine, lambda x: api.sum(x))

    def step(context, x):
        value = strategy.run(replica_fn, args=(x,))
        context.set_last_step_output("sum", value, reduce_op)

    return step


@scenario(
    "10.1",
    cases=[(*kind, op) for kind in KINDS for op in ("SUM", "MEAN", "sum", "mean")],
)
def reduced_outputs_of_many_steps(api, engine, kind, op):
    strategy = make(api, kind)
    step = outputs_of_replicas(api, strategy, op, engine)
    return run_steps(api, strategy, step, initial={"sum": np.float32(0.0)})


@scenario("10.1", cases=KINDS)
def outputs_of_many_steps_for_each_replica(api, engine, kind):
    strategy = make(api, kind)
    initial = {"sum": (np.float32(0.0),) * strategy.num_replicas_in_sync}
    step = outputs_of_replicas(api, strategy, None, engine)
    return run_steps(api, strategy, step, initial=initial)


@scenario("10.1", cases=[(*kind, op) for kind in KINDS for op in ("SUM", "MEAN")])
def outputs_of_many_steps_from_replicas(api, engine, kind, op):
    strategy = make(api, kind)
    reduce_op = distribute(api).ReduceOp[op]

    def step(context, x):
        def replica_fn(x):
            context.set_last_step_output("sum", api.sum(x), reduce_op)

        strategy.run(replica_fn, args=(x,))

    return run_steps(
        api, strategy, step, initial={"sum": np.float32(0.0)}, engine=engine
    )


@scenario("10.1", cases=[("1",), ("2",)])
def replicas_have_to_say_how_to_reduce(api, engine, count):
    strategy = make(api, count)

    def step(context, x):
        strategy.run(lambda: context.set_last_step_output("a", api.array(1.0)))

    return api.fails(
        lambda: run_steps(
            api, strategy, step, initial={"a": np.float32(0.0)}, engine=engine
        )
    )


@scenario("10.1", cases=KINDS)
def outputs_of_many_steps_that_are_reduced_already(api, engine, kind):
    strategy = make(api, kind)

    def step(reduce_op):
        def step_fn(context, x):
            value = strategy.run(lambda x: api.sum(x), args=(x,))
            total = strategy.reduce("SUM", value)
            context.set_last_step_output("sum", total, reduce_op)

        return lambda: run_steps(
            api, strategy, step_fn, initial={"sum": np.float32(0.0)}, engine=engine
        )

    return [step(None)(), step("MEAN")(), api.fails(step("SUM"))]


@scenario("10.1")
def the_last_output_of_a_name_counts(api):
    strategy = make(api, "2")

    def step(context, x):
        context.set_last_step_output("a", api.array(1.0))
        context.set_last_step_output("a", strategy.run(lambda: api.array(2.0)), "SUM")

    return run_steps(api, strategy, step, initial={"a": np.float32(0.0)})


@scenario("10.1", cases=[("1",), ("2",)])
def several_outputs_of_many_steps(api, engine, count):
    strategy = make(api, count)

    def step(context, x):
        def replica_fn(x):
            context.set_last_step_output("largest", x[-1], "MEAN")
            return api.sum(x)

        value = strategy.run(replica_fn, args=(x,))
        context.set_last_step_output("sum", value, "SUM")

    initial = {"largest": np.float32(0.0), "sum": np.float32(0.0)}
    return run_steps(api, strategy, step, 3, initial, engine=engine)


@scenario("10.1", cases=KINDS)
def other_outputs_of_many_steps(api, engine, kind):
    strategy = make(api, kind)

    def step(context, x):
        strategy.run(lambda: context.set_non_tensor_output("inside", "text"))
        context.set_non_tensor_output("outside", {"text": ["of", "any", "kind"]})

    return run_steps(api, strategy, step, engine=engine)


@scenario(
    "10.1",
    differs="one program for all replicas cannot say which one it is",
    expect=TypeError,
    differs_in=("compiled",),
)
def other_outputs_that_depend_on_the_replica(api, engine):
    strategy = make(api, "2")

    def step(context, x):
        def replica_fn():
            replica = distribute(api).get_replica_context().replica_id_in_sync_group
            context.set_non_tensor_output("replica", f"replica {int(replica)}")

        strategy.run(replica_fn)

    return run_steps(api, strategy, step, engine=engine)


@scenario(
    "10.1",
    differs="a step is compiled, and cannot branch on values",
    expect=TypeError,
    differs_in=("compiled",),
)
def steps_that_branch_on_values(api, engine):
    strategy = make(api, "2")

    def step(context, x):
        value = strategy.run(lambda x: api.sum(x), args=(x,))
        total = strategy.reduce("SUM", value)
        context.set_last_step_output("a", total if float(total) < 10.0 else -total)

    return run_steps(api, strategy, step, 1, {"a": np.float32(0.0)}, engine)


KEYS = {
    "other": {"other": np.float32(0.0)},
    "more": {"sum": np.float32(0.0), "more": np.float32(0.0)},
    "none": None,
    "shape": {"sum": np.zeros(3, "float32")},
    "dtype": {"sum": np.int32(0)},
}


@scenario("10.1", cases=[("other",), ("more",), ("shape",), ("dtype",)])
@scenario(
    "10.1",
    cases=[("none",)],
    differs="outputs need no initial values",
    expect=[
        {"sum": [{"float32[]": 22.0}]},
        {},
        [[{"float32[2]": [8.0, 9.0]}, {"float32[2]": [10.0, 11.0]}]],
    ],
)
def initial_values_of_many_steps(api, engine, keys):
    strategy = make(api, "2")
    step = outputs_of_replicas(api, strategy, "SUM")
    return run_steps(api, strategy, step, initial=KEYS[keys], engine=engine)


@scenario("10.1")
def initial_values_of_what_no_step_sets(api):
    strategy = make(api, "2")
    return run_steps(api, strategy, lambda context, x: None, initial={"a": 0.0})


@scenario("10.1", cases=[("1",), ("one_device",)])
@scenario(
    "10.1",
    cases=[("2",)],
    differs="structures are outputs on several replicas, too",
    expect=[
        {"size": {"float32[]": 4.0}, "sum": {"float32[]": 22.0}},
        [{"float32[]": 22.0}, {"float32[]": 4.0}],
    ],
)
def structures_as_outputs_of_many_steps(api, kind):
    strategy = make(api, kind)

    def last(combine):
        def replica_fn(x):
            return combine(api.sum(x), api.sum(x * 0.0 + 1.0))

        def step(context, x):
            value = strategy.run(replica_fn, args=(x,))
            context.set_last_step_output("a", value, "SUM")

        initial = {"a": combine(np.float32(0.0), np.float32(0.0))}
        iterator = strategy.make_dataset_iterator(_floats(api, 12, 4))
        context = strategy.extended.experimental_run_steps_on_iterator(
            step, iterator, 2, initial
        )
        return api.brief(context.last_step_outputs["a"])

    return [last(lambda a, b: {"sum": a, "size": b}), last(lambda a, b: (a, b))]


PLAIN = {
    "number": lambda api: 3.0,
    "array": lambda api: api.array([1.0, 2.0]),
    "integer": lambda api: api.array(7, "int32"),
    "bool": lambda api: api.array(True, "bool"),
}


@scenario("10.1", cases=[(n, name) for n in ("1", "2") for name in PLAIN])
def plain_outputs_of_many_steps(api, engine, count, name):
    strategy = make(api, count)

    def step(context, x):
        context.set_last_step_output("plain", PLAIN[name](api))

    return run_steps(
        api, strategy, step, initial={"plain": np.float32(0.0)}, engine=engine
    )


@scenario("10.1", cases=KINDS)
def elements_as_outputs_of_many_steps(api, engine, kind):
    strategy = make(api, kind)
    initial = {"x": (np.float32(0.0),) * strategy.num_replicas_in_sync}

    def step(context, x):
        context.set_last_step_output("x", x)

    return run_steps(api, strategy, step, 3, initial, engine=engine)


LOOPS = {
    "SUM": ("SUM", 1, 3),
    "MEAN": ("MEAN", 2, 1),
    "twice": ("SUM", 1, 2),
    "past_the_end": ("SUM", 2, 2),
    "no_steps": ("SUM", 0, 2),
}


@scenario("10.1", cases=[(*kind, name) for kind in KINDS for name in LOOPS])
def the_loop_runs_again(api, kind, name):
    reduce_op, iterations, times = LOOPS[name]
    return api.loops(
        lambda: make(api, kind),
        lambda: _floats(api, 12, 4),
        lambda strategy: outputs_of_replicas(api, strategy, reduce_op),
        iterations,
        {"sum": np.float32(7.0)},
        times,
    )


@scenario("10.1", cases=[(*kind, name) for kind in KINDS for name in MAPS])
def many_steps_get_the_element_as_one_argument(api, kind, name):
    strategy = make(api, kind)
    iterator = strategy.make_dataset_iterator(_mapped(api, name))
    seen = []

    def step(context, *args):
        seen.append(len(args))
        value = strategy.run(lambda x: api.sum(_last(x)), args=args)
        context.set_last_step_output("last", value, "SUM")

    context = strategy.extended.experimental_run_steps_on_iterator(
        step, iterator, iterations=2, initial_loop_values={"last": np.float32(0.0)}
    )
    return [set(seen) == {1}, context.last_step_outputs["last"]]


def _last(structure):
    """The last array of a structure."""
    if isinstance(structure, dict):
        return _last(structure[max(structure)])
    return _last(structure[-1]) if isinstance(structure, tuple) else structure


@scenario("10.1", cases=[(*kind, n) for kind in KINDS for n in ("1", "2", "3")])
def variables_in_many_steps(api, engine, kind, steps):
    strategy = make(api, kind)
    with strategy.scope():
        total = api.Variable(1.0, aggregation=api.VariableAggregation.SUM)

    def replica_fn(x):
        total.assign_add(api.sum(x))
        return total.read_value()

    replica_fn = api.compile_if(engine, replica_fn)

    def step(context, x):
        value = strategy.run(replica_fn, args=(x,))
        context.set_last_step_output("total", value, "MEAN")

    initial = {"total": np.float32(0.0)}
    return [run_steps(api, strategy, step, int(steps), initial), api.copies(total)]


@scenario("10.1", cases=[("1",), ("2",)])
def one_step_is_the_default(api, count):
    strategy = make(api, count)
    iterator = strategy.make_dataset_iterator(_floats(api, 12, 4))
    context = strategy.extended.experimental_run_steps_on_iterator(
        outputs_of_replicas(api, strategy, "SUM"),
        iterator,
        initial_loop_values={"sum": np.float32(0.0)},
    )
    return [context.last_step_outputs["sum"], api.steps(strategy, iterator)]


@scenario("10.1", cases=KINDS)
def many_steps_without_outputs(api, engine, kind):
    strategy = make(api, kind)
    return [
        run_steps(api, strategy, lambda context, x: None, engine=engine),
        run_steps(api, strategy, lambda context, x: x, 3, engine=engine),
        run_steps(api, strategy, lambda context, x: None, initial={}, engine=engine),
    ]


@scenario("10.1", cases=[("0",), ("-1",)])
def no_steps_at_all(api, engine, steps):
    strategy = make(api, "2")
    step = outputs_of_replicas(api, strategy, "SUM")
    return run_steps(api, strategy, step, int(steps), engine=engine)


@scenario("10.1", cases=KINDS)
def more_steps_than_data(api, engine, kind):
    strategy = make(api, kind)
    step = outputs_of_replicas(api, strategy, "SUM")
    initial = {"sum": np.float32(0.0)}
    return [
        run_steps(api, strategy, step, 3, initial, engine=engine),
        api.attempt(lambda: run_steps(api, strategy, step, 4, initial, engine=engine)),
        api.attempt(lambda: run_steps(api, strategy, step, 9, initial, engine=engine)),
    ]


@scenario("10.1", cases=[("1",), ("2",), ("3",)])
def many_steps_over_a_partial_batch(api, count):
    strategy = make(api, count)
    iterator = strategy.make_dataset_iterator(_floats(api, 10, 4))
    context = strategy.extended.experimental_run_steps_on_iterator(
        outputs_of_replicas(api, strategy, "SUM"), iterator, 3, {"sum": np.float32(0.0)}
    )
    return context.last_step_outputs["sum"]


@scenario("10.1", cases=[("distributed",), ("of_function",), ("function",)])
def other_iterators_of_many_steps(api, kind):
    strategy = make(api, "2")
    iterator = {
        "distributed": lambda: iter(
            strategy.experimental_distribute_dataset(_floats(api, 12, 4))
        ),
        "of_function": lambda: iter(
            strategy.distribute_datasets_from_function(
                lambda context: _floats(api, 12, 2)
            )
        ),
        "function": lambda: strategy.make_input_fn_iterator(
            lambda context: _floats(api, 12, 2)
        ),
    }[kind]()
    context = strategy.extended.experimental_run_steps_on_iterator(
        outputs_of_replicas(api, strategy, "SUM"), iterator, 2, {"sum": np.float32(0.0)}
    )
    return [
        context.last_step_outputs["sum"],
        api.local_results(strategy, next(iterator)),
    ]


@scenario("10.1")
def many_steps_that_fail(api):
    strategy = make(api, "2")

    def failing(context, x):
        raise KeyError("k")

    def failing_inside(context, x):
        strategy.run(lambda: {}["key"])

    return [
        api.attempt(lambda: run_steps(api, strategy, failing)),
        api.attempt(lambda: run_steps(api, strategy, failing_inside)),
        api.attempt(lambda: run_steps(api, strategy, lambda context: None)),
        run_steps(api, strategy, lambda context, x: None),
    ]


@scenario("10.1")
def many_steps_with_an_unknown_reduction(api):
    strategy = make(api, "2")
    step = outputs_of_replicas(api, strategy, "MAX")
    return api.attempt(lambda: run_steps(api, strategy, step, 1, {"sum": 0.0}))


@scenario("10.1")
def many_steps_need_an_iterator(api):
    strategy = make(api, "2")
    run = strategy.extended.experimental_run_steps_on_iterator
    step = outputs_of_replicas(api, strategy, "SUM")
    return [
        api.fails(lambda w=w: run(step, w, 2, {"sum": np.float32(0.0)}))
        for w in (None, [1.0, 2.0], _floats(api, 4, 2))
    ]


@scenario("10.1")
def many_steps_inside_a_replica(api):
    strategy = make(api, "2")
    iterator = strategy.make_dataset_iterator(_floats(api, 4, 2))
    run = strategy.extended.experimental_run_steps_on_iterator
    return api.attempt(
        lambda: strategy.run(lambda: run(lambda context, x: None, iterator))
    )


@scenario("10.1")
def where_many_steps_run(api):
    v1, strategy = distribute(api), make(api, "2")

    def step(context, x):
        context.set_non_tensor_output(
            "here",
            [
                v1.in_cross_replica_context(),
                v1.get_strategy() is strategy,
                v1.get_replica_context() is None,
                api.class_name(context),
                api.class_name(x),
            ],
        )

    return run_steps(api, strategy, step)[1]


@scenario("10.1", cases=KINDS)
def one_iterator_for_all_ways(api, kind):
    strategy = make(api, kind)
    iterator = strategy.make_dataset_iterator(_floats(api, 40, 4))
    run = strategy.extended.experimental_run_steps_on_iterator
    seen = []
    for _ in range(2):
        seen.append(iterator.get_next())
        seen.append(strategy.experimental_run(lambda x: x * 10.0, iterator))
        context = run(
            outputs_of_replicas(api, strategy, "SUM"), iterator, 3, {"sum": 0.0}
        )
        seen += [context.last_step_outputs["sum"], next(iterator)]
        iterator.initialize()
    return [api.local_results(strategy, each) for each in seen]


INSIDE = {
    "integers": lambda api, x: api.cast(api.sum(x), "int32"),
    "vector": lambda api, x: x * 2.0,
    "reduced": lambda api, x: (
        distribute(api).get_replica_context().all_reduce("SUM", api.sum(x))
    ),
    "constant": lambda api, x: api.array([1.0, 2.0]),
}


@scenario(
    "10.1",
    cases=[
        (n, name, op) for n in ("2", "4") for name in INSIDE for op in ("SUM", "MEAN")
    ],
)
def kinds_of_outputs_from_replicas(api, engine, count, name, op):
    strategy = make(api, count)

    def step(context, x):
        def replica_fn(x):
            context.set_last_step_output("a", INSIDE[name](api, x), op)

        strategy.run(replica_fn, args=(x,))

    return run_steps(api, strategy, step, 3, {"a": np.float32(0.0)}, engine=engine)


@scenario("10.1", cases=KINDS)
def updates_and_outputs_from_replicas(api, engine, kind):
    strategy = make(api, kind)
    with strategy.scope():
        steps = api.Variable(0.0)
        total = api.Variable(0.0, aggregation=api.VariableAggregation.SUM)
        seen = api.Variable(
            0.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.SUM,
        )

    def step(context, x):
        def replica_fn(x):
            total.assign_add(api.sum(x))
            seen.assign_add(api.sum(x * 0.0 + 1.0))
            context.set_last_step_output("total", total.read_value(), "MEAN")

        strategy.run(replica_fn, args=(x,))
        steps.assign_add(1.0)
        context.set_last_step_output("steps", steps.read_value())

    initial = {"steps": np.float32(0.0), "total": np.float32(0.0)}
    outputs = run_steps(api, strategy, step, 3, initial, engine=engine)
    return [outputs, api.copies(steps), api.copies(total), api.copies(seen)]


@scenario("10.1", cases=KINDS)
def training_in_many_steps(api, kind):
    strategy = make(api, kind)
    with strategy.scope():
        weight = api.Variable(0.0, aggregation=api.VariableAggregation.MEAN)
    inputs = (np.float32([1, 2, 3, 4]), np.float32([2, 4, 6, 8]))
    dataset = strategy.experimental_make_numpy_dataset(inputs).repeat().batch(4)
    iterator = strategy.make_dataset_iterator(dataset)

    def replica_fn(batch):
        x, y = batch

        def loss():
            return api.sum(api.square(weight * x - y)) / 4.0

        value, (gradient,) = api.variable_gradients(loss, [weight])
        context = distribute(api).get_replica_context()
        weight.assign_sub(0.05 * context.all_reduce("SUM", gradient))
        return value

    def step(context, batch):
        losses = strategy.run(replica_fn, args=(batch,))
        context.set_last_step_output("loss", losses, "SUM")

    run = strategy.extended.experimental_run_steps_on_iterator
    losses = [
        run(step, iterator, 4, {"loss": np.float32(0.0)}).last_step_outputs["loss"]
        for _ in range(2)
    ]
    return [losses, api.copies(weight)]


# Older still -------------------------------------------------------------------------


@scenario("10.1", "10.3", cases=KINDS)
def unwrap_and_group(api, kind):
    strategy = make(api, kind)
    value = strategy.run(lambda: api.array(1.0))
    strategy.group(value)
    return [strategy.unwrap(value), api.class_name(strategy.unwrap(value))]


@scenario("10.1")
def colocating_variables_of_v1(api):
    strategy = make(api, "2")
    with strategy.scope():
        first = api.Variable(1.0)
        with strategy.extended.colocate_vars_with(first):
            second = api.Variable(2.0)
        with strategy.colocate_vars_with(first):
            third = api.Variable(3.0)
    return [
        [api.copies(second), api.copies(third)],
        api.attempt(lambda: strategy.extended.colocate_vars_with(first)),
        api.attempt(lambda: strategy.colocate_vars_with(first)),
    ]


@scenario("10.1", "10.3", cases=[("1",), ("2",)])
def datasets_of_a_function_by_their_older_name(api, count):
    strategy = make(api, count)
    distributed = strategy.experimental_distribute_datasets_from_function(
        lambda context: _range(api, 10, 2)
    )
    return api.steps(strategy, distributed)


DEPRECATED = {
    "experimental_run": lambda api, s: s.experimental_run(lambda: 1.0),
    "experimental_run_steps_on_iterator": lambda api, s: (
        s.extended.experimental_run_steps_on_iterator(
            lambda context, x: None,
            iter(s.experimental_distribute_dataset(_floats(api, 8, 4))),
        )
    ),
    "experimental_distribute_datasets_from_function": lambda api, s: (
        s.experimental_distribute_datasets_from_function(lambda c: _floats(api, 4, 2))
    ),
    "unwrap": lambda api, s: s.unwrap(5),
}
CURRENT = {
    "run": lambda api, s: s.run(lambda: 1.0),
    "reduce": lambda api, s: s.reduce("MEAN", api.array(1.0)),
    "experimental_local_results": lambda api, s: s.experimental_local_results(1.0),
    "experimental_make_numpy_dataset": lambda api, s: s.experimental_make_numpy_dataset(
        np.arange(3)
    ),
    "get_loss_reduction": lambda api, s: distribute(api).get_loss_reduction(),
}


@scenario("10.3", cases=[(name,) for name in (*DEPRECATED, *CURRENT)])
def deprecated_names_warn_once(api, name):
    strategy = make(api, "2")
    call = (DEPRECATED | CURRENT)[name]
    first, second = api.deprecations(lambda: call(api, strategy), times=2)
    return [any(name in message for message in first), len(second)]
