"""Checkpoints: what is saved, what restoring gives, what a manager keeps (9.3, 12.9)."""

import functools
import os
import pathlib
import shutil
import warnings

from . import scenario

SIZES = [("2", "2"), ("2", "3"), ("2", "1"), ("1", "2"), ("0", "2"), ("2", "0")]
STATUS = (
    "assert_consumed",
    "assert_existing_objects_matched",
    "assert_nontrivial_match",
    "expect_partial",
)


def variable(api, value, num_replicas=2, **kwargs):
    """A mirrored variable, an ordinary one for no replicas."""
    if not num_replicas:
        return api.Variable(value, **kwargs)
    with api.mirrored(num_replicas).scope():
        return api.Variable(value, **kwargs)


def variables(api, values):
    return {name: variable(api, value) for name, value in values.items()}


def values(api, variables):
    return {name: api.plain(each) for name, each in variables.items()}


def on_disk(api, directory):
    api.Checkpoint().sync()
    return api.checkpoints_in(directory)


def verdicts(api, status):
    """What each check of a restore says: "fine" or the error."""

    def verdict(check):
        result = api.attempt(getattr(status, check))
        if isinstance(result, Exception):
            return result
        return "fine" if result is status else "something else"

    return {check: verdict(check) for check in STATUS}


# One variable, other numbers of replicas ----------------------------------------------


@scenario("9.3", cases=SIZES)
def saved_on_and_restored_on_replicas(api, old, new):
    with api.directory() as directory:
        saved = variable(api, [1.0, 2.0], int(old))
        path = api.Checkpoint(v=saved).save(os.path.join(directory, "ckpt"))
        restored = variable(api, [0.0, 0.0], int(new))
        status = api.Checkpoint(v=restored).restore(path)
        status.assert_consumed()
        return [api.relative(path, directory), api.copies(restored)]


@scenario("9.3")
def restored_into_the_variable_that_was_saved(api):
    with api.directory() as directory:
        v = variable(api, [1.0, 2.0])
        checkpoint = api.Checkpoint(v=v)
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        v.assign([5.0, 5.0])
        checkpoint.restore(path)
        return api.copies(v)


@scenario("9.3")
def restored_to_an_earlier_state(api):
    with api.directory() as directory:
        v, paths, seen = variable(api, 0.0), [], []
        checkpoint = api.Checkpoint(v=v)
        for value in (1.0, 2.0, 3.0):
            v.assign(value)
            paths.append(checkpoint.save(os.path.join(directory, "ckpt")))
        for path in (paths[0], paths[2], paths[1]):
            checkpoint.restore(path)
            seen.append(api.plain(api.copies(v)))
        return seen


@scenario("9.3")
def what_is_saved_is_the_state_at_that_time(api):
    with api.directory() as directory:
        v = variable(api, 1.0)
        checkpoint = api.Checkpoint(v=v)
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        v.assign(2.0)
        v.assign_add(5.0)
        checkpoint.restore(path)
        return api.copies(v)


@scenario("9.3")
def saved_after_steps_in_replicas(api, engine):
    with api.directory() as directory:
        strategy = api.mirrored(2)
        with strategy.scope():
            v = api.Variable(1.0, aggregation=api.VariableAggregation.SUM)
        checkpoint = api.Checkpoint(v=v)
        step = api.compile_if(engine, lambda x: v.assign_add(x))
        strategy.run(step, args=(api.per_replica(strategy, 1.0, 2.0),))
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        strategy.run(step, args=(api.per_replica(strategy, 1.0, 2.0),))
        after = api.copies(v)
        checkpoint.restore(path)
        restored = api.copies(v)
        strategy.run(step, args=(api.per_replica(strategy, 1.0, 2.0),))
        return [after, restored, api.copies(v)]


@scenario("9.3")
def copies_that_differ_become_equal(api):
    with api.directory() as directory:
        strategy = api.mirrored(2)
        with strategy.scope():
            v = api.Variable(0.0)
        strategy.run(lambda x: v.assign(x), (api.per_replica(strategy, 1.0, 2.0),))
        checkpoint = api.Checkpoint(v=v)
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        checkpoint.restore(path)
        return api.copies(v)


AGGREGATIONS = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")


def on_read(api, aggregation, num_replicas, value=0.0):
    if not num_replicas:
        return api.Variable(value)
    with api.mirrored(num_replicas).scope():
        return api.Variable(
            value,
            synchronization=api.VariableSynchronization.ON_READ,
            aggregation=getattr(api.VariableAggregation, aggregation),
        )


def filled_on_read(api, aggregation, *parts, dtype="float32"):
    v = on_read(api, aggregation, len(parts), api.array(0, dtype))
    strategy = v.distribute_strategy
    value = api.per_replica(strategy, *parts, dtype=dtype)
    strategy.run(lambda x: v.assign(x), args=(value,))
    return v


@scenario(
    "9.3", "12.9", cases=[(a, n) for a in AGGREGATIONS for n in ("0", "1", "2", "3")]
)
def on_read_variable_restored_on_replicas(api, aggregation, new):
    with api.directory() as directory:
        saved = filled_on_read(api, aggregation, 4.0, 8.0)
        path = api.Checkpoint(v=saved).save(os.path.join(directory, "ckpt"))
        restored = on_read(api, aggregation, int(new))
        api.Checkpoint(v=restored).restore(path).assert_consumed()
        return api.copies(restored)


@scenario("9.3", "12.9", cases=[(aggregation,) for aggregation in AGGREGATIONS])
def on_read_variable_saved_by_one_replica(api, aggregation):
    with api.directory() as directory:
        saved = on_read(api, aggregation, 1, 4.0)
        path = api.Checkpoint(v=saved).save(os.path.join(directory, "ckpt"))
        restored = on_read(api, aggregation, 2)
        api.Checkpoint(v=restored).restore(path)
        return api.copies(restored)


@scenario("9.3", "12.9", cases=[(aggregation,) for aggregation in AGGREGATIONS])
def mirrored_variable_restored_into_an_on_read_one(api, aggregation):
    with api.directory() as directory:
        saved = variable(api, 6.0)
        path = api.Checkpoint(v=saved).save(os.path.join(directory, "ckpt"))
        restored = on_read(api, aggregation, 2)
        api.Checkpoint(v=restored).restore(path)
        return api.copies(restored)


