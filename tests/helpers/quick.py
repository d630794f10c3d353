"""What `make quick` runs of the files that start many processes: one test of each kind.

In these files a test that is not named here is slow.
"""

from __future__ import annotations

import pytest

_QUICK: dict[str, set[str]] = {
    "workers/test_bits.py": set(),
    "workers/test_checkpoints.py": {
        "test_a_damaged_checkpoint_is_passed_over_by_all",
    },
    "workers/test_input.py": {
        "test_a_position_is_saved_and_restored",
        "test_batches_are_dealt_out",
        "test_different_datasets_are_an_error_on_all_workers",
        "test_files",
        "test_no_agreement_in_each_step_where_lengths_are_known",
        "test_several_passes_and_a_break",
    },
    "workers/test_reducing.py": {
        "test_a_plain_value_counts_once_for_each_worker",
        "test_all_gather[compiled]",
        "test_reduce_of_every_dtype[float32]",
        "test_reduce_of_uneven_parts[MEAN-a shorter one]",
        "test_reduce_of_uneven_parts[SUM-an empty worker]",
        "test_shapes_that_do_not_fit_are_an_error_on_all_workers",
    },
    "workers/test_running.py": {
        "test_a_replica_knows_its_place",
        "test_an_error_of_all_workers_leaves_them_usable",
        "test_functional_state[compiled-donate1]",
        "test_gradients_through_collectives[compiled]",
        "test_merge_call[compiled]",
    },
    "workers/test_sequences.py": set(),
    "workers/test_strategy.py": {"test_facts[two_by_two]"},
    "workers/test_training.py": {
        "test_small_gradients_travel_together[two_by_two]",
    },
    "workers/test_variables.py": {
        "test_assigned_in_replicas[ON_WRITE-compiled]",
        "test_different_shapes_are_an_error_on_all_workers[scope]",
        "test_update[outside]",
    },
    "cluster/test_failures.py": {
        "test_a_killed_worker_ends_the_others_who_name_it[compiled steps-1]",
        "test_a_user_who_goes_on_gets_the_error_again",
        "test_all_workers_stop_at_the_same_step",
        "test_how_a_worker_ended_is_said_by_the_others[an exception-1]",
        "test_in_debug_mode_different_programs_are_shown_before_they_run[shapes]",
    },
    "cluster/test_joining.py": {
        "test_a_second_strategy_is_the_same_cluster_and_another_cluster_is_refused",
        "test_a_strategy_after_jax_has_started_is_an_error",
        "test_clusters_of_other_sizes_are_shown_side_by_side",
        "test_ctrl_c_while_joining_ends_at_once",
    },
    "command_line/test_output.py": {
        "test_a_very_long_line_and_one_without_an_end",
        "test_lines_are_never_mixed",
        "test_progress_bars_show_their_last_state",
    },
    "command_line/test_signals.py": {
        "test_ctrl_c_reaches_workers_once",
    },
    "testing/test_failures.py": {
        "test_an_exception_names_the_worker_and_carries_its_traceback",
        "test_the_error_can_be_pickled",
    },
    "testing/test_pool.py": {
        "test_arrays_and_classes_of_the_test",
        "test_closures_and_lambdas",
        "test_processes_stay_between_calls",
        "test_results_come_in_the_order_of_workers",
        "test_sizes_that_make_no_sense",
        "test_what_the_module_offers",
    },
}


def mark_if_slow(item: pytest.Item) -> None:
    """Marks a test of these files that is not named as slow."""
    path, _, name = item.nodeid.removeprefix("tests/").partition("::")
    if path in _QUICK and _QUICK[path].isdisjoint((name, name.split("[")[0])):
        item.add_marker(pytest.mark.slow)
