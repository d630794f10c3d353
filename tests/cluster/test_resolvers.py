"""Resolvers in recorded environments: what Slurm, Kubernetes, MPI and TPUs set and say.

What TensorFlow answers is in tests/conformance/scenarios/cluster_resolvers.py.
"""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from helpers.waiting import SECONDS_TO_HANG

from mirrax._src.cluster.spec import training_cluster
from mirrax.distribute.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    JaxClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

# What `srun --nodes 2 --ntasks-per-node 2` sets for the third of four tasks.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[09-10]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[09-10]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
# What `mpirun -np 3` of Open MPI 4 sets for the second of three processes.
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
# What Google's Kubernetes sets for the second host of a TPU slice.
GKE_TPU = {
    "TPU_WORKER_HOSTNAMES": "tpu-0.svc,tpu-1.svc,tpu-2.svc,tpu-3.svc",
    "TPU_WORKER_ID": "1",
    "TPU_SKIP_MDS_QUERY": "true",
    "MEGASCALE_COORDINATOR_ADDRESS": "tpu-0.svc:8081",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}
READ = ("SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "JAX_", "KUBERNETES_", "JOB_", "CUDA_")

Setter = Callable[[dict[str, str]], None]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setter]:
    """Sets these variables, and none of the others that a resolver reads."""

    def clear() -> None:
        for name in [name for name in os.environ if name.startswith(READ)]:
            monkeypatch.delenv(name)

    clear()

    def set_all(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield set_all
    clear()  # what a resolver has set itself


# Slurm


def test_slurm_without_gpus(environment: Setter) -> None:
    environment({**SLURM, "PATH": "/nowhere"})
    resolver = SlurmClusterResolver()
    found = training_cluster(resolver)
    assert found.addresses[0] == "node09:8888" and found.addresses[3] == "node10:8889"
    assert (found.index, found.names[2]) == (2, "worker 2")
    assert repr(resolver) == "SlurmClusterResolver(task_type='worker', task_id=2)"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_slurm_gives_each_task_its_gpus(environment: Setter) -> None:
    gpus = {}
    for rank in range(4):
        environment(
            {**SLURM, "SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank % 2}"}
        )
        environment({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e"})
        SlurmClusterResolver().cluster_spec()
        gpus[rank] = os.environ["CUDA_VISIBLE_DEVICES"]
    assert gpus == {
        0: "GPU-a,GPU-b",
        1: "GPU-c,GPU-d",
        2: "GPU-a,GPU-b",
        3: "GPU-c,GPU-d",
    }


def test_slurm_leaves_gpus_alone(environment: Setter) -> None:
    environment({**SLURM, "CUDA_VISIBLE_DEVICES": "3"})
    resolver = SlurmClusterResolver(
        gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False
    )
    assert training_cluster(resolver).index == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert resolver.num_accelerators() == {"GPU": 1}


def test_slurm_hides_gpus_from_tasks_that_get_none(environment: Setter) -> None:
    environment({**SLURM, "CUDA_VISIBLE_DEVICES": "0"})
    SlurmClusterResolver(gpus_per_task=0).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_slurm_keeps_its_order_of_nodes_for_a_dictionary(environment: Setter) -> None:
    environment({**SLURM, "SLURM_STEP_NODELIST": "n[9-10],a1"})
    tasks = {"a1": 1, "n10": 1, "n9": 1, "other": 1}
    resolver = SlurmClusterResolver({"worker": 4}, 1, 0, tasks_per_node=tasks)
    assert training_cluster(resolver).addresses == ("n9:1", "n10:1", "a1:1", "other:1")


def test_slurm_with_a_chief(environment: Setter) -> None:
    environment(SLURM)
    resolver = SlurmClusterResolver({"worker": 3, "chief": 1}, gpus_per_node=0)
    found = training_cluster(resolver)
    assert found.names == ("chief 0", "worker 0", "worker 1", "worker 2")
    assert (found.index, found.task_type, found.task_id) == (2, "worker", 1)


@pytest.mark.parametrize(
    ("changes", "kwargs", "message"),
    [
        ({"SLURM_PROCID": "9"}, {}, "SLURM_PROCID is 9, but there are 4 tasks"),
        (
            {"SLURM_LOCALID": "1"},
            {},
            "SLURM_LOCALID of task 2 is 1, but would be 0.*block",
        ),
        (
            {},
            {"jobs": {"worker": 3}},
            "have 3 tasks, but there are 4 .*node\\[09-10\\]",
        ),
        (
            {},
            {"gpus_per_node": 1, "gpus_per_task": None},
            "2 tasks share .* with 1 GPUs",
        ),
        ({}, {"gpus_per_node": 3, "gpus_per_task": 2}, "each need 4, but a node has 3"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "4"},
            {},
            "has 2 nodes, but SLURM_STEP_TASKS_PER_NODE has 1 numbers",
        ),
    ],
)
def test_what_does_not_fit_in_slurm(
    environment: Setter, changes: Any, kwargs: Any, message: str
) -> None:
    environment({**SLURM, **changes})
    with pytest.raises(RuntimeError, match=message):
        SlurmClusterResolver(**{"gpus_per_node": 0, **kwargs})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PROCID", "two", "SLURM_PROCID is 'two', which is not a number"),
        (
            "STEP_NODELIST",
            "n[1-2",
            r"'n\[1-2' in Slurm's list of hosts .* is not a host",
        ),
        (
            "STEP_NODELIST",
            "n[2-1]",
            r"'2-1' in Slurm's list of hosts .* is not a range",
        ),
        (
            "STEP_TASKS_PER_NODE",
            "2(x)",
            r"'2\(x\)' in Slurm's tasks per node .* is not a num",
        ),
    ],
)
def test_what_is_not_clear_in_slurm(
    environment: Setter, name: str, value: str, message: str
) -> None:
    environment({**SLURM, f"SLURM_{name}": value})
    with pytest.raises(ValueError, match=message):
        SlurmClusterResolver(gpus_per_node=0)


