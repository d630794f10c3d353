"""Which types are structures, and which type comes back (3.2, 3.4, 3.5, 5.1, 2.4)."""

from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from . import scenario


class OwnDict(dict):
    pass


class OwnOrderedDict(OrderedDict):
    pass


class OwnList(list):
    pass


class OwnTuple(tuple):
    __slots__ = ()


class Named(NamedTuple):
    a: Any
    b: Any


class OwnNamed(Named):
    __slots__ = ()


class OwnMapping(Mapping):
    def __init__(self, items=()):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


@dataclass
class Plain:
    a: Any
    b: Any


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


STRUCTURES = {
    "dict": lambda a, b: {"b": b, "a": a},
    "OwnDict": lambda a, b: OwnDict(a=a, b=b),
    "OrderedDict": lambda a, b: OrderedDict([("b", b), ("a", a)]),
    "OwnOrderedDict": lambda a, b: OwnOrderedDict([("b", b), ("a", a)]),
    "defaultdict": lambda a, b: defaultdict(list, a=a, b=b),
    "UserDict": lambda a, b: UserDict(a=a, b=b),
    "ChainMap": lambda a, b: ChainMap({"a": a, "b": b}),
    "MappingProxy": lambda a, b: MappingProxyType({"a": a, "b": b}),
    "OwnMapping": lambda a, b: OwnMapping({"a": a, "b": b}),
    "list": lambda a, b: [a, b],
    "OwnList": lambda a, b: OwnList([a, b]),
    "tuple": lambda a, b: (a, b),
    "OwnTuple": lambda a, b: OwnTuple((a, b)),
    "Named": Named,
    "OwnNamed": OwnNamed,
    "deque": lambda a, b: deque([a, b]),
    "Plain": Plain,
    "Frozen": Frozen,
    "SimpleNamespace": lambda a, b: SimpleNamespace(a=a, b=b),
}
RECORDS = [("Plain",), ("Frozen",)]
KINDS = [kind for kind in product(STRUCTURES) if kind not in RECORDS]
UNKNOWN: Any = {
    "differs": "a dataclass that JAX does not know is an error that says how to register it",
    "expect": TypeError,
}


def leaves(structure):
    if isinstance(structure, Mapping):
        return [structure["a"], structure["b"]]
    if isinstance(structure, list | tuple | deque):
        return list(structure)
    return [structure.a, structure.b]


def show(api, structure):
    """Its type and its leaves; of one structure for each replica, those of each."""
    if api.class_name(structure) == "PerReplica":
        return {"each replica's": [show(api, part) for part in structure.values]}
    return [api.class_name(structure), leaves(structure)]


def two(api, strategy):
    return api.per_replica(strategy, 1.0, 2.0), api.per_replica(strategy, 3.0, 4.0)


@scenario("5.1", cases=KINDS)
@scenario("5.1", cases=RECORDS[:1], **UNKNOWN, differs_in=("eager",))
@scenario("5.1", cases=RECORDS[1:], **UNKNOWN)
def structure_as_an_argument(api, engine, kind):
    strategy = api.mirrored(2)
    seen = []

    def replica_fn(structure):
        first = leaves(structure)[0]
        seen.append([api.class_name(structure), api.class_name(first) == "PerReplica"])

    value = STRUCTURES[kind](*two(api, strategy))
    failed = api.attempt(
        lambda: strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    )
    return failed if isinstance(failed, Exception) else seen[0]


@scenario("5.1", cases=KINDS)
@scenario("5.1", cases=RECORDS, **UNKNOWN)
def structure_as_a_keyword_argument(api, kind):
    strategy = api.mirrored(2)
    seen = []

    def replica_fn(structure=None):
        first = leaves(structure)[0]
        seen.append([api.class_name(structure), api.class_name(first) == "PerReplica"])

    kwargs = {"structure": STRUCTURES[kind](*two(api, strategy))}
    failed = api.attempt(lambda: strategy.run(replica_fn, kwargs=kwargs))
    return failed if isinstance(failed, Exception) else seen[0]


@scenario("5.1", cases=KINDS)
@scenario("5.1", cases=RECORDS, **UNKNOWN, differs_in=("eager",))
def structure_as_a_result(api, engine, kind):
    strategy = api.mirrored(2)

    def replica_fn(a, b):
        return STRUCTURES[kind](a, b)

    step = api.compile_if(engine, replica_fn)
    return show(api, strategy.run(step, args=two(api, strategy)))


