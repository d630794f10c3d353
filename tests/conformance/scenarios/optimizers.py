"""Optimizers: gradients are summed over the replicas, every copy is updated (9.1)."""

from . import scenario

G = [1.0, 0.0], [3.0, 1.0]
ROWS = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
BROKEN = "Keras fills only the first copy of slots made in a compiled step"


def applied(api, optimizer, pairs):
    optimizer.apply_gradients(pairs)


def iterations(api, optimizer):
    return int(api.to_numpy(optimizer.iterations))


class Training:
    """Variables, an optimizer for them, and a step that applies given gradients."""

    def __init__(
        self, api, engine, make, *initial, num_replicas=2, build=True, **kwargs
    ):
        self.api = api
        self.strategy = api.mirrored(num_replicas)
        with self.strategy.scope():
            self.variables = [api.Variable(value, **kwargs) for value in initial]
            self.optimizer = make()
        if build:
            api.build(self.strategy, self.optimizer, self.variables)

        def replica_fn(*gradients):
            self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

        self.replica_fn = api.compile_if(engine, replica_fn)

    def step(self, *gradients, dtype="float32"):
        value = self.api.per_replica
        values = [value(self.strategy, *parts, dtype=dtype) for parts in gradients]
        return self.strategy.run(self.replica_fn, args=tuple(values))

    def state(self):
        return {
            "copies": [self.api.copies(v) for v in self.variables],
            "iterations": iterations(self.api, self.optimizer),
        }


def trained(api, engine, make, *gradients, steps=1, dtype="float32", **kwargs):
    """The state after some steps with the same gradients of variables [1, 2]."""
    training = Training(api, engine, make, *[[1.0, 2.0]] * len(gradients), **kwargs)
    for _ in range(steps):
        training.step(*gradients, dtype=dtype)
    return training.state()


@scenario("9.1")
def sgd_sums_gradients(api, engine):
    return trained(api, engine, lambda: api.sgd(0.1), G)


@scenario("9.1")
def sgd_sums_gradients_of_three_replicas(api, engine):
    parts = *G, [5.0, 5.0]
    return trained(api, engine, lambda: api.sgd(0.1), parts, num_replicas=3)


@scenario(
    "9.1",
    differs="TensorFlow fails: one replica is no special case here",
    expect=[[[0.71, 2.0]], 2],
    differs_in=("compiled",),
)
def sgd_with_one_replica(api, engine):
    def make():
        return api.sgd(0.1, 0.9)

    training = Training(api, engine, make, [1.0, 2.0], num_replicas=1)
    for _ in range(2):
        training.step([[1.0, 0.0]])
    state = training.state()
    return [*api.plain(state["copies"]), state["iterations"]]


@scenario("9.1")
def sgd_on_one_device(api, engine):
    strategy = api.one_device()
    with strategy.scope():
        variable, optimizer = api.Variable([1.0, 2.0]), api.sgd(0.1)
    api.build(strategy, optimizer, [variable])
    fn = api.compile_if(engine, lambda g: applied(api, optimizer, [(g, variable)]))
    strategy.run(fn, args=(api.array([1.0, 1.0]),))
    return [api.copies(variable), iterations(api, optimizer)]


@scenario("9.1")
def sgd_outside_of_any_scope(api, engine):
    variable, optimizer = api.Variable([1.0, 2.0]), api.sgd(0.1, 0.9)
    optimizer.build([variable])
    fn = api.compile_if(engine, lambda g: applied(api, optimizer, [(g, variable)]))
    for _ in range(2):
        fn(api.array([1.0, 1.0]))
    return [api.copies(variable), iterations(api, optimizer)]


@scenario("9.1")
def sgd_with_momentum(api, engine):
    return trained(api, engine, lambda: api.sgd(0.1, 0.9), G, steps=3)


@scenario("9.1")
def sgd_with_nesterov_momentum(api, engine):
    return trained(api, engine, lambda: api.sgd(0.1, 0.9, True), G, steps=3)


@scenario("9.1")
def adam(api, engine):
    return trained(api, engine, lambda: api.adam(0.1), G, steps=3)


@scenario("9.1")
def adam_with_changing_gradients(api, engine):
    training = Training(api, engine, lambda: api.adam(0.1), [1.0, 2.0])
    training.step(G)
    training.step(([-2.0, 1.0], [0.5, 0.5]))
    training.step(([0.0, 0.0], [0.0, 0.0]))
    return training.state()