@scenario("9.3", "12.9")
def on_read_variable_restored_into_a_mirrored_one(api):
    with api.directory() as directory:
        saved = filled_on_read(api, "SUM", 4.0, 8.0)
        path = api.Checkpoint(v=saved).save(os.path.join(directory, "ckpt"))
        restored = variable(api, 0.0)
        api.Checkpoint(v=restored).restore(path)
        return api.copies(restored)


@scenario("9.3", "12.9")
def on_read_sum_of_integers(api):
    with api.directory() as directory:
        v = filled_on_read(api, "SUM", 2, 3, dtype="int32")
        checkpoint = api.Checkpoint(v=v)
        checkpoint.restore(checkpoint.save(os.path.join(directory, "ckpt")))
        return [api.copies(v), v.read_value()]


@scenario("9.3", "12.9")
def on_read_variable_without_aggregation_cannot_be_saved(api):
    with api.directory() as directory:
        checkpoint = api.Checkpoint(v=on_read(api, "NONE", 2))
        prefix = os.path.join(directory, "ckpt")
        return [
            api.attempt(lambda: checkpoint.save(prefix)),
            on_disk(api, directory),
        ]


@scenario("9.3", cases=[("bfloat16",), ("float16",), ("int8",), ("uint8",), ("int64",)])
def saved_and_restored_dtype(api, dtype):
    with api.directory() as directory:
        v = variable(api, api.array([1, 2], dtype))
        checkpoint = api.Checkpoint(v=v)
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        v.assign(api.array([0, 0], dtype))
        checkpoint.restore(path)
        return api.copies(v)


@scenario("9.3")
def saved_and_restored_bools(api):
    with api.directory() as directory:
        v = variable(api, [True, False])
        checkpoint = api.Checkpoint(v=v)
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        v.assign([False, False])
        checkpoint.restore(path)
        return api.copies(v)


@scenario("9.3")
def saved_and_restored_empty_array(api):
    with api.directory() as directory:
        v = variable(api, api.array([[], []]))
        checkpoint = api.Checkpoint(v=v)
        checkpoint.restore(checkpoint.save(os.path.join(directory, "ckpt")))
        return api.copies(v)


@scenario("9.3")
def checkpoint_of_nothing(api):
    with api.directory() as directory:
        path = api.Checkpoint().save(os.path.join(directory, "ckpt"))
        status = api.Checkpoint().restore(path)
        return [api.relative(path, directory), verdicts(api, status)]


# Paths and counters -------------------------------------------------------------------


@scenario("9.3")
def paths_are_numbered(api):
    with api.directory() as directory:
        checkpoint = api.Checkpoint(v=variable(api, 1.0))
        before = api.plain(checkpoint.save_counter)
        prefix = os.path.join(directory, "ckpt")
        paths = [checkpoint.save(prefix) for _ in range(3)]
        return [
            before,
            api.relative(paths, directory),
            api.plain(checkpoint.save_counter),
            api.relative(api.latest_checkpoint(directory), directory),
            on_disk(api, directory),
        ]


@scenario("9.3")
def restoring_sets_the_counter(api):
    with api.directory() as directory:
        prefix, v = os.path.join(directory, "ckpt"), variable(api, 1.0)
        first = api.Checkpoint(v=v)
        paths = [first.save(prefix) for _ in range(3)]
        second = api.Checkpoint(v=v)
        second.restore(paths[1])
        return [
            api.plain(second.save_counter),
            api.relative(second.save(prefix), directory),
            api.plain(first.save_counter),
            api.relative(api.latest_checkpoint(directory), directory),
        ]


@scenario("9.3")
def a_path_that_is_saved_again_has_the_new_values(api):
    with api.directory() as directory:
        prefix, v = os.path.join(directory, "ckpt"), variable(api, 1.0)
        api.Checkpoint(v=v).save(prefix)
        v.assign(2.0)
        path = api.Checkpoint(v=v).save(prefix)
        v.assign(3.0)
        api.Checkpoint(v=v).restore(path)
        found = on_disk(api, directory)
        return [api.relative(path, directory), api.copies(v), found]


@scenario("9.3")
def prefix_in_directories_that_do_not_exist(api):
    with api.directory() as directory:
        v = variable(api, 1.0)
        inner = os.path.join(directory, "a", "b")
        path = api.Checkpoint(v=v).save(os.path.join(inner, "model"))
        v.assign(2.0)
        api.Checkpoint(v=v).restore(path).assert_consumed()
        return [
            api.relative(path, directory),
            api.copies(v),
            api.relative(api.latest_checkpoint(inner), directory),
            api.latest_checkpoint(directory),
        ]


@scenario("9.3")
def prefix_with_a_dot(api):
    with api.directory() as directory:
        v = variable(api, 1.0)
        path = api.Checkpoint(v=v).save(os.path.join(directory, "model.v1"))
        v.assign(2.0)
        api.Checkpoint(v=v).restore(path)
        return [api.relative(path, directory), api.copies(v)]


@scenario("9.3")
def prefix_that_is_a_path_object(api):
    with api.directory() as directory:
        v = variable(api, 1.0)
        path = api.Checkpoint(v=v).save(pathlib.Path(directory) / "ckpt")
        v.assign(2.0)
        api.Checkpoint(v=v).restore(pathlib.Path(path)).assert_consumed()
        latest = api.latest_checkpoint(pathlib.Path(directory))
        names = [api.class_name(each) for each in (path, latest)]
        return [api.relative([path, latest], directory), names, api.copies(v)]


@scenario("9.3")
def prefix_that_is_relative(api):
    with api.directory() as directory:
        here = os.getcwd()
        os.chdir(directory)
        try:
            v = variable(api, 1.0)
            checkpoint = api.Checkpoint(v=v)
            paths = [checkpoint.save("models/ckpt"), checkpoint.save("bare")]
            v.assign(2.0)
            checkpoint.restore("models/ckpt-1").assert_consumed()
            return [paths, api.latest_checkpoint("models"), api.copies(v)]
        finally:
            os.chdir(here)


@scenario("9.3")
def latest_checkpoint_where_there_is_none(api):
    with api.directory() as directory:
        missing = os.path.join(directory, "missing")
        return [api.latest_checkpoint(directory), api.latest_checkpoint(missing)]


