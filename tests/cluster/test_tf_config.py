"""TF_CONFIG, read strictly: a right cluster, or a ValueError that says what is wrong."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from property.examples import examples

from mirrax._src.cluster.resolver_tf_config import TFConfigClusterResolver
from mirrax._src.cluster.spec import TrainingCluster, training_cluster

RECORDED = json.loads((Path(__file__).parent / "recorded/tf_config.json").read_text())
ENTRIES = {entry["name"]: entry for entry in RECORDED["entries"]}
# Where TensorFlow fails, waits or aborts, and mirrax knows the size and its own index.
EASIER = {
    "empty": (0, None),
    "blanks": (0, None),
    "evaluator not in the cluster": (1, None),
    "worker beside no ps": (1, 0),
    "worker beside ps": (1, 0),
    "ps": (1, None),
}
# Where TensorFlow goes on, mostly alone, and mirrax says what is wrong.
STRICTER = {
    "list": "TF_CONFIG is [], but must be a JSON object",
    "string": 'TF_CONFIG is "worker", but must be a JSON object',
    "index 1.0": 'TF_CONFIG["task"]["index"] is 1.0, but must be an integer',
    "index 0.7": 'TF_CONFIG["task"]["index"] is 0.7, but must be an integer',
    "index false": 'TF_CONFIG["task"]["index"] is false, but must be an integer',
    "no cluster": 'TF_CONFIG has no "cluster", only "task"',
    "no cluster for an evaluator": 'TF_CONFIG has no "cluster", only "task"',
    "neither": 'TF_CONFIG has no "cluster", only "environment"',
    "misspelt cluster": 'the unknown key "clutser". Did you mean "cluster"?',
    "unknown key": 'TF_CONFIG has the unknown key "colour". It may have "cluster", "task"',
    "unknown key of the task": 'TF_CONFIG["task"] has the unknown key "colour"',
    "no workers for the chief": 'TF_CONFIG["cluster"]["worker"] is empty',
    "port 0": 'TF_CONFIG["cluster"]["worker"][0] is "127.0.0.1:0": the port "0"',
    "port 99999": 'TF_CONFIG["cluster"]["worker"][0] is "127.0.0.1:99999": the port',
    "no host": 'TF_CONFIG["cluster"]["worker"][0] is ":4000": an address is "host:port"',
    "key twice": 'TF_CONFIG cannot be read: the key "type" appears twice',
}
# Where TensorFlow fails, too, or waits for ever.
MESSAGES = {
    "not JSON": 'After "{" comes "cluster: {}}": Expecting property name',
    "single quotes": "write it with json.dumps",
    "number": "TF_CONFIG is 5, but must be a JSON object",
    "null": "TF_CONFIG is null, but must be a JSON object",
    "evaluator 1 not in the cluster": '["index"] is 1, but "evaluator" has 1 task:',
    "two evaluators": 'TF_CONFIG["cluster"]["evaluator"] has 2 tasks, but',
    "ps alone": 'TF_CONFIG["cluster"] has no "worker" and no "chief"',
    "index null": 'TF_CONFIG["task"] has no "index"',
    "index -1": 'TF_CONFIG["task"]["index"] is -1, but must be an integer, 0 or larger',
    "index word": 'TF_CONFIG["task"]["index"] is "first", but must be an integer',
    "index list": 'TF_CONFIG["task"]["index"] is [0], but must be an integer',
    "index 3 of 2": 'TF_CONFIG["task"]["index"] is 3, but "worker" has 2 tasks',
    "index 1 of 1": 'TF_CONFIG["task"]["index"] is 1, but "worker" has 1 task:',
    "no task": 'TF_CONFIG has no "task". Each process of the cluster needs its own',
    "empty task": 'TF_CONFIG["task"] has no "type"',
    "no type": 'TF_CONFIG["task"] has no "type"',
    "no index": 'TF_CONFIG["task"] has no "index"',
    "cluster null": 'TF_CONFIG["cluster"] is null, but must be a JSON object',
    "cluster list": "TF_CONFIG[\"cluster\"] is ['127.0.0.1:4000'], but must be a JSON",
    "cluster string": 'TF_CONFIG["cluster"] is "127.0.0.1:4000", but must be a JSON',
    "task list": "TF_CONFIG[\"task\"] is ['worker', 0], but must be a JSON object",
    "task string": 'TF_CONFIG["task"] is "worker", but must be a JSON object',
    "task null": 'TF_CONFIG["task"] is null, but must be a JSON object',
    "misspelt task": 'unknown key "tasks". Did you mean "task"? It may have "cluster"',
    "misspelt type": 'unknown key "typ". Did you mean "type"? It may have "type"',
    "misspelt index": 'TF_CONFIG["task"] has the unknown key "idx"',
    "misspelt job": 'TF_CONFIG["cluster"] has the unknown key "workers". Did you mean',
    "job in capitals": 'the unknown key "Worker". Did you mean "worker"?',
    "misspelt job of the task": '["type"] is "wroker", not one of "chief", "worker", '
    '"ps", "evaluator". Did you mean "worker"?',
    "number for a job": 'TF_CONFIG["task"]["type"] is 5, not one of',
    "foreign job": 'TF_CONFIG["cluster"] has the unknown key "gateway"',
    "job not in the cluster": '["type"] is "chief", but TF_CONFIG["cluster"] has only',
    "master": 'the unknown key "master". It is an older name of "chief"',
    "master beside workers": 'the unknown key "master". It is an older name of "chief"',
    "two chiefs": 'TF_CONFIG["cluster"]["chief"] has 2 tasks, but there is at most one',
    "no workers": 'TF_CONFIG["cluster"]["worker"] is empty',
    "only worker 1": 'TF_CONFIG["cluster"]["worker"] has no task 0, only 1',
    "word for a worker": 'TF_CONFIG["cluster"]["worker"] has the key "first", which',
    "string for workers": '["worker"] is "127.0.0.1:4000", but must be a list',
    "null for workers": 'TF_CONFIG["cluster"]["worker"] is null, but must be a list',
    "number for an address": 'TF_CONFIG["cluster"]["worker"][0] is 5: an address is',
    "null for an address": 'TF_CONFIG["cluster"]["worker"][0] is null: an address is',
    "no port": '["worker"][0] is "127.0.0.1": the port is missing',
    "word for a port": '["worker"][0] is "127.0.0.1:x": the port "x" is not a number',
    "empty address": 'TF_CONFIG["cluster"]["worker"][0] is "": an address is',
    "address with a protocol": 'is "grpc://127.0.0.1:4000": the port "//127.0.0.1:4000"',
    "address with a blank": 'is " 127.0.0.1:4000": an address is "host:port"',
    "same address": 'TF_CONFIG["cluster"]["worker"][0] and TF_CONFIG["cluster"]["worker"]'
    '[1] are both "127.0.0.1:4000"',
    "same address for the chief": 'TF_CONFIG["cluster"]["chief"][0] and',
    "bad address of another": 'TF_CONFIG["cluster"]["worker"][1] is "127.0.0.1"',
}


def read(text: str | None, **kwargs: Any) -> TrainingCluster:
    """The training cluster of this TF_CONFIG."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TF_CONFIG", raising=False)
        if text is not None:
            patch.setenv("TF_CONFIG", re.sub(r"PORT(\d)", r"400\1", text))
        return training_cluster(TFConfigClusterResolver(**kwargs))


