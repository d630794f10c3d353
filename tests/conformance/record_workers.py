"""Asks TensorFlow what each of several workers gets from a distributed dataset.

python tests/conformance/record_workers.py          # with TensorFlow, without JAX

Starts real processes with `TF_CONFIG` on 127.0.0.1 and writes recorded/workers.json. An
entry there describes its dataset in plain data, so that another library can build the
same one:

    kind              "range" (`n` numbers), "files" (`files[i]` records in file i, which
                      read "100*i + j"), "vectors" (`n` rows of `width` numbers),
                      "varying" (a generator of batches of the sizes in `sizes`)
    reader            for files: "tfrecord" and "text" read the list of files, "interleave"
                      reads two at a time, "list_files" finds them in their folder
    before, after     transformations around `batch`, as [name, argument, ...]
    batch             the argument of `batch`, or null
    policy            the AutoShardPolicy
    method            "dataset": `experimental_distribute_dataset`; "function":
                      `distribute_datasets_from_function`, whose function makes a range of
                      `per_worker[worker]` numbers
    limit             how many steps are taken

and what came out: `steps[step][worker][replica]`, `shapes` likewise for more than one
dimension, `element_spec` of one replica, `contexts[worker]`, or `errors[worker]`
("UnavailableError" is what a worker gets whose peer has failed).

Where `cardinality` is -1 without a `limit` TensorFlow is wrong: it works out the size of
`shard(SHARD_HINT, SHARD_HINT)` with -1 shards, takes a finite dataset for an infinite one
and does not look after its end (`num_steps` then says how far each worker came).
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path

HERE = Path(__file__).parent
RECORDED = HERE / "recorded" / "workers.json"
TIMEOUT_SECONDS = 60
ENTRIES_A_START = 30
CLUSTERS = [(2, 1), (3, 1), (2, 2)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", metavar="FOLDER", help="for its own processes")
    parser.add_argument(
        "--only", metavar="WORKERSxREPLICAS", help="one cluster, printed"
    )
    options = parser.parse_args()
    if options.worker:
        return work(Path(options.worker))

    results = []
    for num_workers, num_replicas in CLUSTERS:
        if options.only not in (None, f"{num_workers}x{num_replicas}"):
            continue
        entries = [
            {**entry, "workers": num_workers, "replicas_per_worker": num_replicas}
            for entry in all_entries(num_workers)
        ]
        # An error on one worker may break the collectives that come after it.
        calm = [entry for entry in entries if not entry.get("alone")]
        starts = [
            calm[at : at + ENTRIES_A_START]
            for at in range(0, len(calm), ENTRIES_A_START)
        ] + [[entry] for entry in entries if entry.get("alone")]
        for entries in starts:
            began = time.monotonic()
            results += ask(entries, num_workers, num_replicas)
            print(
                f"{num_workers} workers x {num_replicas}: {len(entries)} datasets,"
                f" {time.monotonic() - began:.0f} s",
                flush=True,
            )
    for entry in results:
        entry.pop("alone", None)
    if options.only:
        print("\n".join(map(json.dumps, results)))
        return 0
    version = results[0].pop("tensorflow")
    for entry in results:
        entry.pop("tensorflow", None)
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in results)
    RECORDED.write_text(
        f'{{\n  "tensorflow": "{version}",\n  "entries": [\n{lines}\n  ]\n}}\n'
    )
    return 0


def all_entries(num_workers: int) -> list[dict]:
    """The datasets, as plain data."""
    entries = []

    def add(kind, policy="AUTO", batch=None, drop_remainder=False, **more):
        entries.append(
            {
                "kind": kind,
                **more,
                "batch": batch,
                "drop_remainder": drop_remainder,
                "policy": policy,
            }
        )

    for policy in ("AUTO", "DATA", "OFF", "HINT"):
        for n, batch in ((10, 4), (8, 4), (9, 4), (10, 5), (7, 3), (3, 8), (12, 6)):
            add("range", policy, batch, n=n)
        for n, batch in ((10, 4), (10, 5)):
            add("range", policy, batch, True, n=n)
        add("range", policy, 4, n=5, after=[["repeat", 2]])
        add("range", policy, 4, n=5, after=[["repeat"]], limit=6)
        add("range", policy, 4, True, n=9, after=[["repeat"]], limit=4)
        add("range", policy, 4, n=10, after=[["map_add", 1]])
        add("range", policy, 4, n=10, after=[["take", 2]])
        add("range", policy, 4, n=10, after=[["prefetch", 2]])
        add("range", policy, 4, n=10, before=[["repeat", 2]])
        add("range", policy, 1, n=5)
        add("range", policy, 4, n=0)
        add("vectors", policy, n=3, width=4)
        add("vectors", policy, 3, n=5, width=2)
        add("varying", policy, sizes=[4, 1, 3])
    for before in ([["shard_hint"]], [["map_add", 0], ["shard_hint"]]):
        add("range", "HINT", 4, n=10, before=before)
        add("range", "AUTO", 4, n=10, before=before, alone=True)
    add("range", "HINT", 2, n=9, before=[["shard_hint"]])
    add("range", "HINT", 4, n=10, after=[["shard_hint"]])
    add("range", "FILE", 4, n=10, alone=True)
    add("range", "AUTO", n=4, alone=True)
    add("range", "OFF", n=4, alone=True)

    for reader in ("tfrecord", "text", "interleave", "list_files"):
        for policy in ("AUTO", "FILE", "DATA", "OFF"):
            add("files", policy, 2, files=[3, 3, 3], reader=reader)
    for policy in ("AUTO", "FILE", "DATA", "OFF"):
        for files, batch in (([4, 4, 4, 4], 4), ([5, 1, 2], 4), ([4, 0, 3], 2)):
            add("files", policy, batch, files=files, reader="tfrecord")
        add("files", policy, 4, True, files=[5, 4, 5], reader="tfrecord")
        add("files", policy, 4, files=[3, 3, 3], reader="text", after=[["repeat", 2]])
        add("files", policy, 3, files=[3, 3, 3], reader="text", before=[["repeat", 2]])
    for policy in ("AUTO", "FILE", "DATA", "OFF"):
        # One file, or two: too few for the workers.
        too_few = [4] * (num_workers - 1)
        alone = policy in ("AUTO", "FILE")
        add("files", policy, 2, files=too_few, reader="tfrecord", alone=alone)

    for sizes in ((6, 6, 6), (2, 7, 4), (8, 1, 1), (0, 3, 0), (5, 4, 3)):
        add(
            "range",
            batch=2,
            method="function",
            per_worker=list(sizes[:num_workers]),
        )
        add(
            "range",
            batch=2,
            drop_remainder=True,
            method="function",
            per_worker=list(sizes[:num_workers]),
        )
    add("range", method="function", per_worker=[3, 5, 4][:num_workers])
    add(
        "range",
        batch=2,
        method="function",
        per_worker=[3, 5, 4][:num_workers],
        after=[["repeat"]],
        limit=4,
    )
    return entries


def ask(entries: list[dict], num_workers: int, num_replicas: int) -> list[dict]:
    """Starts the workers, waits for them, and puts their answers together."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "entries.json").write_text(json.dumps(entries))
        addresses = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
        processes = []
        for index in range(num_workers):
            config = {
                "cluster": {"worker": addresses},
                "task": {"type": "worker", "index": index},
            }
            environment = {
                **os.environ,
                "TF_CONFIG": json.dumps(config),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "CUDA_VISIBLE_DEVICES": "-1",
            }
            log = open(Path(folder) / f"worker{index}.log", "w")
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--worker", folder],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            for process in processes:
                process.wait(max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print("A worker hangs; what there is counts.", flush=True)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        outputs = [
            [json.loads(line) for line in path.read_text().splitlines()]
            if (path := Path(folder) / f"worker{index}.jsonl").exists()
            else []
            for index in range(num_workers)
        ]
        if not all(outputs):
            for index in range(num_workers):
                print((Path(folder) / f"worker{index}.log").read_text()[-3000:])
    results = []
    for at, entry in enumerate(entries):
        parts = [
            output[at] if at < len(output) else {"error": "hangs"} for output in outputs
        ]
        results.append({**entry, **join(parts)})
    return results


def join(parts: list[dict]) -> dict:
    """One answer from the workers' answers."""
    joined = {"tensorflow": parts[0].get("tensorflow")}
    if any("error" in part for part in parts):
        joined["errors"] = [part.get("error") for part in parts]
    if all("steps" in part for part in parts):
        counts = [len(part["steps"]) for part in parts]
        if len(set(counts)) > 1:
            joined["num_steps"] = counts
        joined["steps"] = [
            list(workers) for workers in zip_longest(*(p["steps"] for p in parts))
        ]
        shapes = [
            list(workers) for workers in zip_longest(*(p["shapes"] for p in parts))
        ]
        flat = [s for step in shapes for worker in step for s in worker or ()]
        if any(len(shape) > 1 for shape in flat):
            joined["shapes"] = shapes
    if all("element_spec" in part for part in parts):
        joined["element_spec"] = parts[0]["element_spec"]
        if any(part["element_spec"] != parts[0]["element_spec"] for part in parts):
            joined["element_specs"] = [part["element_spec"] for part in parts]
    if "cardinality" in parts[0]:
        joined["cardinality"] = parts[0]["cardinality"]
    if any("context" in part for part in parts):
        joined["contexts"] = [part.get("context") for part in parts]
    return joined


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def work(folder: Path) -> int:
    """One worker: answers all entries, a line each."""
    import tensorflow as tf
    from tensorflow.python.distribute import collective_all_reduce_strategy

    entries = json.loads((folder / "entries.json").read_text())
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    num_replicas = entries[0]["replicas_per_worker"]
    if num_replicas > 1:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * num_replicas,
        )

        # TensorFlow takes one CPU a worker; only its list of devices is changed.
        def local_devices(extended, cluster_resolver, worker_device):
            names = [f"{worker_device}/device:CPU:{i}" for i in range(num_replicas)]
            return tuple(names), "CPU"

        extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
        extended._initialize_local_devices = local_devices
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == num_replicas * entries[0]["workers"]

    with open(folder / f"worker{index}.jsonl", "w") as out:
        for at, entry in enumerate(entries):
            own = folder / f"files{at}-worker{index}"
            own.mkdir()
            answer = {"tensorflow": tf.__version__}
            try:
                get(tf, strategy, entry, own, answer)
            except Exception as error:
                answer["error"] = type(error).__name__
            out.write(json.dumps(answer) + "\n")
            out.flush()
    # The others may still wait for this one.
    time.sleep(1)
    os._exit(0)


