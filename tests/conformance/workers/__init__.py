"""What TensorFlow answers on many workers, and mirrax in its place.

Scenarios as in conformance/scenarios, but each is run by every worker of a cluster of
real processes, and the answer is the list of the workers' answers:

    clusters.py    the clusters: how many workers, of which jobs, with `TF_CONFIG`
    scenarios/     the programs; `api` has `multi_worker()` and `worker`, its number
    record.py      asks TensorFlow and writes recorded/
    replay.py      asks mirrax
"""
