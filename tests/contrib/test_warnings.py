"""Every older name works, and says once in a process what to write today."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.scripts import run_script

import mirrax as mx
from mirrax._src.base import errors

from .towers import SUM, Distribution

contrib = mx.contrib.distribute


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not been warned."""
    monkeypatch.setattr(errors, "_warned", set())
    yield


def quiet(fn: Callable[[], Any]) -> Any:
    """What `fn` returns, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return fn()


def made(**kwargs: Any) -> Any:
    return Distribution(["CPU:0", "CPU:1"], **kwargs)


def variable(distribution: Any) -> Any:
    with distribution.scope():
        return mx.Variable(1.0)


def numbers() -> mx.data.Dataset:
    return mx.data.Dataset.range(4)


# What is called, and what the warning tells to write; "" where there is nothing to do.
MEMBERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "num_towers": (lambda d: d.num_towers, "num_replicas_in_sync"),
    "is_single_tower": (lambda d: d.is_single_tower, "num_replicas_in_sync == 1"),
    "worker_devices": (lambda d: d.worker_devices, "extended.worker_devices"),
    "parameter_devices": (lambda d: d.parameter_devices, "extended.parameter_devices"),
    "worker_device_index": (
        lambda d: d.worker_device_index,
        "experimental_distribute_values_from_function",
    ),
    "between_graph": (lambda d: d.between_graph, "extended.experimental_between_graph"),
    "should_init": (lambda d: d.should_init, "extended.experimental_should_init"),
    "should_checkpoint": (lambda d: d.should_checkpoint, "extended.should_checkpoint"),
    "should_save_summary": (
        lambda d: d.should_save_summary,
        "extended.should_save_summary",
    ),
    "read_var": (lambda d: d.read_var(variable(d)), "read_value"),
    "value_container": (lambda d: d.value_container(1), "extended.value_container"),
    "call_for_each_tower": (lambda d: d.call_for_each_tower(lambda: 1), "run"),
    "reduce": (lambda d: d.reduce(SUM, 0, "CPU:0"), "extended.reduce_to"),
    "batch_reduce": (
        lambda d: d.batch_reduce(SUM, [(0, "CPU:0")]),
        "extended.batch_reduce_to",
    ),
    "broadcast": (lambda d: d.broadcast(1.0), "extended.broadcast_to"),
    "map": (lambda d: d.map([1], lambda x: x), "[fn(x) for x in map_over]"),
    "update": (lambda d: d.update(variable(d), lambda v: None), "extended.update"),
    "update_non_slot": (
        lambda d: d.update_non_slot(["CPU:0", "CPU:1"], lambda: None),
        "extended.update_non_slot",
    ),
    "non_slot_devices": (lambda d: d.non_slot_devices([]), "extended.non_slot_devices"),
    "unwrap": (lambda d: d.unwrap(1), "experimental_local_results"),
    "group": (lambda d: d.group(1), ""),
    "distribute_dataset": (
        lambda d: d.distribute_dataset(numbers),
        "distribute_datasets_from_function",
    ),
    "run_steps_on_dataset": (
        lambda d: d.run_steps_on_dataset(lambda context, x: None, iter([1.0])),
        "run_steps",
    ),
    "initialize": (lambda d: d.initialize(), ""),
    "finalize": (lambda d: d.finalize(), ""),
    "configure": (lambda d: d.configure(), ""),
    "get_tower_context": (
        lambda d: contrib.get_tower_context(),
        "mx.distribute.get_replica_context",
    ),
    "get_cross_tower_context": (
        lambda d: contrib.get_cross_tower_context(),
        "mx.distribute.get_strategy",
    ),
    "get_distribution_strategy": (
        lambda d: contrib.get_distribution_strategy(),
        "mx.distribute.get_strategy",
    ),
    "has_distribution_strategy": (
        lambda d: contrib.has_distribution_strategy(),
        "mx.distribute.has_strategy",
    ),
    "get_loss_reduction": (
        lambda d: contrib.get_loss_reduction(),
        "mx.nn.compute_average_loss",
    ),
}


def colocated(distribution: Any) -> Any:
    with distribution.scope():
        v = mx.Variable(1.0)
        with distribution.colocate_vars_with(v):
            return mx.Variable(1.0)


MEMBERS["colocate_vars_with"] = (colocated, "extended.colocate_vars_with")


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_warns_once_and_says_what_to_write(name: str, fresh: None) -> None:
    use, instead = MEMBERS[name]
    distribution = quiet(made)
    errors._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            use(distribution)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 1, texts
    assert caught[0].category is DeprecationWarning
    assert caught[0].filename == __file__
    assert texts[0].startswith(f"`{name}` ")
    wanted = (
        f"write `{instead}`" if instead else "nothing to do in mirrax; leave it out"
    )
    assert wanted in texts[0]


def test_require_tower_context_warns_too(fresh: None) -> None:
    ctx = quiet(contrib.get_tower_context)
    assert ctx is not None
    with pytest.warns(DeprecationWarning, match="write `mx.distribute.get_replica_con"):
        contrib.require_tower_context(ctx)


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (made, "mx.distribute.MirroredStrategy"),
        (lambda: contrib.OneDeviceStrategy("CPU:0"), "mx.distribute.OneDeviceStrategy"),
    ],
)
def test_constructing_warns_once(make: Any, instead: str, fresh: None) -> None:
    with pytest.warns(DeprecationWarning, match=f"write `{instead}`") as caught:
        for _ in range(2):
            make()
    assert len(caught) == 1


def test_every_public_member_is_here() -> None:
    """Of the reference page; `scope` has kept its name."""
    public = {
        name
        for name in dir(contrib.MirroredStrategy)
        if not name.startswith("_") and name not in ("core", "scope")
    }
    assert public <= set(MEMBERS)


def test_names_that_stay_do_not_warn(fresh: None) -> None:
    distribution = quiet(made)
    errors._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with distribution.scope():
            mx.Variable(1.0)
        _ = distribution.core, repr(distribution)


def test_a_warning_that_is_an_error_comes_once(fresh: None) -> None:
    distribution = quiet(made)
    errors._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning, match="`num_towers` is the older name"):
            _ = distribution.num_towers
        assert distribution.num_towers == 2


@pytest.mark.slow
def test_a_new_process() -> None:
    done = run_script(
        """
        import warnings
        import mirrax as mx
        mx.contrib.distribute
        warnings.simplefilter("always")
        with warnings.catch_warnings(record=True) as caught:
            distribution = mx.contrib.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            for _ in range(2):
                with distribution.scope():
                    distribution.call_for_each_tower(mx.contrib.get_tower_context)
        print(*(str(w.message).split("`")[1] for w in caught), sep=",")
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "mx.contrib.distribute.MirroredStrategy,call_for_each_tower,get_tower_context"
    )
