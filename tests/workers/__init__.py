"""Many workers give the results of one: real processes, compared with one process."""
