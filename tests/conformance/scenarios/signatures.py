"""What a compiled function takes: `input_signature`, and what makes it trace anew (5.3)."""

import enum
import functools
from collections import OrderedDict
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from . import scenario


@dataclass(frozen=True)
class Frozen:
    size: Any


@dataclass
class Mutable:
    size: int


class Named(NamedTuple):
    size: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Equal:
    """Told apart by what it holds."""

    def __init__(self, size):
        self.size = size

    def __eq__(self, other):
        return isinstance(other, Equal) and self.size == other.size

    def __hash__(self):
        return hash(self.size)


class Thing:
    """Told apart by its identity."""


def adding_one(api, *specs, **kwargs):
    """A compiled function with this signature, and a list with an entry for each trace."""
    traces = []

    def add(x):
        traces.append(1)
        return x + 1

    return api.function(add, input_signature=[*specs], **kwargs), traces


# Signatures --------------------------------------------------------------------------


@scenario("5.3")
def a_signature_takes_what_fits(api):
    fn, _ = adding_one(api, api.TensorSpec([None], "float32"))
    return [
        fn(api.array([1.0])),
        fn(api.array([1.0, 2.0])),
        fn(x=api.array([1.0, 2.0, 3.0])),
        fn(api.array([])),
    ]


@scenario("5.3")
def one_trace_for_all_that_fits(api):
    fn, traces = adding_one(api, api.TensorSpec([None], "float32"))
    for size in (1, 2, 3, 2):
        fn(api.array([1.0] * size))
    return len(traces)


@scenario("5.3")
def one_trace_for_what_is_converted_to_one_shape(api):
    fn, traces = adding_one(api, api.TensorSpec([2], "float32"))
    for value in ([1.0, 2.0], [1, 2], np.array([1, 2]), api.array([1.0, 2.0])):
        fn(value)
    return len(traces)


@scenario("5.3")
def a_signature_of_any_rank(api):
    fn, _ = adding_one(api, api.TensorSpec(None, "float32"))
    return [fn(api.array(1.0)), fn(api.array([1.0])), fn(api.array([[1.0]]))]


@scenario("5.3")
def a_signature_of_static_and_open_dimensions(api):
    fn, _ = adding_one(api, api.TensorSpec([None, 2], "float32"))
    return [
        fn(api.array([[1.0, 2.0]])),
        api.attempt(lambda: fn(api.array([[1.0, 2.0, 3.0]]))),
        api.attempt(lambda: fn(api.array([1.0, 2.0]))),
    ]


@scenario("5.3")
def a_signature_converts_lists_and_numbers(api):
    fn, _ = adding_one(api, api.TensorSpec([None], "float32"))
    scalar, _ = adding_one(api, api.TensorSpec([], "float32"))
    return [
        fn([1.0, 2.0]),
        fn([1, 2]),
        fn(np.array([1.0, 2.0])),
        fn(np.array([1, 2])),
        scalar(1),
        scalar(True),
    ]


@scenario("5.3", cases=product(("dtype", "rank", "higher_rank", "length")))
def a_signature_does_not_take_another(api, what):
    spec = api.TensorSpec([2] if what == "length" else [None], "float32")
    fn, _ = adding_one(api, spec)
    value = {
        "dtype": lambda: api.array([1, 2], "int32"),
        "rank": lambda: api.array(1.0),
        "higher_rank": lambda: api.array([[1.0]]),
        "length": lambda: api.array([1.0, 2.0, 3.0]),
    }[what]()
    words = ("dtype", "int32", "float32") if what == "dtype" else ("shape", "float32")
    return api.complaint(lambda: fn(value), *words)


@scenario("5.3")
def a_signature_has_a_number_of_arguments(api):
    fn, _ = adding_one(api, api.TensorSpec([None], "float32"))
    x = api.array([1.0])
    return [
        api.attempt(fn),
        api.attempt(lambda: fn(x, x)),
        api.attempt(lambda: fn(y=x)),
        api.attempt(lambda: fn(None)),
        api.attempt(lambda: fn("text")),
    ]


@scenario("5.3")
def a_signature_of_a_structure(api):
    spec = {
        "a": api.TensorSpec([], "float32"),
        "b": (api.TensorSpec([None], "float32"),),
    }

    def add(x):
        return {"sum": x["a"] + api.sum(x["b"][0])}

    fn = api.function(add, input_signature=[spec])
    b = api.array([2.0, 3.0])
    return [
        fn({"a": api.array(1.0), "b": (b,)}),
        fn({"b": ([2.0],), "a": 1.0}),
        api.attempt(lambda: fn({"a": api.array(1.0)})),
        api.attempt(lambda: fn({"a": api.array(1.0), "b": [b]})),
        api.attempt(lambda: fn({"a": api.array(1.0), "b": (b, b)})),
        api.attempt(lambda: fn({"a": api.array(1.0), "b": (b,), "c": b})),
    ]


