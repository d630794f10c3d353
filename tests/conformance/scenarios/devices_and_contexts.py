"""Devices (1.x), strategies, their scopes and which context one is in (2.1, 2.2)."""

import threading

from . import scenario

SPELLINGS = [
    ("CPU:%d",),
    ("cpu:%d",),
    ("/cpu:%d",),
    ("/CPU:%d",),
    ("/device:CPU:%d",),
    ("/device:cpu:%d",),
    ("/job:localhost/replica:0/task:0/device:CPU:%d",),
]

NO_ASSERTION = "a bad argument is a ValueError; TensorFlow fails an assertion"


def context_of(api):
    """Where we are, in the words of the functions that tell."""
    distribute = api.distribute
    return {
        "has_strategy": distribute.has_strategy(),
        "cross_replica": distribute.in_cross_replica_context(),
        "replica_context": distribute.get_replica_context() is not None,
    }


@scenario("1.1", cases=SPELLINGS)
def device_may_be_spelled(api, spelling):
    strategy = api.distribute.MirroredStrategy([spelling % 0, spelling % 1])
    return strategy.num_replicas_in_sync


@scenario("1.1", "12.1", differs=NO_ASSERTION, expect=ValueError)
def two_spellings_of_one_device_are_duplicates(api):
    return api.distribute.MirroredStrategy(["CPU:0", "/device:CPU:0"])


@scenario("12.1", differs=NO_ASSERTION, expect=ValueError)
def duplicate_devices_fail(api):
    return api.distribute.MirroredStrategy(["CPU:0", "CPU:0"])


@scenario("12.1", differs="we name the missing device at once", expect=ValueError)
def unknown_device_index(api):
    strategy = api.distribute.MirroredStrategy(["CPU:0", "CPU:99"])
    return strategy.num_replicas_in_sync


@scenario("1.1", cases=[("CPU:x",), ("XPU:0",), ("nonsense",)])
def malformed_device(api, device):
    return api.distribute.MirroredStrategy(["CPU:0", device]).num_replicas_in_sync


@scenario("1.1", differs=NO_ASSERTION, expect=ValueError)
def empty_device_string(api):
    return api.distribute.MirroredStrategy(["CPU:0", ""]).num_replicas_in_sync


@scenario("1.2")
def no_devices_means_all_cpus_when_there_is_no_accelerator(api):
    strategy = api.distribute.MirroredStrategy()
    return strategy.num_replicas_in_sync == api.num_cpus()


@scenario("1.2")
def empty_list_of_devices(api):
    strategy = api.distribute.MirroredStrategy([])
    return strategy.num_replicas_in_sync == api.num_cpus()


@scenario("1.1")
def devices_may_be_a_tuple(api):
    return api.distribute.MirroredStrategy(("CPU:1", "CPU:0")).num_replicas_in_sync


@scenario("1.1")
def replica_ids_follow_the_order_of_the_devices(api, engine):
    strategy = api.distribute.MirroredStrategy(["CPU:2", "CPU:0"])

    def replica_fn():
        context = api.distribute.get_replica_context()
        return api.cast(context.replica_id_in_sync_group, "int32")

    return strategy.run(api.compile_if(engine, replica_fn))


@scenario("1.4")
def many_all_reduces_on_logical_cpus_end(api, engine):
    strategy = api.mirrored(4)

    def replica_fn(x):
        for _ in range(10):
            x = api.distribute.get_replica_context().all_reduce("MEAN", x) + 1.0
        return x

    step = api.compile_if(engine, replica_fn)
    value = api.per_replica(strategy, 0.0, 1.0, 2.0, 3.0)
    for _ in range(5):
        value = strategy.run(step, args=(value,))
    return value


@scenario("2.1")
def number_of_replicas(api):
    return [
        api.mirrored(1).num_replicas_in_sync,
        api.mirrored(2).num_replicas_in_sync,
        api.mirrored(4).num_replicas_in_sync,
        api.one_device().num_replicas_in_sync,
        api.distribute.get_strategy().num_replicas_in_sync,
    ]


@scenario("2.1")
def cluster_resolver_is_none_on_one_worker(api):
    strategies = api.mirrored(2), api.one_device(), api.distribute.get_strategy()
    return [strategy.cluster_resolver for strategy in strategies]


@scenario("2.1")
def extended_belongs_to_the_strategy(api):
    strategy = api.mirrored(2)
    return strategy.extended is strategy.extended


