"""Copies of variables and strategies, what assignments take and give (4.1-4.4, 2.1)."""

import copy
from itertools import product

from . import scenario

KINDS = [
    ("ordinary", "AUTO", "SUM"),
    ("mirrored", "ON_WRITE", "NONE"),
    ("mirrored", "ON_WRITE", "SUM"),
    ("mirrored", "ON_READ", "MEAN"),
    ("mirrored", "ON_READ", "SUM"),
    ("one_device", "AUTO", "SUM"),
]
ASSIGNED = ("assign", "assign_add", "assign_sub")


def make(api, kind, synchronization, aggregation, **kwargs):
    """A strategy (or None), and a variable that it made."""

    def create():
        return api.Variable(
            [1.0, 2.0],
            name="w",
            synchronization=getattr(api.VariableSynchronization, synchronization),
            aggregation=getattr(api.VariableAggregation, aggregation),
            **kwargs,
        )

    if kind == "ordinary":
        return None, create()
    strategy = api.one_device() if kind == "one_device" else api.mirrored(2)
    with strategy.scope():
        return strategy, create()


def names(variable):
    """Its name and its copies', which end with `:0` in TensorFlow."""
    whole = (variable, *getattr(variable, "values", ()))
    return [each.name.removesuffix(":0") for each in whole]


@scenario("4.1", "4.2", cases=KINDS)
def deepcopy_of_a_variable(api, kind, synchronization, aggregation):
    _, variable = make(api, kind, synchronization, aggregation, trainable=False)
    other = copy.deepcopy(variable)
    facts = [other.synchronization, other.aggregation, other.trainable, names(other)]
    is_kind = type(other) is type(variable)
    before = api.copies(other)
    other.assign(api.array([7.0, 8.0]))
    return {
        "facts": [*facts, is_kind, other is variable],
        "before": before,
        "the copy": api.copies(other),
        "the variable": api.copies(variable),
    }


@scenario("4.1", "4.2", cases=KINDS)
def deepcopy_of_a_variable_in_the_scope(api, kind, synchronization, aggregation):
    strategy, variable = make(api, kind, synchronization, aggregation)
    if strategy is None:
        strategy = api.mirrored(2)
    with strategy.scope():
        other = copy.deepcopy(variable)
    variable.assign(api.array([7.0, 8.0]))
    return [names(other), api.copies(other), api.copies(variable)]


@scenario("4.2")
def deepcopy_keeps_copies_that_differ(api):
    strategy, variable = make(api, "mirrored", "ON_READ", "SUM")

    def replica_fn(x):
        variable.assign_add(x)

    values = api.per_replica(strategy, [1.0, 1.0], [5.0, 5.0])
    strategy.run(replica_fn, args=(values,))
    return api.copies(copy.deepcopy(variable))


@scenario("4.1", cases=KINDS[:3])
def deepcopy_of_a_structure_copies_a_variable_once(
    api, kind, synchronization, aggregation
):
    _, variable = make(api, kind, synchronization, aggregation)
    first, second = copy.deepcopy([variable, variable])
    return [first is second, first is variable]


@scenario("4.1", cases=KINDS[:3])
def deepcopy_of_an_object_with_a_variable(api, kind, synchronization, aggregation):
    class Model:
        pass

    _, variable = make(api, kind, synchronization, aggregation)
    model = Model()
    model.weights = {"w": variable}
    other = copy.deepcopy(model)
    other.weights["w"].assign(api.array([7.0, 8.0]))
    return [api.copies(variable), api.copies(other.weights["w"])]


@scenario("4.2")
def deepcopy_is_updated_as_the_variable_was(api, engine):
    strategy, variable = make(api, "mirrored", "ON_WRITE", "SUM")
    other = copy.deepcopy(variable)

    def replica_fn(x):
        other.assign_add(x)
        return other + 0.0

    values = api.per_replica(strategy, [1.0, 1.0], [5.0, 5.0])
    result = strategy.run(api.compile_if(engine, replica_fn), args=(values,))
    return [result, api.copies(other), api.copies(variable)]


@scenario("4.1")
def copy_of_an_ordinary_variable_is_the_variable(api):
    _, variable = make(api, "ordinary", "AUTO", "NONE")
    return copy.copy(variable) is variable


@scenario("4.2", cases=product(("NONE", "SUM")))
def copy_of_a_mirrored_variable_has_the_same_copies(api, aggregation):
    strategy, variable = make(api, "mirrored", "ON_WRITE", aggregation)
    other = copy.copy(variable)
    other.assign(api.array([7.0, 8.0]))
    first = api.copies(variable)
    variable.assign(api.array([3.0, 4.0]))
    return [first, api.copies(other), names(other)]


@scenario(
    "4.2", differs="the variable itself; TensorFlow's copying never ends", expect=True
)
def copy_of_a_sync_on_read_variable(api):
    _, variable = make(api, "mirrored", "ON_READ", "SUM")
    return copy.copy(variable) is variable


@scenario("2.1", cases=product(("mirrored", "one_device")))
def copies_of_a_strategy(api, kind):
    strategy = api.one_device() if kind == "one_device" else api.mirrored(2)
    return api.complaint(lambda: copy.copy(strategy) is strategy, "deepcopy")


