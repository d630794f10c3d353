"""`v[...].assign(...)`, of every kind of variable in every context (4.1, 4.3, 4.4)."""

from itertools import product

import numpy as np

from . import scenario

AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
KINDS = list(product(("ON_WRITE", "ON_READ"), AGGREGATIONS))
ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]

# What is assigned to, and the shape of what is assigned.
SLICES = {
    "row": (0, [3]),
    "last row": (-1, [3]),
    "rows": (slice(1, 3), [2, 3]),
    "first rows": (slice(None, -1), [2, 3]),
    "beyond the end": (slice(1, 9), [2, 3]),
    "no rows": (slice(1, 1), []),
    "every second row": (slice(None, None, 2), [2, 3]),
    "backwards": (slice(None, None, -1), [3, 3]),
    "all": (slice(None), [3, 3]),
    "ellipsis": (..., [3, 3]),
    "column": ((..., 0), [3]),
    "columns": ((slice(None), slice(1, None)), [3, 2]),
    "element": ((1, 2), []),
    "row and columns": ((0, slice(0, 2)), [2]),
    "new axis": ((slice(None), None), [3, 1, 3]),
    "new axis of a row": ((0, None), [1, 3]),
}


ALL_COPIES = (
    "all copies, as by `assign`; TensorFlow refuses, or assigns the first alone"
)
AFTER = [np.float32([5, 2, 3])] * 2


def make(api, strategy, synchronization, aggregation):
    with strategy.scope():
        return api.Variable(
            [1.0, 2.0, 3.0],
            synchronization=getattr(api.VariableSynchronization, synchronization),
            aggregation=getattr(api.VariableAggregation, aggregation),
        )


def counting(api, shape):
    """10, 20, 30, ... in this shape."""
    return api.array(10.0 * (1.0 + np.arange(np.prod(shape)).reshape(shape)))


@scenario("4.1", cases=product([name.replace(" ", "_") for name in SLICES]))
def assigning_to_a_slice(api, engine, name):
    variable = api.Variable(ROWS)
    index, shape = SLICES[name.replace("_", " ")]
    value = counting(api, shape)

    def step():
        variable[index].assign(value)

    before = variable[index] + 0.0
    api.compile_if(engine, step)()
    return [before, variable.numpy()]


@scenario("4.1")
def a_slice_takes_what_can_be_broadcast(api, engine):
    variable = api.Variable(ROWS)

    def step():
        variable[0].assign(5.0)
        variable[1].assign([6.0])
        variable[:, 0:1].assign(7.0)
        variable[1:, 1:].assign(api.array([[8.0], [9.0]]))
        variable[0, 1].assign(3)

    api.compile_if(engine, step)()
    return variable.numpy()


@scenario("4.1")
def assigning_to_a_slice_returns_the_whole_variable(api):
    variable = api.Variable(ROWS)
    whole = variable[0].assign(0.0)
    again = whole[1].assign(5.0)
    return [again.numpy(), variable.numpy(), tuple(whole.shape)]


@scenario("4.1")
def a_slice_that_was_assigned_in_a_function(api, engine):
    variable = api.Variable(ROWS)

    def step():
        whole = variable[0].assign(0.0)
        return whole + 1.0, variable[0] + 2.0

    return api.compile_if(engine, step)()


@scenario("4.1")
def assigning_to_a_slice_at_an_array(api, engine):
    variable = api.Variable(ROWS)

    def step(i):
        variable[i].assign(0.0)
        variable[..., i].assign(5.0)
        return variable[i] + 0.0

    return [
        api.compile_if(engine, step)(api.array(1, "int32")),
        variable.numpy(),
    ]


@scenario(
    "4.1",
    differs="a compiled program knows its shapes, so the bounds of a slice are Python's",
    expect=[IndexError, np.float32(ROWS)],
    differs_in=("compiled",),
)
def assigning_to_a_slice_that_begins_at_an_array(api, engine):
    variable = api.Variable(ROWS)

    def step(i):
        variable[i:, 0].assign(5.0)

    compiled = api.compile_if(engine, step)
    failed = api.attempt(lambda: compiled(api.array(1, "int32")))
    return [failed, variable.numpy()]


@scenario(
    "4.1",
    cases=product(("3", "-4")),
    differs="a compiled program cannot raise: nothing is assigned",
    expect=[False, np.float32(ROWS)],
    differs_in=("compiled",),
)
def assigning_to_a_slice_at_an_array_that_is_not_there(api, engine, index):
    variable = api.Variable(ROWS)

    def step(i):
        variable[i].assign(5.0)

    compiled = api.compile_if(engine, step)
    failed = api.fails(lambda: compiled(api.array(int(index), "int32")))
    return [failed, variable.numpy()]