@scenario("9.3")
def latest_checkpoint_of_a_directory_that_was_moved(api):
    with api.directory() as directory:
        old, new = os.path.join(directory, "old"), os.path.join(directory, "new")
        v = variable(api, 1.0)
        checkpoint = api.Checkpoint(v=v)
        checkpoint.save(os.path.join(old, "ckpt"))
        checkpoint.sync()
        shutil.move(old, new)
        v.assign(2.0)
        latest = api.latest_checkpoint(new)
        api.Checkpoint(v=v).restore(latest)
        return [api.relative(latest, directory), api.copies(v)]


@scenario("9.3")
def latest_checkpoint_is_the_last_saved_of_several_names(api):
    with api.directory() as directory:
        checkpoint = api.Checkpoint(v=variable(api, 1.0))
        for name in ("b", "a", "b", "a"):
            checkpoint.save(os.path.join(directory, name))
        return api.relative(api.latest_checkpoint(directory), directory)


@scenario("9.3")
def write_and_read(api):
    with api.directory() as directory:
        path, v = os.path.join(directory, "state"), variable(api, 1.0)
        checkpoint = api.Checkpoint(v=v)
        written = checkpoint.write(path)
        v.assign(3.0)
        api.Checkpoint(v=v).read(path).assert_consumed()
        return [
            api.relative(written, directory),
            api.copies(v),
            api.plain(checkpoint.save_counter),
            api.latest_checkpoint(directory),
            on_disk(api, directory),
        ]


@scenario("9.3")
def write_overwrites(api):
    with api.directory() as directory:
        path, v = os.path.join(directory, "state"), variable(api, 1.0)
        checkpoint = api.Checkpoint(v=v)
        checkpoint.write(path)
        v.assign(2.0)
        checkpoint.write(path)
        v.assign(3.0)
        checkpoint.read(path)
        return [api.copies(v), on_disk(api, directory)]


@scenario("9.3")
def write_and_restore(api):
    with api.directory() as directory:
        path, v = os.path.join(directory, "state"), variable(api, 1.0)
        api.Checkpoint(v=v).write(path)
        v.assign(3.0)
        checkpoint = api.Checkpoint(v=v)
        checkpoint.restore(path).expect_partial()
        return [api.copies(v), api.plain(checkpoint.save_counter)]


@scenario("9.3")
def save_and_read(api):
    with api.directory() as directory:
        v = variable(api, 1.0)
        path = api.Checkpoint(v=v).save(os.path.join(directory, "ckpt"))
        v.assign(3.0)
        checkpoint = api.Checkpoint(v=v)
        status = checkpoint.read(path)
        status.assert_existing_objects_matched()
        return api.copies(v)


# What does not fit --------------------------------------------------------------------


def matching(api, saved, wanted):
    """Restores variables of other names, shapes or types than were saved."""
    with api.directory() as directory:
        path = api.Checkpoint(**variables(api, saved)).save(
            os.path.join(directory, "ckpt")
        )
        made = variables(api, wanted)
        status = api.attempt(lambda: api.Checkpoint(**made).restore(path))
        if isinstance(status, Exception):
            return [status, values(api, made)]
        return [verdicts(api, status), values(api, made)]


@scenario("9.3")
def restore_of_what_was_saved(api):
    return matching(api, {"a": 1.0, "b": 2.0}, {"a": 0.0, "b": 0.0})


@scenario("9.3")
def restore_with_a_variable_that_was_not_saved(api):
    return matching(api, {"a": 1.0}, {"a": 0.0, "b": 0.0})


@scenario("9.3")
def restore_without_a_variable_that_was_saved(api):
    return matching(api, {"a": 1.0, "b": 2.0}, {"a": 0.0})


@scenario("9.3")
def restore_of_other_names(api):
    """assert_nontrivial_match is not asked: TensorFlow counts save_counter."""
    result = matching(api, {"a": 1.0}, {"z": 0.0})
    del result[0]["assert_nontrivial_match"]
    return result


@scenario("9.3")
def restore_into_nothing(api):
    result = matching(api, {"a": 1.0}, {})
    del result[0]["assert_nontrivial_match"]
    return result


@scenario("9.3")
def restore_of_a_wrong_shape(api):
    return matching(api, {"a": [1.0, 2.0]}, {"a": [0.0, 0.0, 0.0]})


@scenario("9.3")
def restore_of_a_wrong_shape_that_would_broadcast(api):
    return [
        matching(api, {"a": 1.0}, {"a": [0.0]}),
        matching(api, {"a": [1.0]}, {"a": 0.0}),
        matching(api, {"a": [1.0]}, {"a": [0.0, 0.0]}),
    ]


@scenario(
    "9.3",
    differs="nothing is changed if anything does not fit",
    expect=[ValueError, {"a": 0.0, "b": [0.0, 0.0, 0.0]}],
)
def restore_of_a_wrong_shape_after_others(api):
    return matching(api, {"a": 1.0, "b": [2.0, 3.0]}, {"a": 0.0, "b": [0.0] * 3})


@scenario("9.3")
def restore_of_a_wrong_shape_before_others(api):
    return matching(api, {"a": [1.0, 2.0], "b": 2.0}, {"a": 0.0, "b": 0.0})


@scenario("9.3")
def restore_of_a_wrong_dtype(api):
    half = api.array(0.0, "float16")
    return [
        matching(api, {"a": 1.0, "b": 2.0}, {"a": 0.0, "b": 0}),
        matching(api, {"a": 1.0, "b": 2}, {"a": 0.0, "b": 0.0}),
        matching(api, {"a": 1.0, "b": 2.0}, {"a": 0.0, "b": half}),
    ]


@scenario("9.3")
def restore_of_a_path_that_does_not_exist(api):
    with api.directory() as directory:
        v = variable(api, 1.0)
        checkpoint = api.Checkpoint(v=v)
        paths = [os.path.join(directory, *p) for p in (("ckpt-1",), ("a", "ckpt-1"))]
        return [
            [api.attempt(lambda p=p: checkpoint.restore(p)) for p in paths],
            [api.attempt(lambda p=p: checkpoint.read(p)) for p in paths],
            api.copies(v),
        ]


@scenario("9.3")
def restore_of_a_directory_of_checkpoints(api):
    with api.directory() as directory:
        v = variable(api, 1.0)
        api.Checkpoint(v=v).save(os.path.join(directory, "ckpt"))
        v.assign(2.0)
        error = api.fails(lambda: api.Checkpoint(v=v).restore(directory))
        return [error, api.copies(v)]


@scenario("9.3")
def restore_of_none(api):
    v = variable(api, 1.0)
    checkpoint = api.Checkpoint(v=v)
    return [verdicts(api, checkpoint.restore(None)), api.copies(v)]