@scenario("9.1")
def sgd_with_a_schedule(api, engine):
    def make():
        return api.sgd(api.exponential_decay(0.1, 1, 0.5))

    return trained(api, engine, make, G, steps=3)


@scenario("9.1")
def several_variables(api, engine):
    other = [2.0, 2.0], [-1.0, 2.0]
    return trained(api, engine, lambda: api.sgd(0.1, 0.9), G, other, steps=2)


@scenario("9.1")
def variables_of_different_shapes(api, engine):
    shapes = 1.0, [1.0, 2.0], [[1.0], [2.0]]
    training = Training(api, engine, lambda: api.adam(0.1), *shapes)
    training.step((1.0, 2.0), G, ([[1.0], [1.0]], [[2.0], [0.0]]))
    return training.state()


@scenario("9.1", differs=BROKEN, expect=True, differs_in=("compiled",))
def slots_made_at_the_first_step(api, engine):
    def state(build):
        kwargs = {"steps": 3, "build": build}
        result = trained(api, engine, lambda: api.adam(0.1), G, **kwargs)
        return api.plain(result["copies"])

    built, not_built = state(True), api.attempt(lambda: state(False))
    return built == not_built


@scenario("9.1")
def iterations_before_and_after(api, engine):
    training = Training(api, engine, lambda: api.sgd(0.1), [1.0, 2.0])
    seen = [training.state()["iterations"]]
    for _ in range(3):
        training.step(G)
        seen.append(training.state()["iterations"])
    return seen


@scenario("9.1")
def apply_gradients_returns_the_iterations(api):
    variable, optimizer = api.Variable(1.0), api.sgd(0.1)
    pairs = [(api.array(1.0), variable)]
    results = [optimizer.apply_gradients(pairs) for _ in range(2)]
    return int(api.to_numpy(results[-1]))


@scenario("9.1")
def a_variable_that_is_not_trainable(api, engine):
    return trained(api, engine, lambda: api.sgd(0.1), G, trainable=False)


@scenario("9.1", cases=[("MEAN",), ("SUM",), ("ONLY_FIRST_REPLICA",)])
def a_variable_with_an_aggregation(api, engine, aggregation):
    aggregation = getattr(api.VariableAggregation, aggregation)
    return trained(api, engine, lambda: api.sgd(0.1), G, aggregation=aggregation)


@scenario("9.1")
def a_variable_of_half_precision(api, engine):
    kwargs = {"dtype": "float16"}
    training = Training(api, engine, lambda: api.sgd(0.5), [1.0, 2.0], **kwargs)
    training.step(G)
    return training.state()


@scenario("9.1")
def gradients_of_half_precision(api, engine):
    return trained(api, engine, lambda: api.sgd(0.5), G, dtype="float16")


@scenario("9.1")
def gradients_that_are_integers(api, engine):
    ints = [1, 2], [3, 4]
    return trained(api, engine, lambda: api.sgd(0.1), ints, dtype="int32")


@scenario("9.1")
def gradients_that_are_nan(api, engine):
    parts = [float("nan"), 0.0], [3.0, 1.0]
    return trained(api, engine, lambda: api.sgd(0.1), parts)


@scenario("9.1")
def gradients_of_zeros_move_a_variable_with_momentum(api, engine):
    training = Training(api, engine, lambda: api.sgd(0.1, 0.9), [1.0, 2.0])
    training.step(G)
    training.step(([0.0, 0.0], [0.0, 0.0]))
    return training.state()


WRONG = {
    "longer": ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
    "scalar": (1.0, 2.0),
    "one": ([1.0], [2.0]),
    "row": ([[1.0, 1.0]], [[2.0, 1.0]]),
}


@scenario("9.1", cases=[(name,) for name in WRONG])
def gradient_of_a_wrong_shape(api, engine, shape):
    training = Training(api, engine, lambda: api.sgd(0.1), [1.0, 2.0])
    error = api.attempt(lambda: training.step(WRONG[shape]))
    return [error, training.state()]


