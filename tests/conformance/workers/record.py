"""Asks TensorFlow: writes what each worker of its clusters answers into recorded/.

python tests/conformance/workers/record.py            # with TensorFlow, without JAX
python tests/conformance/workers/record.py --check    # only compares with what is recorded
python tests/conformance/workers/record.py --missing  # only what has no answer yet
python tests/conformance/workers/record.py --only reducing

TensorFlow takes one CPU a worker. For clusters of several replicas a worker only its list
of devices is changed. A worker that does not answer in time has the answer
`{"error": "hangs"}`, which only a scenario that says where mirrax differs should have.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
TIMEOUT_SECONDS = 90
HANGS = {"error": "hangs"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--missing", action="store_true", help="ask what is new")
    parser.add_argument("--only", metavar="FILE", help="one file of scenarios")
    options = parser.parse_args()

    sys.path.insert(0, str(HERE.parents[1]))
    from conformance import tensorflow_api as api
    from conformance.describe import same
    from conformance.workers.scenarios import all_scenarios

    changed = []
    for file, scenarios in groupby(all_scenarios(), key=lambda each: each.file):
        if options.only not in (None, file):
            continue
        old = read(file)["answers"] if path(file).exists() else {}
        known = old if options.missing else {}
        answers = {
            each.name: known.get(each.name)
            or {engine: _ask(api, each, engine) for engine in each.engines}
            for each in scenarios
        }
        changed += [
            f"{file}: {name}: {old.get(name)} -> {answer}"
            for name, answer in answers.items()
            if name not in old or not same(old[name], answer)
        ]
        changed += [f"{file}: {name}: gone" for name in old.keys() - answers.keys()]
        if not options.check:
            write(file, api.version, answers)
    print("\n".join([*changed, f"{len(changed)} answers changed."]))
    return 1 if options.check and changed else 0


def path(file: str) -> Path:
    return RECORDED / f"{file}.json"


def read(file: str) -> dict[str, Any]:
    return json.loads(path(file).read_text())


def write(file: str, version: str, answers: dict[str, Any]) -> None:
    """One line for each scenario, so that a changed answer is a changed line."""
    lines = (f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items())
    path(file).write_text(
        f'{{\n  "tensorflow": "{version}",\n  "answers": {{\n'
        + ",\n".join(lines)
        + "\n  }\n}\n"
    )


def _ask(api: Any, scenario: Any, engine: str) -> list:
    """Each worker's answer; all are processes of their own and end together."""
    from conformance.record_workers import free_ports
    from conformance.workers.clusters import CLUSTERS

    fork = multiprocessing.get_context("fork")
    cluster = CLUSTERS[scenario.cluster]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(cluster.tasks))]
    workers = []
    for worker in range(len(cluster.tasks)):
        here, there = fork.Pipe(duplex=False)
        config = cluster.config(worker, addresses)
        task = (api, scenario, engine, worker, config, there)
        child = fork.Process(target=_answer, args=task)
        child.start()
        there.close()
        workers.append((child, here))
    deadline = time.monotonic() + TIMEOUT_SECONDS
    where = f"{scenario.name} ({engine})"
    try:
        answers = []
        for worker, (_, here) in enumerate(workers):
            if not here.poll(max(0, deadline - time.monotonic())):
                print(f"{where} hangs in TensorFlow on worker {worker}.", flush=True)
                answers.append(HANGS)
            else:
                answers.append(here.recv())
        return answers
    except EOFError:
        raise RuntimeError(f"{where} ends a process of TensorFlow.") from None
    finally:
        for child, _ in workers:
            child.kill()
            child.join()


def _answer(
    api: Any, scenario: Any, engine: str, worker: int, config: str | None, there: Any
) -> None:
    from conformance.describe import describe
    from conformance.workers.clusters import CLUSTERS, WorkerApi

    os.environ.pop("TF_CONFIG", None)
    if config is not None:
        os.environ["TF_CONFIG"] = config
    cluster = CLUSTERS[scenario.cluster]
    _use_devices(cluster.replicas_per_worker)
    own = WorkerApi(api, worker, len(cluster.tasks))
    there.send(describe(api.attempt(lambda: scenario.run(own, engine))))
    # The others may still need this one.
    time.sleep(TIMEOUT_SECONDS)


def _use_devices(count: int) -> None:
    """Makes TensorFlow take `count` CPUs of each worker."""
    if count == 1:
        return
    from tensorflow.python.distribute import collective_all_reduce_strategy

    def local_devices(extended, cluster_resolver, worker_device):
        names = [f"{worker_device}/device:CPU:{i}" for i in range(count)]
        return tuple(names), "CPU"

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    extended._initialize_local_devices = local_devices


if __name__ == "__main__":
    sys.exit(main())
