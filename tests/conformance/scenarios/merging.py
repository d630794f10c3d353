"""merge_call: the replicas meet, one function runs for all of them (2.4)."""

from . import scenario


def merge(api, engine, strategy, merge_fn, *args):
    """Runs a replica function that only merges its arguments."""

    def replica_fn(*args):
        return api.distribute.get_replica_context().merge_call(merge_fn, args=args)

    return strategy.run(api.compile_if(engine, replica_fn), args=args)


@scenario("2.4")
def merge_fn_sees_all_replicas_values(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 5.0)

    def merge_fn(strategy, value):
        first, second = strategy.experimental_local_results(value)
        return first - second

    return merge(api, engine, strategy, merge_fn, value)


@scenario("2.4")
def merge_fn_is_called_once_with_the_strategy(api):
    strategy = api.mirrored(2)
    calls = []

    def merge_fn(given, value):
        calls.append(given is strategy)

    merge(api, "eager", strategy, merge_fn, api.array(1.0))
    return calls


@scenario("2.4")
def merge_call_with_keyword_arguments(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(x):
        return api.distribute.get_replica_context().merge_call(
            lambda strategy, a, b: strategy.reduce("SUM", a, axis=None) * b,
            args=(x,),
            kwargs={"b": 10.0},
        )

    value = api.per_replica(strategy, 1.0, 2.0)
    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("2.4")
def merge_call_of_nested_values(api, engine):
    strategy = api.mirrored(2)

    def merge_fn(strategy, tree):
        return {
            "sum": strategy.reduce("SUM", tree["a"], axis=None),
            "mean": [strategy.reduce("MEAN", tree["b"][0], axis=None)],
        }

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return context.merge_call(merge_fn, args=({"a": x, "b": [x * 2.0]},))

    value = api.per_replica(strategy, 1.0, 3.0)
    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("2.4")
def per_replica_results_of_merge_fn_go_to_their_replicas(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 3.0)

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return 10.0 * context.merge_call(lambda strategy, v: v, args=(x,))

    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("2.4")
def mirrored_results_of_merge_fn(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 3.0)

    def merge_fn(strategy, v):
        return strategy.extended.reduce_to("SUM", v, destinations=v)

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return x * context.merge_call(merge_fn, args=(x,))

    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("2.4")
def merge_fn_may_return_nothing(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        context = api.distribute.get_replica_context()
        return context.merge_call(lambda strategy: None) is None

    return strategy.run(api.compile_if(engine, replica_fn))


@scenario("2.4")
def merge_fn_gets_plain_values_when_they_are_one_object(api):
    shared = api.array(2.0)
    seen = []

    def merge_fn(strategy, value):
        seen.append(value is shared)

    merge(api, "eager", api.mirrored(2), merge_fn, shared)
    return seen


@scenario("2.4")
def merge_fn_gets_the_mirrored_variable(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0)
    seen = []

    def replica_fn():
        api.distribute.get_replica_context().merge_call(
            lambda strategy, v: seen.append(v is variable), args=(variable,)
        )

    strategy.run(api.compile_if(engine, replica_fn))
    return seen[-1]


@scenario("2.4")
def merge_call_twice_in_a_row(api, engine):
    strategy = api.mirrored(2)

    def total(strategy, v):
        return strategy.reduce("SUM", v, axis=None)

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        x = x + context.merge_call(total, args=(x,))
        return x + context.merge_call(total, args=(x,))

    value = api.per_replica(strategy, 1.0, 3.0)
    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("2.4", "6.3")
def update_inside_merge_call(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable([1.0, 1.0])

    def merge_fn(strategy, gradient):
        total = strategy.extended.reduce_to("SUM", gradient, destinations=variable)
        strategy.extended.update(
            variable, lambda v, g: v.assign_sub(0.1 * g), args=(total,)
        )

    def replica_fn(x):
        api.distribute.get_replica_context().merge_call(merge_fn, args=(x,))

    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return api.copies(variable)


@scenario("2.4")
def assign_inside_merge_call(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0)

    def merge_fn(strategy, value):
        variable.assign(strategy.reduce("SUM", value, axis=None))

    def replica_fn(x):
        api.distribute.get_replica_context().merge_call(merge_fn, args=(x,))
        return variable * 1.0

    value = api.per_replica(strategy, 1.0, 3.0)
    result = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return [result, api.copies(variable)]


@scenario("2.4")
def merge_call_inside_merge_call(api, engine):
    def merge_fn(strategy):
        return api.distribute.get_replica_context() is None

    return merge(api, engine, api.mirrored(2), merge_fn)


@scenario("2.4")
def error_in_merge_fn_reaches_the_caller(api, engine):
    def merge_fn(strategy):
        raise KeyError("in merge_fn")

    return merge(api, engine, api.mirrored(2), merge_fn)


@scenario("2.4")
def one_replica_returns_while_another_merges(api):
    strategy = api.mirrored(2)

    def replica_fn():
        context = api.distribute.get_replica_context()
        if int(context.replica_id_in_sync_group) == 0:
            context.merge_call(lambda strategy: None)

    return strategy.run(replica_fn)


@scenario("2.4", "5.7")
def one_replica_raises_while_another_merges(api):
    strategy = api.mirrored(2)

    def replica_fn():
        context = api.distribute.get_replica_context()
        if int(context.replica_id_in_sync_group) == 1:
            raise KeyError("replica 1")
        context.merge_call(lambda strategy: None)

    failed = api.attempt(lambda: strategy.run(replica_fn))
    return [failed, strategy.run(lambda: api.array(1.0))]


@scenario("2.4")
def replicas_merge_with_different_structures(api):
    strategy = api.mirrored(2)

    def replica_fn():
        context = api.distribute.get_replica_context()
        x = api.array(1.0)
        value = [x] if int(context.replica_id_in_sync_group) == 0 else [x, x]
        context.merge_call(lambda strategy, v: None, args=(value,))

    return api.fails(lambda: strategy.run(replica_fn))


@scenario("2.4")
def merge_call_with_one_replica(api, engine):
    def merge_fn(strategy, value):
        return [value + 1.0, strategy.experimental_local_results(value)[0]]

    strategies = api.mirrored(1), api.one_device()
    return [merge(api, engine, each, merge_fn, api.array(1.0)) for each in strategies]