def test_outside_of_slurm_the_variable_is_named(environment: Setter) -> None:
    with pytest.raises(
        RuntimeError, match="SLURM_PROCID is not in the .* Start with srun"
    ):
        SlurmClusterResolver()


def test_a_broken_nvidia_smi_says_so(environment: Setter, tmp_path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    program.chmod(0o755)
    environment({**SLURM, "PATH": f"{tmp_path}:/bin"})
    with pytest.raises(RuntimeError, match="no driver\nPass `gpus_per_node`"):
        SlurmClusterResolver()


# Kubernetes


def pods(*names: str, phase: str = "Running") -> SimpleNamespace:
    return SimpleNamespace(
        items=[
            SimpleNamespace(
                metadata=SimpleNamespace(name=name),
                status=SimpleNamespace(host_ip=f"10.0.0.{name[-1]}", phase=phase),
            )
            for name in names
        ]
    )


def fake_module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    return module


def test_kubernetes_as_a_training_cluster() -> None:
    client = SimpleNamespace(
        list_pod_for_all_namespaces=lambda label_selector: pods("train-1", "train-0")
    )
    resolver = KubernetesClusterResolver(override_client=client)
    with pytest.raises(ValueError, match="task_type is not set"):
        training_cluster(resolver)
    resolver.task_type, resolver.task_id = "worker", 1
    found = training_cluster(resolver)
    assert found.addresses == ("10.0.0.0:8470", "10.0.0.1:8470") and found.index == 1


def test_two_pods_of_a_node_are_one_address() -> None:
    client = SimpleNamespace(
        list_pod_for_all_namespaces=lambda label_selector: pods("a-1", "b-1")
    )
    resolver = KubernetesClusterResolver(override_client=client)
    resolver.task_type, resolver.task_id = "worker", 0
    with pytest.raises(ValueError, match='are both "10.0.0.1:8470"'):
        training_cluster(resolver)


def test_a_pod_that_does_not_run_is_named() -> None:
    client = SimpleNamespace(
        list_pod_for_all_namespaces=lambda label_selector: pods("a-1", phase="Pending")
    )
    with pytest.raises(RuntimeError, match='Pod "a-1", .* is in the phase "Pending"'):
        KubernetesClusterResolver(override_client=client).cluster_spec()


@pytest.mark.parametrize("location", KubernetesExecutableLocation)
def test_the_kubernetes_package_is_configured_once(monkeypatch, location) -> None:
    loaded = []
    api = SimpleNamespace(
        list_pod_for_all_namespaces=lambda label_selector: pods("a-1")
    )
    package = fake_module(
        "kubernetes",
        client=SimpleNamespace(CoreV1Api=lambda: api),
        config=SimpleNamespace(
            load_incluster_config=lambda: loaded.append("WITHIN_CLUSTER"),
            load_kube_config=lambda: loaded.append("OFF_CLUSTER"),
        ),
    )
    monkeypatch.setitem(sys.modules, "kubernetes", package)
    resolver = KubernetesClusterResolver(executable_location=location)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["10.0.0.1:8470"]})
    assert loaded == [location.name]
    with pytest.raises(
        ValueError, match="must be a KubernetesExecutableLocation, got 'x'"
    ):
        KubernetesClusterResolver(executable_location="x")  # type: ignore[arg-type]


