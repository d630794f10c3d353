"""A compiled function and the variables it reads and writes.

Variables' arrays go in and come out as lists; those that are written are donated, so that a
step updates them in place. The list that comes out is where the variables live until the
next call, which passes it on as it is. Many small ones go in, live and come out in packs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base.jax_compat import debug_nans
from mirrax._src.base.launching import launching
from mirrax._src.base.logical import Pool, after_launch
from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.structures import is_open, opened
from mirrax._src.base.values import (
    Args,
    Kwargs,
    PerReplica,
    PyTree,
    first_copy,
    is_leaf,
)
from mirrax._src.cluster import launches
from mirrax._src.engines.arguments import Call, placed
from mirrax._src.engines.inputs import SignatureChanged, choose_input
from mirrax._src.engines.packs import Groups, group_living, group_updated
from mirrax._src.engines.traced import Trace
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.home import Home
from mirrax._src.state.variable import (
    FAILED,
    Variable,
    handed_out,
    lost,
    note_donated,
)

_TWICE = (
    "An array is donated twice: one that `donate_argnums` names appears a second time among the "
    "arguments. Copy it first, `jnp.copy(x)`."
)
_MIXED = (
    "A compiled function uses values or variables that lie on different devices, of different "
    "strategies perhaps, which cannot be one program. Call it for each strategy, or run that "
    "part outside `mx.function`. JAX says: {}"
)


def lies_on(variable: Variable, mesh: ReplicaMesh | None) -> bool:
    """Whether a program on `mesh` takes what the variable stores, which may lie elsewhere."""
    is_ours = isinstance(variable, DistributedVariable)
    return is_ours and (mesh is None or variable.strategy.replica_mesh == mesh)


def one_copy_of(variable: Variable) -> jax.Array:
    """The value of a variable that has one, whatever strategy made it."""
    value = variable.in_full()
    return value.values[0] if isinstance(value, PerReplica) else first_copy(value)


def layouts_match(trace: Trace) -> bool:
    """Whether variables lie on the mesh as they did when a function was traced."""
    return all(
        v.layout_now() is layout or not lies_on(v, trace.mesh)
        for v, layout in trace.reads.items()
    )


class Program:
    """A traced function, compiled.

    The compiled function takes the arrays of variables that are written, those that are only
    read, and one input for each argument of the call.
    """

    # Compiling takes as long as opening or closing so many packs, or longer; doubled each time.
    _patience = 5000
    # Opening or closing a pack takes as long as what JAX's launch does for so many arrays.
    _arrays_for_a_pack = 30

    def __init__(
        self, trace: Trace, call: Call, donate: Sequence[int], label: str = ""
    ) -> None:
        """`label` is what other workers are told when they take part in the program."""
        self.trace = trace
        mesh = trace.mesh
        self._is_spread = mesh is not None and mesh.size > 1
        # Also where argument arrays may not be on the mesh yet.
        must_look = self._is_spread or (mesh is not None and mesh != call.mesh)
        self._takes = [choose_input(*own, must_look) for own, _ in call.arguments()]
        self._trees = [tree for _, tree in call.arguments()]
        self._looks = any(take is not None for take in self._takes)
        self._num_args = len(call.args)
        # Whether the result is a structure of arrays as they come.
        is_bare = all(out.layout is Layout.PLAIN for out in trace.outs)
        is_bare = is_bare and not is_open(trace.out_tree)
        self._is_bare = is_bare and not self._is_spread
        self._is_open = is_open(trace.signature.tree)
        self._gives_back = any(out.argument is not None for out in trace.outs)
        # Donated: what is both read and written. Kept: what is only read.
        reused, kept = self._grouped()
        # JAX reuses donated memory for outputs of the same shape in the order of both
        # lists, so that what is updated in place comes first, in the order of the inputs.
        others = [[v] for v in trace.writes if v not in trace.reads]
        self._reused, self._kept = Groups(reused, mesh), Groups(kept, mesh)
        self._written = Groups([*reused, *others], mesh)
        self._old = slice(len(reused)) if others else None
        packs = self._reused.packs
        self._packed = {v.number for i in packs for v in reused[i]}
        self._alone = {v.number for v in self._reused} - self._packed
        self._handed_on = {v.number for v in trace.handed_on()} - self._packed
        self._home = Home([], packs)
        self._home.is_whole = False
        self._sealed = True  # JAX may not trace it again, but in `compile_and_call`
        # How many packs had to be opened and closed because they were not as it takes them, less
        # what its own save; whether a program with other packs should take its place.
        self._in_vain = 0
        fewer = len(list(self._reused)) - len(reused)
        self._saved = fewer // self._arrays_for_a_pack
        self.is_outworn = False
        self._smallest: int | None = None
        self._label = label
        # What the function closes over, where the program can use it.
        self._consts = trace.closed.consts
        if trace.is_replicas and mesh is not None:
            self._consts = [
                mesh.mirror(c) if isinstance(c, jax.Array) else c for c in self._consts
            ]
        # On several workers' devices, which JAX takes as arguments only.
        self._spanning = [c for c in self._consts if _spans_workers(c)]
        self._donate = [i for i in donate if i < self._num_args]
        # With `jax_debug_nans` JAX runs a failed step again, on the same arguments.
        self._debug = debug_nans.value
        given_up = () if self._debug else (0, *(2 + i for i in self._donate))
        self._jitted = jax.jit(self._pure, donate_argnums=given_up)

    def _grouped(self) -> tuple[list[list[Variable]], list[list[Variable]]]:
        """The variables that are read and written, and those only read, with packs as of now."""
        trace = self.trace
        reused = [v for v in trace.reads if v in trace.writes]
        kept = [v for v in trace.reads if v not in trace.writes]
        return group_updated(reused, trace), group_living(kept, trace.mesh)

    def renewed(self, call: Call) -> Program:
        """The same with packs as of now."""
        program = Program(self.trace, call, self._donate, self._label)
        program._patience = self._patience
        return program

    # Calling -------------------------------------------------------------------------

    def call_again(self, args: Args, kwargs: Kwargs) -> PyTree:
        """The result for arguments like those of the first call.

        Only what is cheap is looked at. JAX itself finds out whether shapes have changed, and
        what has changed in arguments that are passed on as they are.

        Raises:
            SignatureChanged: If they are not like those; nothing has happened then.
        """
        inputs = (*args, kwargs) if kwargs else args
        if len(args) != self._num_args or len(inputs) != len(self._takes):
            raise SignatureChanged
        if self._looks:
            each = zip(self._takes, inputs)
            inputs = [x if take is None else take(x) for take, x in each]
        if self._donate and self._is_spread:  # one device finds out by itself
            self._check_donated(inputs)  # each of which is a list by now
        results = self._run_watched(inputs) if self._label else self._run(inputs)
        if self._is_bare:
            return results
        if not self._gives_back:
            return self.trace.result(results, ())
        given = opened((args, kwargs)) if self._is_open else (args, kwargs)
        leaves = jax.tree.leaves(given, is_leaf=is_leaf)
        return self.trace.result(results, self.trace.signature.arrays_of(leaves))

    def compile_and_call(self, call: Call) -> PyTree:
        """The result; JAX may trace the program again: for other placements, say.

        Raises:
            SignatureChanged: If another thread has just laid out a variable otherwise.
        """
        mesh, known = self.trace.mesh, zip(call.arrays, call.signature.layouts())
        inputs = self._as_inputs(
            [a if layout.in_parts else placed(a, mesh) for a, layout in known]
        )
        self._check_donated(list(map(jax.tree.leaves, inputs)))
        try:
            with launching(), self._unsealed():
                # An array that no strategy has placed may lie where other arguments did.
                self._home.is_whole &= all(v.strategy for v in self._reused)
                if not layouts_match(self.trace):
                    raise SignatureChanged
                run = self._run_watched if self._label else self._run
                results = run(inputs)
        except ValueError as error:
            if "incompatible devices" in str(error):
                raise ValueError(_MIXED.format(error)) from None
            raise
        return results if self._is_bare else self.trace.result(results, call.given)

    @contextlib.contextmanager
    def _unsealed(self) -> Iterator[None]:
        self._sealed = False
        try:
            yield
        finally:
            self._sealed = True

    def _check_donated(self, arrays: Sequence[Any]) -> None:
        """Raises if an array that is given up is also given in another place."""
        given_up: set[int] = set()
        for i in self._donate:
            given_up.update(map(id, arrays[i]))
        if len(given_up) < sum(len(arrays[i]) for i in self._donate) or not all(
            given_up.isdisjoint(map(id, others))
            for i, others in enumerate(arrays)
            if i not in self._donate
        ):
            raise ValueError(_TWICE)

    def _as_inputs(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays of all arguments as the compiled function takes them."""
        it = iter(arrays)
        kinds = iter(self.trace.signature.kinds)
        inputs = []
        for tree, take in zip(self._trees, self._takes):
            own = itertools.islice(kinds, tree.num_leaves)
            found = [next(it) for kind in own if isinstance(kind, Layout)]
            inputs.append(tree.unflatten(found) if take is None else found)
        return inputs

    def _run(self, inputs: Sequence[Any]) -> Any:
        """Runs the program on the variables, and stores what it has written."""
        # One at a time: a second thread must not take arrays that are being donated.
        with launching():
            if debug_nans.value is not self._debug:
                raise SignatureChanged
            if lost:
                for variable in (*self._reused, *self._kept):
                    variable.check_not_lost()
            if handed_out and not handed_out.isdisjoint(self._alone):
                self._unshare()
            home = self._home
            in_vain = also = 0
            if not home.is_whole:
                reused, in_vain = self._reused.arrays(self._array_of)
            else:
                reused = home.arrays[self._old] if self._old else home.arrays
            kept: list[Any] = []
            if self._kept.each:
                kept, also = self._kept.arrays(self._array_of)
            if in_vain or also or self._in_vain:
                self._note_in_vain(in_vain + also)
            if self._spanning:
                kept = [*kept, *self._spanning]
            done: list[Any] = []
            try:
                # One call in C: an interrupt (Ctrl-C) comes before it or after it, never
                # when the old arrays are gone and the new ones are nowhere yet.
                done.extend(map(self._jitted, (reused,), (kept,), *zip(inputs)))
                written, results = done[0]
                if home.renew(written):  # what was read is in no pack any more
                    handed_out.difference_update(self._packed)
                if not home.is_whole or self._handed_on:
                    self._settle()
                if self._donate and handed_out:
                    note_donated()
            except SignatureChanged:
                raise
            except BaseException as error:
                if done:
                    home.renew(done[0][0])
                    self._settle()
                else:
                    self._explain(error)
                raise
        if Pool.is_small:
            after_launch(written or results)
        return results

    def _run_watched(self, inputs: Sequence[Any]) -> Any:
        """A run that other workers take part in."""
        assert self.trace.mesh is not None
        cluster = self.trace.mesh.cluster
        with launching():
            cluster.check()
            launches.last.begin(self._label)
            try:
                with cluster.explaining():
                    results = self._run(inputs)
            except BaseException:
                launches.last.undo()
                raise
            every = [*self._home.arrays, *results]
            if self._smallest is None:
                self._smallest = launches.smallest(every)
            at = self._smallest
            launches.last.end(None if at is None else every[at])
            cluster.note_steps(self.trace.runs)
        return results

    def _explain(self, error: BaseException) -> None:
        """Says what has been lost, where a step failed after it had begun.

        Raises:
            SignatureChanged: If it had not begun, because JAX does not take an argument as
                it is, or where it is. The long way mends that, or says what is wrong.
        """
        gone = [v for v in self._reused if v.is_gone()]
        if gone:
            lost.update((v.number, FAILED) for v in gone)
            error.add_note(
                "The step failed while it updated variables in place: "
                f"{', '.join(v.name for v in gone)} have lost their values. Assign them "
                "again, or restore a checkpoint."
            )
        elif self._sealed and (
            isinstance(error, ValueError | TypeError) or "deleted" in str(error)
        ):
            raise SignatureChanged

    # Variables -----------------------------------------------------------------------

    def _array_of(self, variable: Variable) -> jax.Array:
        mesh = self.trace.mesh
        if lies_on(variable, mesh):
            return variable.in_one_array()[0]
        return placed(one_copy_of(variable), mesh)

    def _note_in_vain(self, count: int) -> None:
        """Notes how many packs a call has to open and close, since they are not as it takes them.

        Raises:
            SignatureChanged: If a program with other packs should take its place.
        """
        self._in_vain = max(0, self._in_vain + count - self._saved)
        if self._in_vain <= self._patience or not self._sealed:
            return
        self._in_vain = 0
        self._patience *= 2
        for i in self._reused.packs:
            for variable in self._reused.each[i]:
                variable.may_be_packed &= variable.lives_at[0] is self._home
        taken = [*self._reused.each, *self._kept.each]
        if _numbers(itertools.chain(*self._grouped())) != _numbers(taken):
            self.is_outworn = True
            raise SignatureChanged

    def _settle(self) -> None:
        """Has the variables live in the list that the program gave."""
        home, writes = self._home, self.trace.writes
        if not home.is_whole and self._written.each:
            for i, group in enumerate(self._written.each):
                is_pack = i in self._written.packs
                for part, variable in enumerate(group):
                    where = i, writes[variable], part if is_pack else None
                    variable.move_to(home, *where)
            home.complete()
            handed_out.difference_update(self._packed)
            for variable in self._written:
                # One that no strategy has made has one copy only.
                if variable.strategy is None and self._is_spread:
                    variable.stored = first_copy(variable.stored)
        if self._handed_on:
            handed_out.update(self._handed_on)

    def _unshare(self) -> None:
        """Gives each variable that will be donated an array of its own."""
        shared = handed_out & self._alone
        for variable in [v for v in self._reused if v.number in shared]:
            array, layout = variable.in_one_array()
            variable.replace_array(jnp.copy(array), layout)
            handed_out.discard(variable.number)

    # Tracing -------------------------------------------------------------------------

    def _pure(
        self, reused: list[Any], kept: list[Any], *inputs: Any
    ) -> tuple[list[jax.Array], Any]:
        if self._sealed:
            raise SignatureChanged
        trace, mesh = self.trace, self.trace.mesh
        values = self._reused.values(reused) | self._kept.values(kept)
        it = iter(kept[len(self._kept.each) :])
        consts = [next(it) if _spans_workers(c) else c for c in self._consts]
        reads = [values[v] for v in trace.reads]
        results, new = trace.apply(reads, jax.tree.leaves(inputs), consts)
        if mesh is not None and mesh.spans_workers:
            constrain = jax.lax.with_sharding_constraint
            results = [  # plain ones on every device, so that every worker has them
                r if layout.in_parts else constrain(r, mesh.mirrored)
                for r, layout in zip(results, trace.out_layouts)
            ]
        written = self._written.updated(reused, dict(zip(trace.writes, new)))
        result = trace.out_tree.unflatten(results) if self._is_bare else results
        return written, result

    def lower(self, arrays: Sequence[Any]) -> Any:
        """JAX's lowered form, to look at what was compiled."""
        reused, _ = self._reused.arrays(self._array_of)
        kept, _ = self._kept.arrays(self._array_of)
        with self._unsealed():
            return self._jitted.lower(reused, kept, *self._as_inputs(arrays))


def _numbers(groups: Iterable[Sequence[Variable]]) -> set[tuple[int, ...]]:
    return {tuple(v.number for v in group) for group in groups}


def _spans_workers(const: Any) -> bool:
    return isinstance(const, jax.Array) and not const.is_fully_addressable


def compile_part(trace: Trace) -> Callable[[Call], PyTree]:
    """A compiled part of an eager replica: reads and writes the copies of who calls it."""
    jitted = jax.jit(functools.partial(trace.apply, consts=trace.closed.consts))

    def run(call: Call) -> PyTree:
        values = [v.concrete(is_local=True) for v in trace.reads]
        results, written = jitted(values, call.arrays)
        for variable, value in zip(trace.writes, written):
            variable.store_local(value)
        return trace.result(results, call.given)

    return run
