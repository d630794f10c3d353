"""Asks TensorFlow what it makes of each TF_CONFIG: writes recorded/tf_config.json.

python tests/cluster/record_tf_config.py          # with TensorFlow, without JAX

Each entry has the text of TF_CONFIG (null: not set), in which PORT0, PORT1, ... stand for
ports, and two answers: `strategy`, from a MultiWorkerMirroredStrategy that really starts,
and `functions`, from the functions in multi_worker_util that it asks. An answer is
`{"workers", "index", "chief"}`, or `{"error"}`, or "waits": for workers that nobody starts,
or "aborts": the process is gone without an exception.
"""

import importlib
import json
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded" / "tf_config.json"
DEADLINE_SECONDS = 12
A, B, C, D = (f"127.0.0.1:PORT{i}" for i in range(4))
ONE, TWO = {"worker": [A]}, {"worker": [A, B]}
WITH_CHIEF = {"chief": [A], "worker": [B, C]}


def entry(cluster: Any, task_type: Any = "worker", index: Any = 0, **more: Any) -> dict:
    return {"cluster": cluster, "task": {"type": task_type, "index": index}, **more}


ENTRIES: dict[str, Any] = {
    "not set": None,
    "empty": "",
    "blanks": "  ",
    "empty object": {},
    "not JSON": "{cluster: {}}",
    "single quotes": "{'cluster': {}}",
    "list": "[]",
    "string": '"worker"',
    "number": "5",
    "null": "null",
    "one worker": entry(ONE),
    "worker 0 of 2": entry(TWO),
    "worker 1 of 2": entry(TWO, index=1),
    "chief alone": entry({"chief": [A]}, "chief"),
    "chief of 3": entry(WITH_CHIEF, "chief"),
    "worker 0 after a chief": entry(WITH_CHIEF),
    "worker 1 after a chief": entry(WITH_CHIEF, index=1),
    "chief after the workers": entry({"worker": [B, C], "chief": [A]}, index=1),
    "worker beside an evaluator": entry({"worker": [A], "evaluator": [B]}),
    "evaluator in the cluster": entry({"worker": [A], "evaluator": [B]}, "evaluator"),
    "evaluator not in the cluster": entry(ONE, "evaluator"),
    "evaluator alone": entry({"evaluator": [A]}, "evaluator"),
    "evaluator 1 not in the cluster": entry(ONE, "evaluator", 1),
    "two evaluators": entry({"worker": [A], "evaluator": [B, C]}),
    "worker beside ps": entry({"worker": [A], "ps": [B]}),
    "worker beside no ps": entry({"worker": [A], "ps": []}),
    "ps": entry({"worker": [A], "ps": [B]}, "ps"),
    "ps alone": entry({"ps": [A]}, "ps"),
    "empty cluster": entry({}),
    "empty cluster without a task": {"cluster": {}},
    "platform's keys": entry(ONE, environment="cloud", job={"scale_tier": "CUSTOM"}),
    "platform's task": {
        "cluster": ONE,
        "task": {"type": "worker", "index": 0, "trial": "1", "cloud": "x"},
    },
    "rpc_layer": entry(ONE, rpc_layer="grpc"),
    "by index": entry({"worker": {"0": A}}),
    "by index, in another order": entry({"worker": {"1": B, "0": A}}, index=1),
    "index as string": entry(ONE, index="0"),
    "index 1.0": entry(TWO, index=1.0),
    "index 0.7": entry(ONE, index=0.7),
    "index false": entry(ONE, index=False),
    "index null": entry(ONE, index=None),
    "index -1": entry(ONE, index=-1),
    "index word": entry(ONE, index="first"),
    "index list": entry(ONE, index=[0]),
    "index 3 of 2": entry(TWO, index=3),
    "index 1 of 1": entry(ONE, index=1),
    "no task": {"cluster": ONE},
    "empty task": {"cluster": ONE, "task": {}},
    "no type": {"cluster": ONE, "task": {"index": 0}},
    "no index": {"cluster": ONE, "task": {"type": "worker"}},
    "no cluster": {"task": {"type": "worker", "index": 0}},
    "no cluster for an evaluator": {"task": {"type": "evaluator", "index": 0}},
    "neither": {"environment": "cloud"},
    "cluster null": entry(None),
    "cluster list": entry([A]),
    "cluster string": entry(A),
    "task list": {"cluster": ONE, "task": ["worker", 0]},
    "task string": {"cluster": ONE, "task": "worker"},
    "task null": {"cluster": ONE, "task": None},
    "misspelt cluster": {"clutser": ONE, "task": {"type": "worker", "index": 0}},
    "misspelt task": {"cluster": ONE, "tasks": {"type": "worker", "index": 0}},
    "misspelt type": {"cluster": ONE, "task": {"typ": "worker", "index": 0}},
    "misspelt index": {"cluster": ONE, "task": {"type": "worker", "idx": 0}},
    "unknown key": entry(ONE, colour="red"),
    "unknown key of the task": {
        "cluster": ONE,
        "task": {"type": "worker", "index": 0, "colour": "red"},
    },
    "misspelt job": entry({"workers": [A]}, "workers"),
    "job in capitals": entry({"Worker": [A]}, "Worker"),
    "misspelt job of the task": entry(ONE, "wroker"),
    "number for a job": entry(ONE, 5),
    "foreign job": entry({"worker": [A], "gateway": [B]}),
    "job not in the cluster": entry(ONE, "chief"),
    "master": entry({"master": [A]}, "master"),
    "master beside workers": entry({"master": [A], "worker": [B]}),
    "two chiefs": entry({"chief": [A, B]}, "chief"),
    "no workers": entry({"worker": []}),
    "no workers for the chief": entry({"chief": [A], "worker": []}, "chief"),
    "only worker 1": entry({"worker": {"1": A}}, index=1),
    "word for a worker": entry({"worker": {"first": A}}),
    "string for workers": entry({"worker": A}),
    "null for workers": entry({"worker": None}),
    "number for an address": entry({"worker": [5]}),
    "null for an address": entry({"worker": [None]}),
    "no port": entry({"worker": ["127.0.0.1"]}),
    "word for a port": entry({"worker": ["127.0.0.1:x"]}),
    "port 0": entry({"worker": ["127.0.0.1:0"]}),
    "port 99999": entry({"worker": ["127.0.0.1:99999"]}),
    "no host": entry({"worker": [":PORT0"]}),
    "empty address": entry({"worker": [""]}),
    "address with a protocol": entry({"worker": [f"grpc://{A}"]}),
    "address with a blank": entry({"worker": [f" {A}"]}),
    "same address": entry({"worker": [A, A]}),
    "same address for the chief": entry({"chief": [A], "worker": [A]}),
    "bad address of another": entry({"worker": [A, "127.0.0.1"]}),
    "key twice": f'{{"cluster": {{"worker": ["{A}"]}}, "task": {{"type": "chief", '
    '"type": "worker", "index": 0}}',
}