@scenario("2.1", cases=product(("mirrored", "one_device")))
def deepcopy_of_a_strategy(api, kind):
    strategy = api.one_device() if kind == "one_device" else api.mirrored(2)
    other = copy.deepcopy(strategy)
    with other.scope():
        is_current = api.distribute.get_strategy() is other
        variable = api.Variable([1.0, 2.0])
    return [
        is_current,
        other.num_replicas_in_sync,
        type(other) is type(strategy),
        api.copies(variable),
    ]


@scenario(
    "2.1",
    cases=product(("mirrored", "one_device")),
    differs="the strategy itself, so that copied variables still belong to it",
    expect=True,
)
def deepcopy_of_a_strategy_is_the_strategy(api, kind):
    strategy = api.one_device() if kind == "one_device" else api.mirrored(2)
    return copy.deepcopy(strategy) is strategy


@scenario("2.1")
def deepcopy_of_a_strategy_runs(api, engine):
    strategy = copy.deepcopy(api.mirrored(2))

    def replica_fn():
        context = api.distribute.get_replica_context()
        return context.all_reduce("SUM", api.array(2.0))

    return strategy.run(api.compile_if(engine, replica_fn))


@scenario("2.1", differs="itself, as every strategy", expect=True)
def deepcopy_of_the_default_strategy(api):
    strategy = api.distribute.get_strategy()
    return api.attempt(lambda: copy.deepcopy(strategy) is strategy)


@scenario("3.1")
def copies_of_per_replica_values(api):
    value = api.per_replica(api.mirrored(2), 1.0, 2.0)
    return [copy.copy(value), copy.deepcopy(value)]


# Assigning ---------------------------------------------------------------------------


@scenario("4.1", cases=product(("ordinary", "mirrored"), ASSIGNED))
def what_an_assignment_takes(api, kind, method):
    _, variable = make(api, kind, "AUTO", "NONE")
    return list(api.parameters(getattr(variable, method)))[1:]


@scenario("4.1", cases=[(*kind, m) for kind in KINDS for m in ASSIGNED])
def what_an_assignment_returns(api, engine, kind, synchronization, aggregation, method):
    """The new value; None with `read_value=False`, in the fourth place."""
    _, variable = make(api, kind, synchronization, aggregation)
    delta = api.array([3.0, 4.0])

    def step(*args, **kwargs):
        def assign():
            result = getattr(variable, method)(delta, *args, **kwargs)
            return result if result is None else result + 0.0

        return api.attempt(api.compile_if(engine, assign))

    return [
        step(),
        step(True),
        step(False, "name"),
        step(False, "name", True),
        step(use_locking=True, name="name", read_value=True),
    ]


@scenario("4.1", cases=[(*kind, m) for kind in KINDS for m in ASSIGNED])
def what_an_assignment_without_a_value_returns(
    api, kind, synchronization, aggregation, method
):
    _, variable = make(api, kind, synchronization, aggregation)
    delta = api.array([3.0, 4.0])
    assign = getattr(variable, method)
    returned = [
        api.attempt(lambda: assign(delta, read_value=False)),
        api.attempt(lambda: assign(delta, False, None, False)),
    ]
    return [returned, api.copies(variable)]


@scenario("4.3", cases=[(*kind[1:], m) for kind in KINDS[1:5] for m in ASSIGNED])
def what_an_assignment_in_a_replica_returns(
    api, engine, synchronization, aggregation, method
):
    strategy, variable = make(api, "mirrored", synchronization, aggregation)

    def replica_fn(x):
        assign = getattr(variable, method)
        first = assign(x, False, "name", True) + 0.0
        assign(x, read_value=False)
        return first, variable.read_value()

    values = api.per_replica(strategy, [1.0, 1.0], [5.0, 5.0])
    return strategy.run(api.compile_if(engine, replica_fn), args=(values,))


@scenario("4.1", cases=product(("ordinary", "mirrored")))
def assignments_can_be_chained(api, kind):
    _, variable = make(api, kind, "AUTO", "NONE")
    one = api.array([1.0, 1.0])
    if kind == "ordinary":
        variable.assign_add(one).assign_sub(one).assign_add(one)
    with_a_name = variable.assign(variable.assign_add(one) * 2.0, name="name")
    return [with_a_name + 0.0, api.copies(variable)]


@scenario("12.8", cases=product(("ordinary", "mirrored", "one_device")))
def aggregation_none(api, kind):
    """`None` stands for the default."""
    strategy = {
        "ordinary": api.distribute.get_strategy,
        "mirrored": lambda: api.mirrored(2),
        "one_device": api.one_device,
    }[kind]()
    on_read = api.VariableSynchronization.ON_READ
    with strategy.scope():
        variable = api.Variable(1.0, aggregation=None)
        other = api.Variable(1.0, aggregation=None, synchronization=on_read)
    return [
        [each.synchronization, each.aggregation, each.trainable]
        for each in (variable, other)
    ]


@scenario("12.8", cases=[("mirrored",)])
@scenario(
    "12.8",
    cases=[("ordinary",), ("one_device",)],
    differs="an error everywhere, not only where variables are mirrored",
    expect=[ValueError, ["synchronization", "None"]],
)
def synchronization_none(api, kind):
    strategy = {
        "ordinary": api.distribute.get_strategy,
        "mirrored": lambda: api.mirrored(2),
        "one_device": api.one_device,
    }[kind]()

    def create():
        with strategy.scope():
            variable = api.Variable(1.0, synchronization=None)
        return [variable.synchronization, variable.aggregation, variable.trainable]

    return api.complaint(create, "synchronization", "None")
