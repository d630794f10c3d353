"""Clusters and those that find them (8.3), from recorded environments."""

import json
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from . import scenario

WORKERS = {"worker": ["a:1", "b:2"]}
CLUSTER = {"chief": ["c:0"], "worker": ["a:1", "b:2"], "ps": ["p:3"]}
TASK = {"type": "worker", "index": 1}
VARIABLES = ("SLURM_", "TF_CONFIG", "CUDA_VISIBLE_DEVICES")

# What `srun --nodes 2 --ntasks 4` sets, as far as it is read.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}
UNEVEN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "t02n[13,41],t03n05",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


@contextmanager
def environment(variables):
    """These variables, and none of the others that a resolver reads."""
    before = {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)}
    before |= {k: os.environ[k] for k in variables if k in os.environ}
    _replace(before, variables)
    try:
        yield
    finally:
        ours = [k for k in os.environ if k.startswith(VARIABLES)]
        _replace({*ours, *variables}, before)


def _replace(old, new):
    for name in old:
        os.environ.pop(name, None)
    os.environ.update(new)


def tf_config(config):
    return environment({"TF_CONFIG": json.dumps(config)})


def simple(api, cluster=WORKERS, **kwargs):
    spec = api.ClusterSpec(cluster)
    return api.distribute.cluster_resolver.SimpleClusterResolver(spec, **kwargs)


# ClusterSpec


@scenario("8.3")
def a_cluster_of_lists(api):
    cluster = api.ClusterSpec(CLUSTER)
    return {
        "jobs": cluster.jobs,
        "dict": cluster.as_dict(),
        "count": [cluster.num_tasks(job) for job in cluster.jobs],
        "indices": [cluster.task_indices(job) for job in cluster.jobs],
        "tasks": [cluster.job_tasks(job) for job in cluster.jobs],
        "address": cluster.task_address("worker", 1),
        "is": bool(cluster),
        "text": repr(cluster),
    }


@scenario("8.3")
def a_cluster_of_some_tasks(api):
    cluster = api.ClusterSpec({"worker": {3: "d:3", 1: "b:1"}, "ps": ("p:1",)})
    return {
        "dict": cluster.as_dict(),
        "count": cluster.num_tasks("worker"),
        "indices": cluster.task_indices("worker"),
        "tasks": cluster.job_tasks("worker"),
        "address": cluster.task_address("worker", 3),
        "text": repr(cluster),
    }


@scenario("8.3")
def a_cluster_of_all_tasks_by_index(api):
    cluster = api.ClusterSpec({"worker": {"1": "b:1", "0": "a:1"}})
    return [cluster.as_dict(), cluster.task_indices("worker"), repr(cluster)]


@scenario("8.3")
def a_cluster_of_nothing(api):
    cluster = api.ClusterSpec({})
    return [bool(cluster), cluster.jobs, cluster.as_dict(), repr(cluster)]


@scenario("8.3")
def a_job_without_tasks(api):
    cluster = api.ClusterSpec({"worker": []})
    indices = cluster.task_indices("worker")
    return [bool(cluster), cluster.num_tasks("worker"), indices, cluster.as_dict()]


@scenario("8.3", differs="an empty job has no tasks; TensorFlow fails", expect=[])
def the_tasks_of_a_job_without_tasks(api):
    return api.ClusterSpec({"worker": []}).job_tasks("worker")


@scenario("8.3")
def a_cluster_of_a_cluster(api):
    first = api.ClusterSpec(CLUSTER)
    second = api.ClusterSpec(first)
    return [second.as_dict()["worker"], first == second, first != second]


@scenario("8.3")
def clusters_do_not_change_with_what_they_were_made_of(api):
    addresses = ["a:1"]
    cluster = api.ClusterSpec({"worker": addresses})
    addresses.append("b:2")
    cluster.as_dict()["worker"].append("c:3")
    return cluster.as_dict()


@scenario("8.3")
def clusters_are_compared(api):
    cluster = api.ClusterSpec(WORKERS)
    others = [
        api.ClusterSpec({"worker": {0: "a:1", 1: "b:2"}}),
        api.ClusterSpec({"worker": ["b:2", "a:1"]}),
        api.ClusterSpec({}),
        {"worker": {0: "a:1", 1: "b:2"}},
        {"worker": ["a:1", "b:2"]},
        None,
        5,
    ]
    return [cluster == other for other in others] + [cluster != WORKERS]


@scenario("8.3")
def a_cluster_is_not_hashable(api):
    return hash(api.ClusterSpec(WORKERS))


