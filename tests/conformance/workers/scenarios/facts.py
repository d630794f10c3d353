"""What a strategy says about its cluster, and which scopes there are (8.1, 12.2)."""

from . import scenario

TRAINING = (
    *("two", "three", "two_by_two", "one", "none"),
    *("chief", "chief_only", "with_evaluator"),
)
ASIDE = ("evaluator", "ps")
CHIEF = {
    "replicas": 1,
    "should_checkpoint": True,
    "should_save_summary": True,
    "experimental_should_init": True,
    "experimental_between_graph": True,
    "static shapes": False,
}


def job_sizes(spec):
    return {job: len(tasks) for job, tasks in spec.as_dict().items()}


@scenario("8.1", "8.3", "12.2", clusters=TRAINING + ASIDE)
def resolver(api):
    found = api.multi_worker().cluster_resolver
    return {
        "class": api.class_name(found),
        "task": [found.task_type, found.task_id],
        "jobs": job_sizes(found.cluster_spec()),
        "environment": found.environment,
        "has a master": found.master() != "",
    }


@scenario("8.1", clusters=TRAINING + ASIDE)
@scenario(
    "8.1",
    clusters=("unlisted_evaluator",),
    differs="an evaluator need not be in the cluster, which does not need it",
    expect=[CHIEF],
)
@scenario(
    "8.1",
    clusters=("with_ps",),
    differs="nobody waits for a parameter server, which takes no part",
    expect=[
        {**CHIEF, "replicas": 2},
        {
            **CHIEF,
            "replicas": 2,
            "should_checkpoint": False,
            "should_save_summary": False,
        },
    ],
)
def roles(api):
    strategy = api.multi_worker()
    extended = strategy.extended
    return {
        "replicas": strategy.num_replicas_in_sync,
        "should_checkpoint": extended.should_checkpoint,
        "should_save_summary": extended.should_save_summary,
        "experimental_should_init": extended.experimental_should_init,
        "experimental_between_graph": extended.experimental_between_graph,
        "static shapes": extended.experimental_require_static_shapes,
    }


@scenario("8.1", clusters=TRAINING)
def devices(api):
    extended = api.multi_worker().extended
    return {
        "worker": [str(each) for each in extended.worker_devices],
        "same": extended.worker_devices == extended.parameter_devices,
        "class": api.class_name(extended.worker_devices),
        "non slot": len(extended.non_slot_devices([])),
    }


@scenario("8.1")
def class_is_the_same_under_both_names(api):
    older = api.distribute.experimental.MultiWorkerMirroredStrategy
    return [
        issubclass(older, api.distribute.MultiWorkerMirroredStrategy),
        isinstance(api.multi_worker(), api.distribute.Strategy),
        isinstance(older(), api.distribute.MultiWorkerMirroredStrategy),
    ]


@scenario("8.1", "6.2", cases=[("RING",), ("AUTO",)])
def communication_options(api, name):
    experimental = api.distribute.experimental
    implementation = experimental.CommunicationImplementation[name]
    options = experimental.CommunicationOptions(
        implementation=implementation, bytes_per_pack=8
    )
    strategy = api.multi_worker(communication_options=options)
    value = api.of_replica(strategy, lambda i: [1.0 + i] * 5)
    return strategy.reduce("SUM", value, axis=None)


@scenario("8.1", cases=[("RING",), ("AUTO",)])
def communication_of_the_older_name(api, name):
    experimental = api.distribute.experimental
    communication = experimental.CollectiveCommunication[name]
    strategy = experimental.MultiWorkerMirroredStrategy(communication=communication)
    value = api.of_replica(strategy, lambda i: 1.0 + i)
    return strategy.reduce("SUM", value, axis=None)


@scenario("8.1")
def arguments_that_are_unknown(api):
    return [
        api.attempt(lambda: api.multi_worker(devices=["CPU:0"])),
        api.fails(lambda: api.multi_worker(communication_options="RING")),
    ]


@scenario("8.1", "8.3")
def resolver_that_is_given(api):
    found = api.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = api.multi_worker(cluster_resolver=found)
    return [
        strategy.cluster_resolver is found,
        strategy.num_replicas_in_sync,
        strategy.reduce("SUM", api.array(1.0 + api.worker), axis=None),
    ]


