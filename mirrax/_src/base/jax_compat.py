"""The only file with private or version-dependent JAX names.

`tests/base/test_jax_compat.py` checks each of them, so that a new JAX breaks there first.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import numpy as np
from jax._src import array as _array
from jax._src import clusters as _clusters
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax as _jaxlib  # pyright: ignore[reportPrivateImportUsage]
from jax.extend import core as _extend_core

if TYPE_CHECKING:
    from jaxlib._jax import Device as Device
else:
    Device = jax.Device

Tracer = jax.core.Tracer
# The class of real arrays: `type(x) is` is ten times faster than `isinstance(x, jax.Array)`.
ConcreteArray = _array.ArrayImpl
eval_jaxpr = jax.core.eval_jaxpr
Literal = _extend_core.Literal
Jaxpr = _extend_core.Jaxpr
ClosedJaxpr = _extend_core.ClosedJaxpr
# XLA of JAX 0.11 ends the process when it compiles a reduction of an array without elements
# for several devices.
EMPTY_PARTS_CRASH = jax.__version_info__[:2] == (0, 11)
# Whether JAX has started a backend, after which its devices are fixed.
backend_started = _xla_bridge.backends_are_initialized
# Gives a token for the innermost JAX trace of this thread; equal inside the same one.
trace_state = _extend_core.get_opaque_trace_state
# Whether this thread is outside of all JAX transformations (jit, grad, vmap, ...).
outside_traces: Callable[[], bool] = _core.trace_ctx.is_top_level


def wrap_cpu_start(
    around: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Has `around()` entered while JAX starts its CPU client, if it has not started yet."""
    if backend_started():
        return
    registration = _xla_bridge._backend_factories["cpu"]
    start = registration.factory

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        client = _distributed.global_state.client
        if _gloo_host and "collectives" not in kwargs and client is not None:
            kwargs["collectives"] = _jaxlib.make_gloo_tcp_collectives(
                client, hostname=_gloo_host[0]
            )
        with around():
            return start(*args, **kwargs)

    _xla_bridge._backend_factories["cpu"] = dataclasses.replace(
        registration, factory=wrapped
    )


def is_staging() -> bool:
    """Whether the innermost trace makes a program that JAX may keep: jit, scan, not grad."""
    return isinstance(_core.trace_ctx.trace, _partial_eval.DynamicJaxprTrace)


def is_thread_of_xla() -> bool:
    """Whether a running program has called this code, on a thread that XLA has started."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    name = frame.f_globals.get("__name__") or ""
    return name.startswith("jax._src.") and "callback" in name


def thread_settings() -> Callable[[], None]:
    """What gives this thread's settings (`jax.enable_x64`) to the thread that calls it."""
    holders: list[Any] = list(_config.config._value_holders.values())
    local = [(h, h.get_local()) for h in holders if hasattr(h, "get_local")]
    changed = [(f, v) for f, v in local if v is not _config.config_ext.unset]

    def apply() -> None:
        for flag, value in changed:
            flag.set_local(value)

    return apply


# The setting itself, whose `value` is read at each step: in a tenth of the time of `jax.config`.
debug_nans = _config.debug_nans

# Entering a new value makes JAX's trace caches miss, which would otherwise keep what a
# function read from a variable when it was first traced.
fresh_traces = jax.make_user_context(None)


def put_uncommitted(value: Any, device: Device) -> jax.Array:
    """NumPy data on `device`, uncommitted, in less than half the time of `device_put`."""
    array = _as_jax_has_it(np.asarray(value))
    aval = jax.core.ShapedArray(array.shape, array.dtype)
    sharding = jax.sharding.SingleDeviceSharding(device)
    return _pxla.batched_device_put(aval, sharding, [array], [device], committed=False)


def put_parts(
    parts: Sequence[Any], shape: tuple[int, ...], sharding: Any, devices: Sequence[Any]
) -> jax.Array:
    """One array of `shape`, of NumPy data for each of this worker's `devices`."""
    first = _as_jax_has_it(parts[0])
    # Mostly all are of one dtype, which JAX has.
    known = first.dtype if first is parts[0] else None
    arrays = [p if p.dtype is known else _as_jax_has_it(p) for p in parts]
    aval = jax.core.ShapedArray(shape, arrays[0].dtype)
    return _pxla.batched_device_put(aval, sharding, arrays, list(devices))


