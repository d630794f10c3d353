"""What TensorFlow's workers got from a distributed dataset, ours get from a plan.

tests/conformance/record_workers.py has asked real TensorFlow clusters and says what the
entries mean.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mirrax as mx
from mirrax._src.input.blocks import value_of
from mirrax._src.input.feeding import distribute_from_function
from mirrax._src.input.options import InputOptions
from mirrax._src.input.sharding import make_plan
from mirrax._src.input.splitting import Share

RECORDED = Path(__file__).parents[1] / "conformance" / "recorded" / "workers.json"
ENTRIES = json.loads(RECORDED.read_text())["entries"]
Dataset = mx.data.Dataset
HINT = mx.data.experimental.SHARD_HINT
OUTPUTS = """steps shapes element_spec element_specs contexts errors num_steps
cardinality""".split()
OURS = {
    "FailedPreconditionError": RuntimeError,
    "NotFoundError": ValueError,
    "IndexError": ValueError,
    "InvalidArgumentError": ValueError,
}


def name_of(entry):
    words = []
    for key, value in entry.items():
        if key not in OUTPUTS and value not in (None, False):
            text = str(value).replace(" ", "").replace("'", "")
            words.append(text if isinstance(value, str) else f"{key}={text}")
    return "-".join(words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.mark.parametrize("entry", ENTRIES, ids=map(name_of, ENTRIES))
def test_workers_get_what_tensorflows_get(entry, folder):
    if "errors" in entry:
        check_error(entry, folder)
        return
    wanted = without_empty_end(entry["steps"])
    found = all_steps(entry, folder)
    if is_accident(entry):
        # TensorFlow takes the dataset for infinite and loses its end; we do not.
        assert without_empty_end(found)[: len(wanted) - 1] == wanted[:-1]
        rows = [x for step in found for worker in step for part in worker for x in part]
        assert sorted(rows) == list(range(entry["n"]))
        return
    assert without_empty_end(found) == wanted
    shapes = entry.get("shapes")
    if shapes is not None:
        assert [[[len(rows) for rows in worker] for worker in step] for step in found][
            : len(wanted)
        ] == [[[s[0] for s in worker] for worker in step] for step in shapes]


def is_accident(entry):
    """Whether TensorFlow's size of a shard for `SHARD_HINT` workers, -1, came out as -1."""
    is_hint = ["shard_hint"] in entry.get("before", [])
    return is_hint and entry.get("cardinality") == -1


def check_error(entry, folder):
    first = entry["errors"][0]
    is_auto_with_files = entry["policy"] == "AUTO" and entry["kind"] == "files"
    if is_auto_with_files:  # here we differ on purpose (SPEC 12.13)
        with pytest.warns(UserWarning, match="fewer than the . workers"):
            found = all_steps(entry, folder)
        rows = [
            row for step in found for worker in step for part in worker for row in part
        ]
        assert sorted(rows) == sorted(records(entry))
        return
    with pytest.raises(OURS[first]):
        all_steps(entry, folder)


def records(entry):
    return [f"{100 * i + j}" for i, n in enumerate(entry["files"]) for j in range(n)]


def all_steps(entry, folder):
    """`steps[step][worker][replica]`; a worker that has ended gets nothing any more."""
    workers, replicas = entry["workers"], entry["replicas_per_worker"]
    parts = []
    for worker in range(workers):
        share = Share(workers, worker, replicas)
        parts.append(steps_of(entry, share, folder)[: entry.get("limit", 100)])
    longest = max(map(len, parts))
    nothing = [[]] * replicas
    return [[p[i] if i < len(p) else nothing for p in parts] for i in range(longest)]


def steps_of(entry, share, folder):
    if entry.get("method") == "function":
        contexts = []

        def dataset_fn(context):
            contexts.append(
                [
                    context.num_input_pipelines,
                    context.input_pipeline_id,
                    context.num_replicas_in_sync,
                ]
            )
            start = 100 * context.input_pipeline_id
            n = entry["per_worker"][context.input_pipeline_id]
            return finish(Dataset.range(start, start + n), entry)

        distributed = distribute_from_function(dataset_fn, share, None, None)
        assert contexts == [entry["contexts"][share.worker]]
        cursor = distributed.steps_of((0,), None)
    else:
        dataset = with_policy(finish(source(entry, folder), entry), entry["policy"])
        cursor = make_plan(dataset, share, InputOptions()).steps((0,), None)
    steps = []
    for _ in range(entry.get("limit", 100)):
        try:
            step = next(cursor)
        except StopIteration:
            break
        steps.append([plain(value_of(part)) for part in step])
    cursor.close()
    return steps


def plain(value):
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [plain(part) for part in value]
    return plain(np.asarray(value).tolist()) if hasattr(value, "tolist") else value


def without_empty_end(steps):
    """TensorFlow ends some passes with steps in which nobody gets anything."""
    steps = [[worker or [] for worker in step] for step in steps]
    while steps and not any(part for worker in steps[-1] for part in worker):
        steps = steps[:-1]
    return [
        [[part for part in worker] if any(worker) else [] for worker in step]
        for step in steps
    ]


def with_policy(dataset, policy):
    options = mx.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        mx.data.experimental.AutoShardPolicy[policy]
    )
    return dataset.with_options(options)


def source(entry, folder):
    match entry["kind"]:
        case "range":
            return Dataset.range(entry["n"])
        case "vectors":
            rows = np.arange(entry["width"]) + 10 * np.arange(entry["n"])[:, None]
            return Dataset.from_tensor_slices(rows)
        case "varying":
            return Dataset.from_generator(
                lambda: (
                    np.arange(10 * size, 11 * size, dtype="int32")
                    for size in entry["sizes"]
                ),
                output_signature=mx.TensorSpec([None], "int32"),
            )
    files = written(entry, folder)
    match entry["reader"]:
        case "tfrecord":
            return mx.data.TFRecordDataset(files)
        case "text":
            return mx.data.TextLineDataset(files)
        case "interleave":
            return Dataset.from_tensor_slices(files).interleave(
                mx.data.TFRecordDataset, cycle_length=2
            )
        case "list_files":
            found = Dataset.list_files(f"{Path(files[0]).parent}/*", shuffle=False)
            return found.flat_map(mx.data.TFRecordDataset)
    raise AssertionError(entry)


def written(entry, folder):
    is_text = entry["reader"] == "text"
    place = folder / "-".join(map(str, ["text" if is_text else "", *entry["files"]]))
    files = [str(place / f"{i}") for i in range(len(entry["files"]))]
    if place.exists():
        return files
    place.mkdir()
    for i, (file, count) in enumerate(zip(files, entry["files"])):
        lines = [f"{100 * i + j}" for j in range(count)]
        if is_text:
            Path(file).write_text("".join(line + "\n" for line in lines))
        else:
            with mx.io.TFRecordWriter(file) as writer:
                for line in lines:
                    writer.write(line.encode())
    return files


def finish(dataset, entry):
    dataset = transform(dataset, entry.get("before", []))
    if entry["batch"] is not None:
        dataset = dataset.batch(entry["batch"], drop_remainder=entry["drop_remainder"])
    return transform(dataset, entry.get("after", []))


def transform(dataset, steps):
    for name, *arguments in steps:
        if name == "map_add":
            dataset = dataset.map(lambda x, amount=arguments[0]: x + amount)
        elif name == "shard_hint":
            dataset = dataset.shard(HINT, HINT)
        else:
            dataset = getattr(dataset, name)(*arguments)
    return dataset