@scenario("2.2")
def contexts_outside_of_any_scope(api):
    return context_of(api)


@scenario("2.2")
def contexts_inside_a_scope(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        inside = context_of(api)
        is_current = api.distribute.get_strategy() is strategy
    return {"inside": inside, "is_current": is_current, "after": context_of(api)}


@scenario("2.2")
def scope_gives_the_strategy(api):
    strategy = api.mirrored(2)
    with strategy.scope() as given:
        return given is strategy


@scenario("2.2")
def scope_nests_in_itself(api):
    strategy = api.mirrored(2)
    with strategy.scope(), strategy.scope():
        inner = context_of(api)
    return [inner, context_of(api)]


@scenario("2.2")
def one_scope_object_entered_twice(api):
    strategy = api.mirrored(2)
    scope = strategy.scope()
    with scope:
        with scope:
            inner = context_of(api)
        middle = context_of(api)
    return [inner, middle, context_of(api)]


@scenario("2.2")
def scope_inside_another_strategys_scope(api):
    first, second = api.mirrored(2), api.mirrored(2)
    with first.scope():
        failed = api.attempt(lambda: second.scope().__enter__())
        return [failed, api.distribute.get_strategy() is first]


@scenario("2.2")
def scope_is_left_when_its_body_raises(api):
    strategy = api.mirrored(2)
    try:
        with strategy.scope():
            raise KeyError("boom")
    except KeyError:
        return context_of(api)


@scenario("2.2")
def default_strategys_scope_is_no_scope(api):
    default = api.distribute.get_strategy()
    with default.scope():
        return context_of(api)


@scenario("2.2")
def default_strategys_scope_inside_a_mirrored_one(api):
    default = api.distribute.get_strategy()
    with api.mirrored(2).scope():
        return api.attempt(lambda: default.scope().__enter__() and "entered")


@scenario("2.2")
def scopes_belong_to_a_thread(api):
    seen = []
    with api.mirrored(2).scope():
        thread = threading.Thread(target=lambda: seen.append(context_of(api)))
        thread.start()
        thread.join()
    return seen


@scenario("2.2")
def set_strategy_without_a_scope(api):
    strategy = api.mirrored(2)
    api.distribute.experimental_set_strategy(strategy)
    try:
        inside = context_of(api)
        variable = api.class_name(api.Variable(1.0))
    finally:
        api.distribute.experimental_set_strategy(None)
    return [inside, variable, context_of(api)]


@scenario("2.2")
def set_strategy_inside_a_scope(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        return api.distribute.experimental_set_strategy(strategy)


@scenario("2.2")
def contexts_inside_run(api):
    strategy = api.mirrored(2)
    seen = []
    strategy.run(lambda: seen.append(context_of(api)))
    return [seen, context_of(api)]


@scenario("2.2")
def run_of_one_strategy_in_the_scope_of_another(api, engine):
    first, second = api.mirrored(2), api.mirrored(2)
    with first.scope():
        return second.run(api.compile_if(engine, lambda: api.array(1.0)))


@scenario("2.2", "12.3")
def scope_inside_a_replica_function(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        with strategy.scope():
            return api.array(1.0)

    return strategy.run(api.compile_if(engine, replica_fn))


@scenario("12.3")
def run_inside_a_replica_function(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        return strategy.run(lambda: api.array(1.0))

    return strategy.run(api.compile_if(engine, replica_fn))


@scenario("12.3")
def reduce_inside_a_replica_function(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        return strategy.reduce("SUM", api.array(1.0), axis=None)

    return strategy.run(api.compile_if(engine, replica_fn))


@scenario("12.3")
def contexts_inside_update(api):
    strategy = api.mirrored(2)
    seen = []
    with strategy.scope():
        variable = api.Variable(1.0)
        strategy.extended.update(variable, lambda v: seen.append(context_of(api)))
        after = context_of(api)
    return [seen, after]


@scenario("12.3")
def contexts_inside_merge_call(api):
    strategy = api.mirrored(2)
    seen = []

    def replica_fn():
        context = api.distribute.get_replica_context()
        context.merge_call(lambda strategy: seen.append(context_of(api)))
        seen.append(context_of(api))

    strategy.run(replica_fn)
    return seen


@scenario("2.2", "2.3")
def one_device_strategy_contexts(api):
    strategy = api.one_device()
    seen = []
    strategy.run(lambda: seen.append(context_of(api)))
    with strategy.scope():
        seen.append(context_of(api))
    return seen