@scenario("8.3", cases=[("num_tasks",), ("task_indices",), ("job_tasks",)])
def an_unknown_job(api, method):
    return getattr(api.ClusterSpec(CLUSTER), method)("evaluator")


@scenario("8.3")
def an_unknown_task(api):
    cluster = api.ClusterSpec(CLUSTER)
    tasks = [("evaluator", 0), ("worker", 2), ("worker", -1), ("worker", None)]
    return [api.attempt(lambda t=task: cluster.task_address(*t)) for task in tasks]


@scenario("8.3")
def what_is_no_cluster(api):
    wrong = [
        None,
        5,
        ["a:1"],
        "a:1",
        {"worker": "a:1"},
        {"worker": 5},
        {"worker": None},
        {"worker": [5]},
        {"worker": [None]},
        {"worker": {"x": "a:1"}},
        {5: ["a:1"]},
    ]
    return [api.attempt(lambda c=cluster: api.ClusterSpec(c)) for cluster in wrong]


@scenario("8.3", differs="a task's index counts from 0", expect=ValueError)
def a_task_before_the_first(api):
    return api.ClusterSpec({"worker": {-1: "a:1"}}).num_tasks("worker")


@scenario("8.3", differs="two tasks with one index are an error", expect=ValueError)
def one_index_in_two_spellings(api):
    return api.ClusterSpec({"worker": {"0": "a:1", 0: "b:1"}}).num_tasks("worker")


@scenario("8.3", differs="an index is a whole number", expect=ValueError)
def half_an_index(api):
    return api.ClusterSpec({"worker": {0.5: "a:1"}}).num_tasks("worker")


# ClusterResolver and SimpleClusterResolver


@scenario("8.3")
def a_resolver_of_ones_own(api):
    class Resolver(api.distribute.cluster_resolver.ClusterResolver):
        def cluster_spec(self):
            return api.ClusterSpec(WORKERS)

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return "somewhere"

    resolver = Resolver()
    before = [resolver.task_type, resolver.task_id, resolver.environment]
    resolver.task_type, resolver.task_id = "worker", 1
    return [before, resolver.task_type, resolver.task_id]


@scenario("8.3")
def a_resolver_needs_two_methods(api):
    class Resolver(api.distribute.cluster_resolver.ClusterResolver):
        def cluster_spec(self):
            return api.ClusterSpec(WORKERS)

    return Resolver()


@scenario("8.3", "1.2")
def accelerators_of_a_machine_without_any(api):
    class Resolver(api.distribute.cluster_resolver.ClusterResolver):
        def cluster_spec(self):
            return api.ClusterSpec(WORKERS)

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return ""

    resolver = Resolver()
    counts = resolver.num_accelerators()
    return [dict(counts), counts["GPU"], dict(resolver.num_accelerators("worker", 1))]


@scenario("8.3")
def a_resolver_that_is_told_nothing(api):
    resolver = simple(api, {})
    return {
        "cluster": resolver.cluster_spec().as_dict(),
        "task": [resolver.task_type, resolver.task_id],
        "master": resolver.master(),
        "environment": resolver.environment,
        "accelerators": resolver.num_accelerators(),
        "rpc_layer": resolver.rpc_layer,
    }


@scenario("8.3")
def a_resolver_that_is_told_everything(api):
    resolver = simple(
        api,
        CLUSTER,
        master="there",
        task_type="worker",
        task_id=1,
        environment="mine",
        num_accelerators={"GPU": 8},
        rpc_layer="http",
    )
    return {
        "task": [resolver.task_type, resolver.task_id],
        "masters": [
            resolver.master(),
            resolver.master("worker", 0),
            resolver.master("worker"),
            resolver.master("ps", 0, rpc_layer="grpc"),
            resolver.master(rpc_layer="grpc"),
        ],
        "environment": resolver.environment,
        "accelerators": resolver.num_accelerators("worker", 0),
        "rpc_layer": resolver.rpc_layer,
        "missing": api.attempt(lambda: resolver.master("worker", 2)),
    }


@scenario("8.3")
def a_resolver_can_be_told_later(api):
    resolver = simple(api)
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "chief", 0, "grpc"
    task = [resolver.task_type, resolver.task_id, resolver.rpc_layer]
    return [task, resolver.master()]


@scenario("8.3")
def a_resolver_takes_a_cluster_spec_only(api):
    make = api.distribute.cluster_resolver.SimpleClusterResolver
    return [
        api.attempt(lambda: make(WORKERS)),
        api.attempt(lambda: make(None)),
        api.attempt(lambda: make(api.ClusterSpec(WORKERS), master=5)),
    ]


