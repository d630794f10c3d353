"""`MultiWorkerMirroredStrategy`: one replica on each device of several machines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base.context import Context
from mirrax._src.base.devices import resolve_devices
from mirrax._src.base.hiding import all_brief
from mirrax._src.base.jax_compat import is_staging
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import Args, Fn, Kwargs, PerReplica, PyTree, one_copy
from mirrax._src.cluster import resolvers, runtime
from mirrax._src.cluster.options import ClusterOptions
from mirrax._src.cluster.resolver_tf_config import TFConfigClusterResolver
from mirrax._src.cluster.resolvers import ClusterResolver
from mirrax._src.cluster.spec import training_cluster
from mirrax._src.collectives.options import (
    CommunicationImplementation,
    CommunicationOptions,
)
from mirrax._src.collectives.programs import first_of_all, run_on_parts
from mirrax._src.input.splitting import Share
from mirrax._src.strategies.strategy import Strategy

# Up to this size initial values travel with the message that compares them.
_SMALL_BYTES = 64 * 1024


@all_brief
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all devices of several machines.

    Every worker runs the same program and makes the strategy first of all, before anything
    uses JAX's devices. Who the workers are is in the environment variable `TF_CONFIG`, or
    in what another `cluster_resolver` says; without either it is those that
    `jax.distributed.initialize` has brought together, or this one with its own devices. `mirrax run --workers 2 train.py` starts workers on one machine.

    >>> strategy = mx.distribute.MultiWorkerMirroredStrategy()
    >>> strategy.num_replicas_in_sync, strategy.cluster_resolver.task_type
    (1, None)

    Args:
        cluster_resolver: Says who the workers are; a `TFConfigClusterResolver` by default.
        communication_options: How values travel: a `CommunicationOptions`, whose
            `timeout_seconds` is the default of `step_timeout`.
        communication: The older form of it: a `CollectiveCommunication`.
        heartbeat: Seconds without a sign of life after which a worker counts as lost, 20 by
            default. One that dies is noticed at once.
        step_timeout: Seconds that a worker may be behind the others, 600 by default.
        join_timeout: Seconds to wait for all workers at the start, 300 by default.
        debug: Whether the workers compare each program before they first run it.

    Raises:
        ValueError: If the cluster is not described right.
        UnavailableError: If workers are missing.
    """

    __module__ = "mirrax.distribute"

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        communication: CommunicationImplementation | str | None = None,
        *,
        heartbeat: float | None = None,
        step_timeout: float | None = None,
        join_timeout: float | None = None,
        debug: bool | None = None,
    ) -> None:
        options = _communication(communication_options, communication)
        self._resolver = cluster_resolver or TFConfigClusterResolver()
        task = training_cluster(self._resolver)
        if task.task_type == "ps":
            raise ValueError(
                f"This process is a parameter server (task type 'ps', {task.task_id}), which "
                "MultiWorkerMirroredStrategy does not use: it trains on workers only. Leave "
                '"ps" out of the cluster.'
            )
        cluster_options = ClusterOptions.of_environment(
            heartbeat=heartbeat,
            step_timeout=step_timeout or options.timeout_seconds,
            join_timeout=join_timeout,
            debug=debug,
        )
        self._cluster: runtime.Cluster | None = None
        if task.index is not None and task.size > 1:
            resolvers.choose_devices(self._resolver)
            self._cluster = runtime.join_cluster(
                task.addresses, task.names, task.index, cluster_options
            )
        elif not task.size and jax.distributed.is_initialized():
            self._cluster = runtime.join_running_jax(cluster_options)
            self._resolver = resolvers.resolver_of(self._cluster)
            task = training_cluster(self._resolver)
        if self._cluster is not None:
            devices = resolvers.agree_on_devices(self._cluster)
        else:
            devices = resolve_devices(None)
            is_alone_on_cpu = not task.size and devices[0].platform == "cpu"
            devices = devices[:1] if is_alone_on_cpu else devices
        mesh = ReplicaMesh(devices, self._cluster)  # pyright: ignore
        extended = self.extended_class(self, options=options, task=task)
        super().__init__(extended, mesh)
        self.extended.check_options(options)
        if self._cluster is not None:
            self._connect()

    def _connect(self) -> None:
        """Has the devices' connections made, for which Gloo waits 30 s and no longer."""
        try:
            with self._explaining():
                self._first_of_all(np.zeros(1, np.float32))
        except jax.errors.JaxRuntimeError as error:
            if "Duplicate GPU" in str(error):
                raise ValueError(
                    "Two workers on one machine use the same GPU. Give each its own: "
                    "`mirrax run` divides them, or set CUDA_VISIBLE_DEVICES for each worker. JAX "
                    f"says: {str(error).splitlines()[0]}"
                ) from error
            raise

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Who the workers are, and which this one is."""
        return self._resolver

    @property
    def input_share(self) -> Share:
        if self._cluster is None:
            return super().input_share
        count = len(self.replica_mesh.local_ids)
        return Share(self._cluster.size, self._cluster.worker, count)

    def _run(self, fn: Fn, args: Args, kwargs: Kwargs, here: Context) -> PyTree:
        if self._cluster is None:
            return super()._run(fn, args, kwargs, here)
        if here.frame is None and not is_staging():  # else the whole program counts
            self._cluster.note_run()
        with self._cluster.explaining():
            return super()._run(fn, args, kwargs, here)

    @contextlib.contextmanager
    def entered(self, what: str) -> Iterator[None]:
        with self._explaining(), super().entered(what):
            yield

    def _explaining(self) -> contextlib.AbstractContextManager[None]:
        """Says which worker is lost, where a call fails because of that."""
        return self._cluster.explaining() if self._cluster else contextlib.nullcontext()

    def should_stop(self) -> bool:
        return self._cluster.should_stop() if self._cluster else super().should_stop()

    def request_stop(self, reason: str = "requested") -> None:
        if self._cluster is None:
            super().request_stop(reason)
        else:
            self._cluster.request_stop(reason)

    def initial_on_all_workers(self, array: jax.Array) -> jax.Array:
        """The first worker's `array`; the others' only has to have its shape and dtype."""
        if self._cluster is None:
            return array
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = self.initial_on_all_workers(jax.random.key_data(array))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        own = np.asarray(array)
        facts = f"{own.dtype.name}{list(own.shape)}"
        is_small = own.nbytes <= _SMALL_BYTES
        is_first = self._cluster.worker == 0
        data = own.tobytes().hex() if is_small and is_first else ""
        found = self._cluster.agree("a new variable", [facts, data])
        for k, (theirs, _) in enumerate(found):
            if theirs != found[0][0]:
                raise ValueError(
                    "Workers make different variables at the same place: "
                    f"{found[0][0]} on {self._cluster.names[0]}, {theirs} on "
                    f"{self._cluster.names[k]}."
                )
        if is_small:
            received = bytes.fromhex(found[0][1])
            return jnp.asarray(np.frombuffer(received, own.dtype).reshape(own.shape))
        # On another thread, because a program cannot be launched while one is traced.
        with self._explaining(), ThreadPoolExecutor(1) as thread:
            return jnp.asarray(thread.submit(self._broadcast, own).result())

    def _broadcast(self, own: np.ndarray) -> np.ndarray:
        """The first worker's bytes, in sizes that need few programs."""
        flat = np.zeros((1 << (own.nbytes - 1).bit_length()) // 4, np.int32)
        flat.view(np.uint8)[: own.nbytes] = np.frombuffer(own.tobytes(), np.uint8)
        whole = np.asarray(self._first_of_all(flat))
        return whole.view(np.uint8)[: own.nbytes].view(own.dtype).reshape(own.shape)

    def _first_of_all(self, own: np.ndarray) -> jax.Array:
        """The first worker's array, by a program on all devices."""
        mesh = self.replica_mesh
        parts = PerReplica([own] * len(mesh.local_ids), mesh.equal_shapes(own))
        whole = run_on_parts(first_of_all, mesh, [parts])[0]
        return one_copy(jax.block_until_ready(whole))


def _communication(
    options: CommunicationOptions | None,
    communication: CommunicationImplementation | str | None,
) -> CommunicationOptions:
    if options is not None and not isinstance(options, CommunicationOptions):
        raise TypeError(
            f"`communication_options` must be a CommunicationOptions, got {options!r}."
        )
    if communication is None:
        return options or CommunicationOptions()
    if options is not None:
        raise ValueError(
            "`communication` is the older form of `communication_options`; give one of them, "
            f"not {communication!r} and {options!r}."
        )
    return CommunicationOptions(implementation=communication)
