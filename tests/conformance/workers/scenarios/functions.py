"""What compiled functions take on many workers: signatures, static values, structures (5.3)."""

from collections import OrderedDict
from dataclasses import dataclass

from . import scenario


@dataclass(frozen=True)
class Frozen:
    size: float


def counted(fn):
    """`fn`, and a list with an entry for each time that its Python runs."""
    traces = []

    def call(*args):
        traces.append(1)
        return fn(*args)

    return call, traces


@scenario("5.3", clusters=("two", "two_by_two"))
def a_signature_with_unknown_sizes(api):
    strategy = api.multi_worker()
    spec = api.TensorSpec([None], "float32")
    double = api.function(lambda x: x * 2.0, input_signature=[spec])
    found = []
    for size in (1, 3, 2):
        value = api.of_replica(strategy, lambda i, size=size: [1.0 + i] * size)
        result = strategy.run(lambda x: double(x), args=(value,))
        found.append(api.local_results(strategy, result))
    return found


@scenario(
    "5.3",
    differs="a compiled function that a replica calls may communicate; TensorFlow refuses",
    expect=[[{"float32[2]": [3.0, 20.0]}]] * 2,
)
def a_signature_and_a_reduction(api):
    strategy = api.multi_worker()
    spec = api.TensorSpec([2], "float32")

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return context.all_reduce("SUM", x)

    step = api.function(replica_fn, input_signature=[spec])
    value = api.of_replica(strategy, lambda i: [1.0 + i, 10.0])
    result = strategy.run(lambda x: step(x), args=(value,))
    return api.local_results(strategy, result)


@scenario("5.3")
def a_value_that_does_not_fit_its_signature(api):
    strategy = api.multi_worker()
    spec = api.TensorSpec([3], "float32")
    double = api.function(lambda x: x * 2.0, input_signature=[spec])
    value = api.of_replica(strategy, lambda i: [1.0, 2.0])
    return api.attempt(lambda: strategy.run(lambda x: double(x), args=(value,)))


@scenario(
    "5.3",
    differs="equal static values share a trace; TensorFlow traces a dataclass each time",
    expect=[[[[{"float32[]": 3.0 + 3.0 * i}]] * 3, 1] for i in range(2)],
)
def equal_static_values_share_a_trace(api):
    strategy = api.multi_worker()
    call, traces = counted(lambda x, options: x * options.size)
    step = api.function(call)
    value = api.of_replica(strategy, lambda i: 1.0 + i)
    results = [
        api.local_results(strategy, strategy.run(step, args=(value, Frozen(3.0))))
        for _ in range(3)
    ]
    return [results, len(traces)]


@scenario("5.2", "5.3", clusters=("two", "two_by_two"))
def mappings_with_values_of_replicas(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: 1.0 + i)
    batch = OrderedDict(b=value, a={"x": value, "y": 5.0})

    def replica_fn(batch):
        return OrderedDict(sum=batch["b"] + batch["a"]["x"], same=batch["a"]["y"])

    step = api.compile_if(engine, replica_fn)
    result = strategy.run(step, args=(batch,))
    return [
        type(result).__name__,
        list(result),
        api.local_results(strategy, result["sum"]),
    ]
