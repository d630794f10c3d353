"""Programs for any strategy that run without one: the default strategy (2.1, 6.3)."""

from itertools import product

from . import scenario
from .extended import make_strategy

STRATEGIES = product(("mirrored", "one_replica", "one_device", "default"))


@scenario("6.3", cases=STRATEGIES)
def state_that_belongs_to_no_single_variable(api, kind):
    """An optimizer's step counter, say: it is updated where the variables are."""
    strategy = make_strategy(api, kind)
    with strategy.scope():
        variables = [api.Variable(1.0, name="b"), api.Variable(2.0, name="a")]
        extended = strategy.extended
        place = extended.non_slot_devices(variables)
        return [
            extended.update_non_slot(
                place, lambda x, y: x + y, (api.array(3.0), api.array(4.0)), group=False
            ),
            extended.update_non_slot(place, lambda: None),
        ]


@scenario(
    "2.1",
    differs="what works for all replicas works in the one that there is",
    expect=[1.0, 2.0],
)
def strategy_methods_in_a_run_of_the_default_strategy(api):
    strategy = api.distribute.get_strategy()

    def replica_fn():
        inner = strategy.run(lambda: api.array(1.0))
        return [inner, strategy.reduce("SUM", api.array(2.0), axis=None)]

    return strategy.run(replica_fn)
