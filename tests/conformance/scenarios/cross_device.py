"""Cross-device operations and sparse gradients (6.1, 6.2, 6.4)."""

import numpy as np

from . import replicas, scenario

ALGORITHMS = [
    ("ReductionToOneDevice",),
    ("NcclAllReduce",),
    ("HierarchicalCopyAllReduce",),
]

ON_CPUS = "a program of its own on the CPU too; TensorFlow's needs GPUs"
SUMS = np.float32([4.0, 6.0])
MEANS = np.float32([2.0, 3.0])


def make_ops(api, name, **kwargs):
    return getattr(api.distribute, name)(**kwargs)


def slices(api, strategy):
    """A per-replica value of sparse gradients: two rows of three on each replica."""
    values = api.per_replica(strategy, [[1.0], [2.0]], [[3.0], [4.0]])
    indices = api.per_replica(strategy, [0, 2], [2, 1], dtype="int32")
    shape = api.array([3, 1], "int32")

    def replica_fn(values, indices):
        return api.IndexedSlices(values, indices, shape)

    return strategy.run(replica_fn, args=(values, indices))


def all_reduce_twice(api, engine, ops):
    strategy = api.mirrored(2, cross_device_ops=ops)
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return [context.all_reduce(op, x) for op in ("SUM", "MEAN")]

    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("6.1", cases=[ALGORITHMS[0], ALGORITHMS[2]])
def all_reduce_with(api, engine, name):
    return all_reduce_twice(api, engine, make_ops(api, name))


@scenario("6.1", differs=ON_CPUS, expect=[replicas(SUMS, SUMS), replicas(MEANS, MEANS)])
def all_reduce_with_nccl_on_cpus(api, engine):
    return all_reduce_twice(api, engine, make_ops(api, "NcclAllReduce"))


@scenario("6.1", cases=ALGORITHMS)
def strategy_reduce_with(api, name):
    strategy = api.mirrored(4, cross_device_ops=make_ops(api, name))
    value = api.per_replica(strategy, 1.0, 2.0, 3.0, 4.0)
    return [strategy.reduce(op, value, axis=None) for op in ("SUM", "MEAN")]


@scenario("6.1", cases=ALGORITHMS)
def variable_aggregation_with(api, engine, name):
    strategy = api.mirrored(2, cross_device_ops=make_ops(api, name))
    with strategy.scope():
        variable = api.Variable(1.0, aggregation=api.VariableAggregation.SUM)

    def replica_fn(x):
        variable.assign_add(x)

    value = api.per_replica(strategy, 1.0, 3.0)
    strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return api.copies(variable)


@scenario("6.1", cases=ALGORITHMS)
def reduce_by_hand(api, name):
    strategy = api.mirrored(2)
    ops = make_ops(api, name)
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    reduced = [
        ops.reduce(op, value, value) for op in (api.ReduceOp.SUM, api.ReduceOp.MEAN)
    ]
    return [*reduced, api.class_name(reduced[0])]


@scenario("6.1", cases=ALGORITHMS)
def reduce_by_hand_to_one_device(api, name):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 3.0)
    return make_ops(api, name).reduce(api.ReduceOp.SUM, value, "CPU:0")


def batch_mean(api, ops):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [2.0, 2.0], [2.0, 4.0])
    other = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    return ops.batch_reduce(api.ReduceOp.MEAN, [(value, value), (other, other)])


@scenario("6.1", cases=[ALGORITHMS[0], ALGORITHMS[2]])
def batch_reduce_by_hand(api, name):
    return batch_mean(api, make_ops(api, name))


@scenario(
    "6.1", differs=ON_CPUS, expect=[replicas(MEANS, MEANS), replicas(MEANS, MEANS)]
)
def batch_reduce_by_hand_with_nccl_on_cpus(api):
    return batch_mean(api, make_ops(api, "NcclAllReduce"))


@scenario("6.1", cases=ALGORITHMS)
def broadcast_by_hand(api, name):
    strategy = api.mirrored(2)
    to = api.per_replica(strategy, 0.0, 0.0)
    sent = make_ops(api, name).broadcast(api.array([1.0, 2.0]), to)
    return [sent, api.class_name(sent)]


@scenario("6.1")
def reduction_to_a_chosen_device(api):
    ops = make_ops(api, "ReductionToOneDevice", reduce_to_device="CPU:1")
    strategy = api.mirrored(2, cross_device_ops=ops)
    value = api.per_replica(strategy, 1.0, 3.0)
    return strategy.reduce("SUM", value, axis=None)


@scenario("6.1")
def reduction_with_a_users_accumulation(api):
    def product(values):
        first, second = values
        return first * second

    ops = make_ops(api, "ReductionToOneDevice", accumulation_fn=product)
    value = api.per_replica(api.mirrored(2), 3.0, 5.0)
    reduce_ops = (api.ReduceOp.SUM, api.ReduceOp.MEAN)
    return [ops.reduce(op, value, "CPU:0") for op in reduce_ops]


@scenario("6.1", cases=[(name, n) for (name,) in ALGORITHMS[1:] for n in ("0", "2")])
def number_of_packs(api, name, num_packs):
    ops = make_ops(api, name, num_packs=int(num_packs))
    strategy = api.mirrored(2, cross_device_ops=ops)
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return context.all_reduce("SUM", [x, x * 10.0, x * 100.0])

    return strategy.run(replica_fn, args=(value,))


@scenario("6.1", cases=ALGORITHMS[1:])
def negative_number_of_packs(api, name):
    return make_ops(api, name, num_packs=-1)