@scenario("5.3")
def a_signature_and_defaults(api):
    def add(x, y=2.0):
        return x + y

    scalar = api.TensorSpec([], "float32")
    both = api.function(add, input_signature=[scalar, scalar])
    one = api.function(add, input_signature=[scalar])
    return [
        both(1.0),
        both(x=1.0, y=3.0),
        both(y=1.0, x=api.array(4.0)),
        one(1.0),
        one(1.0, 2.0),
        api.attempt(lambda: one(1.0, 3.0)),
    ]


@scenario("5.3")
def a_signature_of_a_method(api):
    class Model:
        def __init__(self):
            self.factor = 2.0

        def double(self, x):
            return x * self.factor

        call = api.function(double, input_signature=[api.TensorSpec([None], "float32")])

    model = Model()
    return model.call(api.array([1.0, 2.0]))


@scenario("5.3")
def signatures_that_are_not_taken(api):
    scalar = api.TensorSpec([], "float32")

    def identity(x):
        return x

    def wrapped(signature):
        return api.complaint(
            lambda: api.function(identity, input_signature=signature)(1.0) is None,
            "input_signature",
        )

    return [wrapped(scalar), wrapped([1]), wrapped([scalar] * 2), wrapped((scalar,))]


@scenario("5.3")
def the_signature_of_a_function(api):
    spec = api.TensorSpec([None, 2], "float32", "x")
    fn, _ = adding_one(api, spec)
    return [api.spec(fn.input_signature), fn.input_signature[0].name]


@scenario("5.3")
def a_signature_without_arguments(api):
    return api.function(lambda: api.array(1.0), input_signature=[])()


@scenario("5.3")
def the_element_spec_of_a_distributed_dataset_is_a_signature(api):
    strategy = api.mirrored(2)
    numbers = api.data.Dataset.from_tensor_slices(np.arange(6, dtype="float32"))
    distributed = strategy.experimental_distribute_dataset(numbers.batch(4))

    def step(x):
        return strategy.run(api.sum, args=(x,))

    step = api.function(step, input_signature=[distributed.element_spec])
    return [step(x) for x in distributed]


@scenario("5.3")
def one_trace_for_a_distributed_dataset(api):
    strategy = api.mirrored(2)
    numbers = api.data.Dataset.from_tensor_slices(np.arange(8, dtype="float32"))
    distributed = strategy.experimental_distribute_dataset(numbers.batch(4))
    traces = []

    def step(x):
        traces.append(1)
        return strategy.run(api.sum, args=(x,))

    step = api.function(step, input_signature=[distributed.element_spec])
    for x in distributed:
        step(x)
    return len(traces)


@scenario("5.3")
def one_trace_for_a_distributed_dataset_with_an_uneven_end(api):
    strategy = api.mirrored(2)
    numbers = api.data.Dataset.from_tensor_slices(np.arange(7, dtype="float32"))
    distributed = strategy.experimental_distribute_dataset(numbers.batch(4))
    traces = []

    def step(x):
        traces.append(1)
        return strategy.run(api.sum, args=(x,))

    step = api.function(step, input_signature=[distributed.element_spec])
    for x in distributed:
        step(x)
    return len(traces)


@scenario("5.3")
def the_element_spec_of_a_dataset_of_pairs_is_a_signature(api):
    strategy = api.mirrored(2)
    x = np.arange(8, dtype="float32").reshape(4, 2)
    data = {"x": x, "y": np.arange(4, dtype="int32")}
    dataset = api.data.Dataset.from_tensor_slices(data).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)

    def step(batch):
        def replica_fn(batch):
            return api.sum(batch["x"]), api.sum(batch["y"])

        return strategy.run(replica_fn, args=(batch,))

    step = api.function(step, input_signature=[distributed.element_spec])
    return [step(batch) for batch in distributed]


@scenario("5.3")
def a_plain_array_for_a_signature_of_replicas(api):
    strategy = api.mirrored(2)
    numbers = api.data.Dataset.from_tensor_slices(np.arange(8, dtype="float32"))
    distributed = strategy.experimental_distribute_dataset(numbers.batch(4))
    step = api.function(lambda x: x, input_signature=[distributed.element_spec])
    return api.fails(lambda: step(api.array([1.0, 2.0])))


@scenario("5.3")
def a_replica_function_with_a_signature(api):
    strategy = api.mirrored(2)
    fn, _ = adding_one(api, api.TensorSpec([None], "float32"))
    return strategy.run(fn, args=(api.array([1.0, 2.0]),))