def config_of(cluster: Any, task_type: Any = "worker", index: Any = 0) -> str:
    task = {"type": task_type, "index": index}
    return json.dumps({"cluster": cluster, "task": task})


@pytest.mark.parametrize("name", {**STRICTER, **MESSAGES})
def test_what_is_wrong_is_named(name: str) -> None:
    message = {**STRICTER, **MESSAGES}[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        read(ENTRIES[name]["text"])


@pytest.mark.parametrize(
    "name", [name for name in ENTRIES if name not in {**STRICTER, **MESSAGES}]
)
def test_answers_like_tensorflow(name: str) -> None:
    ours, theirs = read(ENTRIES[name]["text"]), ENTRIES[name]["functions"]
    if name in EASIER:
        assert (ours.size, ours.index) == EASIER[name]
    elif (
        ours.index is None
    ):  # no cluster, or an evaluator, which is the first of its own
        assert ours.task_type in (None, "evaluator")
        assert theirs == {"workers": 1, "index": 0, "chief": True}
    else:
        assert (ours.size, ours.index) == (theirs["workers"], theirs["index"])
        assert (ours.index == 0) == theirs["chief"]


def test_the_lists_of_departures_are_right() -> None:
    answered = {
        name for name, entry in ENTRIES.items() if "workers" in entry["strategy"]
    }
    waiting = {name for name, entry in ENTRIES.items() if entry["strategy"] == "waits"}
    assert STRICTER.keys() <= answered | waiting
    assert not answered & {*EASIER, *MESSAGES}
    assert ENTRIES.keys() - answered - waiting <= {*EASIER, *MESSAGES}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, TrainingCluster((), (), None, None, None)),
        ("", TrainingCluster((), (), None, None, None)),
        ("{}", TrainingCluster((), (), None, None, None)),
        (config_of({}), TrainingCluster((), (), None, None, None)),
        (
            config_of({"worker": ["a:1", "b:2"]}, index=1),
            TrainingCluster(("a:1", "b:2"), ("worker 0", "worker 1"), 1, "worker", 1),
        ),
        (
            config_of({"worker": ["a:1"], "chief": ["[::1]:2"]}, "worker", "0"),
            TrainingCluster(
                ("[::1]:2", "a:1"), ("chief 0", "worker 0"), 1, "worker", 0
            ),
        ),
        (
            config_of({"worker": {"1": "b:2", "0": "a:1"}, "ps": ["p:1"]}, "ps"),
            TrainingCluster(("a:1", "b:2"), ("worker 0", "worker 1"), None, "ps", 0),
        ),
        (
            config_of({"chief": ["a:1"]}, "evaluator"),
            TrainingCluster(("a:1",), ("chief 0",), None, "evaluator", 0),
        ),
    ],
)
def test_training_clusters(text: str | None, expected: TrainingCluster) -> None:
    assert read(text) == expected
    assert read(text).size == len(expected.names)


