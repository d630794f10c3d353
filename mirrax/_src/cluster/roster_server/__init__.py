"""The process that knows all workers: who has joined, who is alive, what they agree on.

The first worker starts it beside itself as a program of its own (`python roster_server`),
because it has to outlive that worker: when JAX's coordination service ends with the process
that it lives in, JAX aborts every other worker before anything can be explained. So it also
hosts that service. It needs no JAX beside the service and starts in 0.2 s; that is why its
modules import each other by relative names, and nothing else of mirrax.

Messages are lines of JSON, each an object with one key that says what it is. The server
speaks first: `roster`, the version, and a challenge if there is a secret. From workers:

    prove   that it knows the secret, and a challenge of its own
    hello   who it is, and facts that must be equal on all workers
    status  where it is, up to five times a second
    agree   a value for an agreement, by name; `withdraw` that it is not wanted any more
    stop    that all should stop; `reached` is the answer to `stopping`
    accuse  that another worker does not do what it should; `gave_up` that one did not join
    note    that something has been done so often; passed on to all
    saved   which checkpoint has been written, and at which step
    failed  that it ends, and why; `bye` if its program is done

From somebody who is no worker, but knows the secret: `look`, which is answered by `job`.

To workers:

    proved  that the server knows the secret, too
    refused why the connection is closed
    missing who has not joined yet
    go      all have joined: everybody's facts, the port of JAX's service
    status  of those who are behind the others, once a second
    agreed  everybody's values
    stopping, stop_at  the two halves of agreeing on the step to stop at
    ended   workers whose programs are done
    say     a line for the first worker's log
    failure the first worker that is lost, and how
"""