def get(tf, strategy, entry: dict, folder: Path, answer: dict) -> None:
    """Fills in `answer` with what this worker gets."""

    def dataset_fn(context):
        answer["context"] = [
            context.num_input_pipelines,
            context.input_pipeline_id,
            context.num_replicas_in_sync,
        ]
        n = entry["per_worker"][context.input_pipeline_id]
        start = 100 * context.input_pipeline_id
        return finish(tf, tf.data.Dataset.range(start, start + n), entry)

    if entry.get("method") == "function":
        distributed = strategy.distribute_datasets_from_function(dataset_fn)
    else:
        dataset = finish(tf, source(tf, entry, folder), entry)
        options = tf.data.Options()
        policy = tf.data.experimental.AutoShardPolicy[entry["policy"]]
        options.experimental_distribute.auto_shard_policy = policy
        answer["cardinality"] = int(dataset.cardinality())
        distributed = strategy.experimental_distribute_dataset(
            dataset.with_options(options)
        )
    spec = distributed.element_spec._value_specs[0]
    answer["element_spec"] = [spec.shape.as_list(), spec.dtype.name]
    answer["steps"], answer["shapes"] = [], []
    iterator = iter(distributed)
    for _ in range(entry.get("limit", 100)):
        try:
            batch = next(iterator)
        except StopIteration:
            break
        parts = [part.numpy() for part in strategy.experimental_local_results(batch)]
        answer["steps"].append([plain(part.tolist()) for part in parts])
        answer["shapes"].append([list(part.shape) for part in parts])