@scenario(
    "9.1",
    differs="nothing is updated if anything is wrong",
    expect=[ValueError, [[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0], [1.0, 2.0]], 0],
    differs_in=("eager",),
)
def gradient_of_a_wrong_shape_for_the_second_variable(api, engine):
    training = Training(api, engine, lambda: api.sgd(0.1), [1.0, 2.0], [1.0, 2.0])
    error = api.attempt(lambda: training.step(G, WRONG["longer"]))
    state = training.state()
    return [error, *api.plain(state["copies"]), state["iterations"]]


@scenario("9.1")
def gradients_of_different_shapes_on_replicas(api, engine):
    training = Training(api, engine, lambda: api.sgd(0.1), [1.0, 2.0])
    error = api.attempt(lambda: training.step(([1.0, 1.0], [1.0])))
    return [error, training.state()]


def with_none(api, engine, *present):
    """Applies gradients, None for some of the variables."""
    strategy = api.mirrored(2)
    with strategy.scope():
        variables = [api.Variable([1.0, 2.0]) for _ in present]
        optimizer = api.sgd(0.1)
    api.build(strategy, optimizer, variables)

    def replica_fn(gradient):
        gradients = [gradient if there else None for there in present]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    step = api.compile_if(engine, replica_fn)
    value = api.per_replica(strategy, *G)
    error = api.attempt(lambda: strategy.run(step, args=(value,)))
    copies = [api.plain(api.copies(v)) for v in variables]
    return [error, copies, iterations(api, optimizer)]


@scenario(
    "9.1",
    differs="a gradient that is None is an error that names the variable",
    expect=[ValueError, [[[1.0, 2.0]] * 2] * 2, 0],
)
def some_gradients_are_none(api, engine):
    return with_none(api, engine, True, False)


@scenario("9.1")
def all_gradients_are_none(api, engine):
    return with_none(api, engine, False, False)


def none_on_one_replica(api, *shared):
    """Applies a gradient that only the first replica has, after others."""
    strategy = api.mirrored(2)
    with strategy.scope():
        variables = [api.Variable([1.0, 2.0]) for _ in (*shared, 0)]
        optimizer = api.sgd(0.1)
    api.build(strategy, optimizer, variables)

    def replica_fn(gradient):
        context = api.distribute.get_replica_context()
        is_first = int(api.to_numpy(context.replica_id_in_sync_group)) == 0
        gradients = [*[gradient for _ in shared], gradient if is_first else None]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    value = api.per_replica(strategy, *G)
    error = api.attempt(lambda: strategy.run(replica_fn, args=(value,)))
    copies = [api.plain(api.copies(v)) for v in variables]
    return [error, copies, iterations(api, optimizer)]


@scenario("9.1")
def the_only_gradient_is_none_on_one_replica(api):
    return none_on_one_replica(api)


@scenario(
    "9.1",
    differs="a gradient that is None is an error that names the variable",
    expect=[ValueError, [[[1.0, 2.0]] * 2] * 2, 0],
)
def one_gradient_of_two_is_none_on_one_replica(api):
    return none_on_one_replica(api, "another")


