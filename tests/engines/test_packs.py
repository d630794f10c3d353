"""Many small variables live in packs, and nobody can tell."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import compile_if, mirrored, per_replica
from helpers.hlo import compiled_text, last_programs

import mirrax as mx
from mirrax._src.engines import packs
from mirrax._src.engines.program import Program
from mirrax._src.state import home as home_module
from mirrax._src.state import variable as variables_module

SHAPES = [(3,), (3,), (2, 2), (3,), (1, 2), (2, 2), (), (3,), (), (3,), (4,)]
COUNT = len(SHAPES)


@pytest.fixture
def always(monkeypatch):
    """Packs of two to four."""
    monkeypatch.setattr(packs, "_MANY_ON_CPUS", 2)
    monkeypatch.setattr(packs, "_FEWEST", 2)
    monkeypatch.setattr(packs, "_MOST", 4)


def make(strategy, shapes=SHAPES, dtype="float32"):
    with strategy.scope():
        return [
            mx.Variable(np.full(shape, i), name=f"v{i}", dtype=dtype)
            for i, shape in enumerate(shapes)
        ]


def add_to(variables, engine="compiled") -> Any:
    def step(x):
        for v in variables:
            v.assign_add(jnp.broadcast_to(x, v.shape).astype(v.dtype))

    return compile_if(engine, step)


def packed(variables):
    return [v.lives_at[2] is not None for v in variables]


@pytest.fixture
def many(monkeypatch):
    """Packs of eight to sixteen, as on GPUs."""
    monkeypatch.setattr(packs, "_MANY_ON_CPUS", packs._MANY)


@contextlib.contextmanager
def failing(function):
    """Has the last program of `function` fail after it has taken its arrays."""
    [program] = last_programs(function).values()
    jitted = program._jitted

    def fail(*args):
        jitted(*args)
        raise RuntimeError("out of luck")

    program._jitted = fail
    yield
    program._jitted = jitted


def arrays_of(strategy, function):
    """How many arrays a step takes from its variables and gives back in their place."""
    return compiled_text(function, strategy).splitlines()[0].count("-alias)")


# Which ------------------------------------------------------------------------------------


def train(strategy, shapes):
    variables = make(strategy, shapes)
    with strategy.scope():
        optimizer = mx.train.Optimizer(optax.sgd(0.1, momentum=0.9))

    @mx.function
    def step():
        gradients = [v.read_value() for v in variables]
        optimizer.apply_gradients(zip(gradients, variables))

    for _ in range(3):
        strategy.run(step)
    return variables, step


def test_many_small_ones_are_few_arrays_of_a_step(many):
    strategy = mirrored(2)
    variables, step = train(strategy, [(5,)] * 48)
    assert all(packed(variables))
    # 96 in packs of 16, and the count of steps.
    assert arrays_of(strategy, step) == 7

    def by_hand(value):
        trace = 0.0
        for _ in range(3):
            trace = 0.9 * trace + 2 * value  # both replicas' gradients
            value -= 0.1 * trace
        return value

    for i, v in enumerate(variables):
        np.testing.assert_allclose(v.numpy(), np.full(5, by_hand(i)), rtol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_on_any_number_of_devices(always, replicas):
    strategy = mirrored(replicas)
    variables = make(strategy, [(3,), (3,)])
    strategy.run(add_to(variables), args=(1.0,))
    assert packed(variables) == [True, True]
    assert [v.numpy()[0] for v in variables] == [1.0, 2.0]


def test_a_weight_and_its_slot_are_at_like_places_whatever_their_names_order(many):
    variables, step = train(mirrored(2), [(5,)] * 48)
    [program] = last_programs(step).values()
    parts = {v.name: v.lives_at[2] for v in program.trace.writes}
    for v in variables:
        assert parts[v.name] == parts[f"optimizer/0/trace/{v.name}"]


@pytest.mark.parametrize(
    "shapes", [[(5,)] * 40, [(5,)] * 100 + [(10_000,)]], ids=["few", "beside large"]
)
def test_where_little_is_gained_each_has_an_array(many, shapes):
    strategy = mirrored(2)
    variables = make(strategy, shapes)
    strategy.run(add_to(variables), args=(1.0,))
    assert not any(packed(variables))


def test_only_what_all_replicas_have_alike(always):
    strategy = mirrored(2)
    own = {"synchronization": mx.VariableSynchronization.ON_READ}
    with strategy.scope():
        each = [
            *make(strategy),
            *make(strategy, [(0,), (0,)]),
            mx.Variable(jnp.ones(3), aggregation=mx.VariableAggregation.SUM, **own),
            mx.Variable(jax.random.key(0)),
            mx.Variable(jax.random.key(1)),
        ]
    outside = mx.Variable(jnp.ones(3))

    @mx.function
    def step():
        for v in each[:-2]:
            v.assign_add(jnp.ones(v.shape, v.dtype))
        for key in each[-2:]:
            key.assign(jax.random.split(key.read_value())[0])
        return outside + 1

    strategy.run(step)
    # Not those that are left: the fifth of its shape, and the only ones of theirs.
    expected = [shape != (1, 2) for shape in SHAPES[:9]] + [False, False]
    assert packed([*each, outside]) == expected + [False] * 6


def test_names_may_be_anything(always):
    strategy = mirrored(2)
    with strategy.scope():
        names = 7, "v10", "v9", "v" + "9" * 5000
        variables = [mx.Variable(jnp.zeros(3), name=name) for name in names]  # pyright: ignore[reportArgumentType]
    strategy.run(add_to(variables), args=(1.0,))
    assert [v.lives_at[2] for v in variables] == [0, 2, 1, 3]


def test_wide_ones_have_an_array_each(always):
    strategy = mirrored(2)
    with jax.enable_x64(True):
        variables = make(strategy, [(3,)] * 4, "float64")
        strategy.run(add_to(variables), args=(1.0,))
    assert not any(packed(variables))
    assert [v.numpy()[0] for v in variables] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "bool", "uint8", "complex64"])
def test_other_dtypes(always, dtype):
    strategy = mirrored(2)
    variables = make(strategy, [(3,), (3,), (3,)], dtype)
    before = [v.numpy() for v in variables]
    step = mx.function(
        lambda: [v.assign(~v if dtype == "bool" else v + v) for v in variables] and None
    )
    strategy.run(step)
    for old, v in zip(before, variables):
        expected = ~old if dtype == "bool" else old + old
        assert v.numpy().dtype == old.dtype
        np.testing.assert_array_equal(v.numpy(), expected)


# Reading, assigning, and other programs -------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.* has been traced")  # for copies alike and apart
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_what_can_be_done_to_variables(
    always, monkeypatch, replicas, seed
):
    strategy, choose = mirrored(replicas), random.Random(seed)
    monkeypatch.setattr(Program, "_patience", choose.choice([3, 10]))
    variables = make(strategy)
    model = [np.full(shape, float(i)) for i, shape in enumerate(SHAPES)]
    every, some = add_to(variables), add_to(variables[1:4])
    eagerly = add_to(variables[::2], "eager")
    other = add_to(list(variables))
    total = mx.function(lambda: sum(jnp.sum(v.read_value()) for v in variables))
    kept = []
    rows = mx.distribute.PerReplica([jnp.ones(1 + i) for i in range(replicas)])

    @mx.function
    def add_mean(x):
        one = mx.get_replica_context().all_reduce("MEAN", jnp.mean(x))
        for v in variables:
            v.assign_add(jnp.full(v.shape, one))

    def step(function, numbers, *args):
        strategy.run(function, args=args or (1.0,))
        for i in numbers:
            model[i] = model[i] + 1.0

    def assign():
        i = choose.randrange(COUNT)
        variables[i].assign(jnp.full(SHAPES[i], 7.0))
        model[i] = np.full(SHAPES[i], 7.0)

    def read():
        i = choose.randrange(COUNT)
        kept.append((variables[i].read_value(), model[i]))

    def read_all():
        assert float(total()) == sum(np.sum(value) for value in model)

    actions = [
        lambda: step(every, range(COUNT)),
        lambda: step(other, range(COUNT)),
        lambda: step(some, range(1, 4)),
        lambda: step(eagerly, range(0, COUNT, 2)),
        lambda: step(add_mean, range(COUNT), rows),
        *(assign, read, read_all),
    ]
    for _ in range(25):
        choose.choice(actions)()
    kept.extend((v.read_value(), value) for v, value in zip(variables, model))
    for found, expected in kept:
        np.testing.assert_array_equal(found, expected)
    strategy.assert_in_sync(variables)


def test_programs_of_the_same_variables_pass_packs_on(always, monkeypatch):
    strategy = mirrored(2)
    variables = make(strategy)
    one, other = add_to(variables), add_to(variables)
    for step in (one, other):
        strategy.run(step, args=(1.0,))
    made = []
    monkeypatch.setattr(packs.Pack, "close", lambda *_: made.append(1))
    monkeypatch.setattr(packs.Pack, "open", lambda *_: made.append(1))
    for step in (one, other, one):
        strategy.run(step, args=(1.0,))
    assert not made
    monkeypatch.undo()
    np.testing.assert_array_equal(variables[0].numpy(), np.full(3, 5.0))


def test_a_pack_of_which_one_is_read_is_open_until_the_next_step(always, monkeypatch):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 8)
    step = add_to(variables)
    strategy.run(step, args=(1.0,))
    made = count_packing(monkeypatch)
    first, *_ = [v.read_value() for v in variables[:4]]
    assert len(made) == 1
    strategy.run(step, args=(1.0,))
    np.testing.assert_array_equal(first, np.ones(3))
    assert [v.numpy()[0] for v in variables] == [2.0 + i for i in range(8)]
    assert len(made) == 1 + 2


def count_packing(monkeypatch):
    made = []
    for name in ("close", "open"):
        do = getattr(packs.Pack, name)
        monkeypatch.setattr(
            packs.Pack, name, lambda *args, do=do: made.append(1) or do(*args)
        )
    return made


def test_a_program_that_only_reads_takes_packs_as_they_are(always, monkeypatch):
    strategy = mirrored(2)
    variables = make(strategy)
    step = add_to(variables)
    total = mx.function(lambda: sum(jnp.sum(v.read_value()) for v in variables))
    strategy.run(step, args=(1.0,))
    made = count_packing(monkeypatch)
    sums = [float(total())]
    for _ in range(2):
        strategy.run(step, args=(1.0,))
        sums.append(float(total()))
    assert not made
    at_first = sum(np.sum(v.numpy()) for v in variables) - 3 * sum(
        v.numpy().size for v in variables
    )
    size = sum(v.numpy().size for v in variables)
    assert sums == [at_first + k * size for k in (1, 2, 3)]


def test_a_program_of_some_takes_the_packs_that_it_updates_as_a_whole(
    always, monkeypatch
):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 8)
    every, some = add_to(variables), add_to(variables[2:])
    for step in (every, some):
        strategy.run(step, args=(1.0,))
    made = count_packing(monkeypatch)
    for step in (every, some):
        strategy.run(step, args=(1.0,))
    # The first pack is made of two that were left in it, open since, and two that are arrays by
    # now, and is then opened again.
    assert len(made) == 1 + 1
    monkeypatch.undo()
    assert [v.numpy()[0] for v in variables] == [2.0, 3.0, *range(6, 12)]


def test_copies_that_were_assigned_apart_stay_apart(always):
    strategy = mirrored(2)
    with strategy.scope():
        variables = [mx.Variable(jnp.zeros(2), name=f"v{i}") for i in range(3)]
    step = add_to(variables)
    strategy.run(step, args=(1.0,))
    parts = per_replica(strategy, [5.0, 5.0], [6.0, 6.0])
    strategy.extended.update(variables[1], lambda v, x: v.assign(x), args=(parts,))
    strategy.run(step, args=(1.0,))
    copies = strategy.experimental_local_results(variables[1])
    assert [np.asarray(c)[0].item() for c in copies] == [6.0, 7.0]
    assert variables[0].numpy().tolist() == [2.0, 2.0]


def test_copies_and_checkpoints_of_packed_variables(always, tmp_path):
    strategy = mirrored(2)
    variables = make(strategy)
    step = add_to(variables)
    strategy.run(step, args=(1.0,))
    twin = copy.deepcopy(variables[0])
    checkpoint = mx.train.Checkpoint(variables=variables)
    checkpoint.write(tmp_path / "saved", wait=True)
    strategy.run(step, args=(1.0,))
    assert twin.numpy().tolist() == [1.0] * 3
    assert variables[0].numpy().tolist() == [2.0] * 3
    checkpoint.read(tmp_path / "saved")
    strategy.run(step, args=(1.0,))
    for i, v in enumerate(variables):
        np.testing.assert_array_equal(v.numpy(), np.full(SHAPES[i], i + 2.0))


# When something ends ----------------------------------------------------------------------


def test_variables_outlive_their_program(always):
    strategy = mirrored(2)
    variables = make(strategy)
    strategy.run(add_to(variables), args=(1.0,))
    gc.collect()
    assert variables[9].numpy().tolist() == [10.0] * 3
    strategy.run(add_to(variables), args=(1.0,))
    assert variables[9].numpy().tolist() == [11.0] * 3


def test_a_variable_that_lives_on_keeps_its_own_pack_only(always):
    strategy = mirrored(2)
    [kept, *others] = make(strategy, [(3,)] * 8)
    strategy.run(add_to([kept, *others]), args=(1.0,))
    home = kept.lives_at[0]
    assert [array is None for array in home.arrays] == [False, False]
    del others
    gc.collect()
    assert kept.lives_at[0] is home
    assert [array is None for array in home.arrays] == [False, True]
    assert kept.numpy().tolist() == [1.0] * 3


def test_a_program_may_be_collected_while_a_variable_is_read(always, monkeypatch):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 4)
    step = add_to(variables)
    strategy.run(step, args=(1.0,))
    step.itself = step
    del step
    array_at = home_module.Home.array_at

    def collect_and_take(home, place, part):
        gc.collect()
        return array_at(home, place, part)

    monkeypatch.setattr(home_module.Home, "array_at", collect_and_take)
    assert [v.numpy()[0] for v in variables] == [1.0, 2.0, 3.0, 4.0]


def test_a_variable_that_is_going_is_seen_with_nothing_in_it(always, monkeypatch):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 4)
    own = mx.VariableSynchronization.ON_READ, mx.VariableAggregation.SUM
    with strategy.scope():
        variables.append(
            mx.Variable(jnp.zeros(3), synchronization=own[0], aggregation=own[1])
        )
    strategy.run(add_to(variables), args=(1.0,))
    assert packed(variables) == [True] * 4 + [False]
    assert len([v.read_value() for v in variables]) == 5
    gc.collect()
    seen = []
    leave = home_module.Home.leave

    def leave_and_look(*args):
        leave(*args)
        own = [v for v in variables_module.live_variables() if v.strategy is strategy]
        variables_module.note_donated()
        seen.append((len(own), strategy.memory().variables))

    monkeypatch.setattr(home_module.Home, "leave", leave_and_look)
    while variables:
        variables.pop()
    counts, sizes = zip(*seen)
    assert counts == (5, 4, 3, 2, 1)
    assert [sum(each.values()) for each in sizes] == [48, 36, 24, 12, 0]


def test_a_callback_on_the_callers_thread_may_not_read_what_is_updated(always):
    strategy = mirrored(1)
    variables = make(strategy, [(3,)] * 4)
    said = []

    def see(_):
        try:
            variables[2].numpy()
        except RuntimeError as error:
            said.append(str(error))

    @mx.function
    def step():
        for v in variables:
            v.assign_add(jnp.ones(3))
        jax.debug.callback(see, variables[0].read_value()[0])

    for _ in range(2):
        strategy.run(step)
        jax.block_until_ready([v.lives_at[0].arrays for v in variables])
    jax.effects_barrier()
    # At the first step the pack is a new array beside those that they had.
    [message] = said
    assert "'v2' has no value at the moment" in message and "as an argument" in message
    assert all(packed(variables))
    assert [v.numpy()[0] for v in variables] == [2.0, 3.0, 4.0, 5.0]


def test_a_pack_that_all_have_left_is_freed(always):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 4)
    step = add_to(variables)
    strategy.run(step, args=(1.0,))
    home = variables[0].lives_at[0]
    for v in variables[:3]:
        v.assign(jnp.zeros(3))
    assert home.arrays[0] is not None
    variables[3].assign(jnp.zeros(3))
    assert home.arrays == [None]


def test_a_step_that_fails_while_it_runs_names_all_of_the_pack(always):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 3)
    step = add_to(variables)
    strategy.run(step, args=(1.0,))
    with failing(step), pytest.raises(RuntimeError, match="out of luck") as caught:
        strategy.run(step, args=(1.0,))
    assert "v0, v1, v2 have lost their values" in "".join(caught.value.__notes__)
    with pytest.raises(RuntimeError, match="'v1' has lost its value"):
        variables[1].read_value()
    with pytest.raises(RuntimeError, match="'v1' has lost its value"):
        _ = variables[1].stored
    assert strategy.memory().variables["v1"] == 12
    for v in variables:
        v.assign(jnp.full(3, 4.0))
    strategy.run(step, args=(1.0,))
    assert variables[1].numpy().tolist() == [5.0] * 3
    assert not set(variables_module.lost) & {v.number for v in variables}


def test_a_variable_whose_part_was_donated_by_itself_is_still_in_the_pack(always):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 3)
    strategy.run(add_to(variables), args=(1.0,))
    alone = add_to(variables[1:2])
    strategy.run(alone, args=(1.0,))
    strategy.run(add_to(variables), args=(1.0,))
    with failing(alone), pytest.raises(RuntimeError, match="out of luck"):
        strategy.run(alone, args=(1.0,))
    assert variables[1].numpy().tolist() == [4.0] * 3
    strategy.run(alone, args=(1.0,))
    assert [v.numpy()[0] for v in variables] == [2.0, 5.0, 4.0]


def test_nan_in_one_variable_does_not_hinder_reading_another(always):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 3)
    variables[1].assign(jnp.full(3, jnp.nan))
    strategy.run(add_to(variables), args=(1.0,))
    with jax.debug_nans(True), jax.debug_infs(True):
        assert variables[0].numpy().tolist() == [1.0] * 3
        with pytest.raises(FloatingPointError):
            jnp.sqrt(-jnp.ones(3))


def test_a_mesh_of_the_callers_own_does_not_hinder_reading(always):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 3)
    strategy.run(add_to(variables), args=(1.0,))
    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[2:4], "x")):
        assert variables[0].numpy().tolist() == [1.0] * 3
        assert not jax.sharding.get_abstract_mesh().empty


@pytest.mark.parametrize("place", [0, 2])
def test_a_copy_of_a_variable_that_a_step_has_updated(place):
    variables = [mx.Variable(jnp.zeros(3)) for _ in range(3)]
    mx.function(lambda: [v.assign_add(jnp.ones(3)) for v in variables] and None)()
    twin = copy.deepcopy(variables[place])
    variables[place].assign(jnp.zeros(3))
    assert twin.numpy().tolist() == [1.0] * 3


def test_an_interrupted_assignment_is_seen_by_the_next_step(always, monkeypatch):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 3)
    step = add_to(variables)
    strategy.run(step, args=(1.0,))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(home_module.Home, "leave", interrupt)
    with pytest.raises(KeyboardInterrupt):
        variables[1].assign(jnp.full(3, 100.0))
    monkeypatch.undo()
    monkeypatch.setattr(packs, "_MANY_ON_CPUS", 2)
    strategy.run(step, args=(1.0,))
    strategy.run(step, args=(1.0,))
    assert [v.numpy()[0] for v in variables] == [3.0, 102.0, 5.0]


def test_what_was_read_is_forgotten_with_the_next_step(always):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 3)
    step = add_to(variables)
    strategy.run(step, args=(1.0,))
    assert variables_module.handed_out.isdisjoint(v.number for v in variables)
    variables[1].read_value()
    assert variables[1].number in variables_module.handed_out
    strategy.run(step, args=(1.0,))
    assert variables[1].number not in variables_module.handed_out


def test_memory_counts_variables_of_a_pack_one_by_one(always):
    strategy = mirrored(2)
    gc.collect()
    before = strategy.memory()
    variables = make(strategy, [(300,), (300,)])
    strategy.run(add_to(variables), args=(1.0,))
    report = strategy.memory()
    assert packed(variables) == [True, True]
    assert (report.variables["v0"], report.variables["v1"]) == (1200, 1200)
    grown = {
        k: n - before.devices["CPU:1"][k] for k, n in report.devices["CPU:1"].items()
    }
    assert grown["variables"] == 2400
    assert grown["others"] < 2400


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_an_evaluation_before_the_first_step(always, monkeypatch, engine):
    monkeypatch.setattr(Program, "_patience", 5)
    strategy = mirrored(2)
    variables = make(strategy)
    step = add_to(variables)

    def total():
        return sum(jnp.sum(v.read_value()) for v in variables)

    evaluate = compile_if(engine, total)
    size = sum(v.numpy().size for v in variables)
    sums = [float(evaluate())]
    for _ in range(4):
        strategy.run(step, args=(1.0,))
        if engine == "compiled" and len(sums) == 3:
            made = count_packing(monkeypatch)
        sums.append(float(evaluate()))
    assert sums == [sums[0] + k * size for k in range(5)]
    if engine == "compiled":
        assert not made
        assert evaluate.trace_count == 1


def test_a_step_of_every_second_variable_beside_one_of_all(always, monkeypatch):
    monkeypatch.setattr(Program, "_patience", 20)
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 8)
    every, second = add_to(variables), add_to(variables[::2])

    def both():
        strategy.run(every, args=(1.0,))
        strategy.run(second, args=(1.0,))

    both()
    assert all(packed(variables))
    for _ in range(28):
        both()
    # Those that the two have taken from each other so often are in no pack any more.
    assert packed(variables) == [False, True] * 4
    made = count_packing(monkeypatch)
    both()
    assert not made
    monkeypatch.undo()
    assert [v.numpy()[0] for v in variables] == [
        i + 30.0 * (2 - i % 2) for i in range(8)
    ]
    assert (every.trace_count, second.trace_count) == (1, 1)


def test_a_variable_that_is_assigned_before_each_step_leaves_its_pack(
    always, monkeypatch
):
    monkeypatch.setattr(Program, "_patience", 5)
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 4)
    step = add_to(variables)
    total = mx.function(lambda: sum(jnp.sum(v.read_value()) for v in variables))

    def assign_and_step(value):
        variables[1].assign(jnp.full(3, value))
        read = variables[2].read_value()
        strategy.run(step, args=(1.0,))
        return read, float(total())

    found = [assign_and_step(float(k)) for k in range(12)]
    assert packed(variables) == [True, False, True, True]
    assert [read[0] for read, _ in found] == [2.0 + k for k in range(12)]
    # The others are 0, 2 and 3 at first.
    assert [total for _, total in found] == [
        3 * (5 + 3 * (k + 1) + k + 1) for k in range(12)
    ]
    made = count_packing(monkeypatch)
    variables[1].assign(jnp.zeros(3))
    strategy.run(step, args=(1.0,))
    float(total())
    assert not made
    assert (step.trace_count, total.trace_count) == (1, 1)


def test_a_variable_that_is_assigned_now_and_then_stays_in_its_pack(
    always, monkeypatch
):
    monkeypatch.setattr(Program, "_patience", 5)
    monkeypatch.setattr(Program, "_arrays_for_a_pack", 3)
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 4)
    step = add_to(variables)
    for _ in range(12):
        variables[1].assign(jnp.zeros(3))
        strategy.run(step, args=(1.0,))
        strategy.run(step, args=(1.0,))
    assert all(packed(variables))
    assert [v.numpy()[0] for v in variables] == [24.0, 2.0, 26.0, 27.0]


def test_a_step_that_runs_twice_for_each_of_a_part_leaves_what_both_update(
    always, monkeypatch
):
    monkeypatch.setattr(Program, "_patience", 20)
    monkeypatch.setattr(Program, "_arrays_for_a_pack", 6)
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 8)
    every, second = add_to(variables), add_to(variables[::2])
    for _ in range(40):
        for step in (every, every, second):
            strategy.run(step, args=(1.0,))
    assert packed(variables) == [False, True] * 4
    assert [v.numpy()[0] for v in variables] == [
        i + 40.0 * (3 - i % 2) for i in range(8)
    ]
    assert (every.trace_count, second.trace_count) == (1, 1)


def test_packs_come_and_go_while_old_programs_live_on(always, monkeypatch):
    """JAX keeps what it has traced as long as somebody, an exception say, holds the function."""
    monkeypatch.setattr(Program, "_patience", 3)
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 8)
    for i, v in enumerate(variables):
        v.name = f"v{9 - i}"
    values = np.arange(8.0)
    step = add_to(variables)

    @mx.function
    def total():
        return sum(10.0**i * v.read_value()[0] for i, v in enumerate(variables))

    old: list[Program] = []
    renew = Program.renewed

    def renewed(self, call):
        old.append(self)
        return renew(self, call)

    monkeypatch.setattr(Program, "renewed", renewed)
    for k in range(40):
        if k % 10 < 4:
            strategy.run(step, args=(1.0,))
            values += 1.0
        else:
            for i in (0, 3, 7):
                values[i] = k
                variables[i].assign(jnp.full(3, values[i]))
        np.testing.assert_allclose(float(total()), values @ 10.0 ** np.arange(8), 1e-5)
    assert len(old) > 2
    assert total.trace_count == 1


def test_reading_where_transfers_are_forbidden(always):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 3)
    strategy.run(add_to(variables), args=(1.0,))
    with jax.transfer_guard("disallow"):
        read = variables[1].read_value()
    assert read.tolist() == [2.0] * 3


def test_reading_under_a_map_of_the_callers_own(always):
    strategy = mirrored(2)
    variables = make(strategy, [(3,)] * 3)
    strategy.run(add_to(variables), args=(1.0,))
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    spec = jax.sharding.PartitionSpec("x")

    def times(x):
        return x * variables[1].read_value()[0]

    found = jax.shard_map(times, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.ones(2))
    assert found.tolist() == [2.0, 2.0]