def _as_jax_has_it(array: np.ndarray) -> np.ndarray:
    """In a dtype of JAX's and this machine's byte order, which `batched_device_put` takes for granted."""
    own = array.dtype
    if own.kind in "mMOSU":
        raise TypeError(
            f"Dtype {own} is not a valid JAX array type. Convert it in the dataset, by "
            "`map` with `astype`, say."
        )
    dtype = jax.dtypes.canonicalize_dtype(own)
    if not dtype.isnative:
        dtype = dtype.newbyteorder("=")
    return array if dtype == own else array.astype(dtype)


def uncommitted(array: jax.Array) -> jax.Array:
    """The same buffer as an array that JAX may move: it mixes with those of other devices."""
    if not isinstance(array, _array.ArrayImpl):
        return array  # a typed random key, say
    aval, sharding = array.aval, array.sharding
    if type(sharding) is not jax.sharding.SingleDeviceSharding:
        (device,) = sharding.device_set
        sharding = jax.sharding.SingleDeviceSharding(device)
    if not aval.sharding.mesh.empty:  # which an array of one device may still carry
        aval = jax.core.ShapedArray(array.shape, array.dtype, weak_type=aval.weak_type)
    return _array.ArrayImpl(aval, sharding, [array], committed=False, _skip_checks=True)


def with_inputs(closed: ClosedJaxpr, inputs: Sequence[Any]) -> ClosedJaxpr:
    """`closed` with fewer inputs: those it does not use are left out."""
    jaxpr = closed.jaxpr.replace(
        invars=list(inputs), debug_info=closed.jaxpr.debug_info.with_unknown_names()
    )
    return ClosedJaxpr(jaxpr, closed.consts)


def sub_program(
    jaxpr: Jaxpr, eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Jaxpr:
    """Some equations of `jaxpr` as a jaxpr of their own."""
    return jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(eqns),
        effects=set().union(*(eqn.effects for eqn in eqns)),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def make_jaxpr(
    fn: Callable[..., tuple[list[Any], Any]],
    axis: tuple[str, int] | None,
    args: Sequence[Any],
) -> tuple[ClosedJaxpr, Any]:
    """`fn(*args)`, which gives outputs and what else is known of them, as a jaxpr and that.

    `axis` may be reduced over; not in a `shard_map`, whose types reach into user code.
    """
    known: list[Any] = []  # must hold no tracers: they do not outlive the trace

    def outputs(*args: Any) -> list[Any]:
        outs, known[:] = fn(*args)
        return outs

    closed = jax.make_jaxpr(outputs, axis_env=[axis] if axis else None)(*args)
    return closed, known


# This worker's address for the others. Gloo would take that of the machine's name, which on
# many machines is one of loopback.
_gloo_host: list[str] = []


def connect_workers(
    address: str, worker: int, count: int, own_host: str, timeout: int
) -> None:
    """Joins JAX's coordination service at `address`; others reach this worker at `own_host`.

    As `jax.distributed.initialize`, without its service (which ends with its process, and
    takes all others along), its heartbeats (which abort the process), its handler of
    SIGTERM, and its way to end, which waits for workers that are gone.
    """
    state = _distributed.global_state
    client = _jaxlib.get_distributed_runtime_client(
        address,
        worker,
        init_timeout=timeout,
        heartbeat_timeout=7 * 24 * 3600,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state.process_id, state.num_processes = worker, count
    state.coordinator_address = address
    state.client = client
    if jax.config.jax_cpu_collectives_implementation == "gloo":  # pyright: ignore[reportAttributeAccessIssue]
        _gloo_host.append(own_host)
    # Never taken apart: at the end of the process its threads would abort it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


def running_processes() -> tuple[Any, str, int, int]:
    """JAX's coordination service: its client and address; this process and how many."""
    state = _distributed.global_state
    address = state.coordinator_address or ""
    return state.client, address, state.process_id, state.num_processes


# The coordinator's address, the number of processes, this one's, its device ids.
ClusterFacts = tuple[str | None, int | None, int | None, Sequence[int] | None]


def detect_cluster(
    given: ClusterFacts, method: str | None, timeout_seconds: int
) -> ClusterFacts:
    """`given`, with what JAX finds in the environment for what is None."""
    if method is not None and not cluster_detection_methods()[method].is_env_present():
        return given  # JAX would fail with a KeyError
    return _clusters.ClusterEnv.auto_detect_unset_distributed_params(
        *given, method, timeout_seconds
    )


def cluster_detection_methods() -> dict[str, type[_clusters.ClusterEnv]]:
    """What `method` may be, and the class of JAX's that it names."""
    kinds = _clusters.ClusterEnv._cluster_types
    return {kind.name: kind for kind in kinds if kind.name}