def test_without_the_kubernetes_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match="pip install kubernetes"):
        KubernetesClusterResolver()


# JAX


def test_jax_finds_slurm(environment: Setter) -> None:
    environment(SLURM)
    resolver = JaxClusterResolver()
    found = training_cluster(resolver)
    assert found.addresses[0] == "node09:62055"  # 61440 + 4711 % 4096
    assert (found.size, found.index, found.task_type) == (4, 2, "worker")
    assert resolver.local_device_ids == (0,)


def test_jax_finds_open_mpi(environment: Setter) -> None:
    environment({**OPEN_MPI, "JAX_COORDINATOR_PORT": "2222"})
    resolver = JaxClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec(
        {"worker": ["10.96.0.1:2222", "", ""]}
    )
    assert training_cluster(resolver).index == 1
    assert resolver.local_device_ids == (1,)


def test_jax_finds_a_tpu_slice(environment: Setter, monkeypatch) -> None:
    environment(GKE_TPU)
    module = "jax._src.clusters.cloud_tpu_cluster"
    monkeypatch.setattr(f"{module}.running_in_cloud_tpu_vm", True)
    monkeypatch.setattr("jax._src.clusters.cluster.running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(f"{module}.socket.gethostbyname", lambda name: "10.0.0.1")
    resolver = JaxClusterResolver()
    found = training_cluster(resolver)
    assert (found.addresses[0], found.size, found.index) == ("tpu-0.svc:8482", 8, 5)
    assert resolver.local_device_ids is None


def test_jax_finds_a_kubernetes_job(environment: Setter, monkeypatch) -> None:
    environment({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"})
    environment({"HOSTNAME": "train-2"})
    owner = SimpleNamespace(controller=True, kind="Job")
    metadata = SimpleNamespace(
        name="train-2", labels={"job-name": "train"}, owner_references=[owner]
    )
    pod = SimpleNamespace(metadata=metadata, spec=SimpleNamespace(subdomain="pods"))
    job = SimpleNamespace(
        metadata=SimpleNamespace(name="train", labels={}),
        spec=SimpleNamespace(parallelism=3),
    )
    core = SimpleNamespace(
        list_namespaced_pod=lambda namespace, field_selector: SimpleNamespace(
            items=[pod]
        )
    )
    batch = SimpleNamespace(read_namespaced_job=lambda name, namespace: job)
    client = SimpleNamespace(
        CoreV1Api=lambda: core,
        BatchV1Api=lambda: batch,
        exceptions=SimpleNamespace(ApiException=RuntimeError),
    )
    config = SimpleNamespace(load_incluster_config=lambda: None)
    package = fake_module("kubernetes", client=client, config=config)
    monkeypatch.setitem(sys.modules, "kubernetes", package)
    module = "jax._src.clusters.k8s_cluster"
    monkeypatch.setattr(f"{module}.K8sCluster._namespace", lambda: "default")
    monkeypatch.setattr(f"{module}.socket.gethostbyname", lambda name: "10.0.0.7")
    found = training_cluster(JaxClusterResolver())
    assert (found.addresses[0], found.size) == ("train-0.pods:55527", 3)
    assert found.names[found.index or 0] == "worker 2"


def test_jax_asks_mpi4py_once_and_only_if_told(
    environment: Setter, monkeypatch
) -> None:
    broadcasts = []

    def bcast(value: str, root: int) -> str:
        broadcasts.append(value)
        return "first:2222"

    world = SimpleNamespace(
        Get_rank=lambda: 1,
        Get_size=lambda: 2,
        bcast=bcast,
        Split_type=lambda kind: SimpleNamespace(Get_rank=lambda: 0),
    )
    mpi = SimpleNamespace(COMM_WORLD=world, COMM_TYPE_SHARED=0)
    monkeypatch.setitem(sys.modules, "mpi4py", fake_module("mpi4py", MPI=mpi))
    with pytest.raises(RuntimeError, match="JAX found no cluster"):
        JaxClusterResolver()
    resolver = JaxClusterResolver(cluster_detection_method="mpi4py")
    for _ in range(3):
        assert training_cluster(resolver).addresses == ("first:2222", "")
    assert len(broadcasts) == 1


def test_jax_is_told_everything(environment: Setter) -> None:
    environment({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_LOCAL_DEVICE_IDS": "2,3"})
    resolver = JaxClusterResolver(num_processes=2, process_id=1)
    assert resolver.master() == resolver.master("worker", 0) == "a:1"
    assert resolver.master(rpc_layer="grpc") == "grpc://a:1"
    assert resolver.master("worker", 1, "grpc") == ""
    assert resolver.local_device_ids == (2, 3)
    assert JaxClusterResolver("b:1", 2, 0, local_device_ids=1).local_device_ids == (1,)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            {},
            RuntimeError,
            "`coordinator_address`, `num_processes`, `process_id` must be",
        ),
        (
            {"coordinator_address": "a:1"},
            RuntimeError,
            "`num_processes`, `process_id` must",
        ),
        (
            {"cluster_detection_method": "slurm"},
            RuntimeError,
            r"JAX found no cluster with slurm.*\(srun\)",
        ),
        (
            {"cluster_detection_method": "pbs"},
            ValueError,
            "is 'pbs', but JAX has ompi, slurm, mpi4py",
        ),
        (
            {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
            ValueError,
            "`process_id` is 2, but must be from 0 to `num_processes` - 1, which is 1",
        ),
    ],
)
def test_what_jax_does_not_find_is_named(
    environment: Setter, kwargs: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        JaxClusterResolver(**kwargs)


# All


class OwnResolver(ClusterResolver):
    """As users write them."""

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec({"worker": ["a:1", "b:2"], "ps": ["p:1"]})

    def master(self, task_type=None, task_id=None, rpc_layer=None) -> str:
        return ""


def test_accelerators_are_those_of_the_task(monkeypatch) -> None:
    devices = [
        SimpleNamespace(process_index=process, platform="gpu")
        for process in (0, 0, 0, 1, 1)
    ]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "local_devices", lambda: devices[:3])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    resolver = OwnResolver()
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.num_accelerators() == {"GPU": 3}
    assert resolver.num_accelerators("worker", 0) == {"GPU": 3}
    assert resolver.num_accelerators("worker", 1) == {"GPU": 2}
    assert resolver.num_accelerators("ps", 0) == {}
    with pytest.raises(ValueError, match='"worker" has no task 2'):
        resolver.num_accelerators("worker", 2)
    monkeypatch.setattr(jax, "process_count", lambda: 1)  # not joined yet
    assert resolver.num_accelerators("worker", 1) == {}
    assert resolver.num_accelerators()["TPU"] == 0


def test_resolvers_start_no_backend() -> None:
    code = """
import mirrax as mx
from mirrax._src.base.jax_compat import backend_started
from mirrax._src.cluster.spec import training_cluster
resolvers = mx.distribute.cluster_resolver
spec = resolvers.ClusterSpec({"worker": ["a:1"]})
for resolver in (
    resolvers.TFConfigClusterResolver(),
    resolvers.SimpleClusterResolver(spec, task_type="worker", task_id=0),
    resolvers.JaxClusterResolver("a:1", 1, 0),
):
    training_cluster(resolver), resolver.master(), repr(resolver)
    assert not backend_started()
resolver = resolvers.TFConfigClusterResolver()
assert resolver.num_accelerators() == {}
assert backend_started()
"""
    clean = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    subprocess.run(
        [sys.executable, "-c", "import mirrax.distribute.cluster_resolver\n" + code],
        check=True,
        timeout=SECONDS_TO_HANG,
        env={**clean, "JAX_PLATFORMS": "cpu"},
    )


def test_wrong_arguments_say_what_is_wanted() -> None:
    with pytest.raises(TypeError, match=r"Wrap it: .ClusterSpec"):
        SimpleClusterResolver({"worker": ["a:1"]})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="A UnionResolver joins resolvers, got 5"):
        UnionResolver(5)  # type: ignore[arg-type]
    first = SimpleClusterResolver(ClusterSpec({"worker": {0: "a:1", 2: "c:1"}}))
    with pytest.raises(KeyError, match="'worker' has task 0 in two of the resolvers"):
        UnionResolver(first, first).cluster_spec()


def test_a_union_reads_tf_config(monkeypatch) -> None:
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}',
    )
    chief = SimpleClusterResolver(ClusterSpec({"chief": ["c:1"]}))
    joined = UnionResolver(TFConfigClusterResolver(), chief)
    found = training_cluster(joined)
    assert found.names == ("chief 0", "worker 0", "worker 1") and found.index == 2
    assert joined.environment is None and joined.rpc_layer is None
