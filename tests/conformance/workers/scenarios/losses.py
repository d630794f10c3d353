"""Losses, metrics and optimizers over workers (9.1, 9.2, 9.3)."""

from itertools import product

import numpy as np

from . import scenario

MANY = ("two", "three", "two_by_two")


@scenario("9.2", clusters=MANY)
def average_loss(api, engine):
    """The default global batch is the worker's, times the number of replicas."""
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0 + i, 2.0])
    fn = api.compile_if(engine, lambda x: api.compute_average_loss(x))
    shares = strategy.run(fn, args=(value,))
    total = strategy.reduce("SUM", shares, axis=None)
    return [api.local_results(strategy, shares), total]


SHARES = [[{"float32[]": 1.5}], np.float32(3.0)]


@scenario(
    "9.2",
    "5.6",
    differs="all examples of the global batch count the same",
    expect=[[SHARES, SHARES]] * 2,
)
def average_loss_of_uneven_batches(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0, 2.0, 3.0] if i == 0 else [6.0])
    fn = api.compile_if(engine, lambda x: api.compute_average_loss(x))
    own = strategy.run(fn, args=(value,))
    whole = api.compile_if(
        engine, lambda x: api.compute_average_loss(x, global_batch_size=4)
    )
    whole = strategy.run(whole, args=(value,))
    return [
        [api.local_results(strategy, each), strategy.reduce("SUM", each, axis=None)]
        for each in (own, whole)
    ]


@scenario("9.2")
def average_loss_in_cross_replica_context(api):
    strategy = api.multi_worker()
    losses = api.array([1.0 + api.worker, 3.0])
    with strategy.scope():
        inside = api.attempt(lambda: api.compute_average_loss(losses))
        scaled = api.attempt(lambda: api.scale_regularization_loss(losses))
    return [inside, scaled, api.compute_average_loss(losses)]


@scenario("9.2")
def regularization_loss(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0 + i, 3.0])
    fn = api.compile_if(engine, lambda x: api.scale_regularization_loss(x))
    return api.local_results(strategy, strategy.run(fn, args=(value,)))


@scenario("9.3", cases=[("Mean",), ("Sum",)], clusters=MANY)
def metric(api, engine, name):
    """Each replica counts for itself; the result is of all workers."""
    strategy = api.multi_worker()
    with strategy.scope():
        made = getattr(api, name)()
    value = api.of_replica(strategy, lambda i: [1.0 + i, 2.0, 3.0])

    def replica_fn(x):
        made.update_state(x)

    step = api.compile_if(engine, replica_fn)
    for _ in range(2):
        strategy.run(step, args=(value,))
    copies = [api.copies(each) for each in api.metric_variables(made)]
    found = made.result()
    made.reset_state()
    return [copies, found, [api.copies(each) for each in api.metric_variables(made)]]


@scenario("9.3", "5.6")
def metric_of_uneven_batches(api):
    strategy = api.multi_worker()
    with strategy.scope():
        made = api.Mean()
    value = api.of_replica(strategy, lambda i: [6.0] * (1 + 2 * i) + [0.0])
    strategy.run(lambda x: made.update_state(x) and None, args=(value,))
    return made.result()


@scenario("9.3")
def metric_in_cross_replica_context(api):
    strategy = api.multi_worker()
    with strategy.scope():
        made = api.Sum()
        updated = api.attempt(lambda: made.update_state(1.0 + api.worker) and None)
        return [updated, api.attempt(made.result)]


@scenario("9.3")
def accuracy(api, engine):
    strategy = api.multi_worker()
    with strategy.scope():
        made = api.Accuracy()
    truth = api.of_replica(strategy, lambda i: [1, 2, 3], "int32")
    guess = api.of_replica(strategy, lambda i: [1, 2 - i, 3 - i], "int32")

    def replica_fn(truth, guess):
        made.update_state(truth, guess)

    strategy.run(api.compile_if(engine, replica_fn), args=(truth, guess))
    return made.result()


OPTIMIZERS = {
    "sgd": lambda api: api.sgd(0.1),
    "momentum": lambda api: api.sgd(0.1, momentum=0.9),
    "adam": lambda api: api.adam(0.1),
}


@scenario("9.1", cases=product(OPTIMIZERS), clusters=MANY)
def training(api, engine, name):
    """Gradients are summed over all workers, the weights stay equal."""
    strategy = api.multi_worker()
    with strategy.scope():
        weights = api.Variable([1.0 + api.worker, 2.0])
        bias = api.Variable(0.5)
        optimizer = OPTIMIZERS[name](api)
    api.build(strategy, optimizer, [weights, bias])
    value = api.of_replica(strategy, lambda i: [1.0 + i, 0.5 * i])

    def replica_fn(x):
        def loss():
            return api.sum((weights * x + bias) * weights)

        found, gradients = api.variable_gradients(loss, [weights, bias])
        optimizer.apply_gradients(zip(gradients, [weights, bias], strict=True))
        return found

    def step(x):
        return strategy.reduce("SUM", strategy.run(replica_fn, args=(x,)), axis=None)

    step = api.compile_if(engine, step)
    losses = [step(value) for _ in range(3)]
    return [losses, api.copies(weights), api.copies(bias)]


@scenario("9.1")
def iterations_of_an_optimizer(api):
    strategy = api.multi_worker()
    with strategy.scope():
        weights = api.Variable([1.0, 2.0])
        optimizer = api.sgd(0.1)
    api.build(strategy, optimizer, [weights])

    def replica_fn():
        optimizer.apply_gradients([(api.array([1.0, 1.0]), weights)])

    for _ in range(3):
        strategy.run(replica_fn)
    return [api.plain(optimizer.iterations), api.copies(weights)]