@scenario("8.1")
def properties_cannot_be_set(api):
    strategy = api.multi_worker()
    return [
        api.attempt(lambda: setattr(strategy, "num_replicas_in_sync", 3)),
        api.attempt(lambda: setattr(strategy, "cluster_resolver", None)),
    ]


@scenario("2.2", "8.1")
def scope_and_contexts(api, engine):
    strategy = api.multi_worker()
    distribute = api.distribute

    def where():
        return [
            distribute.has_strategy(),
            distribute.in_cross_replica_context(),
            distribute.get_strategy() is strategy,
            distribute.get_replica_context() is not None,
        ]

    seen = []

    def replica_fn():
        seen.append(where())
        distribute.get_replica_context().merge_call(lambda s: seen.append(where()))

    outside = where()
    with strategy.scope() as entered:
        inside = where()
    strategy.run(api.compile_if(engine, replica_fn))
    return [outside, inside, entered is strategy, seen]


@scenario("2.2")
def scopes_in_scopes(api):
    strategy, other = api.multi_worker(), api.multi_worker()

    def enter(each):
        with each.scope():
            return api.distribute.get_strategy() is strategy

    def enter_in(outer, inner):
        with outer.scope():
            return enter(inner)

    return [
        enter_in(strategy, strategy),
        api.attempt(lambda: enter_in(strategy, other)),
        api.attempt(lambda: enter_in(strategy, api.one_device())),
        api.attempt(lambda: strategy.run(lambda: enter(strategy))),
        api.attempt(lambda: strategy.run(lambda: enter(other))),
        api.attempt(lambda: strategy.run(lambda: strategy.run(lambda: 1))),
        api.distribute.has_strategy(),
    ]


@scenario("2.2")
def strategy_for_the_whole_program(api):
    strategy = api.multi_worker()
    api.distribute.experimental_set_strategy(strategy)
    try:
        made = api.Variable(1.0 + api.worker)
        return [
            api.distribute.get_strategy() is strategy,
            api.class_name(made),
            api.copies(made),
        ]
    finally:
        api.distribute.experimental_set_strategy(None)


@scenario("8.1")
def second_strategy_in_one_process(api):
    first, second = api.multi_worker(), api.multi_worker()
    value = api.array(1.0 + api.worker)
    with first.scope():
        one = api.Variable(5.0 + api.worker)
    with second.scope():
        other = api.Variable(7.0 + api.worker)
    return [
        first.reduce("SUM", value, axis=None),
        second.reduce("MEAN", value, axis=None),
        first.reduce("MEAN", value, axis=None),
        api.copies(one),
        api.copies(other),
        first.num_replicas_in_sync == second.num_replicas_in_sync,
    ]


@scenario("8.1")
def one_device_strategy_beside(api):
    """Strategies of one process stay on their own worker."""
    strategy, alone = api.multi_worker(), api.one_device()
    with alone.scope():
        variable = api.Variable(1.0 + api.worker)
    doubled = alone.run(lambda: variable * 2.0)
    return [
        api.copies(variable),
        alone.reduce("SUM", doubled, axis=None),
        strategy.reduce("SUM", api.array(doubled), axis=None),
    ]


@scenario("8.1")
def mirrored_strategy_beside(api):
    strategy, alone = api.multi_worker(), api.mirrored(1)
    with alone.scope():
        variable = api.Variable(1.0 + api.worker)
    return [
        alone.num_replicas_in_sync,
        api.copies(variable),
        alone.reduce("SUM", api.array(1.0 + api.worker), axis=None),
        strategy.reduce("SUM", api.array(1.0 + api.worker), axis=None),
    ]


@scenario("8.1")
def variable_of_another_strategy(api):
    strategy, other = api.multi_worker(), api.multi_worker()
    with strategy.scope():
        variable = api.Variable(1.0 + api.worker)
    return [
        strategy.extended.variable_created_in_scope(variable),
        other.extended.variable_created_in_scope(variable),
        strategy.extended.variable_created_in_scope(api.Variable(1.0)),
    ]