@scenario("9.3")
def restore_after_an_attribute_was_added(api):
    with api.directory() as directory:
        checkpoint = api.Checkpoint(v=variable(api, 1.0))
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        checkpoint.w = variable(api, 2.0)
        status = checkpoint.restore(path)
        return [verdicts(api, status), api.copies(checkpoint.w)]


@scenario("9.3")
def restore_after_a_restore_that_failed(api):
    with api.directory() as directory:
        v, prefix = variable(api, 1.0), os.path.join(directory, "ckpt")
        good = api.Checkpoint(v=v).save(prefix)
        bad = api.Checkpoint(v=variable(api, [1.0])).save(prefix + "-other")
        v.assign(2.0)
        checkpoint = api.Checkpoint(v=v)
        error = api.attempt(lambda: checkpoint.restore(bad))
        checkpoint.restore(good)
        return [error, api.copies(v)]


@scenario("9.3")
def save_where_a_file_is_in_the_way(api):
    with api.directory() as directory:
        pathlib.Path(directory, "file").write_text("text")
        checkpoint = api.Checkpoint(v=variable(api, 1.0))

        def save():
            checkpoint.save(os.path.join(directory, "file", "ckpt"))
            checkpoint.sync()

        return api.fails(save)


@scenario("9.3")
def names_that_a_checkpoint_does_not_have(api):
    checkpoint = api.Checkpoint(v=variable(api, 1.0))
    return [
        api.attempt(lambda: checkpoint.w),
        hasattr(checkpoint, "v"),
        hasattr(checkpoint, "w"),
        api.attempt(lambda: api.Checkpoint(save_counter=variable(api, 1))),
    ]


@scenario("9.3")
def attributes_that_cannot_be_saved(api):
    return [
        api.attempt(lambda: api.Checkpoint(a=None)),
        api.attempt(lambda: api.Checkpoint(a=lambda: 1)),
    ]


# Restored later -----------------------------------------------------------------------


@scenario("9.3")
def attribute_that_comes_after_the_restore(api):
    with api.directory() as directory:
        saved = api.Checkpoint(a=variable(api, 1.0), b=variable(api, [5.0, 6.0]))
        path = saved.save(os.path.join(directory, "ckpt"))
        checkpoint = api.Checkpoint()
        status = checkpoint.restore(path)
        early = verdicts(api, status)["assert_consumed"]
        checkpoint.a = variable(api, 0.0)
        checkpoint.b = variable(api, [0.0, 0.0])
        checkpoint.c = variable(api, 7.0)
        copies = [api.copies(checkpoint.a), api.copies(checkpoint.b)]
        return [early, copies, api.copies(checkpoint.c)]


@scenario("9.3")
def attributes_that_come_after_the_restore_are_consumed(api):
    with api.directory() as directory:
        saved = api.Checkpoint(a=variable(api, 1.0), b=variable(api, 2.0))
        path = saved.save(os.path.join(directory, "ckpt"))
        checkpoint = api.Checkpoint(a=variable(api, 0.0))
        status = checkpoint.restore(path)
        seen = [verdicts(api, status)["assert_consumed"]]
        checkpoint.b = variable(api, 0.0)
        return [*seen, verdicts(api, status)["assert_consumed"]]


@scenario("9.3")
def attribute_set_again_is_not_restored_again(api):
    with api.directory() as directory:
        path = api.Checkpoint(a=variable(api, 1.0)).save(
            os.path.join(directory, "ckpt")
        )
        checkpoint, a = api.Checkpoint(), variable(api, 0.0)
        checkpoint.restore(path).expect_partial()
        checkpoint.a = a
        a.assign(7.0)
        checkpoint.a = a
        return api.copies(a)


@scenario("9.3")
def attribute_of_a_wrong_shape_that_comes_after_the_restore(api):
    with api.directory() as directory:
        path = api.Checkpoint(a=variable(api, 1.0)).save(
            os.path.join(directory, "ckpt")
        )
        checkpoint, a = api.Checkpoint(), variable(api, [0.0, 0.0])
        checkpoint.restore(path).expect_partial()
        return [api.attempt(lambda: setattr(checkpoint, "a", a)), api.copies(a)]


@scenario("9.3")
def the_last_restore_is_what_comes_later(api):
    with api.directory() as directory:
        a = variable(api, 1.0)
        saved, prefix = api.Checkpoint(a=a), os.path.join(directory, "ckpt")
        first = saved.save(prefix)
        a.assign(2.0)
        second = saved.save(prefix)
        checkpoint = api.Checkpoint()
        checkpoint.restore(first).expect_partial()
        checkpoint.restore(second).expect_partial()
        checkpoint.a = variable(api, 0.0)
        return api.copies(checkpoint.a)


@scenario("9.3")
def restored_later_onto_other_replicas(api):
    with api.directory() as directory:
        path = api.Checkpoint(a=filled_on_read(api, "SUM", 4.0, 8.0)).save(
            os.path.join(directory, "ckpt")
        )
        checkpoint = api.Checkpoint()
        checkpoint.restore(path).expect_partial()
        checkpoint.a = on_read(api, "SUM", 3)
        return api.copies(checkpoint.a)


# Structures ---------------------------------------------------------------------------


def structure(api, start):
    def make(offset):
        return variable(api, start + offset)

    return {
        "list": [make(0), make(1)],
        "dict": {"k": make(2), "nested": {"m": [make(3)]}},
        "inner": api.Checkpoint(v=make(4)),
        "tuple": (make(5),),
    }


def structure_values(api, tree):
    parts = [*tree["list"], tree["dict"]["k"], tree["dict"]["nested"]["m"][0]]
    return api.plain([*parts, tree["inner"].v, tree["tuple"][0]])


@scenario("9.3")
def lists_dicts_and_checkpoints_in_checkpoints(api):
    with api.directory() as directory:
        path = api.Checkpoint(**structure(api, 10.0)).save(
            os.path.join(directory, "ckpt")
        )
        tree = structure(api, 0.0)
        api.Checkpoint(**tree).restore(path).assert_consumed()
        return structure_values(api, tree)


@scenario("9.3")
def attribute_that_was_replaced(api):
    with api.directory() as directory:
        checkpoint = api.Checkpoint(a=variable(api, 1.0))
        checkpoint.a = variable(api, 5.0)
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        restored = variable(api, 0.0)
        api.Checkpoint(a=restored).restore(path).assert_consumed()
        return api.copies(restored)


