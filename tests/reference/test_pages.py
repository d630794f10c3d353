"""Every class, property, method and argument of TensorFlow's API pages is here.

`pages.json` has what the pages list (`record.py` has read it from them). A parameter of a
page has the same name, place and default in mirrax; mirrax may have more, after them.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
from inspect import Parameter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mirrax as mx

from .pages import PAGES, SLIPS

pytestmark = pytest.mark.filterwarnings("ignore:.*is the older name")

CLASSES = {
    "000": mx.distribute.experimental.MultiWorkerMirroredStrategy,
    "001": mx.compat.v1.distribute.MirroredStrategy,
    "002": mx.distribute.MirroredStrategy,
    "003": mx.contrib.distribute.MirroredStrategy,
}
MODULES = {
    "000": mx.distribute,
    "001": mx.compat.v1.distribute,
    "002": mx.distribute,
    "003": mx.contrib.distribute,
}
# The enumerations whose values a page names by themselves.
ENUMS = {
    "000": mx.distribute.experimental.CollectiveCommunication,
    "001": mx.compat.v1.distribute.InputReplicationMode,
}
# What the texts call "context", "iterator" and so on.
OBJECTS = {
    "extended": mx.distribute.StrategyExtended,
    "input_context": mx.distribute.InputContext,
    "value_context": mx.distribute.experimental.ValueContext,
    "cluster_resolver": mx.distribute.cluster_resolver.ClusterResolver,
    "context": mx.contrib.distribute.MultiStepContext(),
    "tower_ctx": mx.contrib.distribute.TowerContext,
}
# What has another name here: `tf.x.y` is `mx.x.y` otherwise.
COUNTERPARTS = {
    "tf.ConfigProto": mx.compat.v1.ConfigProto,
    "tf.Tensor": jax.Array,
    "tf.TypeSpec": mx.TensorSpec,
    "tf.constant": jnp.asarray,
    "tf.distribute.InputIterator": mx.compat.v1.distribute.InputIterator,
    "tf.get_tower_context": mx.contrib.distribute.get_tower_context,
    "tf.get_variable": mx.Variable,
    "tf.identity": jnp.asarray,
    "tf.nest": jax.tree,
    "tf.random.uniform": jax.random.uniform,
}
# What has none: docs/names.md says what to do in its place.
WITHOUT = {
    "tf.Graph",
    "tf.colocate_with",
    "tf.compat.v1.TensorInfo.CompositeTensor",
    "tf.device",
    "tf.distribute.TPUStrategy",
    "tf.group",
    "tf.keras",
    "tf.keras.Model",
    "tf.saved_model.save",
    "tf.variable_creator_scope",
    "ParameterServerStrategy",
}


def listed(kind: str) -> list[Any]:
    """(page, name) for everything in the lists of a kind that has a counterpart."""
    return [
        pytest.param(page, SLIPS.get(name, name), id=f"{page}-{name}")
        for page, lists in PAGES.items()
        for name in lists[kind]
        if name not in WITHOUT
    ]


def calls() -> list[Any]:
    """(page, method, parameters) of all methods and constructors."""
    return [
        pytest.param(page, name, parameters.split(", "), id=f"{page}-{name}")
        for page, lists in PAGES.items()
        for name, parameters in [
            ("__init__", lists["constructor"]),
            *lists["methods"].items(),
        ]
    ]


def signature_of(page: str, method: str) -> inspect.Signature:
    """The signature without `self`."""
    found = inspect.signature(getattr(CLASSES[page], method))
    return found.replace(parameters=list(found.parameters.values())[1:])


def name_of(parameter: str) -> str:
    return parameter.partition("=")[0].strip("*")


def kind_of(parameter: str) -> Any:
    stars = parameter.count("*")
    kinds = (
        Parameter.POSITIONAL_OR_KEYWORD,
        Parameter.VAR_POSITIONAL,
        Parameter.VAR_KEYWORD,
    )
    return kinds[stars]


def default_of(parameter: str) -> Any:
    """The default as it is compared: a constant, or `.NAME` of an enumeration's member."""
    _, has_default, text = parameter.partition("=")
    if not has_default:
        return Parameter.empty
    is_member = text.startswith("tf.")
    return f".{text.rpartition('.')[2]}" if is_member else ast.literal_eval(text)


def comparable(default: Any) -> Any:
    return f".{default.name}" if isinstance(default, enum.Enum) else default