# UnionResolver


def union(api, *clusters, **kwargs):
    parts = [simple(api, cluster) for cluster in clusters]
    return api.distribute.cluster_resolver.UnionResolver(*parts, **kwargs)


@scenario("8.3")
def a_union_joins_lists(api):
    joined = union(api, CLUSTER, {"worker": ["d:4"], "evaluator": ["e:5"]})
    return joined.cluster_spec().as_dict()


@scenario("8.3")
def a_union_keeps_indices(api):
    joined = union(api, {"worker": {5: "f:5"}}, WORKERS, {"worker": {3: "d:3"}})
    return joined.cluster_spec().as_dict()


@scenario("8.3")
def a_union_of_the_same_task(api):
    return union(api, {"worker": {1: "f:5"}}, WORKERS).cluster_spec()


@scenario("8.3")
def a_union_is_its_first_resolver(api):
    first = simple(
        api,
        master="there",
        task_type="worker",
        task_id=1,
        environment="mine",
        num_accelerators={"GPU": 2},
        rpc_layer="http",
    )
    joined = api.distribute.cluster_resolver.UnionResolver(first, simple(api, CLUSTER))
    return {
        "task": [joined.task_type, joined.task_id, joined.rpc_layer],
        "environment": joined.environment,
        "accelerators": joined.num_accelerators(),
        "masters": [
            joined.master(),
            joined.master("worker", 3),
            joined.master("ps", 0),
        ],
    }


@scenario("8.3")
def a_union_can_be_told(api):
    joined = union(api, WORKERS, task_type="chief", task_id=3, rpc_layer="grpc")
    before = [joined.task_type, joined.task_id, joined.rpc_layer]
    masters = [joined.master(), joined.master("worker", 0)]
    joined.task_type, joined.task_id, joined.rpc_layer = "worker", 1, "http"
    return [before, masters, joined.task_type, joined.task_id, joined.rpc_layer]


@scenario(
    "8.3", differs="0 is a task, too; TensorFlow asks the first resolver", expect=0
)
def a_union_that_is_task_0(api):
    first = simple(api, task_type="worker", task_id=1)
    return api.distribute.cluster_resolver.UnionResolver(first, task_id=0).task_id


@scenario("8.3")
def a_union_of_something_else(api):
    make = api.distribute.cluster_resolver.UnionResolver
    return [api.attempt(make), api.attempt(lambda: make(simple(api), "x"))]


# TFConfigClusterResolver


def tf_config_answers(api, **kwargs):
    resolver = api.distribute.cluster_resolver.TFConfigClusterResolver(**kwargs)
    return {
        "cluster": api.attempt(lambda: resolver.cluster_spec().as_dict()),
        "type": api.attempt(lambda: resolver.task_type),
        "id": api.attempt(lambda: resolver.task_id),
        "master": api.attempt(resolver.master),
        "rpc_layer": api.attempt(lambda: resolver.rpc_layer),
        "environment": resolver.environment,
    }


TF_CONFIGS = {
    "empty object": {},
    "worker": {"cluster": WORKERS, "task": TASK},
    "index as string": {"cluster": WORKERS, "task": {**TASK, "index": "1"}},
    "one worker": {"cluster": {"worker": ["a:1"]}, "task": {**TASK, "index": 0}},
    "sparse": {"cluster": {"worker": {"1": "b:1"}}, "task": TASK},
    "by index": {"cluster": {"worker": {"0": "a:1", "1": "b:1"}}, "task": TASK},
    "all jobs": {"cluster": CLUSTER, "task": {"type": "ps", "index": 0}},
    "evaluator": {"cluster": CLUSTER, "task": {"type": "evaluator", "index": 0}},
    "foreign job": {"cluster": {"x": ["a:1"]}, "task": {"type": "x", "index": 0}},
    "no such task": {"cluster": WORKERS, "task": {"type": "worker", "index": 2}},
    "no task": {"cluster": WORKERS},
    "no type": {"cluster": WORKERS, "task": {"index": 1}},
    "no index": {"cluster": WORKERS, "task": {"type": "worker"}},
    "no cluster": {"task": TASK},
    "rpc layer": {"cluster": WORKERS, "task": TASK, "rpc_layer": "grpc"},
    "session master": {"cluster": WORKERS, "task": TASK, "session_master": "m"},
    "null cluster": {"cluster": None, "task": TASK},
    "list for a cluster": {"cluster": ["a:1"], "task": TASK},
    "string for tasks": {"cluster": {"worker": "a:1"}, "task": TASK},
    "word for an index": {"cluster": WORKERS, "task": {**TASK, "index": "x"}},
    "number for a type": {"cluster": WORKERS, "task": {**TASK, "type": 5}},
}