@scenario("9.3")
def attribute_that_was_deleted(api):
    with api.directory() as directory:
        checkpoint = api.Checkpoint(a=variable(api, 1.0), b=variable(api, 2.0))
        del checkpoint.b
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        a = variable(api, 0.0)
        api.Checkpoint(a=a).restore(path).assert_consumed()
        return api.copies(a)


@scenario("9.3")
def list_that_grows_before_the_save(api):
    with api.directory() as directory:
        checkpoint = api.Checkpoint(l=[variable(api, 1.0)])
        checkpoint.l.append(variable(api, 2.0))
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        wanted = [variable(api, 0.0), variable(api, 0.0)]
        api.Checkpoint(l=wanted).restore(path).assert_consumed()
        return api.plain(wanted)


@scenario("9.3")
def longer_list_than_was_saved(api):
    with api.directory() as directory:
        path = api.Checkpoint(l=[variable(api, 1.0)]).save(
            os.path.join(directory, "ckpt")
        )
        wanted = [variable(api, 0.0), variable(api, 9.0)]
        status = api.Checkpoint(l=wanted).restore(path)
        return [verdicts(api, status)["assert_consumed"], api.plain(wanted)]


@scenario(
    "9.3",
    differs="keys may be numbers",
    expect=[[1.0, 1.0], [2.0, 2.0]],
)
def dict_with_keys_that_are_numbers(api):
    with api.directory() as directory:
        saved = {1: variable(api, 1.0), 2: variable(api, 2.0)}
        path = api.Checkpoint(d=saved).save(os.path.join(directory, "ckpt"))
        made = {1: variable(api, 0.0), 2: variable(api, 0.0)}
        api.Checkpoint(d=made).restore(path).assert_consumed()
        return [api.plain(api.copies(v)) for v in made.values()]


@scenario("9.3")
def structures_that_are_empty(api):
    with api.directory() as directory:
        v = variable(api, 1.0)
        path = api.Checkpoint(v=v, list=[], dict={}).save(
            os.path.join(directory, "ckpt")
        )
        v.assign(2.0)
        api.Checkpoint(v=v, list=[], dict={}).restore(path).assert_consumed()
        return api.copies(v)


@scenario("9.3")
def variables_of_two_strategies_in_one_checkpoint(api):
    with api.directory() as directory:

        def make(value):
            kinds = {"two": 2, "three": 3, "one": 1, "none": 0}
            return {name: variable(api, value, n) for name, n in kinds.items()}

        path = api.Checkpoint(**make(5.0)).save(os.path.join(directory, "ckpt"))
        made = make(0.0)
        api.Checkpoint(**made).restore(path).assert_consumed()
        return {name: api.copies(v) for name, v in made.items()}


@scenario("9.3")
def many_variables_in_one_checkpoint(api):
    with api.directory() as directory:
        saved = [variable(api, [float(i)] * 3) for i in range(20)]
        path = api.Checkpoint(all=saved).save(os.path.join(directory, "ckpt"))
        made = [variable(api, [0.0] * 3) for _ in saved]
        api.Checkpoint(all=made).restore(path).assert_consumed()
        return api.plain(made)


@scenario("9.3")
def one_variable_under_two_names(api):
    with api.directory() as directory:
        v = variable(api, 1.0)
        path = api.Checkpoint(a=v, b=v).save(os.path.join(directory, "ckpt"))
        w = variable(api, 0.0)
        api.Checkpoint(a=w, b=w).restore(path).assert_consumed()
        return api.copies(w)


@scenario("9.3")
def checkpoint_that_holds_itself(api):
    with api.directory() as directory:
        v = variable(api, 1.0)
        checkpoint = api.Checkpoint(v=v)
        checkpoint.itself = checkpoint
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        v.assign(2.0)
        checkpoint.restore(path)
        return [api.relative(path, directory), api.copies(v)]


@scenario(
    "9.3",
    differs="a checkpoint saves plain values too",
    expect=["ckpt-1", 3, 0.5, "text", [1, 2], 9],
)
def attributes_that_are_python_values(api):
    with api.directory() as directory:
        saved = api.Checkpoint(
            number=3, rate=0.5, name="text", list=[1, 2], inner=api.Checkpoint(n=9)
        )
        path = saved.save(os.path.join(directory, "ckpt"))
        checkpoint = api.Checkpoint(
            number=0, rate=0.0, name="", list=[0, 0], inner=api.Checkpoint(n=0)
        )
        checkpoint.restore(path)
        return [
            api.relative(path, directory),
            checkpoint.number,
            checkpoint.rate,
            checkpoint.name,
            list(checkpoint.list),
            checkpoint.inner.n,
        ]


@scenario(
    "9.3",
    differs="a checkpoint saves plain values too, also those set later",
    expect=3,
)
def attribute_that_is_set_to_a_python_value(api):
    with api.directory() as directory:
        checkpoint = api.Checkpoint()
        checkpoint.step = 3
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        checkpoint.step = 8
        checkpoint.restore(path)
        return checkpoint.step


@scenario(
    "9.3",
    differs="a checkpoint saves arrays too",
    expect=[[1.0, 2.0], [3.0, 4.0]],
)
def attributes_that_are_arrays(api):
    with api.directory() as directory:
        params = {"w": api.array([1.0, 2.0]), "b": [api.array([3.0, 4.0])]}
        path = api.Checkpoint(params=params).save(os.path.join(directory, "ckpt"))
        zeros = {"w": api.array([0.0, 0.0]), "b": [api.array([0.0, 0.0])]}
        checkpoint = api.Checkpoint(params=zeros)
        checkpoint.restore(path)
        params = checkpoint.params
        return api.plain([params["w"], params["b"][0]])


class Model:
    """An object that is no part of either library."""

    def __init__(self, api, value):
        self.w = variable(api, value)
        self.layers = [variable(api, value + 1.0)]


@scenario(
    "9.3",
    differs="any object's variables are saved",
    expect=[[5.0, 5.0], [6.0, 6.0]],
)
def attributes_that_are_objects_with_variables(api):
    with api.directory() as directory:
        path = api.Checkpoint(model=Model(api, 5.0)).save(
            os.path.join(directory, "ckpt")
        )
        model = Model(api, 0.0)
        api.Checkpoint(model=model).restore(path).assert_consumed()
        return [api.plain(api.copies(v)) for v in (model.w, model.layers[0])]


# Where it is called -------------------------------------------------------------------