@scenario("4.1")
def assigning_to_all_of_a_number(api):
    variable = api.Variable(1.0)
    first = variable[...].assign(3.0).numpy()
    return [first, variable[()].assign(4.0).numpy()]


@scenario("4.1")
def a_slice_takes_a_name(api):
    variable = api.Variable(ROWS)
    variable[0].assign(0.0, "name")
    variable[1].assign(0.0, name="name")
    return [variable.numpy(), api.parameters(variable[0].assign)]


@scenario(
    "4.1",
    cases=[("assign_add",)],
    differs="slices can be added to; TensorFlow can only replace them",
    expect=np.float32([11, 2]),
)
@scenario(
    "4.1",
    cases=[("assign_sub",)],
    differs="slices can be subtracted from; TensorFlow can only replace them",
    expect=np.float32([-9, 2]),
)
def adding_to_a_slice(api, engine, method):
    variable = api.Variable([1.0, 2.0])

    def step():
        return getattr(variable[0], method)(10.0) + 0.0

    return api.attempt(api.compile_if(engine, step))


@scenario("4.1")
def a_slice_of_a_slice_is_not_assigned(api):
    variable = api.Variable(ROWS)
    failed = api.attempt(lambda: variable[0][1].assign(1.0))
    return [failed, variable.numpy()]


@scenario("4.1")
def a_slice_is_not_assigned_with_an_equals_sign(api):
    variable = api.Variable(ROWS)

    def assign():
        variable[0] = 1.0

    return [api.fails(assign), variable.numpy()]


@scenario("4.1")
def a_slice_does_not_take(api, engine):
    variable = api.Variable(ROWS)

    def assigning(value):
        def step():
            variable[0].assign(value)

        return api.compile_if(engine, step)

    return {
        "another shape": api.fails(assigning(api.array([1.0, 2.0]))),
        "another rank": api.fails(assigning(api.array([[1.0], [2.0], [3.0]]))),
        "after": variable.numpy(),
    }


@scenario(
    "4.1",
    differs="integers lose nothing as floats; TensorFlow takes no array of another dtype",
    expect=[None, np.float32([5, 2, 3])],
)
def a_slice_of_floats_takes_integers(api, engine):
    variable = api.Variable([1.0, 2.0, 3.0])
    value = api.array([5], "int32")

    def step():
        variable[:1].assign(value)

    return [api.attempt(api.compile_if(engine, step)), variable.numpy()]


@scenario("4.1")
def a_slice_of_integers_takes_no_floats(api, engine):
    variable = api.Variable(api.array([1, 2, 3], "int32"))
    value = api.array([5.0])

    def step():
        variable[:1].assign(value)

    return [api.fails(api.compile_if(engine, step)), variable.numpy()]


@scenario("4.1")
def a_slice_that_is_not_there(api, engine):
    variable = api.Variable(ROWS)

    def step():
        variable[5].assign(1.0)

    return [api.fails(api.compile_if(engine, step)), variable.numpy()]


@scenario("4.1")
def rows_that_are_chosen_by_a_mask_are_not_assigned(api):
    variable = api.Variable(ROWS)
    mask = api.array([True, False, True], "bool")
    return [
        api.attempt(lambda: variable[mask].assign(0.0)),
        api.fails(lambda: variable[[0, 2]].assign(api.array([[0.0] * 3] * 2))),
        variable.numpy(),
    ]


@scenario("4.3", "4.4", cases=KINDS)
def assigning_to_a_slice_in_replicas(api, engine, synchronization, aggregation):
    """Each replica assigns to its own copy, whatever the aggregation."""
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)

    def replica_fn(x):
        return variable[0].assign(x) + 0.0

    value = api.per_replica(strategy, 10.0, 20.0)
    result = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return [result, api.copies(variable)]


@scenario("4.3", "4.4", cases=KINDS)
def assigning_one_value_to_a_slice_in_replicas(
    api, engine, synchronization, aggregation
):
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)

    def replica_fn():
        variable[1:].assign(5.0)

    strategy.run(api.compile_if(engine, replica_fn))
    return api.copies(variable)


@scenario("4.3", "6.3", cases=KINDS)
def assigning_to_a_slice_in_update(api, engine, synchronization, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)

    def merge_fn(strategy, x):
        def update(copy, x):
            copy[0].assign(x)

        strategy.extended.update(variable, update, args=(x,))

    def replica_fn(x):
        api.distribute.get_replica_context().merge_call(merge_fn, args=(x,))

    value = api.per_replica(strategy, 10.0, 20.0)
    strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return api.copies(variable)


