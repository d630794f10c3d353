"""Structures as TensorFlow's users know them: every mapping, and subclasses of list and tuple.

Each keeps its type on the way to the replicas and back. Objects that JAX does not know and
that hold arrays are errors, which say how to register their class.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import (
    all_styles,
    both_engines,
    compile_if,
    mirrored,
    parts,
    per_replica,
    run,
)

import mirrax as mx

PerReplica = mx.distribute.PerReplica


class SubDict(dict[str, Any]):
    pass


class SubOrdered(collections.OrderedDict[str, Any]):
    pass


class SubList(list[Any]):
    pass


class SubTuple(tuple[Any, ...]):
    pass


class SubDefault(collections.defaultdict[str, Any]):
    pass


class Own(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, *args: Any) -> None:
        self._items = dict(*args)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class FromPairs(Own):
    def __init__(self, pairs: Any) -> None:
        super().__init__([(key, value) for key, value in pairs])


class Closed(Own):
    """Cannot be built from its items alone."""

    def __init__(self, items: Any, path: str) -> None:
        super().__init__(items)
        self.path = path


class Pair(NamedTuple):
    b: Any
    a: Any


class SubPair(Pair):
    pass


MAPPINGS = {
    "dict": dict,
    "SubDict": SubDict,
    "OrderedDict": collections.OrderedDict,
    "SubOrdered": SubOrdered,
    "UserDict": collections.UserDict,
    "ChainMap": collections.ChainMap,
    "MappingProxyType": types.MappingProxyType,
    "Own": Own,
    "FromPairs": lambda items: FromPairs(items.items()),
    "defaultdict": lambda items: collections.defaultdict(list, items),
    "SubDefault": lambda items: SubDefault(list, items),
}
SEQUENCES = {
    "list": list,
    "tuple": tuple,
    "SubList": SubList,
    "SubTuple": SubTuple,
    "Pair": lambda items: Pair(*items),
    "SubPair": lambda items: SubPair(*items),
    "deque": lambda items: collections.deque(items, maxlen=5),
}
each_mapping = pytest.mark.parametrize("kind", MAPPINGS.values(), ids=MAPPINGS)
each_sequence = pytest.mark.parametrize("kind", SEQUENCES.values(), ids=SEQUENCES)


@pytest.fixture
def strategy():
    return mirrored(2)


def kept(mapping: Any) -> bool:
    """Whether the order of keys is kept; JAX sorts those of plain dicts."""
    return type(mapping) not in (dict, collections.defaultdict)


# Mappings ---------------------------------------------------------------------------------


@all_styles
@each_mapping
def test_a_mapping_goes_to_replicas_and_back(strategy, kind, engine):
    seen = set()

    def replica_fn(given, *, extra):
        seen.add((type(given), type(given["n"])))
        assert list(given) == (["b", "a", "n"] if kept(given) else ["a", "b", "n"])
        total = given["a"] + extra["x"]
        return kind({"b": given["b"] * 2, "a": total, "c": given["n"]["x"]})

    step = compile_if(engine, replica_fn)
    for i in range(3):
        inner = kind({"x": per_replica(strategy, 3.0 + i, 4.0 + i)})
        made = kind({"b": per_replica(strategy, 1.0, 2.0), "a": 10.0, "n": inner})
        args, kwargs = (made,), {"extra": kind({"x": 1.0})}
        if engine == "caller":
            result = run(strategy, replica_fn, *args, engine=engine, **kwargs)
        else:
            result = strategy.run(step, args, kwargs)
        assert seen == {(type(made), type(made))}
        assert type(result) is type(made)
        assert list(result) == (["b", "a", "c"] if kept(made) else ["a", "b", "c"])
        assert parts(strategy, result["b"]) == [2.0, 4.0]
        assert np.asarray(parts(strategy, result["a"])).tolist() in ([11.0], [11.0] * 2)
        assert parts(strategy, result["c"]) == [3.0 + i, 4.0 + i]
    if engine == "compiled":
        assert step.trace_count == 1


@both_engines
@each_mapping
def test_a_mapping_in_an_uneven_step(strategy, kind, engine):
    x = PerReplica([jnp.ones(2), jnp.ones(3)])
    made = kind({"x": x, "scale": 2.0})

    def replica_fn(given):
        assert type(given) is type(made)
        total = mx.get_replica_context().all_reduce("SUM", jnp.sum(given["x"]))
        return kind({"own": given["x"] * given["scale"], "all": total})

    result = run(strategy, replica_fn, made, engine=engine)
    assert type(result) is type(made)
    assert parts(strategy, result["own"]) == [[2.0, 2.0], [2.0, 2.0, 2.0]]
    assert parts(strategy, result["all"]) == [5.0, 5.0]


@both_engines
@each_mapping
def test_a_mapping_is_reduced_gathered_and_taken_apart(strategy, kind, engine):
    x = per_replica(strategy, [1.0], [2.0])
    made = kind({"b": x, "a": kind({"x": x})})

    def calls(given):
        return (
            strategy.reduce("SUM", given, axis=None),
            strategy.reduce("MEAN", given, axis=0),
            strategy.gather(given, axis=0),
            strategy.experimental_local_results(given),
        )

    total, mean, whole, local = compile_if(engine, calls)(made)
    for result in (total, mean, whole, *local):
        assert type(result) is type(made)
        assert type(result["a"]) is type(made)
    assert [total["b"].tolist(), total["a"]["x"].tolist()] == [[3.0], [3.0]]
    assert [float(mean["b"]), float(mean["a"]["x"])] == [1.5, 1.5]
    assert whole["a"]["x"].tolist() == [1.0, 2.0]
    assert [part["a"]["x"].tolist() for part in local] == [[1.0], [2.0]]


@both_engines
@each_mapping
def test_a_mapping_meets_in_collectives(strategy, kind, engine):
    def merge(strategy, given, *, other):
        assert type(given) is type(other) is type(kind({}))
        total = strategy.reduce("SUM", given, axis=None)
        return kind({"total": total["x"], "own": other["x"]})

    def replica_fn(x):
        context = mx.get_replica_context()
        merged = context.merge_call(merge, (kind({"x": x}),), {"other": kind({"x": x})})
        reduced = context.all_reduce("SUM", kind({"x": x}))
        joined = context.all_gather(kind({"x": x[None]}), axis=0)
        assert {type(merged), type(reduced), type(joined)} == {type(kind({}))}
        return merged["total"], merged["own"], reduced["x"], joined["x"]

    x = per_replica(strategy, 1.0, 2.0)
    results = run(strategy, replica_fn, x, engine=engine)
    total, *others = [parts(strategy, r) for r in results]
    assert total in ([3.0], [3.0, 3.0])
    assert others == [[1.0, 2.0], [3.0, 3.0], [[1.0, 2.0]] * 2]


@both_engines
@each_mapping
def test_a_mapping_in_an_update(strategy, kind, engine):
    with strategy.scope():
        v = mx.Variable(1.0)

    def add(copy, given):
        assert type(given) is type(kind({}))
        return kind({"new": copy.assign_add(given["x"]).read_value()})

    def update(x):
        return strategy.extended.update(v, add, args=(kind({"x": x}),))

    result = compile_if(engine, update)(per_replica(strategy, 2.0, 2.0))
    assert type(result) is type(kind({}))
    assert parts(strategy, result["new"]) == [3.0, 3.0]


@each_mapping
def test_a_compiled_function_takes_and_gives_mappings(kind):
    double = mx.function(lambda m: kind({"y": m["x"] * 2, "x": m["x"]}))
    for i in range(3):
        result = double(kind({"x": jnp.float32(i)}))
        assert type(result) is type(kind({}))
        assert [float(result["y"]), float(result["x"])] == [2.0 * i, i]
    assert double.trace_count == 1
    assert double(kind({"x": jnp.ones(2)}))["y"].tolist() == [2.0, 2.0]


def test_what_a_default_dict_makes_is_kept(strategy):
    x = per_replica(strategy, 1.0, 2.0)
    result = strategy.run(lambda d: d, args=(SubDefault(list, x=x),))
    assert result.default_factory is list


@both_engines
def test_replicas_may_order_keys_differently(strategy, engine):
    x = PerReplica([jnp.ones(1), jnp.ones(2)])

    def replica_fn(x):
        result = SubDict(b=x, a=-x)
        return result if len(x) == 1 else SubDict(reversed(result.items()))

    result = run(strategy, replica_fn, x, engine=engine)
    assert list(result) == ["b", "a"]
    assert parts(strategy, result["b"]) == [[1.0], [1.0, 1.0]]
    assert parts(strategy, result["a"]) == [[-1.0], [-1.0, -1.0]]


def test_keys_that_cannot_be_sorted(strategy):
    x = per_replica(strategy, 1.0, 2.0)
    made = collections.UserDict({"b": x, 1: x})
    total = strategy.reduce("SUM", made, axis=None)
    assert list(total.items()) == [("b", 3.0), (1, 3.0)]


def test_gradients_of_variables_in_a_mapping():
    variables = collections.UserDict(w=mx.Variable(3.0), b=mx.Variable(1.0))
    found = mx.grad(lambda: variables["w"] ** 2 + variables["b"], variables)()
    assert type(found) is collections.UserDict
    assert [float(found["w"]), float(found["b"])] == [6.0, 1.0]


@both_engines
def test_many_steps_on_mappings(strategy, engine):
    rows = collections.UserDict(x=np.arange(8.0, dtype=np.float32))
    data = mx.data.Dataset.from_tensor_slices(rows).batch(4)
    batches = iter(strategy.experimental_distribute_dataset(data))
    mx.config.run_functions_eagerly(engine == "eager")
    try:
        sums = strategy.run_steps(
            lambda m: SubDict(s=jnp.sum(m["x"])), batches, steps=2
        )
    finally:
        mx.config.run_functions_eagerly(False)
    assert type(sums) is SubDict
    assert parts(strategy, sums["s"]) == [[1.0, 9.0], [5.0, 13.0]]


def test_the_class_can_be_registered_later(strategy):
    class Late(collections.UserDict[str, Any]):
        pass

    x = per_replica(strategy, 1.0, 2.0)
    double = mx.function(lambda m: Late(y=m["x"] * 2))
    assert parts(strategy, strategy.run(double, args=(Late(x=x),))["y"]) == [2.0, 4.0]
    jax.tree_util.register_pytree_node(
        Late,
        lambda m: ([m["y" if "y" in m else "x"]], tuple(m)),
        lambda k, c: Late(zip(k, c)),
    )
    assert parts(strategy, strategy.run(double, args=(Late(x=x),))["y"]) == [2.0, 4.0]


def test_a_registered_class_is_left_to_its_owner(strategy):
    class Known(dict[str, Any]):
        name = ""

    def build(name, children):
        known = Known(x=children[0])
        known.name = name
        return known

    jax.tree_util.register_pytree_node(Known, lambda k: ([k["x"]], k.name), build)
    known = build("mine", [per_replica(strategy, 1.0, 2.0)])
    assert strategy.run(lambda k: k.name, args=(known,)) == "mine"


def test_a_program_does_not_keep_the_arrays_of_a_call(strategy):
    step = mx.function(lambda m: jnp.sum(m["x"]))
    x = jnp.ones(3)
    gone = weakref.ref(x)
    strategy.run(step, args=(collections.UserDict(x=x),))
    del x
    gc.collect()
    assert gone() is None


# Lists and tuples -------------------------------------------------------------------------


@both_engines
@each_sequence
def test_subclasses_of_list_and_tuple_keep_their_type(strategy, kind, engine):
    seen = set()

    def replica_fn(given):
        seen.add((type(given), getattr(given, "maxlen", None)))
        return kind([given[1], given[0] * 2])

    made = kind([per_replica(strategy, 1.0, 2.0), 5.0])
    result = run(strategy, replica_fn, made, engine=engine)
    assert seen == {(type(made), getattr(made, "maxlen", None))}
    assert type(result) is type(made)
    assert parts(strategy, result[1]) == [2.0, 4.0]
    total = strategy.reduce("SUM", kind([result[1], result[1]]), axis=None)
    assert (type(total), list(total)) == (type(made), [6.0, 6.0])


# Objects that JAX does not know -----------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: Any
    name: str = "x"


class Attrs:
    """As a class that attrs has made."""

    __attrs_attrs__ = (types.SimpleNamespace(name="x"),)

    def __init__(self, x: Any) -> None:
        self.x = x


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float
    names: tuple[str, ...] = ("a",)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Known:
    x: Any


RECORDS = {
    "dataclass": (Batch, r"register_dataclass\(Batch\)"),
    "attrs": (Attrs, r"register_pytree_node\(Attrs, \.\.\.\)"),
    "closed": (lambda x: Closed({"x": x}, "path"), r"register_pytree_node\(Closed"),
}
each_record = pytest.mark.parametrize("kind, advice", RECORDS.values(), ids=RECORDS)


@both_engines
@each_record
@pytest.mark.parametrize("what", ["per-replica", "array", "list"])
def test_arrays_in_unknown_objects_are_errors(strategy, kind, advice, what, engine):
    x = jnp.ones(2)
    distributed = per_replica(strategy, 1.0, 2.0)
    held = {"per-replica": distributed, "array": x, "list": [x]}[what]
    name = kind(held).__class__.__name__
    for args, kwargs, where in [
        ((1, kind(held)), {}, "Argument 1"),
        ((), {"batch": {"a": [kind(held)]}}, r"Argument 'batch'\['a'\]\[0\]"),
        ((SubDict(a=kind(held)),), {}, r"Argument 0\['a'\]"),
    ]:
        with pytest.raises(TypeError, match=rf"{where} is a {name}, .*{advice}"):
            run(strategy, lambda *args, **kwargs: 0, *args, engine=engine, **kwargs)
    for call in (
        lambda v: strategy.reduce("MEAN", v, None),
        lambda v: strategy.gather(v, 0),
    ):
        with pytest.raises(TypeError, match=rf"Value\['a'\] is a {name}, .*{advice}"):
            call({"a": kind(held)})
    with pytest.raises(TypeError, match=rf"Value is a {name}, .*{advice}"):
        strategy.experimental_local_results(kind(held))


@both_engines
@each_record
@pytest.mark.parametrize("count", [1, 2])
def test_results_and_merged_values_too(kind, advice, engine, count):
    strategy = mirrored(count)

    def returns(x):
        return {"out": kind(x)}

    def merges(x):
        mx.get_replica_context().merge_call(lambda strategy, given: 0, (kind(x),))

    def gets(x):
        mx.get_replica_context().merge_call(lambda strategy: kind(jnp.ones(2)))

    cases = {returns: r"Result\['out'\]", merges: "Argument 0", gets: "Result"}
    for fn, where in cases.items():
        with pytest.raises(TypeError, match=rf"{where} is a .*{advice}"):
            run(strategy, fn, jnp.ones(2), engine=engine)


def _cycle() -> Batch:
    batch = Batch(None)
    batch.x = batch
    return batch


STATIC = {
    "dataclass": Batch(None),
    "attrs": Attrs("a"),
    "frozen": Config(0.5),
    "closed": Closed({"a": 1}, "path"),
    "cycle": _cycle(),
}


@both_engines
@pytest.mark.parametrize("given", STATIC.values(), ids=STATIC)
def test_objects_without_arrays_are_static(strategy, given, engine):
    seen = []

    def replica_fn(given, x):
        seen.append(given)
        return x, given

    result = run(strategy, replica_fn, given, 1.0, engine=engine)
    assert result[1] is given
    assert seen
    assert all(one is given for one in seen)


@both_engines
def test_variables_in_objects_are_no_arrays(strategy, engine):
    with strategy.scope():
        given = Batch(mx.Variable(2.0))
    result = run(strategy, lambda batch: batch.x + 1.0, given, engine=engine)
    assert set(parts(strategy, result)) == {3.0}


@both_engines
def test_registered_dataclasses_are_structures(strategy, engine):
    made = Known(SubDict(a=per_replica(strategy, 1.0, 2.0)))
    result = run(strategy, lambda k: Known(k.x["a"] * 2), made, engine=engine)
    assert type(result) is Known
    assert parts(strategy, result.x) == [2.0, 4.0]
    assert strategy.reduce("SUM", result, axis=None).x == 6.0


def test_static_arguments_are_not_looked_into(strategy):
    @dataclasses.dataclass(frozen=True, eq=False)
    class Table:
        rows: np.ndarray

    step = mx.function(lambda x, table: x + table.rows, static_argnames="table")
    table = Table(np.ones(2, np.float32))
    result = strategy.run(
        step, args=(per_replica(strategy, 1.0, 2.0),), kwargs={"table": table}
    )
    assert parts(strategy, result) == [[2.0, 2.0], [3.0, 3.0]]


# Elements ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*MAPPINGS.values()], ids=MAPPINGS)
def test_elements_keep_their_type(strategy, kind):
    rows = kind({"b": np.arange(8), "a": kind({"x": np.arange(8.0)})})
    data = mx.data.Dataset.from_tensor_slices(rows)
    assert type(data.element_spec) is type(rows)
    first = next(iter(data.map(lambda e: kind({"b": e["b"] + 1, "a": e["a"]}))))
    assert (type(first), first["b"], type(first["a"])) == (type(rows), 1, type(rows))
    for element in strategy.experimental_distribute_dataset(data.batch(4)):
        assert type(element) is type(element["a"]) is type(rows)
        assert list(element) == ["b", "a"]
        total = strategy.run(lambda e: jnp.sum(e["b"]), args=(element,))
    assert parts(strategy, total) == [9, 13]


def test_elements_of_other_structure_are_told_apart():
    pairs = [collections.UserDict(a=np.int32(1)), SubDict(a=np.int32(1))]
    data = mx.data.Dataset.range(2).map(lambda i: pairs[int(i)])
    with pytest.raises(ValueError, match="elements of a batch must be alike"):
        list(data.batch(2))