@scenario("9.3")
def saved_and_restored_in_the_scope(api):
    with api.directory() as directory, api.mirrored(2).scope():
        v = api.Variable(1.0)
        checkpoint = api.Checkpoint(v=v)
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        v.assign(2.0)
        checkpoint.restore(path)
        return api.copies(v)


@scenario("9.3")
def saved_in_a_function(api):
    with api.directory() as directory:
        checkpoint = api.Checkpoint(v=variable(api, 1.0))
        save = api.function(lambda: checkpoint.save(os.path.join(directory, "ckpt")))
        return [api.fails(save), on_disk(api, directory)]


@scenario(
    "9.3",
    differs="replicas cannot save one checkpoint each under the same name",
    expect=RuntimeError,
)
def saved_in_a_replica(api):
    with api.directory() as directory:
        strategy = api.mirrored(2)
        with strategy.scope():
            checkpoint = api.Checkpoint(v=api.Variable(1.0))

        def replica_fn():
            checkpoint.save(os.path.join(directory, "ckpt"))

        return api.attempt(lambda: strategy.run(replica_fn))


# Optimizers, metrics, iterators -------------------------------------------------------


def model_with_optimizer(api, num_replicas, name=None):
    strategy = api.mirrored(num_replicas) if num_replicas else api.one_device()
    with strategy.scope():
        v, optimizer = api.Variable([1.0, 2.0], name=name), api.adam(0.1)
    api.build(strategy, optimizer, [v])
    return strategy, v, optimizer


def steps(api, engine, model, number):
    strategy, v, optimizer = model
    fn = api.compile_if(engine, lambda g: optimizer_step(optimizer, g, v))
    parts = [[1.0, 2.0]] * strategy.num_replicas_in_sync
    for _ in range(number):
        strategy.run(fn, args=(api.per_replica(strategy, *parts),))


def optimizer_step(optimizer, gradient, v):
    optimizer.apply_gradients([(gradient, v)])


def saved_model(api, engine, directory, num_replicas, name=None):
    model = model_with_optimizer(api, num_replicas, name)
    steps(api, engine, model, 2)
    checkpoint = api.Checkpoint(v=model[1], optimizer=model[2])
    return model, checkpoint.save(os.path.join(directory, "ckpt"))


@scenario("9.3", "9.1", cases=[("2", "2"), ("2", "0"), ("0", "2"), ("0", "3")])
def optimizer_goes_on_where_it_was(api, engine, old, new):
    with api.directory() as directory:
        old, path = saved_model(api, engine, directory, int(old))
        restored = model_with_optimizer(api, int(new))
        checkpoint = api.Checkpoint(v=restored[1], optimizer=restored[2])
        checkpoint.restore(path).assert_existing_objects_matched()
        count = api.plain(restored[2].iterations)
        steps(api, engine, restored, 2)
        steps(api, engine, old, 2)
        return [
            count,
            api.copies(restored[1]),
            api.copies(old[1]),
            api.plain(restored[2].iterations),
        ]


@scenario("9.3", "9.1")
def optimizer_of_a_variable_with_another_name(api):
    with api.directory() as directory:
        old, path = saved_model(api, "eager", directory, 2, "w")
        strategy, v, optimizer = model_with_optimizer(api, 2, "kernel")
        status = api.Checkpoint(v=v, optimizer=optimizer).restore(path)
        status.expect_partial()
        for model in (old, (strategy, v, optimizer)):
            gradient = api.per_replica(model[0], [3.0, -2.0], [0.5, 0.0])
            fn = functools.partial(optimizer_step, model[2], v=model[1])
            model[0].run(fn, args=(gradient,))
        return api.plain(api.copies(v)) == api.plain(api.copies(old[1]))


@scenario(
    "9.3",
    "9.1",
    differs="TensorFlow restores only the first copy of slots that are made later",
    expect=True,
)
def optimizer_that_is_built_after_the_restore(api):
    with api.directory() as directory:
        old, path = saved_model(api, "eager", directory, 2)
        strategy = api.mirrored(2)
        with strategy.scope():
            v, optimizer = api.Variable([1.0, 2.0]), api.adam(0.1)
        status = api.Checkpoint(v=v, optimizer=optimizer).restore(path)
        status.expect_partial()
        for model in (old, (strategy, v, optimizer)):
            gradient = api.per_replica(model[0], [3.0, -2.0], [0.5, 0.0])
            fn = functools.partial(optimizer_step, model[2], v=model[1])
            model[0].run(fn, args=(gradient,))
        return api.plain(api.copies(v)) == api.plain(api.copies(old[1]))


@scenario("9.3", "11.6", cases=[("0",), ("1",), ("2",), ("3",)])
def metric_goes_on_where_it_was(api, new):
    def make(num_replicas):
        if not num_replicas:
            return api.Mean()
        with api.mirrored(num_replicas).scope():
            return api.Mean()

    with api.directory() as directory:
        metric = make(2)
        strategy = api.metric_variables(metric)[0].distribute_strategy
        value = api.per_replica(strategy, [0.0, 2.0], [4.0])
        strategy.run(lambda x: metric.update_state(x), args=(value,))
        path = api.Checkpoint(metric=api.trackable(metric)).save(
            os.path.join(directory, "ckpt")
        )
        restored = make(int(new))
        checkpoint = api.Checkpoint(metric=api.trackable(restored))
        checkpoint.restore(path).assert_consumed()
        return restored.result()


def dataset(api):
    return api.data.Dataset.range(12).batch(2)


@scenario("9.3")
def iterator_goes_on_where_it_was(api):
    with api.directory() as directory:
        iterator = iter(dataset(api))
        first = [api.plain(next(iterator)) for _ in range(2)]
        checkpoint = api.Checkpoint(iterator=iterator)
        path = checkpoint.save(os.path.join(directory, "ckpt"))
        after = [api.plain(next(iterator)) for _ in range(3)]
        other = iter(dataset(api))
        api.Checkpoint(iterator=other).restore(path)
        new = [api.plain(next(other)) for _ in range(3)]
        checkpoint.restore(path)
        return [first, after, new, api.plain(next(iterator))]


@scenario("9.3")
def iterator_with_shuffling_goes_on_where_it_was(api):
    with api.directory() as directory:

        def make():
            return iter(dataset(api).unbatch().shuffle(4, seed=7).repeat(2).batch(3))

        iterator = make()
        for _ in range(3):
            next(iterator)
        path = api.Checkpoint(iterator=iterator).save(os.path.join(directory, "ckpt"))
        after = [api.plain(each) for each in iterator]
        other = make()
        api.Checkpoint(iterator=other).restore(path)
        return [api.plain(each) for each in other] == after


