"""Each private or version-dependent JAX name does what mirrax takes it for."""

from __future__ import annotations

import _thread
import ast
import functools
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.compilations import count_compilations
from jax import lax

from mirrax._src.base import jax_compat

CPUS = jax.local_devices(backend="cpu")

# Every name that is private or changes with the version, and what falls with it.
PROMISES = {
    "_array.ArrayImpl": "parts of replicas can be added up: arrays that JAX may move",
    "_clusters.ClusterEnv": "`JaxClusterResolver` finds workers as JAX does",
    "_config.config": "settings of the caller's thread hold in eager replicas",
    "_config.config_ext": "settings of the caller's thread hold in eager replicas",
    "_config.debug_nans": "a step that looks for NaNs does not donate its variables",
    "_core.trace_ctx": "compiled and eager code are told apart, and reads in `jax.jit` refused",
    "_distributed.global_state": "workers join, and can be told from one another",
    "_extend_core.ClosedJaxpr": "programs are read and cut",
    "_extend_core.Jaxpr": "programs are read and cut",
    "_extend_core.Literal": "programs are read and cut",
    "_extend_core.get_opaque_trace_state": "a variable assigned inside `lax.scan` is an error",
    "_jaxlib.get_distributed_runtime_client": "a lost worker does not abort the others",
    "_jaxlib.make_gloo_tcp_collectives": "CPU workers find each other by their own addresses",
    "_partial_eval.DynamicJaxprTrace": "a variable read inside `jax.jit` is an error",
    "_pxla.batched_device_put": "batches reach the devices quickly",
    "_xla_bridge._backend_factories": "many logical CPUs do not run out of threads",
    "_xla_bridge.backends_are_initialized": "logical devices are made while it is possible",
}


def test_every_private_name_is_on_the_list() -> None:
    assert jax_compat.__file__ is not None
    tree = ast.parse(Path(jax_compat.__file__).read_text())
    aliases = {
        alias.asname
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax.")
        for alias in node.names
        if alias.asname and alias.asname.startswith("_")
    }
    used = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in aliases
    }
    assert used == PROMISES.keys()


@pytest.mark.parametrize("name", PROMISES)
def test_the_name_is_there(name: str) -> None:
    message = f"Without {name} this promise falls: {PROMISES[name]}."
    try:
        found = functools.reduce(getattr, name.split("."), jax_compat)
    except AttributeError:
        pytest.fail(message)
    assert found is not None, message


def test_what_jax_keeps_is_told_from_what_it_does_at_once() -> None:
    seen = {}

    def note(kind):
        def body(x):
            seen[kind] = jax_compat.is_staging()
            return x

        return body

    note("plain")(1.0)
    jax.jit(note("jit"))(1.0)
    jax.grad(note("grad"))(1.0)
    jax.vmap(note("vmap"))(jnp.ones(2))
    lax.scan(lambda c, _: (note("scan")(c), None), 1.0, None, 1)
    assert seen == {
        "plain": False,
        "jit": True,
        "grad": False,
        "vmap": False,
        "scan": True,
    }


def test_backend_started() -> None:
    jax.devices()
    assert jax_compat.backend_started()


def test_trace_state_tells_traces_apart() -> None:
    outside = jax_compat.trace_state()
    assert outside == jax_compat.trace_state()
    assert jax_compat.outside_traces()
    seen = []

    def body(x):
        seen.append((jax_compat.trace_state(), jax_compat.outside_traces()))
        lax.scan(
            lambda c, _: (seen.append((jax_compat.trace_state(), False)), (c, None))[1],
            x,
            None,
            2,
        )
        return x

    jax.jit(body)(1.0)
    assert not seen[0][1]
    assert outside != seen[0][0] != seen[1][0]


def test_uncommitted_arrays_share_the_buffer_and_mix_with_other_devices() -> None:
    a, b = (jax.device_put(jnp.arange(3.0), device) for device in CPUS[:2])
    free = jax_compat.uncommitted(b)
    assert not free.committed and free.devices() == {CPUS[1]}
    assert free.unsafe_buffer_pointer() == b.unsafe_buffer_pointer()
    np.testing.assert_array_equal(a + free, [0, 2, 4])
    with jax.default_device(CPUS[1]):
        assert (free + 1).devices() == {CPUS[1]}


@pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2])
def test_uncommitted_arrays_forget_the_mesh_that_they_were_computed_under(kind) -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:2], "x", axis_types=(kind,))
    with jax.set_mesh(mesh):
        made = jax.jit(lambda x: x * 2)(np.ones(4))
        free = jax_compat.uncommitted(jax.device_put(made, CPUS[1]))
    assert free.aval.sharding.mesh.empty  # pyright: ignore[reportAttributeAccessIssue]
    other = jax.sharding.Mesh(
        jax.devices()[:2], "y", axis_types=(jax.sharding.AxisType.Explicit,)
    )
    with jax.set_mesh(other):
        assert jax.jit(lambda x: x + 1)(free).tolist() == [3.0] * 4


def test_a_jaxpr_may_reduce_over_an_axis_and_be_cut() -> None:
    closed, known = jax_compat.make_jaxpr(
        lambda x: ([lax.psum(x * 2, "replica") + 1], ("said", x.shape)),
        ("replica", 2),
        (jnp.float32(3),),
    )
    assert known == ["said", ()]
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
    assert names == ["mul", "psum", "add"]
    first = closed.jaxpr.eqns[0]
    part = jax_compat.sub_program(
        closed.jaxpr, [first], closed.jaxpr.invars, first.outvars
    )
    (doubled,) = jax_compat.eval_jaxpr(part, (), jnp.float32(3))
    assert float(doubled) == 6


@pytest.mark.parametrize("value", [np.arange(3), np.float64(1.5), np.zeros((2, 0))])
def test_numpy_data_is_put_on_a_device_uncommitted(value):
    device = jax.devices("cpu")[1]
    array = jax_compat.put_uncommitted(value, device)
    assert array.devices() == {device} and not array.committed
    assert array.dtype == jax.dtypes.canonicalize_dtype(value.dtype)
    assert np.array_equal(array, value)
    assert (array + jnp.ones(())).shape == value.shape  # it mixes with other devices'


def test_parts_become_one_array_on_several_devices(two_cpus) -> None:
    mesh = two_cpus.replica_mesh
    parts = np.arange(6, dtype="i4").reshape(2, 3)
    array = jax_compat.put_parts(list(parts), (6,), mesh.split, mesh.devices)
    assert array.sharding == mesh.split and array.committed
    assert np.array_equal(array, np.arange(6))
    assert [s.device for s in array.addressable_shards] == list(mesh.devices)


def test_jax_knows_ways_to_find_a_cluster() -> None:
    assert "slurm" in jax_compat.cluster_detection_methods()
    given = ("127.0.0.1:1", 2, 1, [0])
    assert jax_compat.detect_cluster(given, "slurm", 1) == given


def test_one_process_has_no_client_of_a_coordination_service() -> None:
    assert jax_compat.running_processes() == (None, "", 0, 1)


def test_gloo_takes_the_name_of_a_host() -> None:
    make = jax_compat._jaxlib.make_gloo_tcp_collectives
    assert "hostname" in (make.__doc__ or "")
    join = jax_compat._jaxlib.get_distributed_runtime_client
    assert "shutdown_on_destruction" in (join.__doc__ or "")


def test_whether_jax_looks_for_nans_can_be_read_quickly() -> None:
    assert jax_compat.debug_nans.value is False
    with jax.debug_nans(True):
        assert jax_compat.debug_nans.value is True


def test_a_program_that_the_persistent_cache_holds_counts_as_compiled() -> None:
    """Tests that count compilations run with that cache (tests/helpers/programs.py)."""

    def compile_once() -> int:
        with count_compilations() as compiled:
            jax.jit(lambda x: x * 3 + 4)(np.float32(1))
        return compiled.count

    assert compile_once() == compile_once() == 1


@pytest.mark.parametrize("count", [1, 2])
def test_threads_of_xla_are_known(count) -> None:
    """On one CPU, a callback of a program whose inputs are ready runs on the caller's thread."""
    seen = []

    def note(_):
        seen.append(jax_compat.is_thread_of_xla())

    mesh = jax.sharding.Mesh(np.array(CPUS[:count]), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.block_until_ready(jax.device_put(jnp.ones(count), sharding))
    jax.jit(lambda x: jax.debug.callback(note, x.sum()))(x)
    jax.effects_barrier()
    assert set(seen) == {count > 1}
    with ThreadPoolExecutor(1) as thread:
        assert not thread.submit(jax_compat.is_thread_of_xla).result()
    assert not jax_compat.is_thread_of_xla()


def test_a_thread_of_pythons_that_begins_in_jax_is_none_of_xla() -> None:
    told: queue.Queue[bool] = queue.Queue()
    note = jax.vmap(lambda x: (told.put(jax_compat.is_thread_of_xla()), x)[1])
    _thread.start_new_thread(note, (jnp.ones(2),))
    assert told.get(timeout=60) is False
