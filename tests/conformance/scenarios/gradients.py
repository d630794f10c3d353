"""Gradients: through all_reduce and all_gather (2.3), of variables (5.8)."""

from . import scenario

OPS = [("SUM",), ("MEAN",)]


def gradient_on_replicas(api, engine, fn, *parts):
    """The gradient of `fn(context, x)` with respect to each replica's `x`."""
    strategy = api.mirrored(len(parts))

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return api.gradient(lambda x: fn(context, x), x)

    value = api.per_replica(strategy, *parts)
    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("2.3", cases=OPS)
def gradient_of_all_reduce(api, engine, op):
    def fn(context, x):
        return context.all_reduce(op, x * x)

    return gradient_on_replicas(api, engine, fn, 2.0, 3.0)


@scenario("2.3", cases=OPS)
def gradient_of_all_reduce_with_a_weight_for_each_replica(api, engine, op):
    def fn(context, x):
        weight = api.cast(context.replica_id_in_sync_group, "float32") + 1.0
        return weight * context.all_reduce(op, x)

    return gradient_on_replicas(api, engine, fn, 2.0, 3.0)


@scenario("2.3", cases=[("SUM", "SUM"), ("SUM", "MEAN"), ("MEAN", "MEAN")])
def gradient_of_chained_all_reduces(api, engine, inner, outer):
    def fn(context, x):
        return context.all_reduce(outer, x * context.all_reduce(inner, x))

    return gradient_on_replicas(api, engine, fn, 2.0, 3.0)


@scenario("2.3")
def gradient_of_all_reduce_of_a_structure(api, engine):
    def fn(context, x):
        total = context.all_reduce("SUM", {"a": x, "b": [x * x]})
        return total["a"] + total["b"][0]

    return gradient_on_replicas(api, engine, fn, 2.0, 3.0)


@scenario("2.3")
def gradient_of_half_of_an_all_reduced_structure(api, engine):
    def fn(context, x):
        return context.all_reduce("SUM", [x, x * x])[1]

    return gradient_on_replicas(api, engine, fn, 2.0, 3.0)


@scenario("2.3")
def gradient_of_all_gather(api, engine):
    def fn(context, x):
        return api.sum(api.square(context.all_gather(x, axis=0)))

    return gradient_on_replicas(api, engine, fn, [1.0, 2.0], [3.0, 4.0])


@scenario("2.3")
def gradient_of_all_gather_along_the_second_axis(api, engine):
    def fn(context, x):
        gathered = context.all_gather(x, axis=1)
        return api.sum(gathered * api.array([[1.0, 2.0, 3.0, 4.0]]))

    return gradient_on_replicas(api, engine, fn, [[1.0, 2.0]], [[3.0, 4.0]])


@scenario("2.3", "5.6")
def gradient_of_uneven_all_gather(api, engine):
    def fn(context, x):
        return api.sum(context.all_gather(x, axis=0) * api.array([1.0, 2.0, 3.0]))

    return gradient_on_replicas(api, engine, fn, [1.0, 2.0], [3.0])


@scenario("2.3")
def second_derivative_through_all_reduce(api, engine):
    def fn(context, x):
        def inner(x):
            return context.all_reduce("SUM", x * x * x)

        return api.gradient(inner, x)

    return gradient_on_replicas(api, engine, fn, 2.0, 3.0)


@scenario("2.3")
def gradient_with_one_replica(api, engine):
    def fn(context, x):
        return context.all_reduce("SUM", x * x)

    return gradient_on_replicas(api, engine, fn, 2.0)


@scenario("5.8")
def gradient_of_a_mirrored_variable_is_each_replicas_own(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        w = api.Variable([1.0, 2.0])

    def replica_fn(x):
        return api.variable_gradients(lambda: api.sum(w * x), [w])

    batch = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    return strategy.run(api.compile_if(engine, replica_fn), args=(batch,))


@scenario("5.8")
def gradients_of_several_variables(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        w, b = api.Variable([[1.0], [2.0]]), api.Variable([0.5])

    def replica_fn(x):
        def loss():
            return api.mean(api.square(api.matmul(x, w) + b))

        return api.variable_gradients(loss, [w, b])

    batch = api.per_replica(strategy, [[1.0, 2.0]], [[3.0, 4.0]])
    return strategy.run(api.compile_if(engine, replica_fn), args=(batch,))


@scenario("5.8")
def gradient_of_a_loss_that_is_all_reduced(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        w = api.Variable(2.0)

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return api.variable_gradients(lambda: context.all_reduce("SUM", w * x), [w])

    batch = api.per_replica(strategy, 1.0, 3.0)
    return strategy.run(api.compile_if(engine, replica_fn), args=(batch,))


@scenario("5.8")
def gradient_steps_keep_the_copies_equal(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        w = api.Variable([0.0, 0.0], aggregation=api.VariableAggregation.MEAN)

    def replica_fn(x, y):
        def loss():
            return api.mean(api.square(api.sum(x * w, axis=1) - y))

        value, (gradient,) = api.variable_gradients(loss, [w])
        gradient = api.distribute.get_replica_context().all_reduce("MEAN", gradient)
        w.assign_sub(0.1 * gradient)
        return value

    step = api.compile_if(engine, replica_fn)
    x = api.per_replica(strategy, [[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [2.0, 0.0]])
    y = api.per_replica(strategy, [1.0, 2.0], [3.0, 2.0])
    losses = [
        strategy.reduce("MEAN", strategy.run(step, args=(x, y)), axis=None)
        for _ in range(3)
    ]
    return {"losses": losses, "copies": api.copies(w)}


@scenario("5.8")
def gradient_of_an_ordinary_variable(api, engine):
    w = api.Variable([1.0, 2.0])
    fn = api.compile_if(
        engine, lambda: api.variable_gradients(lambda: api.sum(w * w), [w])
    )
    return fn()


@scenario("5.8")
def gradient_of_an_integer_variable_beside_a_float_one(api):
    n, w = api.Variable(2), api.Variable(3.0)
    value, gradients = api.variable_gradients(lambda: w * w, [w])
    return [value, gradients, n]