@scenario("9.1")
def gradients_for_no_variables(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable, optimizer = api.Variable(1.0), api.sgd(0.1)
    api.build(strategy, optimizer, [variable])
    fn = api.compile_if(engine, lambda: applied(api, optimizer, []))
    error = api.attempt(lambda: strategy.run(fn))
    return [error, iterations(api, optimizer)]


@scenario("9.1")
def what_is_not_a_list_of_pairs(api):
    variable, optimizer = api.Variable(1.0), api.sgd(0.1)
    return [
        api.fails(lambda: optimizer.apply_gradients([api.array(1.0)])),
        api.fails(lambda: optimizer.apply_gradients(None)),
        api.fails(lambda: optimizer.apply_gradients([(api.array(1.0),)])),
        api.fails(lambda: optimizer.apply_gradients([(api.array(1.0), 2.0)])),
        api.copies(variable),
    ]


@scenario("9.1")
def pairs_may_come_from_a_generator(api):
    variable, optimizer = api.Variable(1.0), api.sgd(0.1)
    optimizer.apply_gradients((g, variable) for g in [api.array(1.0)])
    return api.copies(variable)


@scenario("9.1")
def gradient_that_is_a_python_number(api):
    variable, optimizer = api.Variable(1.0), api.sgd(0.1)
    optimizer.apply_gradients([(2.0, variable)])
    return api.copies(variable)


@scenario(
    "9.1",
    differs="one update cannot have two gradients for a variable",
    expect=[ValueError, 1.0],
)
def gradients_that_name_a_variable_twice(api):
    variable, optimizer = api.Variable(1.0), api.sgd(0.1)
    pairs = [(api.array(1.0), variable), (api.array(2.0), variable)]
    error = api.attempt(lambda: applied(api, optimizer, pairs))
    return [error, api.plain(variable)]


@scenario(
    "9.1",
    differs="an integer variable cannot be trained, and an error says so",
    expect=[TypeError, [1, 2]],
)
def gradient_of_a_variable_of_integers(api):
    variable, optimizer = api.Variable([1, 2]), api.sgd(0.1)
    pairs = [(api.array([1.0, 1.0]), variable)]
    error = api.attempt(lambda: applied(api, optimizer, pairs))
    return [error, api.plain(variable)]


@scenario("9.1")
def variable_that_the_optimizer_does_not_know(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        a, b, optimizer = api.Variable(1.0), api.Variable(2.0), api.sgd(0.1)
    api.build(strategy, optimizer, [a])
    value = api.per_replica(strategy, 1.0, 2.0)

    def step(*variables):
        fn = api.compile_if(
            engine, lambda g: applied(api, optimizer, [(g, v) for v in variables])
        )
        return api.attempt(lambda: strategy.run(fn, args=(value,)))

    results = [step(a), step(b), step(a, b)]
    copies = [api.copies(a), api.copies(b)]
    return [results, copies, iterations(api, optimizer)]


@scenario("9.1", cases=[("sgd",), ("adam",)])
def gradients_for_some_of_the_variables(api, engine, kind):
    strategy = api.mirrored(2)
    with strategy.scope():
        a, b = api.Variable(1.0), api.Variable(2.0)
        optimizer = api.sgd(0.1, 0.9) if kind == "sgd" else api.adam(0.1)
    api.build(strategy, optimizer, [a, b])
    value = api.per_replica(strategy, 1.0, 2.0)

    def step(variable):
        return api.compile_if(
            engine, lambda g: applied(api, optimizer, [(g, variable)])
        )

    first, second = step(a), step(b)
    for fn in (first, second, first):
        strategy.run(fn, args=(value,))
    return [api.copies(a), api.copies(b), iterations(api, optimizer)]


@scenario("9.1")
def variables_in_another_order_than_they_were_built(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        a, b = api.Variable(1.0), api.Variable([2.0, 2.0])
        optimizer = api.sgd(0.1, 0.9)
    api.build(strategy, optimizer, [a, b])

    def replica_fn(x, y):
        optimizer.apply_gradients([(y, b), (x, a)])

    step = api.compile_if(engine, replica_fn)
    x, y = api.per_replica(strategy, 1.0, 2.0), api.per_replica(strategy, *G)
    for _ in range(2):
        strategy.run(step, args=(x, y))
    return [api.copies(a), api.copies(b)]


CLIPPED = "gradients are summed before they are clipped"


def clipped_sgd(api):
    return api.sgd(0.1, global_clipnorm=1.0)


@scenario("9.1", differs=CLIPPED, expect=[[[0.94, 2.0]] * 2, [[1.0, 1.92]] * 2])
def clipping_by_the_global_norm(api, engine):
    gradients = ([3.0, 0.0], [3.0, 0.0]), ([0.0, 4.0], [0.0, 4.0])
    state = trained(api, engine, lambda: clipped_sgd(api), *gradients)
    return api.plain(state["copies"])


@scenario("9.1")
def clipping_of_gradients_that_are_small(api, engine):
    small = [0.01, 0.02], [0.03, 0.01]
    return trained(api, engine, lambda: clipped_sgd(api), small)


@scenario(
    "9.1",
    differs=CLIPPED,
    expect=[[1 - 0.1 * 3 / 29.25**0.5, 2 - 0.1 * 4.5 / 29.25**0.5]] * 2,
)
def clipping_of_one_replicas_gradient(api, engine):
    large = [3.0, 4.0], [0.0, 0.5]
    state = trained(api, engine, lambda: clipped_sgd(api), large)
    return api.plain(state["copies"][0])


@scenario("9.1")
def clipping_with_one_gradient_for_all(api):
    variable, optimizer = api.Variable([1.0, 2.0]), clipped_sgd(api)
    optimizer.apply_gradients([(api.array([3.0, 4.0]), variable)])
    return api.copies(variable)


ACCUMULATED = "Keras cannot accumulate in a compiled step on several replicas"


def accumulated(api, engine, steps):
    def make():
        return api.sgd(0.1, gradient_accumulation_steps=2)

    training = Training(api, engine, make, [1.0, 2.0])
    for number in range(steps):
        training.step(([1.0, 0.0], [3.0, float(number)]))
    state = training.state()
    return [api.plain(state["copies"][0]), state["iterations"]]


@scenario(
    "9.1",
    "11.11",
    differs=ACCUMULATED,
    expect=[[[1.0, 2.0]] * 2, 0],
    differs_in=("compiled",),
)
def accumulation_before_the_update(api, engine):
    return accumulated(api, engine, 1)


@scenario(
    "9.1",
    "11.11",
    differs=ACCUMULATED,
    expect=[[[0.6, 1.95]] * 2, 1],
    differs_in=("compiled",),
)
def accumulation_updates_with_the_mean(api, engine):
    return accumulated(api, engine, 2)


@scenario(
    "9.1",
    "11.11",
    differs=ACCUMULATED,
    expect=[[[0.6, 1.95]] * 2, 1],
    differs_in=("compiled",),
)
def accumulation_begins_anew(api, engine):
    return accumulated(api, engine, 3)


@scenario(
    "9.1",
    "11.11",
    differs=ACCUMULATED,
    expect=[[[0.2, 1.7]] * 2, 2],
    differs_in=("compiled",),
)
def accumulation_updates_twice(api, engine):
    return accumulated(api, engine, 4)


@scenario("9.1", "11.11")
def accumulation_outside_of_any_scope(api):
    variable = api.Variable([1.0, 2.0])
    optimizer = api.sgd(0.1, 0.9, gradient_accumulation_steps=3)
    seen = []
    for number in range(7):
        gradient = api.array([1.0, float(number)])
        optimizer.apply_gradients([(gradient, variable)])
        seen.append([api.plain(variable), iterations(api, optimizer)])
    return seen


@scenario("9.1", "11.11")
def accumulation_over_a_wrong_number_of_steps(api):
    return api.attempt(lambda: api.sgd(0.1, gradient_accumulation_steps=-1))


def sliced(api, engine, make, values, indices, steps=2):
    """Rows of a variable, updated with sparse gradients."""
    strategy = api.mirrored(2)
    with strategy.scope():
        variable, optimizer = api.Variable(ROWS), make()
    api.build(strategy, optimizer, [variable])

    def replica_fn(values, indices):
        gradient = api.IndexedSlices(values, indices, api.array([3, 2], "int32"))
        optimizer.apply_gradients([(gradient, variable)])

    step = api.compile_if(engine, replica_fn)
    values = api.per_replica(strategy, *values)
    indices = api.per_replica(strategy, *indices, dtype="int32")
    for _ in range(steps):
        strategy.run(step, args=(values, indices))
    return api.copies(variable)


ONE_ROW = ([[1.0, 1.0]], [[2.0, 2.0]]), ([0], [2])


@scenario("9.1", "6.4")
def sparse_gradients_with_sgd(api, engine):
    return sliced(api, engine, lambda: api.sgd(0.1), *ONE_ROW)


@scenario("9.1", "6.4")
def sparse_gradients_with_momentum(api, engine):
    return sliced(api, engine, lambda: api.sgd(0.1, 0.9), *ONE_ROW, steps=3)


@scenario("9.1", "6.4")
def sparse_gradients_with_adam(api, engine):
    return sliced(api, engine, lambda: api.adam(0.1), *ONE_ROW, steps=3)


@scenario("9.1", "6.4")
def sparse_gradients_of_the_same_row(api, engine):
    values = [[1.0, 1.0], [1.0, 2.0]], [[2.0, 2.0], [4.0, 4.0]]
    indices = [0, 0], [2, 0]
    return sliced(api, engine, lambda: api.sgd(0.1), values, indices)


@scenario("9.1", "6.4")
def sparse_gradients_of_different_numbers_of_rows(api, engine):
    values = [[1.0, 1.0], [1.0, 2.0]], [[2.0, 2.0]]
    indices = [0, 1], [2]
    return sliced(api, engine, lambda: api.sgd(0.1), values, indices)


@scenario("9.1", "6.4")
def sparse_and_dense_gradients_together(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        rows, bias = api.Variable(ROWS), api.Variable([1.0, 2.0])
        optimizer = api.sgd(0.1, 0.9)
    api.build(strategy, optimizer, [rows, bias])

    def replica_fn(values, indices, gradient):
        slices = api.IndexedSlices(values, indices, api.array([3, 2], "int32"))
        optimizer.apply_gradients([(slices, rows), (gradient, bias)])

    values = api.per_replica(strategy, *ONE_ROW[0])
    indices = api.per_replica(strategy, *ONE_ROW[1], dtype="int32")
    gradient = api.per_replica(strategy, *G)
    strategy.run(api.compile_if(engine, replica_fn), args=(values, indices, gradient))
    return [api.copies(rows), api.copies(bias)]


def together(api, engine, gradient, in_scope):
    """Applies a gradient of a mirrored variable in cross-replica context."""
    strategy = api.mirrored(2)
    with strategy.scope():
        variable, optimizer = api.Variable([1.0, 2.0]), api.sgd(0.1, 0.9)
    api.build(strategy, optimizer, [variable])
    value = gradient(strategy)
    fn = api.compile_if(engine, lambda: applied(api, optimizer, [(value, variable)]))
    if in_scope:
        with strategy.scope():
            error = api.attempt(fn)
    else:
        error = api.attempt(fn)
    return [error, api.plain(api.copies(variable)), iterations(api, optimizer)]


@scenario(
    "9.1",
    differs="it works in cross-replica context too: Keras needs a replica context",
    expect=[None, [[0.9, 1.9]] * 2, 1],
)
def gradients_applied_in_cross_replica_context(api, engine):
    return together(api, engine, lambda strategy: api.array([1.0, 1.0]), True)


@scenario(
    "9.1",
    differs="it works in cross-replica context too: Keras needs a replica context",
    expect=[None, [[0.6, 1.9]] * 2, 1],
)
def distributed_gradients_applied_in_cross_replica_context(api, engine):
    return together(api, engine, lambda s: api.per_replica(s, *G), True)


@scenario("9.1")
def gradients_applied_outside_of_the_scope(api, engine):
    return together(api, engine, lambda strategy: api.array([1.0, 1.0]), False)


@scenario(
    "9.1",
    differs="it works in cross-replica context too: Keras needs a replica context",
    expect=[[[0.6, 1.9]] * 2, 1],
)
def gradients_applied_in_merge_call(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable, optimizer = api.Variable([1.0, 2.0]), api.sgd(0.1)
    api.build(strategy, optimizer, [variable])

    def replica_fn(gradient):
        api.distribute.get_replica_context().merge_call(
            lambda strategy, g: applied(api, optimizer, [(g, variable)]),
            args=(gradient,),
        )

    step = api.compile_if(engine, replica_fn)
    value = api.per_replica(strategy, *G)
    strategy.run(step, args=(value,))
    return [api.plain(api.copies(variable)), iterations(api, optimizer)]


@scenario("9.1")
def optimizer_made_outside_of_the_scope(api, engine):
    optimizer, strategy = api.sgd(0.1), api.mirrored(2)
    with strategy.scope():
        variable = api.Variable([1.0, 2.0])
    api.build(strategy, optimizer, [variable])
    fn = api.compile_if(engine, lambda g: applied(api, optimizer, [(g, variable)]))
    strategy.run(fn, args=(api.per_replica(strategy, *G),))
    return api.copies(variable)


@scenario("9.1")
def optimizer_made_inside_a_replica_function(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable([1.0, 2.0])

    def replica_fn(gradient):
        api.sgd(0.1).apply_gradients([(gradient, variable)])

    strategy.run(replica_fn, args=(api.per_replica(strategy, *G),))
    return api.copies(variable)


@scenario(
    "9.1",
    differs="the error says what is wrong",
    expect=[ValueError, [[1.0, 2.0]]],
)
def gradient_of_a_variable_made_outside_of_the_scope(api):
    variable, strategy = api.Variable([1.0, 2.0]), api.mirrored(2)
    with strategy.scope():
        optimizer = api.sgd(0.1)
    value = api.per_replica(strategy, *G)

    def replica_fn(gradient):
        optimizer.apply_gradients([(gradient, variable)])

    error = api.attempt(lambda: strategy.run(replica_fn, args=(value,)))
    return [error, api.plain(api.copies(variable))]


def loss_fn(api, w, x, y):
    errors = api.square(api.sum(x * w, axis=1) - y)
    return api.compute_average_loss(errors, global_batch_size=4)


@scenario("9.1", "9.2", cases=[("sgd",), ("momentum",), ("adam",)])
def training_loop(api, engine, kind):
    strategy = api.mirrored(2)
    with strategy.scope():
        w = api.Variable([0.0, 0.0])
        optimizer = {
            "sgd": lambda: api.sgd(0.1),
            "momentum": lambda: api.sgd(0.1, 0.9),
            "adam": lambda: api.adam(0.1),
        }[kind]()
    api.build(strategy, optimizer, [w])

    def replica_fn(x, y):
        loss, gradients = api.variable_gradients(lambda: loss_fn(api, w, x, y), [w])
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return loss

    step = api.compile_if(engine, replica_fn)
    x = api.per_replica(strategy, [[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [2.0, 0.0]])
    y = api.per_replica(strategy, [1.0, 2.0], [3.0, 2.0])
    losses = [
        strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
        for _ in range(5)
    ]
    return [losses, api.copies(w), iterations(api, optimizer)]


@scenario("9.1", "9.2")
def training_loop_in_a_function(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        w, optimizer = api.Variable([0.0, 0.0]), api.sgd(0.1, 0.9)
    api.build(strategy, optimizer, [w])

    def replica_fn(x, y):
        loss, gradients = api.variable_gradients(lambda: loss_fn(api, w, x, y), [w])
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return loss

    @api.function
    def step(x, y):
        losses = strategy.run(replica_fn, args=(x, y))
        return strategy.reduce("SUM", losses, axis=None)

    x = api.per_replica(strategy, [[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [2.0, 0.0]])
    y = api.per_replica(strategy, [1.0, 2.0], [3.0, 2.0])
    return [[step(x, y) for _ in range(3)], api.copies(w)]


@scenario("9.1", "9.2")
def training_is_the_same_on_one_device_and_on_two(api, engine):
    rows = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]]
    goals = [1.0, 2.0, 3.0, 2.0]

    def result(strategy, *parts):
        with strategy.scope():
            w, optimizer = api.Variable([0.0, 0.0]), api.sgd(0.1, 0.9)
        api.build(strategy, optimizer, [w])

        def replica_fn(x, y):
            _, gradients = api.variable_gradients(lambda: loss_fn(api, w, x, y), [w])
            optimizer.apply_gradients(zip(gradients, [w], strict=True))

        step = api.compile_if(engine, replica_fn)
        x = api.per_replica(strategy, *[rows[part] for part in parts])
        y = api.per_replica(strategy, *[goals[part] for part in parts])
        for _ in range(3):
            strategy.run(step, args=(x, y))
        return api.copies(w)[0]

    one = result(api.one_device(), slice(4))
    return [one, result(api.mirrored(2), slice(2), slice(2, 4))]


@scenario("9.1")
def two_optimizers_for_two_variables(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        a, b = api.Variable([1.0, 2.0]), api.Variable([1.0, 2.0])
        first, second = api.sgd(0.1, 0.9), api.adam(0.1)
    api.build(strategy, first, [a])
    api.build(strategy, second, [b])

    def replica_fn(gradient):
        first.apply_gradients([(gradient, a)])
        second.apply_gradients([(gradient, b)])

    step = api.compile_if(engine, replica_fn)
    for _ in range(2):
        strategy.run(step, args=(api.per_replica(strategy, *G),))
    return [api.copies(a), api.copies(b)]


@scenario("9.1")
def variable_assigned_between_steps(api, engine):
    training = Training(api, engine, lambda: api.sgd(0.1, 0.9), [1.0, 2.0])
    training.step(G)
    training.variables[0].assign([10.0, 20.0])
    training.step(G)
    return training.state()