def users_ops(api, calls):
    """Operations that take the first replica's value, whatever was asked."""

    class First(api.distribute.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, *args, **kwargs):
            calls.append(f"reduce {reduce_op.name}")
            return per_replica_value.values[0]

        def batch_reduce_implementation(self, reduce_op, pairs, *args, **kwargs):
            calls.append(f"batch_reduce {reduce_op.name} of {len(pairs)}")
            return [value.values[0] for value, _ in pairs]

        def broadcast_implementation(self, tensor, destinations):
            calls.append("broadcast")
            return tensor

    return First()


@scenario("6.1")
def users_own_hooks_by_hand(api):
    calls = []
    ops = users_ops(api, calls)
    value = api.per_replica(api.mirrored(2), 1.0, 3.0)
    results = [
        ops.reduce(api.ReduceOp.SUM, value, value),
        ops.batch_reduce(api.ReduceOp.MEAN, [(value, value), (value, value)]),
        ops.broadcast(api.array(7.0), value),
    ]
    return [results, calls]


@scenario("6.1")
def users_own_hooks_are_used_by_the_strategy(api):
    calls = []
    strategy = api.mirrored(2, cross_device_ops=users_ops(api, calls))
    with strategy.scope():
        value = api.per_replica(strategy, 1.0, 3.0)
        results = [
            strategy.extended.batch_reduce_to("SUM", [(value, value), (value, value)]),
            strategy.extended.broadcast_to(api.array(7.0), value),
        ]
    return [results, calls]


@scenario("6.1")
def users_own_hooks_are_used_by_all_reduce(api):
    calls = []
    strategy = api.mirrored(2, cross_device_ops=users_ops(api, calls))

    def replica_fn(x):
        return api.distribute.get_replica_context().all_reduce("SUM", [x, x * 2.0])

    value = api.per_replica(strategy, 1.0, 3.0)
    return [strategy.run(replica_fn, args=(value,)), calls]


@scenario(
    "6.1",
    differs="the user's operations serve `reduce` too; TensorFlow's own do on CPUs",
    expect=np.float32(1.0),
)
def users_own_hooks_are_used_by_reduce(api):
    strategy = api.mirrored(2, cross_device_ops=users_ops(api, []))
    value = api.per_replica(strategy, 1.0, 3.0)
    return strategy.reduce("SUM", value, axis=None)


@scenario("6.1")
def cross_device_ops_without_hooks(api):
    ops = api.distribute.CrossDeviceOps()
    value = api.per_replica(api.mirrored(2), 1.0, 3.0)
    return ops.reduce(api.ReduceOp.SUM, value, value)


@scenario("6.2")
def communication_options_and_their_defaults(api):
    experimental = api.distribute.experimental
    options = experimental.CommunicationOptions()
    named = experimental.CommunicationOptions(
        bytes_per_pack=1024,
        timeout_seconds=10.0,
        implementation=experimental.CommunicationImplementation.RING,
    )
    return [
        [options.bytes_per_pack, options.timeout_seconds, options.implementation],
        [named.bytes_per_pack, named.timeout_seconds, named.implementation],
    ]


@scenario("6.2")
def communication_options_check_their_arguments(api):
    make = api.distribute.experimental.CommunicationOptions
    return [
        api.attempt(lambda: make(bytes_per_pack=-1)),
        make(implementation="RING").implementation,
        api.attempt(lambda: make(implementation="MPI")),
    ]


@scenario("6.2")
def names_of_the_communication_implementations(api):
    experimental = api.distribute.experimental
    old, new = (
        experimental.CollectiveCommunication,
        experimental.CommunicationImplementation,
    )
    return [old is new, [each.name for each in new], new.AUTO.value, new.NCCL.value]


@scenario("6.2", cases=[("1",), ("8",), ("1048576",)])
def packing_changes_no_result(api, engine, bytes_per_pack):
    strategy = api.mirrored(2)
    options = api.distribute.experimental.CommunicationOptions(int(bytes_per_pack))
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        many = [x * float(i) for i in range(5)]
        return context.all_reduce("SUM", many, options=options)

    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario(
    "6.2",
    differs="integers and floats may travel in one call",
    expect=[replicas(SUMS, SUMS), replicas(np.int32([4, 6]), np.int32([4, 6]))],
)
def all_reduce_of_mixed_types(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return context.all_reduce("SUM", [x, api.cast(x, "int32")])

    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("6.4", cases=[("SUM",), ("MEAN",)])
def sparse_reduce_stays_sparse(api, op):
    strategy = api.mirrored(2)
    return strategy.reduce(op, slices(api, strategy), axis=None)


@scenario("6.4", cases=ALGORITHMS)
def sparse_reduce_by_hand_with(api, name):
    strategy = api.mirrored(2)
    value = slices(api, strategy)
    return make_ops(api, name).reduce(api.ReduceOp.SUM, value, value)


@scenario("6.4")
def sparse_and_dense_in_one_all_reduce(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [[1.0]], [[3.0]])

    def replica_fn(x):
        sparse = api.IndexedSlices(
            x, api.array([1], "int32"), api.array([3, 1], "int32")
        )
        context = api.distribute.get_replica_context()
        total = context.all_reduce("SUM", [x, sparse])
        return {"dense": total[0], "rows": total[1].values, "at": total[1].indices}

    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("6.4", cases=[("SUM",), ("MEAN",)])
def sparse_all_reduce_with_uneven_rows(api, engine, op):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [[1.0], [2.0]], [[3.0]])
    index = api.per_replica(strategy, [0, 1], [1], dtype="int32")

    def replica_fn(x, i):
        sparse = api.IndexedSlices(x, i, api.array([3, 1], "int32"))
        total = api.distribute.get_replica_context().all_reduce(op, sparse)
        return {"rows": total.values, "at": total.indices}

    return strategy.run(api.compile_if(engine, replica_fn), args=(value, index))