@scenario("9.3")
def iterator_at_its_end_stays_there(api):
    with api.directory() as directory:
        iterator = iter(dataset(api))
        number = len(list(iterator))
        path = api.Checkpoint(iterator=iterator).save(os.path.join(directory, "ckpt"))
        other = iter(dataset(api))
        api.Checkpoint(iterator=other).restore(path)
        return [number, len(list(other))]


@scenario(
    "9.3",
    differs="distributed iterators can be saved too",
    expect=[[[4], [5]], [[4], [5]]],
)
def distributed_iterator_goes_on_where_it_was(api):
    with api.directory() as directory:
        strategy = api.mirrored(2)
        make = strategy.experimental_distribute_dataset
        iterator = iter(make(dataset(api)))
        for _ in range(2):
            next(iterator)
        path = api.Checkpoint(iterator=iterator).save(os.path.join(directory, "ckpt"))
        after = next(iterator)
        other = iter(make(dataset(api)))
        api.Checkpoint(iterator=other).restore(path)
        parts = strategy.experimental_local_results
        return [api.plain(parts(after)), api.plain(parts(next(other)))]


# Managers -----------------------------------------------------------------------------


def managed(api, directory, max_to_keep=None, value=1.0, **kwargs):
    checkpoint = api.Checkpoint(v=variable(api, value))
    return api.CheckpointManager(checkpoint, directory, max_to_keep, **kwargs)


def kept(api, manager, directory):
    """What the manager lists, its latest, and what is on disk."""
    return {
        "checkpoints": api.relative(manager.checkpoints, directory),
        "latest": api.relative(manager.latest_checkpoint, directory),
        "in the directory": api.relative(api.latest_checkpoint(directory), directory),
        "on disk": on_disk(api, directory),
    }


@scenario("9.3", cases=[("None",), ("1",), ("2",), ("5",)])
def manager_keeps(api, number):
    with api.directory() as directory:
        manager = managed(api, directory, None if number == "None" else int(number))
        paths = [manager.save() for _ in range(4)]
        return [api.relative(paths, directory), kept(api, manager, directory)]


@scenario("9.3")
def manager_that_keeps_nothing(api):
    with api.directory() as directory:
        return [
            api.attempt(lambda: managed(api, directory, 0)),
            api.attempt(lambda: managed(api, directory, -1)),
        ]


@scenario("9.3")
def manager_without_max_to_keep(api):
    with api.directory() as directory:
        checkpoint = api.Checkpoint(v=variable(api, 1.0))
        return api.attempt(lambda: api.CheckpointManager(checkpoint, directory))


@scenario("9.3")
def manager_before_the_first_save(api):
    with api.directory() as directory:
        inner = os.path.join(directory, "new")
        manager = managed(api, inner, 2)
        before = [manager.checkpoints, manager.latest_checkpoint]
        manager.save()
        directories = api.relative(manager.directory, directory)
        return [before, directories, kept(api, manager, inner)]


@scenario("9.3")
def manager_with_another_name(api):
    with api.directory() as directory:
        manager = managed(api, directory, 2, checkpoint_name="model")
        for _ in range(3):
            manager.save()
        return kept(api, manager, directory)


@scenario("9.3")
def manager_saves_and_restores(api):
    with api.directory() as directory:
        v = variable(api, 1.0)
        checkpoint = api.Checkpoint(v=v)
        manager = api.CheckpointManager(checkpoint, directory, 2)
        manager.save()
        v.assign(2.0)
        manager.save()
        v.assign(3.0)
        checkpoint.restore(manager.latest_checkpoint).assert_consumed()
        latest = api.copies(v)
        checkpoint.restore(manager.checkpoints[0])
        return [latest, api.copies(v), api.plain(checkpoint.save_counter)]


@scenario("9.3")
def manager_with_explicit_numbers(api):
    with api.directory() as directory:
        manager = managed(api, directory)
        paths = [manager.save(checkpoint_number=n) for n in (10, 5)]
        paths += [manager.save(), manager.save()]
        counter = api.plain(manager.checkpoint.save_counter)
        return [api.relative(paths, directory), counter, kept(api, manager, directory)]


@scenario("9.3")
def manager_with_explicit_numbers_keeps_the_last_saved(api):
    with api.directory() as directory:
        manager = managed(api, directory, 2)
        for number in (10, 5, 7):
            manager.save(checkpoint_number=number)
        return kept(api, manager, directory)


@scenario("9.3")
def manager_with_the_same_number_again(api):
    with api.directory() as directory:
        manager = managed(api, directory)
        for number in (10, 5, 7, 5):
            manager.save(checkpoint_number=number)
        return kept(api, manager, directory)


@scenario("9.3")
def manager_with_numbers_of_other_kinds(api):
    with api.directory() as directory:
        manager = managed(api, directory)
        numbers = [0, api.array(4, "int32"), api.Variable(5)]
        paths = [manager.save(checkpoint_number=number) for number in numbers]
        return api.relative(paths, directory)


def at_steps(api, steps, interval, **kwargs):
    with api.directory() as directory:
        step = api.Variable(0)
        checkpoint = api.Checkpoint(step=step)
        manager = api.CheckpointManager(
            checkpoint,
            directory,
            None,
            step_counter=step,
            checkpoint_interval=interval,
        )
        paths = []
        for number in steps:
            step.assign(number)
            paths.append(manager.save(**kwargs))
        return api.relative(paths, directory)


@scenario("9.3")
def manager_with_an_interval(api):
    return at_steps(api, [0, 1, 2, 3, 4, 7, 8, 9], 2)


@scenario("9.3")
def manager_with_an_interval_that_is_not_checked(api):
    return at_steps(api, [0, 1, 2, 3], 2, check_interval=False)


@scenario("9.3")
def manager_with_an_interval_whose_steps_go_back(api):
    return at_steps(api, [4, 1, 5, 6], 2)


@scenario("9.3")
def manager_with_a_counter_but_no_interval(api):
    return at_steps(api, [0, 0, 1], None)


@scenario("9.3")
def manager_with_an_interval_but_no_counter(api):
    with api.directory() as directory:
        return api.attempt(lambda: managed(api, directory, checkpoint_interval=2))


