"""Logical CPU devices: made on request, and with a pool that cannot dead-lock."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx

COUNT_THREADS = """
from mirrax._src.base.logical import _pool_size
print(_pool_size())
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PJRT_NPROC")}
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        env={**kept, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
    )


def output(code: str, **env: str) -> str:
    done = run(code, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 16])
def test_asking_for_devices_makes_them_and_a_pool_of_twice_as_many(count) -> None:
    code = f"""
import mirrax as mx
mx.MirroredStrategy([f"CPU:{{i}}" for i in range({count})])
"""
    threads = int(output(code + COUNT_THREADS))
    assert threads >= 2 * count


@pytest.mark.slow
def test_devices_that_the_user_asks_jax_for_get_the_pool_too() -> None:
    code = """
import mirrax, jax
jax.config.update("jax_num_cpu_devices", 12)
assert len(jax.devices()) == 12
"""
    assert int(output(code + COUNT_THREADS)) >= 24


@pytest.mark.slow
def test_devices_from_xla_flags_get_the_pool_too() -> None:
    flags = "--xla_force_host_platform_device_count=12"
    code = "import mirrax, jax; assert len(jax.devices()) == 12\n"
    assert int(output(code + COUNT_THREADS, XLA_FLAGS=flags)) >= 24


@pytest.mark.slow
def test_the_users_own_setting_stays_and_a_small_one_is_warned_about() -> None:
    code = 'import mirrax as mx; mx.MirroredStrategy([f"CPU:{i}" for i in range(8)])\n'
    done = run(code + COUNT_THREADS, NPROC="9")
    assert done.stdout.strip() == "9"
    assert "has 9 threads, but 8 CPU devices need 16" in done.stderr
    assert "NPROC=9 sets its size; set it to 16 or more" in done.stderr


COUNT_FAULTS = """
import resource

def faults():  # of a step that takes 96 MiB and gives it back; NumPy would take huge pages
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [b"x" * (24 * 2**20) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print([faults() for _ in range(6)][-1])
"""
PAGES_OF_A_STEP = 96 * 2**20 // os.sysconf("SC_PAGE_SIZE")


needs_glibc = pytest.mark.skipif(
    os.confstr("CS_GNU_LIBC_VERSION") is None, reason="settings of glibc's malloc"
)


@pytest.mark.slow
@needs_glibc
def test_what_a_thread_has_freed_is_not_all_kept() -> None:
    code = """
import threading
import mirrax as mx
mx.MirroredStrategy(["CPU:0", "CPU:1"])

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(x for x in lines if x.startswith("VmRSS")).split()[1]) // 1024

before = resident()
for size in (4, 16):
    use = lambda: [b"x" * (size * 2**20) for _ in range(1024 // size)]
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
print(resident() - before)
"""
    assert int(output(code)) < 400  # MiB, of 1 GiB twice


@pytest.mark.slow
@needs_glibc
@pytest.mark.parametrize(
    "own, is_kept",
    [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "65536"}, False)],
    ids=["by default", "as the user sets it"],
)
def test_memory_that_a_step_frees_is_kept_for_the_next_one(own, is_kept) -> None:
    code = "import mirrax as mx; mx.MirroredStrategy(['CPU:0', 'CPU:1'])\n"
    found = int(output(code + COUNT_FAULTS, **own))
    assert (found < PAGES_OF_A_STEP / 10) is is_kept, found


@pytest.mark.slow
def test_importing_too_late_is_warned_about_and_still_runs() -> None:
    code = """
import jax
jax.config.update("jax_num_cpu_devices", 16)
jax.devices()
import mirrax as mx, jax.numpy as jnp
strategy = mx.MirroredStrategy()
step = mx.function(lambda x: mx.get_replica_context().all_reduce("sum", x))
for i in range(100):
    total = strategy.run(step, args=(jnp.float32(i),))
print(float(total))
"""
    done = run(code)
    assert done.stdout.strip() == str(99.0 * 16), done.stderr
    assert "import mirrax first" in done.stderr


@pytest.mark.slow
def test_children_do_not_inherit_the_pool() -> None:
    code = """
import os, mirrax as mx
mx.MirroredStrategy(["CPU:0", "CPU:1"])
print([name for name in ("NPROC", "PJRT_NPROC") if name in os.environ])
"""
    assert output(code) == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_whether_the_pool_has_one_thread_is_known(threads) -> None:
    code = """
import mirrax, jax
from mirrax._src.base.logical import has_one_thread
jax.devices()
print(has_one_thread())
"""
    assert output(code, PJRT_NPROC=str(threads)) == str(threads == 1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names threads by prctl")
def test_threads_may_have_names_that_are_no_text() -> None:
    code = r"""
import ctypes, threading
import mirrax, jax
from mirrax._src.base.logical import has_one_thread
jax.devices()
named, end = threading.Event(), threading.Event()

def work():
    ctypes.CDLL(None).prctl(15, b"caf\xe9", 0, 0, 0)
    named.set()
    end.wait()

thread = threading.Thread(target=work)
thread.start()
named.wait()
print(has_one_thread())
end.set()
"""
    assert output(code, PJRT_NPROC="1") == "True"


def test_a_configuration_that_is_there_already_is_accepted() -> None:
    mx.config.set_logical_device_configuration(cpu=8)
    assert len(mx.config.list_logical_devices("CPU")) == 8
    assert mx.config.list_logical_devices("cpu")[3].name == "/device:CPU:3"
    assert mx.config.list_logical_devices("TPU") == []


def test_a_configuration_that_comes_too_late_says_so() -> None:
    with pytest.raises(RuntimeError, match="already started with 8 CPU.*at the top"):
        mx.config.set_logical_device_configuration(cpu=3)
    with pytest.raises(ValueError, match="at least 1"):
        mx.config.set_logical_device_configuration(cpu=0)


SOAK = """
import sys
import numpy as np, jax, jax.numpy as jnp, mirrax as mx
count, steps = int(sys.argv[1]), int(sys.argv[2])
strategy = mx.MirroredStrategy([f"CPU:{i}" for i in range(count)])
rng = np.random.default_rng(0)
with strategy.scope():
    weights = [mx.Variable(rng.normal(size=s).astype("float32") * 0.05)
               for s in ((784, 128), (128, 128), (128, 10))]

@mx.function
def step(x):
    def loss():
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.sum(h * h)
    value, grads = mx.value_and_grad(loss, weights)()
    for w, g in zip(weights, mx.get_replica_context().all_reduce("sum", grads)):
        w.assign_sub(1e-4 * g)
    return value

for i in range(steps):
    x = rng.normal(size=(256 // count, 784)).astype("float32")
    value = strategy.run(step, args=(mx.distribute.PerReplica([x] * count),))
assert np.isfinite(float(strategy.reduce("SUM", value, axis=None)))
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_steps_without_waiting_run_through(count) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PJRT_NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", SOAK, str(count), "200"],
        env=kept,
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
    )
    assert done.stdout.strip() == "done", (
        f"{count} devices hung or failed:\n{done.stderr}"
    )
