"""Names of copies, devices of replicas, hints, `configure`, and the words of errors."""

from itertools import product

from . import scenario


def device(name):
    return name.rpartition("device:")[2].lstrip("/").upper()


@scenario("12.11", cases=product(("named", "unnamed", "nested"), ("AUTO", "ON_READ")))
def names_of_copies(api, kind, synchronization):
    name = {"named": "w", "unnamed": None, "nested": "a/b"}[kind]
    with api.mirrored(2).scope():
        variable = api.Variable(
            1.0,
            name=name,
            synchronization=getattr(api.VariableSynchronization, synchronization),
        )
    names = [variable.name, *(each.name for each in variable.values)]
    return [each.removesuffix(":0") for each in names]


@scenario("12.11")
def names_of_copies_in_update(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0, name="w")
    names = []

    def update(copy):
        names.append(copy.name.removesuffix(":0"))

    with strategy.scope():
        strategy.extended.update(variable, update)
    return names


@scenario("12.11")
def names_of_a_variable_in_replicas(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0, name="w")
    names = []

    def replica_fn():
        names.append(variable.name.removesuffix(":0"))
        return api.array(0.0)

    strategy.run(api.compile_if(engine, replica_fn))
    return names[0]


@scenario("6.3")
def worker_devices_by_replica(api):
    devices = api.mirrored(2).extended.worker_devices_by_replica
    return [[device(each) for each in replica] for replica in devices]


@scenario("6.3", cases=product(("one_device", "default")))
def worker_devices_by_replica_of_other_strategies(api, kind):
    strategy = (
        api.one_device() if kind == "one_device" else api.distribute.get_strategy()
    )
    return api.attempt(lambda: strategy.extended.worker_devices_by_replica)


@scenario("10.1", cases=product(("main", "v1")))
def configure(api, kind):
    strategy = api.mirrored(2) if kind == "main" else api.mirrored_v1(2)
    return [
        api.parameters(strategy.configure),
        strategy.configure(),
        strategy.configure(api.v1().ConfigProto()),
        strategy.num_replicas_in_sync,
    ]


@scenario("10.1", cases=product(("main", "v1")))
def configure_with_a_cluster(api, kind):
    strategy = api.mirrored(2) if kind == "main" else api.mirrored_v1(2)
    cluster = {"worker": ["localhost:1", "localhost:2"]}
    return api.fails(
        lambda: strategy.configure(cluster_spec=cluster, task_type="worker", task_id=0)
    )


@scenario("6.2")
def collective_hints(api):
    hints = api.distribute.experimental.CollectiveHints
    made, default = hints(50, timeout_seconds=2.0), hints()
    return [
        [made.bytes_per_pack, made.timeout_seconds, made.implementation],
        [default.bytes_per_pack, default.timeout_seconds, default.implementation],
        list(api.parameters(hints)),
        api.complaint(lambda: hints(bytes_per_pack=-1), "bytes_per_pack", "-1"),
    ]


@scenario("6.2")
def collective_hints_where_options_are(api, engine):
    strategy = api.mirrored(2)
    hints = api.distribute.experimental.CollectiveHints(bytes_per_pack=4)

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return context.all_reduce("SUM", [x, x + 1.0], hints)

    value = api.per_replica(strategy, 1.0, 2.0)
    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("6.2")
def collective_hints_in_extended(api):
    strategy = api.mirrored(2)
    hints = api.distribute.experimental.CollectiveHints(bytes_per_pack=4)
    value = api.per_replica(strategy, 1.0, 2.0)
    extended = strategy.extended
    with strategy.scope():
        return [
            extended.reduce_to("SUM", value, "CPU:0", hints),
            extended.batch_reduce_to("SUM", [(value, "CPU:0")], hints)[0],
        ]


# Words -------------------------------------------------------------------------------


@scenario("7.4")
def words_about_a_batch_that_cannot_be_divided(api):
    context = api.distribute.InputContext(1, 0, 2)
    return api.complaint(
        lambda: context.get_per_replica_batch_size(5),
        "global_batch_size",
        "5",
        "divisible",
        "2",
    )


@scenario(
    "12.1",
    differs="a ValueError, as for every other device that is not taken",
    expect=[ValueError, ["duplicate", "devices", "CPU:0"]],
)
def words_about_duplicate_devices(api):
    return api.complaint(
        lambda: api.distribute.MirroredStrategy(["CPU:0", "CPU:0"]),
        "duplicate",
        "devices",
        "CPU:0",
    )


@scenario("12.9", cases=product(("assign_add", "assign_sub")))
def words_about_adding_to_a_sync_on_read_sum(api, engine, method):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(
            1.0,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=api.VariableAggregation.SUM,
        )

    def step():
        getattr(variable, method)(1.0)

    with strategy.scope():
        step = api.compile_if(engine, step)
        return api.complaint(step, method, "cross-replica", "SUM")


@scenario("3.5")
def words_about_gather_in_a_replica(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        return strategy.gather(api.array([1.0]), axis=0)

    step = api.compile_if(engine, replica_fn)
    return api.complaint(
        lambda: strategy.run(step), "gather", "cross-replica", "all_gather"
    )


@scenario("3.4")
def words_about_reduce_in_a_replica(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        return strategy.reduce("SUM", api.array([1.0]), axis=None)

    step = api.compile_if(engine, replica_fn)
    return api.complaint(
        lambda: strategy.run(step), "cross-replica", "get_replica_context()"
    )


@scenario("12.3")
def words_about_run_in_a_replica(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        return strategy.run(lambda: api.array(1.0))

    step = api.compile_if(engine, replica_fn)
    return api.complaint(lambda: strategy.run(step), "cross-replica")


@scenario("12.3")
def words_about_a_scope_in_a_replica(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        with strategy.scope():
            return api.array(1.0)

    step = api.compile_if(engine, replica_fn)
    return api.complaint(lambda: strategy.run(step), "cross-replica")


@scenario("12.5")
def words_about_a_sum_of_a_plain_value(api):
    strategy = api.mirrored(2)
    return api.complaint(lambda: strategy.reduce("SUM", 1.0, axis=None), "SUM", "1.0")


@scenario("3.4")
def words_about_a_reduction_that_does_not_exist(api):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 2.0)
    return api.complaint(
        lambda: strategy.reduce("PROD", value, axis=None), "PROD", "ReduceOp"
    )


@scenario("2.2")
def words_about_two_strategies(api):
    first, second = api.mirrored(2), api.mirrored(2)

    def nest():
        with first.scope(), second.scope():
            pass

    return api.complaint(nest, "strategy")


@scenario("12.8", cases=product(("integer_mean", "none", "text")))
def words_about_a_variable_that_cannot_be_made(api, kind):
    aggregation = api.VariableAggregation
    kwargs = {
        "integer_mean": {"initial_value": 1, "aggregation": aggregation.MEAN},
        "none": {
            "initial_value": 1.0,
            "synchronization": api.VariableSynchronization.NONE,
        },
        "text": {"initial_value": 1.0, "aggregation": "sum"},
    }[kind]
    words = {
        "integer_mean": ("MEAN", "float", "aggregation"),
        "none": ("NONE", "synchronization", "not supported"),
        "text": ("aggregation", "sum"),
    }[kind]
    with api.mirrored(2).scope():
        return api.complaint(lambda: api.Variable(**kwargs), *words)


@scenario("6.4")
def words_about_gathering_slices(api):
    slices = api.IndexedSlices(api.array([1.0]), api.array([0], "int32"))
    return api.complaint(
        lambda: api.mirrored(2).gather(slices, axis=0), "gather", "IndexedSlices"
    )