def test_there_are_four_pages() -> None:
    assert {page: lists["class"] for page, lists in PAGES.items()} == {
        "000": "tf.compat.v2.distribute.experimental.MultiWorkerMirroredStrategy",
        "001": "tf.compat.v1.distribute.MirroredStrategy",
        "002": "tf.distribute.MirroredStrategy",
        "003": "tf.contrib.distribute.MirroredStrategy",
    }
    counts = [len(lists["methods"]) for lists in PAGES.values()]
    assert counts == [7, 11, 7, 19]


@pytest.mark.parametrize("page", PAGES)
def test_the_class_has_the_name_and_the_base_of_the_page(page: str) -> None:
    lists = PAGES[page]
    assert CLASSES[page].__name__ == lists["class"].rpartition(".")[2]
    assert issubclass(CLASSES[page], getattr(MODULES[page], lists["base"]))


@pytest.mark.parametrize(("page", "name"), listed("properties"))
def test_properties_are_properties(page: str, name: str) -> None:
    assert isinstance(inspect.getattr_static(CLASSES[page], name), property)


@pytest.mark.parametrize(("page", "name", "parameters"), calls())
def test_parameters_are_those_of_the_page(
    page: str, name: str, parameters: list[str]
) -> None:
    wanted = [p for p in parameters if p]
    ours = list(signature_of(page, name).parameters.values())
    keywords = [p for p in ours if p.kind is Parameter.KEYWORD_ONLY]
    in_order = [p for p in ours if p not in keywords]
    same, more = in_order[: len(wanted)], in_order[len(wanted) :] + keywords
    assert [p.name for p in same] == [name_of(p) for p in wanted]
    assert [p.kind for p in same] == [kind_of(p) for p in wanted]
    assert [comparable(p.default) for p in same] == [default_of(p) for p in wanted]
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    assert all(p.default is not Parameter.empty or p.kind in variable for p in more), (
        "a parameter that the page does not have must have a default"
    )


@pytest.mark.parametrize(("page", "name", "parameters"), calls())
def test_calls_bind_by_position_and_by_keyword(
    page: str, name: str, parameters: list[str]
) -> None:
    signature = signature_of(page, name)
    values = {name_of(p): i for i, p in enumerate(parameters) if p and "*" not in p}
    required = {name_of(p) for p in parameters if p and not set("=*") & set(p)}
    for given in (values, {k: v for k, v in values.items() if k in required}):
        assert signature.bind(*given.values()).arguments == given
        assert signature.bind(**given).arguments == given
    if "*args" in parameters:
        signature.bind(*values.values(), "more", and_a="keyword")


@pytest.mark.parametrize("page", PAGES)
def test_values_are_members_of_their_enumeration(page: str) -> None:
    members = ENUMS[page].__members__ if page in ENUMS else {}
    assert set(PAGES[page]["values"]) <= set(members)


def test_what_has_no_counterpart_is_on_a_page() -> None:
    found = {n for lists in PAGES.values() for n in lists["names"] + lists["types"]}
    assert found >= WITHOUT | SLIPS.keys() | COUNTERPARTS.keys()


@pytest.mark.parametrize(("page", "name"), listed("names"))
def test_names_have_a_counterpart(page: str, name: str) -> None:
    path = name.replace("tf.compat.v2.", "tf.").split(".")[1:]
    found = COUNTERPARTS.get(name) or functools.reduce(getattr, path, mx)
    assert found is not mx


@pytest.mark.parametrize(("page", "name"), listed("types"))
def test_types_are_beside_the_class(page: str, name: str) -> None:
    homes = [MODULES[page], mx.distribute]
    assert any(inspect.isclass(getattr(home, name, None)) for home in homes)


@pytest.mark.parametrize(("page", "name"), listed("members"))
def test_members_of_other_objects_exist(page: str, name: str) -> None:
    owner, _, member = name.partition(".")
    if owner == "iterator":
        strategy = CLASSES[page](["CPU:0"])
        with strategy.scope():
            iterator = make_iterator(strategy)
        assert callable(getattr(iterator, member))
    else:
        assert hasattr(CLASSES[page] if owner == "strategy" else OBJECTS[owner], member)


def make_iterator(strategy: Any) -> Any:
    """What the page calls an iterator."""
    dataset = mx.data.Dataset.range(4).batch(2)
    if hasattr(strategy, "distribute_dataset"):
        return strategy.distribute_dataset(lambda: dataset).make_one_shot_iterator()
    return strategy.make_dataset_iterator(dataset)
