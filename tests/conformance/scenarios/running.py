"""Strategy.run: its arguments, both engines, uneven parts, errors (5.x, 12.16)."""

import numpy as np

from . import replicas, scenario


@scenario("5.1")
def plain_arguments_go_to_every_replica(api, engine):
    strategy = api.mirrored(2)
    fn = api.compile_if(engine, lambda x, y: x * y)
    return strategy.run(fn, args=(api.array([1.0, 2.0]), 3.0))


@scenario("5.1")
def distributed_arguments_are_unwrapped(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    return strategy.run(api.compile_if(engine, lambda x: x * 10.0), args=(value,))


@scenario("5.1")
def keyword_arguments(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 2.0)
    fn = api.compile_if(engine, lambda x, *, scale, shift=0.0: x * scale + shift)
    return [
        strategy.run(fn, args=(value,), kwargs={"scale": api.array(10.0)}),
        strategy.run(fn, kwargs={"x": value, "scale": value, "shift": 1.0}),
    ]


@scenario("5.1")
def arguments_inside_structures(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 2.0)

    def replica_fn(batch, pair):
        return batch["x"] + batch["more"][0] + pair[0] * pair[1]

    batch = {"x": value, "more": [value]}
    return strategy.run(
        api.compile_if(engine, replica_fn), args=(batch, (value, api.array(100.0)))
    )


@scenario("5.1")
def args_may_be_a_list(api):
    return api.mirrored(2).run(lambda x, y: x + y, args=[api.array(1.0), 2.0])


@scenario("5.1")
def variables_as_arguments(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0)

    def replica_fn(v):
        v.assign_add(api.array(2.0))
        return v * 1.0

    result = strategy.run(api.compile_if(engine, replica_fn), args=(variable,))
    return [result, api.copies(variable)]


@scenario("5.2")
def eager_function_is_called_once_for_each_replica_and_step(api):
    strategy = api.mirrored(2)
    calls = []
    for _ in range(3):
        strategy.run(lambda: calls.append(1))
    return len(calls)


@scenario("5.2")
def eager_function_may_branch_on_values_and_on_its_replica(api):
    strategy = api.mirrored(2)

    def replica_fn(x):
        index = int(api.distribute.get_replica_context().replica_id_in_sync_group)
        if index == 1 and float(x) > 1.0:
            return x * 100.0
        return x

    return strategy.run(replica_fn, args=(api.per_replica(strategy, 5.0, 5.0),))


@scenario("5.3", "5.5")
def function_around_the_caller_of_run(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        w = api.Variable(1.0, aggregation=api.VariableAggregation.MEAN)

    def replica_fn(x):
        w.assign_add(x)
        return w * x

    def step(batch):
        result = strategy.run(replica_fn, args=(batch,))
        return strategy.reduce("SUM", result, axis=None)

    step = api.compile_if(engine, step)
    batch = api.per_replica(strategy, 1.0, 3.0)
    return [step(batch), step(batch), api.copies(w)]


@scenario("5.3")
def compiled_function_is_not_traced_again_for_equal_shapes(api):
    strategy = api.mirrored(2)
    traces = []

    def replica_fn(x):
        traces.append(1)
        return x * 2.0

    fn = api.function(replica_fn)
    strategy.run(fn, args=(api.per_replica(strategy, 1.0, 2.0),))
    first = len(traces)
    strategy.run(fn, args=(api.per_replica(strategy, 3.0, 4.0),))
    second = len(traces)
    strategy.run(fn, args=(api.per_replica(strategy, [3.0], [4.0]),))
    return [first == second, len(traces) > second]


@scenario("5.3")
def compiled_function_sees_new_values_of_variables(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        w = api.Variable(1.0)
    fn = api.function(lambda x: x * w)
    first = strategy.run(fn, args=(api.array(2.0),))
    w.assign(10.0)
    return [first, strategy.run(fn, args=(api.array(2.0),))]


@scenario("5.4")
def function_over_a_loop_of_runs(api, engine):
    strategy = api.mirrored(2)
    batches = [api.per_replica(strategy, float(i), 10.0 * i) for i in range(3)]

    def epoch():
        total = api.array(0.0)
        for batch in batches:
            result = strategy.run(lambda x: x + 1.0, args=(batch,))
            total += strategy.reduce("SUM", result, axis=None)
        return total

    return api.compile_if(engine, epoch)()


@scenario("5.5")
def several_runs_in_one_function_share_variables(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        w = api.Variable(0.0, aggregation=api.VariableAggregation.SUM)

    def step(batch):
        strategy.run(lambda x: w.assign_add(x) * 1.0, args=(batch,))
        middle = w * 1.0
        return [middle, strategy.run(lambda: w * 2.0)]

    return api.compile_if(engine, step)(api.per_replica(strategy, 1.0, 3.0))


@scenario("5.6")
def uneven_inputs(api, engine):
    strategy = api.mirrored(2)
    fn = api.compile_if(engine, lambda x: {"double": x * 2.0, "sum": api.sum(x)})
    return strategy.run(fn, args=(api.per_replica(strategy, [1.0, 2.0, 3.0], [4.0]),))


@scenario("5.6")
def uneven_inputs_with_an_all_reduce(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return x / context.all_reduce("SUM", api.sum(x))

    value = api.per_replica(strategy, [1.0, 2.0], [5.0])
    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("5.6")
def an_empty_part(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(x):
        return [x * 2.0, api.sum(x)]

    value = api.per_replica(strategy, [1.0, 2.0], [])
    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


class Trouble(Exception):
    """A user's own exception."""


@scenario("5.7")
def exception_reaches_the_caller_as_itself(api, engine):
    strategy = api.mirrored(2)
    trouble = Trouble("as raised")

    def replica_fn():
        raise trouble

    failed = api.attempt(lambda: strategy.run(api.compile_if(engine, replica_fn)))
    after = strategy.run(api.compile_if(engine, lambda: api.array(1.0)))
    return [failed, failed is trouble, str(failed) == "as raised", after]


@scenario("5.7")
def exception_in_one_replica_only(api):
    strategy = api.mirrored(2)

    def replica_fn():
        if int(api.distribute.get_replica_context().replica_id_in_sync_group) == 1:
            raise Trouble()
        return api.array(1.0)

    failed = api.attempt(lambda: strategy.run(replica_fn))
    return [failed, api.distribute.has_strategy(), strategy.run(lambda: 1)]


@scenario("5.9")
def state_in_and_state_out(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(state, x):
        context = api.distribute.get_replica_context()
        mean = context.all_reduce("MEAN", x)
        return {"w": state["w"] + mean, "step": state["step"] + 1}

    fn = api.compile_if(engine, replica_fn)
    state = {"w": api.array([0.0, 0.0]), "step": api.array(0, "int32")}
    batch = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    for _ in range(3):
        state = strategy.run(fn, args=(state, batch))
    return state


@scenario(
    "5.10",
    differs="the name of TensorFlow 2.0 still works",
    expect=replicas(np.float32(2.0), np.float32(2.0)),
)
def experimental_run_v2(api):
    strategy = api.mirrored(2)
    return strategy.experimental_run_v2(lambda x: x * 2.0, args=(api.array(1.0),))