@scenario("8.3", cases=[(name,) for name in TF_CONFIGS])
def tf_config_of(api, name):
    with tf_config(TF_CONFIGS[name]):
        return tf_config_answers(api)


@scenario("8.3")
def without_a_tf_config(api):
    with environment({}):
        return tf_config_answers(api)


@scenario("8.3", differs="an empty TF_CONFIG is none", expect={})
def a_tf_config_of_nothing(api):
    with environment({"TF_CONFIG": ""}):
        resolver = api.distribute.cluster_resolver.TFConfigClusterResolver()
        return resolver.cluster_spec().as_dict()


@scenario("8.3", cases=[("{",), ("{'cluster': {}}",), ("cluster",), ('{"a": 1} x',)])
def a_tf_config_that_is_not_json(api, text):
    with environment({"TF_CONFIG": text}):
        return api.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec()


@scenario(
    "8.3",
    cases=[("[]",), ('"x"',)],
    differs="what is no object is not taken for an empty one",
    expect=ValueError,
)
def a_tf_config_that_is_no_object(api, text):
    with environment({"TF_CONFIG": text}):
        resolver = api.distribute.cluster_resolver.TFConfigClusterResolver()
        return resolver.cluster_spec().as_dict()


@scenario(
    "8.3",
    cases=[("null",), ("5",)],
    differs="a wrong value is a ValueError",
    expect=ValueError,
)
def a_tf_config_that_is_a_scalar(api, text):
    with environment({"TF_CONFIG": text}):
        return api.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec()


@scenario("8.3", differs="one key twice is an error", expect=ValueError)
def a_tf_config_with_one_key_twice(api):
    with environment({"TF_CONFIG": '{"task": {"index": 0, "index": 1}}'}):
        return api.distribute.cluster_resolver.TFConfigClusterResolver().task_id


@scenario("8.3")
def tf_config_and_other_words(api):
    with tf_config(TF_CONFIGS["rpc layer"]):
        return tf_config_answers(
            api, task_type="worker", task_id="0", rpc_layer="http", environment="mine"
        )


@scenario("8.3")
def tf_config_is_read_each_time(api):
    resolver = api.distribute.cluster_resolver.TFConfigClusterResolver()
    with tf_config(TF_CONFIGS["worker"]):
        first = [resolver.task_id, resolver.master("worker", 0)]
        resolver.task_id = 0
        second = [resolver.task_id, resolver.master()]
    with environment({}):
        return [first, second, resolver.task_type, resolver.task_id]


@scenario("8.3", "1.2")
def tf_config_and_accelerators(api):
    with tf_config(TF_CONFIGS["worker"]):
        resolver = api.distribute.cluster_resolver.TFConfigClusterResolver()
        return dict(resolver.num_accelerators())


# SlurmClusterResolver


def slurm_answers(api, variables, **kwargs):
    with environment(variables):
        resolver = api.distribute.cluster_resolver.SlurmClusterResolver(**kwargs)
        before = [*resolver.get_task_info(), resolver.master()]
        cluster = resolver.cluster_spec().as_dict()
        return {
            "before": before,
            "cluster": cluster,
            "task": resolver.get_task_info(),
            "masters": [resolver.master(), resolver.master("worker", 0, "http")],
            "accelerators": resolver.num_accelerators(),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "rpc_layer": resolver.rpc_layer,
        }


@scenario("8.3")
def slurm_step(api):
    return slurm_answers(api, SLURM)


@scenario("8.3")
def slurm_step_with_uneven_nodes(api):
    return slurm_answers(api, UNEVEN)


@scenario("8.3", cases=[("0",), ("1",), ("2",), ("3",)])
def slurm_task(api, rank):
    local = {"SLURM_PROCID": rank, "SLURM_LOCALID": str(int(rank) % 2)}
    return slurm_answers(api, {**SLURM, **local})


@scenario("8.3")
def slurm_jobs(api):
    return slurm_answers(api, SLURM, jobs={"worker": 3, "ps": 1}, port_base=2222)


