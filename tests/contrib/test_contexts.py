"""Where code runs: contexts of towers, the functions that ask, scopes, and constructing."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx

from .towers import (
    MEAN,
    SUM,
    Distribution,
    all_sizes,
    both_engines,
    call,
    older_names,
    parts,
    tower,
    tower_id,
    towers,
)

pytestmark = older_names

contrib = mx.contrib.distribute


def where() -> tuple[Any, Any, Any, bool]:
    """What the four functions say here."""
    return (
        contrib.get_tower_context(),
        contrib.get_cross_tower_context(),
        contrib.get_distribution_strategy(),
        contrib.has_distribution_strategy(),
    )


# The functions --------------------------------------------------------------------------


def test_outside_any_scope() -> None:
    ctx, between, distribution, has_one = where()
    assert between is None and not has_one
    assert (ctx.tower_id, ctx.num_towers, ctx.is_single_tower) == (0, 1, True)
    assert ctx.distribution_strategy is distribution
    assert isinstance(distribution, contrib.DistributionStrategy)
    assert isinstance(ctx.device, str)


def test_in_a_scope() -> None:
    distribution = towers(2)
    with distribution.scope() as entered:
        assert entered is distribution
        assert where() == (None, distribution, distribution, True)
        with distribution.scope():
            assert where() == (None, distribution, distribution, True)
        assert where() == (None, distribution, distribution, True)
    assert not contrib.has_distribution_strategy()


@both_engines
@all_sizes
def test_in_a_tower_and_in_a_merge_function(engine: str, n: int) -> None:
    distribution, merged = towers(n), []

    def fn():
        ctx, between, found, has_one = where()
        assert ctx is not None and between is None
        assert found is distribution and has_one
        assert ctx.distribution_strategy is distribution
        assert ctx.num_towers == n and ctx.is_single_tower == (n == 1)
        assert contrib.require_tower_context(ctx) is None
        ctx.merge_call(lambda d: merged.append(where()))
        return ctx.tower_id

    ids = call(distribution, fn, engine=engine)
    assert parts(distribution, ids) == list(range(n))
    assert merged == [(None, distribution, distribution, True)]


def test_the_functions_are_in_contrib_too() -> None:
    for name in (
        "get_tower_context",
        "get_cross_tower_context",
        "get_distribution_strategy",
        "has_distribution_strategy",
        "get_loss_reduction",
    ):
        assert getattr(mx.contrib, name) is getattr(contrib, name)


def test_merging_outside_any_scope() -> None:
    ctx = contrib.get_tower_context()
    assert ctx is not None
    default = contrib.get_distribution_strategy()

    def merge_fn(distribution, x, *, y):
        assert distribution is default
        assert where() == (None, default, default, False)
        return x + y

    assert ctx.merge_call(merge_fn, 1, y=2) == 3


def test_losses_are_averaged() -> None:
    assert contrib.get_loss_reduction() is MEAN


def test_contexts_belong_to_threads() -> None:
    found = []
    with towers(2).scope():
        thread = threading.Thread(target=lambda: found.append(where()[3]))
        thread.start()
        thread.join()
    assert found == [False]


def test_a_dropped_strategy_is_forgotten() -> None:
    distribution = towers(2)
    core = distribution.core
    gone = weakref.ref(distribution)
    with distribution.scope():
        v = mx.Variable(1.0)
    del distribution
    gc.collect()
    assert gone() is None
    with core.scope():  # the main strategy lives on, with a face of its own
        again = contrib.get_distribution_strategy()
        assert again.core is core
        assert parts(again, again.call_for_each_tower(lambda: v + tower_id())) == [1, 2]


def test_main_code_works_in_the_scope_of_towers() -> None:
    distribution = towers(2)
    with distribution.scope():
        assert mx.get_strategy() is distribution.core
        assert mx.distribute.in_cross_replica_context()

    def fn():
        replica = mx.get_replica_context()
        assert replica is not None and mx.get_strategy() is distribution.core
        return replica.all_reduce("SUM", tower_id() + 1.0)

    assert parts(distribution, distribution.call_for_each_tower(fn)) == [3.0, 3.0]


# TowerContext ---------------------------------------------------------------------------


@all_sizes
def test_a_tower_knows_its_device(n: int) -> None:
    distribution, devices = towers(n), []

    def fn():
        assert isinstance(tower_id(), int)
        assert jnp.zeros(()).devices() == {jax.devices("cpu")[tower_id()]}
        devices.append(tower().device)

    distribution.call_for_each_tower(fn)
    assert devices == distribution.worker_devices


def test_compiled_towers_have_no_device() -> None:
    with pytest.raises(RuntimeError, match="not known in a compiled function"):
        call(towers(2), lambda: tower().device, engine="compiled")


def test_a_towers_context_can_be_printed() -> None:
    shown = []
    towers(2).call_for_each_tower(lambda: shown.append(repr(tower())))
    assert all(text.startswith("TowerContext(") for text in shown)


def test_require_tower_context() -> None:
    outside = contrib.get_tower_context()
    assert outside is not None
    assert contrib.require_tower_context(outside) is None
    distribution, kept = towers(2), []
    with distribution.scope():
        with pytest.raises(RuntimeError, match="has to run in a tower"):
            contrib.require_tower_context(outside)
        with pytest.raises(RuntimeError, match="not that of the current tower"):
            distribution.call_for_each_tower(
                lambda: contrib.require_tower_context(outside)
            )
        distribution.call_for_each_tower(lambda: kept.append(tower()))
        with pytest.raises(RuntimeError, match="not that of the current tower"):
            distribution.call_for_each_tower(
                lambda: contrib.require_tower_context(kept[0])
            )


# Properties -----------------------------------------------------------------------------


@all_sizes
def test_properties(n: int) -> None:
    distribution = towers(n)
    assert distribution.num_towers == n
    assert distribution.is_single_tower is (n == 1)
    names = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(n)]
    for devices in (distribution.worker_devices, distribution.parameter_devices):
        assert devices == names
        devices.clear()
    assert distribution.worker_devices == distribution.parameter_devices == names
    assert distribution.between_graph is False
    assert distribution.should_init is True
    assert distribution.should_checkpoint is True
    assert distribution.should_save_summary is True
    assert isinstance(distribution.core, mx.MirroredStrategy)
    assert repr(distribution) == f"contrib.MirroredStrategy({distribution.core!r})"


@pytest.mark.parametrize(
    "name",
    [
        "between_graph",
        "is_single_tower",
        "num_towers",
        "parameter_devices",
        "should_checkpoint",
        "should_init",
        "should_save_summary",
        "worker_device_index",
        "worker_devices",
    ],
)
def test_properties_cannot_be_set(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(towers(2), name, 1)


def test_the_frame_of_a_session_has_nothing_to_do() -> None:
    distribution = towers(2)
    assert distribution.initialize() is None
    assert distribution.finalize() is None
    assert distribution.configure() is None
    assert distribution.configure(task_type="worker", task_id=0) is None


def test_a_session_keeps_its_state_to_itself() -> None:
    config = mx.compat.v1.ConfigProto()
    distribution = towers(2)
    assert distribution.configure(session_config=config) is None
    assert config.isolate_session_state
    assert distribution.num_towers == 2


# Constructing ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["num_gpus", "num_gpus_per_worker"])
def test_no_gpus_are_the_first_cpu(name: str) -> None:
    arguments: dict[str, Any] = {name: 0}
    distribution = Distribution(**arguments)
    assert distribution.worker_devices[0].endswith("CPU:0")
    assert distribution.num_towers == 1


def test_all_devices_by_default() -> None:
    assert Distribution().num_towers == jax.device_count()
    assert Distribution().core.extended.worker_devices == (
        mx.MirroredStrategy().extended.worker_devices
    )


@pytest.mark.parametrize(
    "devices",
    [
        ["/device:CPU:1", "/cpu:0"],
        ("cpu:1", "CPU:0"),
        ["/job:localhost/replica:0/task:0/device:CPU:1", "CPU:0"],
    ],
)
def test_device_strings(devices: Any) -> None:
    found = Distribution(devices=devices).worker_devices
    assert [name[-5:] for name in found] == ["CPU:1", "CPU:0"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"num_gpus": 2, "num_gpus_per_worker": 2},
            ValueError,
            "`num_gpus` and `num_gpus_per_worker`",
        ),
        ({"devices": ["CPU:0"], "num_gpus": 0}, ValueError, "`devices` or `num_gpus`"),
        (
            {"devices": ["CPU:0"], "num_gpus_per_worker": 1},
            ValueError,
            "`devices` or `num_gpus`",
        ),
        ({"devices": ["CPU:0", "/cpu:0"]}, ValueError, "CPU:0 is given twice"),
        ({"devices": ["GPU:7"]}, ValueError, "no device 'GPU:7'"),
        ({"devices": "CPU:0"}, TypeError, "`devices` must be a list"),
        ({"devices": 5}, TypeError, "`devices` must be a list"),
        ({"num_gpus": -1}, ValueError, "`num_gpus` must be .*0 or larger, got -1"),
        ({"num_gpus": "2"}, ValueError, "`num_gpus` must be .*got '2'"),
        ({"cross_tower_ops": 5}, TypeError, "`cross_tower_ops` must be a CrossTower"),
        (
            {"cross_tower_ops": mx.distribute.NcclAllReduce()},
            TypeError,
            "`cross_tower_ops` must be a CrossTowerOps",
        ),
    ],
)
def test_strategies_that_cannot_be(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Distribution(**arguments)


def test_gpus_that_are_not_there() -> None:
    distribution = Distribution(num_gpus=jax.device_count("cpu") + 20)
    with pytest.raises(ValueError, match="no device 'GPU:0'"):
        _ = distribution.num_towers


def test_scopes_of_different_strategies() -> None:
    first, second = towers(2), towers(2)
    with first.scope():
        with pytest.raises(RuntimeError, match="Mixing different strategies"):
            with second.scope():
                pass
        with pytest.raises(RuntimeError, match="Mixing different strategies"):
            with mx.MirroredStrategy(["CPU:0"]).scope():
                pass
        assert contrib.get_distribution_strategy() is first


def test_a_scope_can_be_entered_again_and_inside_itself() -> None:
    distribution = towers(2)
    scope = distribution.scope()
    for _ in range(2):
        with scope as first, scope as second:
            assert first is second is distribution
            assert contrib.get_cross_tower_context() is distribution
        assert not contrib.has_distribution_strategy()


def test_a_scope_is_left_when_its_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), towers(2).scope():
        _ = 1 / 0
    assert not contrib.has_distribution_strategy()


# A cluster, as far as one process can see -----------------------------------------------

CLUSTER = {"worker": ["localhost:1", "localhost:2"]}


@pytest.mark.parametrize(
    ("arguments", "configuration", "error", "message"),
    [
        ({}, {}, ValueError, "A cluster needs `num_gpus`"),
        ({"devices": ["CPU:0"]}, {}, ValueError, "A cluster needs `num_gpus`"),
        ({"num_gpus": 0}, {}, ValueError, "task_id is not set"),
        (
            {"num_gpus": 0},
            {"task_type": "ps", "task_id": 0},
            ValueError,
            'task_type is "ps"',
        ),
        (
            {"num_gpus": 0},
            {"task_type": "worker", "task_id": 7},
            ValueError,
            'task_id is 7, but "worker" has 2 tasks',
        ),
        (
            {"num_gpus": 0, "cross_tower_ops": contrib.AllReduceCrossTowerOps()},
            {"task_type": "worker", "task_id": 0},
            ValueError,
            "`cross_tower_ops` is for the devices of one machine",
        ),
    ],
)
def test_clusters_that_cannot_be(
    arguments: Any, configuration: Any, error: type[Exception], message: str
) -> None:
    distribution = Distribution(**arguments)
    with pytest.raises(error, match=message):
        distribution.configure(cluster_spec=CLUSTER, **configuration)


@pytest.mark.parametrize("use", ["num_towers", "worker_devices", "scope", "run"])
def test_a_cluster_comes_before_everything_else(use: str) -> None:
    distribution = Distribution(num_gpus=0)
    if use == "scope":
        with distribution.scope():
            pass
    elif use == "run":
        distribution.call_for_each_tower(lambda: None)
    else:
        getattr(distribution, use)
    with pytest.raises(RuntimeError, match="comes first"):
        distribution.configure(cluster_spec=CLUSTER, task_type="worker", task_id=0)


# One device -----------------------------------------------------------------------------


def test_one_device() -> None:
    distribution = contrib.OneDeviceStrategy("CPU:2")
    assert isinstance(distribution, contrib.DistributionStrategy)
    assert (distribution.num_towers, distribution.is_single_tower) == (1, True)
    assert distribution.worker_device_index == 0
    assert [d[-5:] for d in distribution.worker_devices] == ["CPU:2"]
    assert [d[-5:] for d in distribution.parameter_devices] == ["CPU:2"]
    with distribution.scope():
        v = mx.Variable(1.0)
        assert v.read_value().devices() == {jax.devices("cpu")[2]}
        ids = distribution.call_for_each_tower(lambda x: x + tower_id(), 3)
        merged = distribution.call_for_each_tower(
            lambda: tower().merge_call(lambda d, x: (d is distribution, x), 5)
        )
        distribution.update(v, lambda v, x: v.assign_add(x), 2.0)
        assert float(distribution.reduce(SUM, v.read_value(), "CPU:2")) == 3.0
        mapped = distribution.map(range(10), lambda x, y: x * y, 2)
        assert int(distribution.reduce(SUM, mapped, "CPU:2")) == 90
    assert int(ids) == 3 and merged == (True, 5)
    assert distribution.unwrap(v) == [v]
    assert distribution.value_container(v) is v
    with pytest.raises(ValueError, match="takes no `cluster_spec`"):
        distribution.configure(cluster_spec=CLUSTER)


def test_any_main_strategy_can_have_towers() -> None:
    core = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    distribution = contrib.DistributionStrategy(core)
    assert distribution.core is core and distribution.num_towers == 2
    ids = distribution.call_for_each_tower(lambda: np.float32(tower_id()))
    assert parts(distribution, ids) == [0.0, 1.0]