def main() -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    tf = importlib.import_module("tensorflow")
    tf.get_logger().setLevel("FATAL")
    lines = []
    for name, config in ENTRIES.items():
        is_text = config is None or isinstance(config, str)
        text = config if is_text else json.dumps(config)
        answers = {
            "strategy": ask(tf, text, of_strategy),
            "functions": ask(tf, text, of_functions),
        }
        lines.append(json.dumps({"name": name, "text": text, **answers}))
        print(lines[-1], flush=True)
    body = ",\n    ".join(lines)
    RECORDED.write_text(
        f'{{\n  "tensorflow": "{tf.__version__}",\n  "entries": [\n    {body}\n  ]\n}}\n'
    )
    return 0


def ask(tf: Any, text: str | None, question: Callable[[Any], Any]) -> Any:
    """The answer of a process of its own, which may wait for ever."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(tf, text, question, there))
    child.start()
    there.close()
    try:
        return here.recv() if here.poll(DEADLINE_SECONDS) else "waits"
    except EOFError:
        return "aborts"
    finally:
        child.kill()
        child.join()


def _answer(
    tf: Any, text: str | None, question: Callable[[Any], Any], there: Any
) -> None:
    os.environ.pop("TF_CONFIG", None)
    if text is not None:
        ports = {name: str(free_port()) for name in {*re.findall(r"PORT\d", text)}}
        os.environ["TF_CONFIG"] = re.sub(r"PORT\d", lambda name: ports[name[0]], text)
    try:
        there.send(question(tf))
    except Exception as error:
        there.send({"error": type(error).__name__})


def of_strategy(tf: Any) -> dict[str, Any]:
    extended = tf.distribute.MultiWorkerMirroredStrategy().extended
    return {
        "workers": extended._num_workers,
        "index": extended._id_in_cluster,
        "chief": extended._is_chief,
    }


def of_functions(tf: Any) -> dict[str, Any]:
    util = importlib.import_module("tensorflow.python.distribute.multi_worker_util")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec()
    job, index = resolver.task_type, resolver.task_id
    if not cluster:
        return {"workers": 1, "index": 0, "chief": True}
    return {
        "workers": util.worker_count(cluster, job),
        "index": util.id_in_cluster(cluster, job, index),
        "chief": util.is_chief(cluster, job, index),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
