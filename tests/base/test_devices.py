"""Device strings and the devices they mean."""

from __future__ import annotations

import jax
import pytest

import mirrax as mx
from mirrax._src.base.devices import device_name, resolve_devices

CPUS = jax.local_devices(backend="cpu")


@pytest.mark.parametrize(
    "text",
    [
        "CPU:1",
        "cpu:1",
        "/cpu:1",
        "/CPU:1",
        "/device:CPU:1",
        "device:CPU:1",
        "/job:localhost/replica:0/task:0/device:CPU:1",
        "/job:worker/replica:0/task:0/cpu:1",
        CPUS[1],
        mx.config.list_logical_devices("CPU")[1],
    ],
    ids=str,
)
def test_spellings_of_one_device(text) -> None:
    assert resolve_devices([text]) == (CPUS[1],)


@pytest.mark.parametrize(
    "text", ["", "CPU", "CPU:", "CPU:-1", "XPU:0", "0", "CPU:0:1", 3]
)
def test_a_malformed_device_is_named(text) -> None:
    with pytest.raises(ValueError, match=r"is not a device\. Write it like 'GPU:0'"):
        mx.MirroredStrategy([text])


def test_a_missing_device_lists_what_exists() -> None:
    with pytest.raises(ValueError, match=r"no device 'GPU:7'.*CPU:0, CPU:1"):
        mx.MirroredStrategy(["GPU:7"])


def test_a_cpu_asked_for_too_late_says_what_to_call_first() -> None:
    with pytest.raises(
        ValueError, match=r"set_logical_device_configuration\(cpu=100\)"
    ):
        mx.MirroredStrategy(["CPU:99"])


@pytest.mark.parametrize("other", ["CPU:0", "/cpu:0", "/device:CPU:0"])
def test_two_spellings_of_one_device_are_an_error(other) -> None:
    with pytest.raises(ValueError, match=r"CPU:0 is given twice, as 'CPU:0' and"):
        mx.MirroredStrategy(["CPU:0", other])


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_no_devices_means_all(nothing) -> None:
    strategy = mx.MirroredStrategy(nothing)
    assert strategy.num_replicas_in_sync == len(jax.local_devices())


def test_replicas_keep_the_order_of_devices() -> None:
    strategy = mx.MirroredStrategy(["CPU:3", "CPU:1"])
    value = strategy.run(lambda: mx.get_replica_context().replica_id_in_sync_group)
    places = [device_name(*part.devices()) for part in value.values]
    assert places == ["CPU:3", "CPU:1"]
    assert [int(part) for part in value.values] == [0, 1]
    compiled = strategy.run(
        mx.function(lambda: mx.get_replica_context().replica_id_in_sync_group)
    )
    assert [device_name(*part.devices()) for part in compiled.values] == places
    assert [int(part) for part in compiled.values] == [0, 1]


def test_one_device_may_be_given_without_a_list() -> None:
    assert mx.MirroredStrategy("CPU:2").num_replicas_in_sync == 1


def test_a_number_of_devices_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"must be a list such as .*, got 2"):
        mx.MirroredStrategy(2)  # type: ignore[arg-type]


def test_the_hint_is_enough_for_all_devices() -> None:
    with pytest.raises(ValueError, match=r"'CPU:98'.*\(cpu=100\)"):
        mx.MirroredStrategy(["CPU:98", "CPU:99"])
