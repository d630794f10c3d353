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


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Has CPUs taken for accelerators, with or without pinned memory of the host."""

    def pretend(is_pinned: bool) -> None:
        monkeypatch.setattr(copying, "_is_on_host", lambda array: False)
        monkeypatch.setattr(copying, "_has_pinned_memory", lambda array: is_pinned)

    return pretend


def test_more_than_half_of_the_pinned_memory_is_not_taken(
    accelerators, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerators(True)
    arrays = {"first": jnp.arange(3.0), "second": jnp.arange(2.0)}
    for gigabytes, is_pinned in ((40e-9, True), (39e-9, False)):
        monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(gigabytes))
        for array in copying.out_of_reach(arrays).values():
            assert isinstance(array, jax.Array if is_pinned else np.ndarray)


def test_they_go_to_pinned_memory(accelerators) -> None:
    accelerators(True)
    array, key, own = jnp.arange(3.0), jax.random.key(1), np.ones(2)
    taken = copying.out_of_reach({"array": array, "key": key, "own": own})
    assert taken["array"].sharding.memory_kind == "pinned_host"
    assert taken["array"].unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(taken["array"], array)
    assert jax.random.key_data(taken["key"]).tolist() == [0, 1]
    assert taken["own"] is own


def test_arrays_in_parts_stay_in_parts(accelerators, two_cpus) -> None:
    accelerators(True)
    array = jax.device_put(jnp.arange(4.0), two_cpus.replica_mesh.sharded((4,)))
    taken = copying.out_of_reach({"array": array})["array"]
    assert taken.sharding.spec == array.sharding.spec
    np.testing.assert_array_equal(taken, np.arange(4.0))


def test_without_pinned_memory_they_are_on_the_host(accelerators) -> None:
    accelerators(False)
    taken = copying.out_of_reach({"array": jnp.arange(3.0), "key": jax.random.key(1)})
    assert type(taken["array"]) is np.ndarray
    assert jax.random.key_data(taken["key"]).tolist() == [0, 1]


def test_a_cpu_has_no_need_of_it() -> None:
    array = jnp.arange(3.0)
    taken = copying.out_of_reach({"array": array})["array"]
    assert type(taken) is np.ndarray and taken.flags.owndata


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