@scenario("8.3")
def slurm_with_everything_given(api):
    variables = {"SLURM_PROCID": "3"}
    return slurm_answers(
        api,
        variables,
        jobs={"worker": 4},
        gpus_per_node=8,
        gpus_per_task=3,
        tasks_per_node={"m2": 2, "m1": 2},
        auto_set_gpu=False,
        rpc_layer="http",
    )


@scenario("8.3")
def slurm_with_tasks_per_node(api):
    variables = {**SLURM}
    del variables["SLURM_STEP_TASKS_PER_NODE"]
    return slurm_answers(api, variables, tasks_per_node=2)


@scenario("8.3")
def slurm_counts_gpus_with_nvidia_smi(api):
    variables = {**SLURM}
    del variables["CUDA_VISIBLE_DEVICES"]
    with api.directory() as path:
        lines = "".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})\n" for i in range(4))
        program = Path(path) / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<END\n{lines}END\n")
        program.chmod(0o755)
        return slurm_answers(api, {**variables, "PATH": f"{path}:{os.environ['PATH']}"})


@scenario("8.3")
def slurm_and_a_broken_nvidia_smi(api):
    variables = {**SLURM}
    del variables["CUDA_VISIBLE_DEVICES"]
    with api.directory() as path:
        program = Path(path) / "nvidia-smi"
        program.write_text("#!/bin/sh\nexit 9\n")
        program.chmod(0o755)
        return slurm_answers(api, {**variables, "PATH": f"{path}:/usr/bin:/bin"})


@scenario("8.3", differs="a machine without nvidia-smi has no GPUs", expect=0)
def slurm_without_nvidia_smi(api):
    variables = {**SLURM, "PATH": "/nowhere"}
    del variables["CUDA_VISIBLE_DEVICES"]
    return slurm_answers(api, variables)["accelerators"]["GPU"]


NODES = ["node01:8888", "node01:8889", "node02:8888", "node02:8889"]


@scenario(
    "8.3",
    cases=[("",), ("-1",), ("NoDevFiles",)],
    differs="these mean no GPUs, and tasks without GPUs train on CPUs",
    expect={"worker": NODES},
)
def slurm_with_gpus_hidden(api, visible):
    answers = slurm_answers(api, {**SLURM, "CUDA_VISIBLE_DEVICES": visible})
    return answers["cluster"]


@scenario("8.3", differs="tasks without GPUs train on CPUs", expect={"worker": NODES})
def slurm_without_gpus(api):
    return slurm_answers(api, SLURM, gpus_per_node=0)["cluster"]


@scenario("8.3", differs="it says that tasks would get no GPU", expect=RuntimeError)
def slurm_with_fewer_gpus_than_tasks(api):
    return slurm_answers(api, SLURM, gpus_per_node=1)


@scenario(
    "8.3", differs="of the GPUs that are visible each task gets its part", expect="5"
)
def slurm_with_some_gpus(api):
    variables = {**SLURM, "CUDA_VISIBLE_DEVICES": "3,5"}
    variables |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    return slurm_answers(api, variables)["visible"]


@scenario(
    "8.3",
    differs="nodes are in Slurm's order, in which tasks are numbered, not the alphabet's",
    expect=["n9:8888", "n10:8888"],
)
def slurm_with_node_10_after_node_9(api):
    variables = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    variables |= {
        "SLURM_STEP_NODELIST": "n[9-10]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    return slurm_answers(api, variables)["cluster"]["worker"]


@scenario("8.3", cases=[(n,) for n in ("PROCID", "STEP_NUM_TASKS", "STEP_NODELIST")])
def slurm_without(api, name):
    variables = {**SLURM}
    del variables[f"SLURM_{name}"]
    return slurm_answers(api, variables)


@scenario("8.3")
def outside_of_slurm(api):
    return slurm_answers(api, {})


@scenario("8.3")
def slurm_with_numbers_that_do_not_fit(api):
    return [
        api.attempt(lambda: slurm_answers(api, SLURM, jobs={"worker": 3})),
        api.attempt(lambda: slurm_answers(api, SLURM, gpus_per_task=3)),
        api.attempt(lambda: slurm_answers(api, SLURM, tasks_per_node=3)),
    ]


HOSTS = [
    "node1",
    "n[1-2],m5,o[3-4,6,7-9]",
    "n[01-03]",
    "n[08-11]",
    "a-b[1-2],c.d-e",
    "[1-2]",
    "n[1],m[2,4]",
]


def hosts_of(api, text):
    """The hosts of a list, as the resolver with one task on each has them."""
    variables = {**SLURM, "SLURM_STEP_NODELIST": text, "SLURM_PROCID": "0"}
    for count in range(1, 20):
        jobs = {"worker": count}
        try:
            answers = slurm_answers(api, variables, jobs=jobs, tasks_per_node=1)
            return sorted(answers["cluster"]["worker"])
        except RuntimeError:
            continue
    return None


@scenario("8.3", differs="no node is left out silently", expect=RuntimeError)
def slurm_with_fewer_numbers_than_nodes(api):
    variables = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "2"}
    return slurm_answers(api, {**variables, "SLURM_PROCID": "0"})["cluster"]