@scenario("4.3", "6.3", cases=KINDS)
def assigning_to_a_slice_of_the_variable_that_is_updated(
    api, synchronization, aggregation
):
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)

    def update(copy):
        variable[0].assign(8.0)

    with strategy.scope():
        strategy.extended.update(variable, update)
    return api.copies(variable)


@scenario("4.3", cases=KINDS)
def assigning_to_a_slice_of_a_copy(api, synchronization, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)
    variable.values[1][0].assign(9.0)
    return api.copies(variable)


@scenario("4.3", cases=product(AGGREGATIONS), differs=ALL_COPIES, expect=[None, AFTER])
def assigning_to_a_slice_of_a_mirrored_variable_in_the_scope(api, engine, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_WRITE", aggregation)

    def step():
        variable[0].assign(5.0)

    with strategy.scope():
        failed = api.attempt(api.compile_if(engine, step))
    return [failed, api.copies(variable)]


@scenario("4.3", cases=product(AGGREGATIONS), differs=ALL_COPIES, expect=[None, AFTER])
def assigning_to_a_slice_of_a_mirrored_variable_in_merge_call(api, engine, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_WRITE", aggregation)

    def merge_fn(strategy):
        variable[0].assign(5.0)

    def replica_fn():
        api.distribute.get_replica_context().merge_call(merge_fn)

    step = api.compile_if(engine, replica_fn)
    return [api.attempt(lambda: strategy.run(step)), api.copies(variable)]


@scenario("4.3", cases=product(AGGREGATIONS), differs=ALL_COPIES, expect=AFTER)
def assigning_to_a_slice_of_a_mirrored_variable_outside_of_the_scope(
    api, engine, aggregation
):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_WRITE", aggregation)

    def step():
        variable[0].assign(5.0)

    api.compile_if(engine, step)()
    return api.copies(variable)


@scenario("4.4", cases=[("NONE",)])
@scenario("4.4", cases=[("MEAN",)], differs=ALL_COPIES, expect=[None, None, AFTER])
@scenario(
    "4.4",
    cases=[("SUM",)],
    differs="all copies share the value, as by `assign`; TensorFlow refuses",
    expect=[None, None, [np.float32([2.5, 2, 3])] * 2],
)
def assigning_to_a_slice_of_a_sync_on_read_variable(api, engine, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_READ", aggregation)

    def step():
        variable[0].assign(5.0)

    outside = api.attempt(api.compile_if(engine, step))
    with strategy.scope():
        inside = api.attempt(api.compile_if(engine, step))
    return [outside, inside, api.copies(variable)]


@scenario("4.4", differs=ALL_COPIES, expect=[AFTER, AFTER[0]])
def assigning_to_a_slice_of_a_sync_on_read_first_replica(api, engine):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_READ", "ONLY_FIRST_REPLICA")

    def step():
        variable[0].assign(5.0)

    with strategy.scope():
        api.compile_if(engine, step)()
    return [api.copies(variable), variable.read_value()]


@scenario("4.3")
def assigning_to_a_slice_with_one_device(api, engine):
    strategy = api.one_device()
    variable = make(api, strategy, "ON_WRITE", "SUM")

    def replica_fn():
        variable[0].assign(5.0)

    strategy.run(api.compile_if(engine, replica_fn))
    with strategy.scope():
        variable[1].assign(6.0)
    variable[2].assign(7.0)
    return variable.numpy()


@scenario("4.3")
def assigning_to_a_slice_with_one_replica(api, engine):
    strategy = api.mirrored(1)
    variable = make(api, strategy, "ON_WRITE", "SUM")

    def replica_fn():
        variable[0].assign(5.0)

    strategy.run(api.compile_if(engine, replica_fn))
    variable[2].assign(7.0)
    return variable.numpy()


@scenario(
    "4.3",
    differs="replicas cannot assign the one copy of a variable from outside the scope",
    expect=[ValueError, np.float32([1, 2])],
)
def assigning_to_a_slice_of_an_ordinary_variable_in_replicas(api, engine):
    strategy = api.mirrored(2)
    variable = api.Variable([1.0, 2.0])

    def replica_fn():
        variable[0].assign(5.0)

    step = api.compile_if(engine, replica_fn)
    return [api.attempt(lambda: strategy.run(step)), variable.numpy()]