def test_arguments_replace_the_task() -> None:
    text = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}})
    assert read(text, task_type="worker", task_id=1).index == 1
    with pytest.raises(ValueError, match='^task_id is 2, but "worker" has 2 tasks'):
        read(text, task_type="worker", task_id=2)
    with pytest.raises(ValueError, match='^task_type is "chief", but TF_CONFIG'):
        read(text, task_type="chief", task_id=0)
    with pytest.raises(ValueError, match='^TF_CONFIG has no "task"'):
        read(text, task_type="worker")


def test_a_syntax_error_shows_the_place_in_a_long_line() -> None:
    addresses = [f"worker-{i}.example.com:2222" for i in range(50)]
    text = config_of({"worker": addresses}).replace('"worker-30', "worker-30")
    with pytest.raises(json.JSONDecodeError) as caught:
        read(text)
    assert "TF_CONFIG is not JSON" in str(caught.value)
    assert 'comes "worker-30.example.co"' in str(caught.value)
    assert caught.value.pos == text.index("worker-30")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, "1" * 10_000])
def test_what_json_cannot_hold_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="TF_CONFIG"):
        read(text)


def test_the_repr_of_a_bad_resolver_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{oops")
    assert (
        repr(TFConfigClusterResolver()) == "TFConfigClusterResolver(TF_CONFIG='{oops')"
    )


# Any JSON at all, and right configurations with one thing changed.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["cluster", "task", "type", "index", "worker", "chief", "0"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
hosts = st.sampled_from(["a", "b.example.com", "10.0.0.1", "[::1]", "host-1"])
addresses = st.builds("{}:{}".format, hosts, st.integers(1, 65535))


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """A right TF_CONFIG."""
    sizes = {
        "chief": draw(st.integers(0, 1)),
        "worker": draw(st.integers(0, 4)),
        "ps": draw(st.integers(0, 2)),
        "evaluator": draw(st.integers(0, 1)),
    }
    if not sizes["chief"] + sizes["worker"]:
        sizes["worker"] = 1
    count = sum(sizes.values())
    chosen = iter(
        draw(st.lists(addresses, min_size=count, max_size=count, unique_by=str.lower))
    )
    jobs = draw(st.permutations([job for job, size in sizes.items() if size]))
    cluster = {job: [next(chosen) for _ in range(sizes[job])] for job in jobs}
    job = draw(st.sampled_from(jobs))
    index = draw(st.integers(0, sizes[job] - 1))
    return {"cluster": cluster, "task": {"type": job, "index": index}}


@examples(300)
@given(configurations())
def test_a_right_configuration_gives_its_cluster(config: dict[str, Any]) -> None:
    cluster, task = config["cluster"], config["task"]
    found = read(json.dumps(config))
    assert list(found.addresses) == cluster.get("chief", []) + cluster.get("worker", [])
    assert (found.task_type, found.task_id) == (task["type"], task["index"])
    assert found.size == len(found.names) == len({*found.names})
    if task["type"] in ("chief", "worker"):
        assert found.index is not None
        own = cluster[task["type"]][task["index"]]
        assert found.addresses[found.index] == own
        assert found.names[found.index] == f"{task['type']} {task['index']}"
    else:
        assert found.index is None


@st.composite
def damaged(draw: st.DrawFn) -> tuple[dict[str, Any], Any]:
    """A right TF_CONFIG in which one value, somewhere, is another."""
    config = draw(configurations())
    new = draw(json_values)
    damaged = copy.deepcopy(config)
    place: Any = damaged
    while True:
        keys: list[Any] = (
            list(place) if isinstance(place, dict) else list(range(len(place)))
        )
        if draw(st.booleans()) and isinstance(place, dict):
            keys.append(draw(st.text(max_size=8)))
        key = draw(st.sampled_from(keys))
        inner = place[key] if key in keys[: len(place)] else None
        if not inner or not isinstance(inner, dict | list) or draw(st.booleans()):
            break
        place = inner
    place[key] = new
    return config, damaged


@examples(500)
@given(damaged())
def test_one_wrong_value_is_a_right_cluster_or_is_named(pair: Any) -> None:
    config, damaged = pair
    try:
        found = read(json.dumps(damaged))
    except ValueError as error:
        assert "TF_CONFIG" in str(error)
        assert len(str(error)) < 600
    else:
        check_is_right(damaged, found)


@examples(500)
@given(json_values)
@example({"cluster": {"worker": ["a:1"]}, "task": {"type": [], "index": 0}})
@example({"cluster": {"worker": {"0": "a:1", "00": "b:1"}}, "task": {}})
@example({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 10**30}})
def test_any_json_is_a_right_cluster_or_a_value_error(value: Any) -> None:
    try:
        found = read(json.dumps(value))
    except ValueError as error:
        assert "TF_CONFIG" in str(error)
    else:
        check_is_right(value, found)


@examples(200)
@given(st.text(alphabet=st.characters(exclude_characters="\0", codec="utf-8")))
def test_any_text_is_a_right_cluster_or_a_value_error(text: str) -> None:
    try:
        found = read(text)
    except ValueError as error:
        assert "TF_CONFIG" in str(error)
    else:
        assert found.size == 0


def check_is_right(config: dict[str, Any], found: TrainingCluster) -> None:
    """Only what says so in full is a cluster; only what says it is none, is none."""
    if not found.size:
        jobs = {*config.get("cluster", {})}
        assert not config or config["cluster"] == {} or jobs <= {"evaluator", "ps"}
        assert found.index is None
        return
    cluster, task = config["cluster"], config["task"]
    assert task["type"] == found.task_type and int(task["index"]) == found.task_id
    for name, address in zip(found.names, found.addresses):
        job, index = name.split()
        tasks = cluster[job]
        assert address == (
            tasks[int(index)] if isinstance(tasks, list) else tasks[index]
        )
        assert re.fullmatch(r"\S+:\d+", address)