@scenario("9.3")
def manager_with_an_interval_after_a_restore(api):
    with api.directory() as directory:

        def make():
            step = api.Variable(0)
            return step, api.CheckpointManager(
                api.Checkpoint(step=step),
                directory,
                None,
                step_counter=step,
                checkpoint_interval=5,
            )

        step, manager = make()
        step.assign(10)
        paths = [manager.save()]
        step, manager = make()
        paths.append(manager.restore_or_initialize())
        for number in (12, 15):
            step.assign(number)
            paths.append(manager.save())
        return api.relative(paths, directory)


@scenario("9.3")
def restore_or_initialize_without_checkpoints(api):
    with api.directory() as directory:
        calls = []
        manager = managed(api, directory, 3, init_fn=lambda: calls.append(1))
        results = [manager.restore_or_initialize() for _ in range(2)]
        return [results, len(calls)]


@scenario("9.3")
def restore_or_initialize_with_checkpoints(api):
    with api.directory() as directory:
        for value in (7.0, 8.0):
            managed(api, directory, 3, value).save(checkpoint_number=int(value))
        calls = []
        manager = managed(api, directory, 3, init_fn=lambda: calls.append(1))
        path = manager.restore_or_initialize()
        copies = api.copies(manager.checkpoint.v)
        return [api.relative(path, directory), len(calls), copies]


@scenario("9.3")
def restore_or_initialize_restores_each_time(api):
    with api.directory() as directory:
        manager = managed(api, directory, 3)
        manager.save()
        manager.checkpoint.v.assign(5.0)
        path = manager.restore_or_initialize()
        return [api.relative(path, directory), api.copies(manager.checkpoint.v)]


@scenario("9.3")
def restore_or_initialize_without_init_fn(api):
    with api.directory() as directory:
        manager = managed(api, directory, 3)
        return [manager.restore_or_initialize(), api.copies(manager.checkpoint.v)]


@scenario("9.3")
def restore_or_initialize_of_what_does_not_match(api):
    with api.directory() as directory:
        managed(api, directory, 3, 7.0).save()
        v, w = variable(api, 0.0), variable(api, 1.0)
        checkpoint = api.Checkpoint(v=v, w=w)
        manager = api.CheckpointManager(checkpoint, directory, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is not there
            path = manager.restore_or_initialize()
        return [api.relative(path, directory), api.copies(v), api.copies(w)]


@scenario("9.3")
def manager_finds_earlier_checkpoints(api):
    with api.directory() as directory:
        first = managed(api, directory, 3)
        for _ in range(3):
            first.save()
        return kept(api, managed(api, directory, 2), directory)


@scenario("9.3")
def manager_goes_on_after_earlier_checkpoints(api):
    with api.directory() as directory:
        first = managed(api, directory, 3)
        for _ in range(3):
            first.save()
        manager = managed(api, directory, 2)
        manager.restore_or_initialize()
        path = manager.save()
        return [api.relative(path, directory), kept(api, manager, directory)]


@scenario("9.3")
def manager_goes_on_after_an_older_checkpoint(api):
    with api.directory() as directory:
        manager = managed(api, directory)
        paths = [manager.save() for _ in range(3)]
        manager.checkpoint.restore(paths[0])
        path = manager.save()
        return [api.relative(path, directory), kept(api, manager, directory)]


@scenario("9.3")
def save_that_fails_leaves_the_others(api):
    with api.directory() as directory:
        checkpoint = api.Checkpoint(v=variable(api, 1.0))
        manager = api.CheckpointManager(checkpoint, directory, 2)
        manager.save()
        checkpoint.bad = on_read(api, "NONE", 2)
        error = api.attempt(manager.save)
        return [error, kept(api, manager, directory)]


@scenario("9.3")
def manager_that_begins_anew_beside_earlier_checkpoints(api):
    with api.directory() as directory:
        first = managed(api, directory, 3)
        for _ in range(3):
            first.save()
        manager = managed(api, directory, 2)
        path = manager.save()
        return [api.relative(path, directory), kept(api, manager, directory)]


@scenario("9.3")
def two_managers_in_one_directory(api):
    with api.directory() as directory:
        a = managed(api, directory, 2, checkpoint_name="a")
        b = managed(api, directory, 2, checkpoint_name="b")
        for manager in (a, b, a, a):
            manager.save()
        return [kept(api, a, directory), kept(api, b, directory)]


@scenario("9.3")
def saves_that_the_manager_does_not_know(api):
    with api.directory() as directory:
        manager = managed(api, directory, 1)
        paths = [manager.save()]
        paths.append(manager.checkpoint.save(os.path.join(directory, "ckpt")))
        paths.append(manager.save())
        return [api.relative(paths, directory), kept(api, manager, directory)]


@scenario("9.3")
def manager_keeps_one_every_so_many_hours(api):
    with api.directory() as directory:
        every = {"keep_checkpoint_every_n_hours": 1e-9}
        manager = managed(api, directory, 1, **every)
        for _ in range(3):
            manager.save()
        return kept(api, manager, directory)


@scenario("9.3")
def manager_keeps_one_in_many_hours(api):
    with api.directory() as directory:
        manager = managed(api, directory, 1, keep_checkpoint_every_n_hours=100.0)
        for _ in range(3):
            manager.save()
        return kept(api, manager, directory)


@scenario("9.3")
def manager_in_a_directory_that_is_a_path_object(api):
    with api.directory() as directory:
        manager = managed(api, pathlib.Path(directory), 2)
        path = manager.save()
        return [api.relative(path, directory), kept(api, manager, directory)]


@scenario("9.3")
def training_that_was_interrupted(api, engine):
    """Stopped after three of six steps and begun anew, it ends the same."""
    with api.directory() as directory:

        def train(until, where):
            model = model_with_optimizer(api, 2)
            step = api.Variable(0)
            checkpoint = api.Checkpoint(v=model[1], optimizer=model[2], step=step)
            manager = api.CheckpointManager(checkpoint, where, 2)
            manager.restore_or_initialize()
            start = api.plain(step)
            while api.plain(step) < until:
                steps(api, engine, model, 1)
                step.assign_add(1)
                manager.save()
            manager.sync()
            return [start, api.plain(api.copies(model[1]))]

        whole = train(6, os.path.join(directory, "whole"))
        parts = os.path.join(directory, "parts")
        train(3, parts)
        resumed = train(6, parts)
        return [whole[0], resumed[0], whole[1] == resumed[1]]