@scenario("5.3")
def a_replica_function_with_a_signature_and_per_replica_values(api):
    strategy = api.mirrored(2)
    fn, _ = adding_one(api, api.TensorSpec([None], "float32"))
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    return strategy.run(fn, args=(value,))


@scenario("5.3")
def a_replica_function_with_a_signature_refuses_another_dtype(api):
    strategy = api.mirrored(2)
    fn, _ = adding_one(api, api.TensorSpec([None], "float32"))
    value = api.array([1], "int32")
    return api.complaint(lambda: strategy.run(fn, args=(value,)), "float32", "int32")


# Retracing ---------------------------------------------------------------------------

STATIC = {
    "frozen_dataclass": lambda: (Frozen(1), Frozen(1), Frozen(2)),
    "frozen_dataclass_of_a_tuple": lambda: (Frozen((1, 2)), Frozen((1, 2))),
    "enum": lambda: (Colour.RED, Colour.RED, Colour.BLUE),
    "equal_objects": lambda: (Equal(1), Equal(1), Equal(2)),
    "other_objects": lambda: (Thing(), Thing()),
    "text": lambda: ("a", "".join(["a"]), "b"),
    "bytes": lambda: (b"a", b"a", b"b"),
    "truth": lambda: (True, True, False),
    "nothing": lambda: (None, None),
    "tuple_of_text": lambda: (("a", "b"), ("a", "b"), ("a", "c")),
    "list_of_text": lambda: (["a", "b"], ["a", "b"], ["a", "c"]),
    "list_and_tuple": lambda: (["a"], ("a",)),
    "dict_of_text": lambda: ({"a": "x"}, {"a": "x"}, {"a": "y"}),
    "dict_in_another_order": lambda: ({"a": "x", "b": "y"}, {"b": "y", "a": "x"}),
    "named_tuple_of_text": lambda: (Named("a"), Named("a"), Named("b")),
    "named_tuple_and_tuple": lambda: (Named("a"), ("a",)),
    "functions": lambda: (len, len, max),
    "lambdas": lambda: (lambda: 1, lambda: 1),
    "types": lambda: (int, int, str),
    "range": lambda: (range(3), range(3), range(4)),
    "frozenset": lambda: (frozenset([1]), frozenset([1])),
    "ordered_dict": lambda: (OrderedDict(a="x"), OrderedDict(a="x")),
    "partials": lambda: (functools.partial(len), functools.partial(len)),
}


def count_traces(api, values):
    traces = []

    def fn(x):
        traces.append(1)
        return api.array(1.0)

    fn = api.function(fn)
    for value in values:
        fn(value)
    return len(traces)


@scenario("5.3", cases=product(STATIC))
def equal_static_arguments_are_one_trace(api, kind):
    return count_traces(api, STATIC[kind]())


@scenario("5.3", cases=product(STATIC))
def equal_static_arguments_are_one_trace_in_replicas(api, kind):
    strategy = api.mirrored(2)
    traces = []

    def replica_fn(x):
        traces.append(1)
        return api.array(1.0)

    step = api.function(lambda x: strategy.run(replica_fn, args=(x,)))
    before = []
    for value in STATIC[kind]():
        count = len(traces)
        step(value)
        before.append(len(traces) > count)
    return before


@scenario("5.3", cases=product(("mutable_dataclass", "set", "frozen_of_a_list")))
def arguments_that_cannot_be_compared(api, kind):
    value = {
        "mutable_dataclass": Mutable(1),
        "set": {1},
        "frozen_of_a_list": Frozen([1]),
    }[kind]
    return api.attempt(lambda: count_traces(api, [value]))


@scenario(
    "5.3",
    cases=product(("int", "float")),
    differs="Python numbers are traced, as `jax.jit` does",
    expect=1,
)
def python_numbers_are_static(api, kind):
    kind = {"int": int, "float": float}[kind]
    return count_traces(api, [kind(1), kind(1), kind(2)])


@scenario("5.3")
def named_tuples_of_arrays_are_one_trace(api):
    return count_traces(api, [Named(api.array(1.0)), Named(api.array(2.0))])


@scenario("5.3")
def arrays_are_told_apart_by_shape_and_dtype(api):
    return count_traces(
        api,
        [
            api.array(1.0),
            api.array(2.0),
            api.array([1.0]),
            api.array([1.0, 2.0]),
            api.array([1.0]),
            api.array(1, "int32"),
        ],
    )


@scenario("5.3")
def static_arguments_reach_the_function_as_they_are(api):
    found = []

    def fn(x):
        found.append(x)
        return api.array(1.0)

    fn = api.function(fn)
    fn(Frozen(3))
    fn(Colour.BLUE)
    fn(Named("a"))
    fn({"k": "v"})
    return [
        [type(x).__name__ for x in found],
        found[0].size,
        found[1] is Colour.BLUE,
        found[2].size,
    ]