def source(tf, entry: dict, folder: Path):
    Dataset = tf.data.Dataset
    match entry["kind"]:
        case "range":
            return Dataset.range(entry["n"])
        case "vectors":
            n, width = entry["n"], entry["width"]
            rows = [[10 * row + i for i in range(width)] for row in range(n)]
            return Dataset.from_tensor_slices(rows)
        case "varying":
            return Dataset.from_generator(
                lambda: (
                    [10 * size + i for i in range(size)] for size in entry["sizes"]
                ),
                output_signature=tf.TensorSpec([None], tf.int32),
            )
    files = [str(folder / f"{i}") for i in range(len(entry["files"]))]
    for i, (file, count) in enumerate(zip(files, entry["files"])):
        records = [f"{100 * i + j}" for j in range(count)]
        if entry["reader"] == "text":
            Path(file).write_text("".join(record + "\n" for record in records))
        else:
            with tf.io.TFRecordWriter(file) as writer:
                for record in records:
                    writer.write(record.encode())
    match entry["reader"]:
        case "tfrecord":
            return tf.data.TFRecordDataset(files)
        case "text":
            return tf.data.TextLineDataset(files)
        case "interleave":
            return Dataset.from_tensor_slices(files).interleave(
                tf.data.TFRecordDataset, cycle_length=2
            )
        case "list_files":
            found = Dataset.list_files(f"{folder}/*", shuffle=False)
            return found.flat_map(tf.data.TFRecordDataset)


def finish(tf, dataset, entry: dict):
    dataset = transform(tf, dataset, entry.get("before", []))
    if entry["batch"] is not None:
        dataset = dataset.batch(entry["batch"], drop_remainder=entry["drop_remainder"])
    return transform(tf, dataset, entry.get("after", []))


def transform(tf, dataset, steps: list[list]):
    for name, *arguments in steps:
        if name == "map_add":
            dataset = dataset.map(lambda x, amount=arguments[0]: x + amount)
        elif name == "shard_hint":
            hint = tf.data.experimental.SHARD_HINT
            dataset = dataset.shard(hint, hint)
        else:
            dataset = getattr(dataset, name)(*arguments)
    return dataset


def plain(value):
    if isinstance(value, list):
        return [plain(part) for part in value]
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    sys.exit(main())
