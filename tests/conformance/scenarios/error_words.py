"""The words of errors that people search for, and small things (2.2, 3.4, 3.5, 5.3)."""

from itertools import product

from . import scenario


@scenario("2.2", cases=product(("scope", "run", "reduce", "assign", "default", "set")))
def words_about_mixed_strategies(api, kind):
    first, second = api.mirrored(2), api.mirrored(2)
    default = api.distribute.get_strategy()
    with first.scope():
        variable = api.Variable(1.0)
    value = api.per_replica(first, 1.0, 2.0)

    def enter(strategy):
        with strategy.scope():
            pass

    act = {
        "scope": lambda: enter(first),
        "run": lambda: first.run(lambda: None),
        "reduce": lambda: first.reduce("SUM", value, axis=None),
        "assign": lambda: variable.assign(2.0),
        "default": lambda: enter(default),
        "set": lambda: api.distribute.experimental_set_strategy(first),
    }[kind]
    words = {
        "default": ("must not", "nest", "scope"),
        "set": ("must not", "called inside a", "scope"),
    }.get(kind, ("mixing different",))
    with second.scope():
        return api.complaint(act, *words)


@scenario("3.4", cases=product(("number", "array", "to_device")))
def words_about_a_sum_of_one_value(api, kind):
    strategy = api.mirrored(2)
    act = {
        "number": lambda: strategy.reduce("SUM", 3.0, axis=None),
        "array": lambda: strategy.reduce("SUM", api.array(3.0), axis=None),
        "to_device": lambda: strategy.extended.reduce_to("SUM", 3.0, "CPU:0"),
    }[kind]
    with strategy.scope():
        return api.complaint(act, "cannot be reduced with", "ReduceOp.SUM")


@scenario("3.5")
def words_about_gathering_slices_of_replicas(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        slices = api.IndexedSlices(api.array([1.0]), api.array([0], "int32"))
        context = api.distribute.get_replica_context()
        return context.all_gather(slices, axis=0)

    step = api.compile_if(engine, replica_fn)
    return api.complaint(lambda: strategy.run(step), "does not support IndexedSlices")


@scenario("5.3")
def a_spec_of_an_array(api):
    spec = api.TensorSpec.from_tensor(api.array([[1.0, 2.0]]), name="x")
    return [api.spec(spec), spec.name, api.spec(api.TensorSpec.from_spec(spec))]


@scenario(
    "5.8",
    differs="JAX's gradients are arrays; a tape has None",
    expect=[1.0, [2.0], [0.0]],
)
def the_gradient_of_a_variable_that_is_not_used(api):
    used, unused = api.Variable([1.0]), api.Variable([1.0])
    value, found = api.variable_gradients(lambda: api.sum(used * used), [used, unused])
    return [value, *(None if g is None else api.plain(g) for g in found)]