@scenario("8.3", cases=[(text,) for text in HOSTS])
def slurm_hosts(api, text):
    return hosts_of(api, text)


@scenario(
    "8.3", cases=[("n[1-2",), ("n[[1]]",), ("n[1-2-3]",), ("n[a-b]",), ("n1,,m1",)]
)
def slurm_hosts_that_are_not_clear(api, text):
    return hosts_of(api, text)


@scenario(
    "8.3",
    differs="Slurm writes such lists",
    expect=["r1n1:8888", "r1n2:8888", "r2n1:8888", "r2n2:8888"],
)
def slurm_hosts_with_two_numbers(api):
    return hosts_of(api, "r[1-2]n[1-2]")


@scenario("8.3", cases=[("x",), ("2(3)",), ("2,",), ("-1",)])
def slurm_tasks_that_are_not_clear(api, text):
    return slurm_answers(api, {**SLURM, "SLURM_STEP_TASKS_PER_NODE": text})


# KubernetesClusterResolver

# What the API says of pods, as far as it is read.
PODS = {
    "job-name=tensorflow": [
        ("tf-1", "10.0.0.2", "Running"),
        ("tf-0", "10.0.0.1", "Running"),
    ],
    "job-name=a": [("a-0", "10.1.0.1", "Running")],
    "job-name=b": [("b-1", "10.2.0.2", "Running"), ("b-0", "10.2.0.9", "Running")],
    "job-name=waiting": [("w-0", "10.0.0.1", "Running"), ("w-1", None, "Pending")],
}


class Client:
    """The part of `kubernetes.client.CoreV1Api` that is used."""

    def __init__(self):
        self.asked = []

    def list_pod_for_all_namespaces(self, label_selector):
        self.asked.append(label_selector)
        return SimpleNamespace(
            items=[
                SimpleNamespace(
                    metadata=SimpleNamespace(name=name),
                    status=SimpleNamespace(
                        host_ip=ip, pod_ip=f"pod of {name}", phase=phase
                    ),
                )
                for name, ip, phase in PODS.get(label_selector, [])
            ]
        )


def kubernetes(api, *args, **kwargs):
    return api.distribute.cluster_resolver.KubernetesClusterResolver(
        *args, override_client=Client(), **kwargs
    )


@scenario("8.3")
def kubernetes_by_default(api):
    resolver = kubernetes(api)
    before = [resolver.task_type, resolver.task_id, resolver.master()]
    resolver.task_type, resolver.task_id = "worker", 1
    return {
        "before": before,
        "cluster": resolver.cluster_spec().as_dict(),
        "masters": [resolver.master(), resolver.master("worker", 0, "http")],
        "rpc_layer": resolver.rpc_layer,
        "environment": resolver.environment,
    }


@scenario("8.3")
def kubernetes_with_labels(api):
    mapping = {"worker": ["job-name=b", "job-name=a"], "ps": ["job-name=tensorflow"]}
    resolver = kubernetes(api, mapping, tf_server_port=2222, rpc_layer="")
    cluster = resolver.cluster_spec().as_dict()
    return [cluster, resolver.master("ps", 0)]


@scenario("8.3")
def kubernetes_without_pods(api):
    return kubernetes(api, {"worker": ["job-name=none"]}).cluster_spec().as_dict()


@scenario("8.3")
def kubernetes_while_a_pod_waits(api):
    return kubernetes(api, {"worker": ["job-name=waiting"]}).cluster_spec()


@scenario("8.3")
def kubernetes_is_asked_each_time(api):
    client = Client()
    make = api.distribute.cluster_resolver.KubernetesClusterResolver
    resolver = make({"worker": ["job-name=a"]}, override_client=client)
    before = len(client.asked)
    resolver.cluster_spec()
    resolver.cluster_spec()
    return [before, client.asked]


@scenario("8.3")
def kubernetes_locations(api):
    locations = api.distribute.cluster_resolver.KubernetesExecutableLocation
    return {each.name: each.value for each in locations}