@scenario("5.1", cases=product(("dict", "OrderedDict", "OwnOrderedDict")))
def keys_keep_their_order(api, engine, kind):
    strategy = api.mirrored(2)

    def replica_fn(structure):
        return structure

    value = STRUCTURES[kind](*two(api, strategy))
    result = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return [list(result), list(strategy.reduce("SUM", value, axis=None))]


@scenario("2.4", cases=KINDS)
@scenario("2.4", cases=RECORDS, **UNKNOWN)
def structure_in_merge_call(api, engine, kind):
    strategy = api.mirrored(2)
    seen = []

    def merge_fn(strategy, structure):
        seen.append(api.class_name(structure))
        return structure

    def replica_fn(a, b):
        value = STRUCTURES[kind](a, b)
        result = api.distribute.get_replica_context().merge_call(merge_fn, (value,))
        seen.append(api.class_name(result))
        return leaves(result)

    step = api.compile_if(engine, replica_fn)
    result = strategy.run(step, args=two(api, strategy))
    return [seen[:2], result]


@scenario("2.3", cases=KINDS + RECORDS)
def structure_in_all_reduce(api, engine, kind):
    strategy = api.mirrored(2)
    seen = []

    def replica_fn(a, b):
        value = STRUCTURES[kind](a, b)
        result = api.distribute.get_replica_context().all_reduce("SUM", value)
        seen.append(api.class_name(result))
        return leaves(result)

    step = api.compile_if(engine, replica_fn)
    result = api.attempt(lambda: strategy.run(step, args=two(api, strategy)))
    return isinstance(result, Exception) or [seen[0], result]


@scenario("3.4", cases=KINDS)
@scenario("3.4", cases=RECORDS, **UNKNOWN)
def structure_that_is_reduced(api, kind):
    strategy = api.mirrored(2)
    value = STRUCTURES[kind](*two(api, strategy))
    return show(api, strategy.reduce("SUM", value, axis=None))


@scenario("3.5", cases=KINDS)
@scenario("3.5", cases=RECORDS, **UNKNOWN)
def structure_that_is_gathered(api, kind):
    strategy = api.mirrored(2)
    a = api.per_replica(strategy, [1.0], [2.0])
    # The type only: of a structure TensorFlow gathers nothing but the first replica's.
    return api.class_name(strategy.gather(STRUCTURES[kind](a, a), axis=0))


@scenario("3.2", cases=KINDS)
@scenario("3.2", cases=RECORDS, **UNKNOWN)
def local_results_of_a_structure(api, kind):
    strategy = api.mirrored(2)
    value = STRUCTURES[kind](*two(api, strategy))
    results = strategy.experimental_local_results(value)
    return [api.class_name(results), [show(api, each) for each in results]]


@scenario("5.3", cases=KINDS + RECORDS)
def structure_through_a_function(api, kind):
    value = STRUCTURES[kind](api.array(1.0), api.array(2.0))
    return show(api, api.function(lambda structure: structure)(value))


@scenario("7.3", cases=KINDS)
@scenario("7.3", cases=RECORDS, **UNKNOWN)
def structure_as_an_element(api, kind):
    strategy = api.mirrored(2)
    value = STRUCTURES[kind]([1.0, 2.0], [3.0, 4.0])
    dataset = api.data.Dataset.from_tensors(value)
    distributed = strategy.experimental_distribute_dataset(dataset.batch(2))
    element = next(iter(distributed))
    return api.class_name(element)


@scenario("5.1")
def structures_in_structures(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(structure):
        inner = structure["x"]
        return OwnDict(y=Named(inner.a + 1.0, [inner.b]), z=OwnMapping({"k": inner.a}))

    a, b = two(api, strategy)
    value = OwnDict(x=OwnNamed(a, b))
    result = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    kinds = [result, result["y"], result["z"]]
    return [
        [api.class_name(each) for each in kinds],
        [result["y"].a, result["y"].b, result["z"]["k"]],
    ]


@scenario("5.1", cases=product(("empty_dict", "empty_list", "empty_named", "nothing")))
def empty_structures(api, engine, kind):
    strategy = api.mirrored(2)
    value = {
        "empty_dict": OwnDict(),
        "empty_list": [],
        "empty_named": (),
        "nothing": None,
    }[kind]

    def replica_fn(structure):
        return structure

    result = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return [api.class_name(result), not result]
