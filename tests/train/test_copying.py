"""What `save` takes is out of reach of later steps, without waiting where memory allows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx
from mirrax._src.train import copying, storage


class FakeDevice:
    """An accelerator of this size."""

    platform = "gpu"

    def __init__(self, stats: dict[str, int] | None) -> None:
        self.memory_stats = lambda: stats


def have_room(stats: dict[str, int] | None) -> bool:
    """Whether 80 bytes can be copied on a device that says this of its memory."""

    class Shard:
        device, data = FakeDevice(stats), np.zeros(20, "f")

    class Array:
        addressable_shards = [Shard()]

    return copying._have_room([Array()])  # pyright: ignore[reportArgumentType]


def test_copies_have_to_fit_beside_the_largest_step() -> None:
    assert have_room({"bytes_limit": 100, "peak_bytes_in_use": 20})
    assert not have_room({"bytes_limit": 100, "peak_bytes_in_use": 21})
    assert not have_room({})
    assert not have_room(None)


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Has CPUs taken for accelerators, with or without room for copies."""

    def pretend(has_room: bool) -> None:
        monkeypatch.setattr(copying, "_is_on_host", lambda array: False)
        monkeypatch.setattr(copying, "_have_room", lambda arrays: has_room)

    return pretend


def test_with_room_they_are_copied_on_the_device(accelerators) -> None:
    accelerators(True)
    array, key, own = jnp.arange(3.0), jax.random.key(1), np.ones(2)
    taken = copying.out_of_reach({"array": array, "key": key, "own": own})
    assert isinstance(taken["array"], jax.Array)
    assert taken["array"].unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
    assert taken["array"].sharding == array.sharding
    assert jax.random.key_data(taken["key"]).tolist() == [0, 1]
    assert taken["own"] is own


def test_without_room_they_are_on_the_host(accelerators) -> None:
    accelerators(False)
    taken = copying.out_of_reach({"array": jnp.arange(3.0), "key": jax.random.key(1)})
    assert type(taken["array"]) is np.ndarray
    assert jax.random.key_data(taken["key"]).tolist() == [0, 1]


def test_save_returns_before_anything_is_on_the_host(
    accelerators, two_cpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerators(True)
    with two_cpus.scope():
        variable = mx.Variable(np.arange(100_000, dtype=np.float32))

    @mx.function
    def step() -> None:
        variable.assign_add(np.ones(variable.shape, np.float32))

    go_on, write = threading.Event(), storage.write
    written: list[Any] = []

    def late(*args: Any) -> Any:
        assert go_on.wait(60)
        written.extend(args[2].values())
        return write(*args)

    monkeypatch.setattr(storage, "write", late)
    checkpoint = mx.train.Checkpoint(variable=variable)
    path = checkpoint.save(tmp_path / "ckpt")
    for _ in range(3):
        two_cpus.run(step)  # takes over the memory
    go_on.set()
    checkpoint.sync()
    assert any(isinstance(value, jax.Array) for value in written)
    np.testing.assert_array_equal(
        mx.train.load_checkpoint(path)["variable"], np.arange(100_000)
    )
    np.testing.assert_array_equal(variable, np.arange(100_000) + 3)
