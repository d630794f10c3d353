"""Devices that do not exist, are written wrongly or given twice."""

from __future__ import annotations

import jax
import pytest
from helpers.recovery import assert_usable

import mirrax as mx


@pytest.fixture(autouse=True, scope="module")
def jax_has_started():
    """Before, asking for `CPU:8` would make it."""
    assert len(jax.devices()) == 8


@pytest.mark.parametrize(
    "device", ["CPU:8", "/cpu:99", "GPU:0", "/device:TPU:3", "/job:worker/task:0/gpu:7"]
)
def test_an_unknown_device_is_named_with_those_that_exist(device):
    with pytest.raises(ValueError, match="no device") as caught:
        mx.MirroredStrategy(["CPU:0", device])
    assert repr(device) in str(caught.value)
    assert "CPU:0, CPU:1" in str(caught.value)


def test_an_unknown_cpu_says_what_to_call_first():
    hint = r"set_logical_device_configuration\(cpu=9\)"
    with pytest.raises(ValueError, match=hint):
        mx.MirroredStrategy(["CPU:8"])


@pytest.mark.parametrize(
    "device",
    ["", "CPU", "CPU:", "CPU:x", "CPU:-1", "XPU:0", "/device/CPU:0", "cpu 0", 0],
)
def test_a_malformed_device_shows_how_to_write_one(device):
    with pytest.raises(
        ValueError, match="is not a device. Write it like 'GPU:0'"
    ) as caught:
        mx.MirroredStrategy([device, "CPU:1"])
    assert repr(device) in str(caught.value)


@pytest.mark.parametrize(
    "first, second",
    [
        ("CPU:1", "CPU:1"),
        ("CPU:1", "/cpu:1"),
        ("/device:CPU:1", "cpu:1"),
        ("CPU:1", "/job:localhost/replica:0/task:0/device:CPU:1"),
    ],
)
def test_a_device_given_twice_shows_both_spellings(first, second):
    with pytest.raises(ValueError, match="CPU:1 is given twice") as caught:
        mx.MirroredStrategy([first, "CPU:0", second])
    assert repr(first) in str(caught.value)
    assert repr(second) in str(caught.value)


def test_a_device_given_as_a_name_and_as_an_object():
    with pytest.raises(ValueError, match="CPU:1 is given twice.*'CPU:1'.*jax.Device"):
        mx.MirroredStrategy(["CPU:1", jax.devices()[1]])


def test_one_device_strategy_checks_its_device_too():
    with pytest.raises(ValueError, match="no device 'CPU:42'"):
        mx.OneDeviceStrategy("CPU:42")
    with pytest.raises(ValueError, match="'one' is not a device"):
        mx.OneDeviceStrategy("one")


def test_logical_devices_cannot_be_asked_for_too_late():
    message = r"(?s)already started with 8 CPU.*cannot become 4.*cpu=4\) at the top"
    with pytest.raises(RuntimeError, match=message):
        mx.config.set_logical_device_configuration(cpu=4)
    mx.config.set_logical_device_configuration(cpu=8)
    assert len(mx.config.list_logical_devices("CPU")) == 8


@pytest.mark.parametrize("count", [0, -1])
def test_logical_devices_are_at_least_one(count):
    with pytest.raises(ValueError, match=f"at least 1, got {count}"):
        mx.config.set_logical_device_configuration(cpu=count)


def test_cross_device_ops_must_be_an_algorithm():
    with pytest.raises(TypeError, match=r"CrossDeviceOps.*NcclAllReduce\(\).*'nccl'"):
        mx.MirroredStrategy(["CPU:0"], cross_device_ops="nccl")  # type: ignore[arg-type]


def test_a_reduction_device_must_run_a_replica():
    ops = mx.distribute.ReductionToOneDevice(reduce_to_device="CPU:5")
    strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    value = strategy.run(lambda: mx.get_replica_context().replica_id_in_sync_group)
    with pytest.raises(ValueError, match="CPU:5, which runs no replica.*CPU:0, CPU:1"):
        strategy.reduce("SUM", value, axis=None)
    assert_usable(mx.MirroredStrategy(["CPU:0", "CPU:1"]))
