"""A computation in two halves: the first gives some of its results, the second the others later, and nothing is done twice.

    now, kept = split.first(again, once)
    later = split.second(again, kept)

A vjp of layers gives the gradient of their input, which the stage before waits for, and those of their weights, which nobody
waits for. JAX computes both in one pass. Here that pass is traced, and what the first result needs is told from what only the
second one needs, also inside of loops: a loop over layers becomes two, of which the first hands the second what it needs of
each layer. That is the input and the gradient at each matmul's output, as a zero-bubble schedule would have it (Qi et al.
2023).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "closed_call": "call_jaxpr"}
# Cheap to do again, where what goes in is no larger than what comes out.
MOVES = ("convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "sharding_constraint",
         "copy")


@dataclasses.dataclass(frozen=True)
class _Operation:
    """A function of values to values, both by number. `eqn` is where it comes from, if it is one equation."""
    run: Callable[[list], Sequence]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    eqn: Any = None


class _Program:
    """A jaxpr as a list of operations, with calls inlined. Values have numbers; `avals` and, of constants, `known` go by them."""

    def __init__(self, jaxpr: Any, consts: Sequence):
        self.operations: list[_Operation] = []
        self.avals: list[Any] = []
        self.known: dict[int, Any] = {}
        self.inputs = [self._new(var.aval) for var in jaxpr.invars]
        env = dict(zip(jaxpr.invars, self.inputs)) | {var: self._constant(var.aval, value)
                                                      for var, value in zip(jaxpr.constvars, consts)}
        self.outputs = self._add(jaxpr, env)

    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _constant(self, aval: Any, value: Any) -> int:
        number = self._new(aval)
        self.known[number] = value
        return number

    def _add(self, jaxpr: Any, env: dict) -> list[int]:
        def read(atom):
            return self._constant(atom.aval, atom.val) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            ins = tuple(map(read, eqn.invars))
            if eqn.primitive.name in INLINED:
                inner, consts = _opened(eqn.params[INLINED[eqn.primitive.name]])
                bound = dict(zip(inner.invars, ins)) | {var: self._constant(var.aval, value)
                                                        for var, value in zip(inner.constvars, consts)}
                env.update(zip(eqn.outvars, self._add(inner, bound)))
                continue
            outs = tuple(self._new(var.aval) for var in eqn.outvars)
            env.update(zip(eqn.outvars, outs))
            self.operations.append(_Operation(_bound(eqn), ins, outs, eqn))
        return list(map(read, jaxpr.outvars))

    def divide(self, now: set[int], shared: set[int]) -> tuple[list[_Operation], list[_Operation], list[int]]:
        """(operations for the values `now`, those for all other outputs, values that the second take from the first).

        Args:
          now: numbers of values.
          shared: those that both are given.
        """
        needed, wanted = set(now), {number for number in self.outputs if number not in now}
        first: list[_Operation] = []
        second: list[_Operation] = []
        made: dict[int, _Operation] = {}
        for operation in reversed(self.operations):
            if not needed & set(operation.outs):
                if wanted & set(operation.outs):
                    second.append(operation)
                    wanted |= set(operation.ins)
                continue
            rest = [out for out in operation.outs if out in wanted and out not in needed]
            if rest and operation.eqn.primitive.name == "scan":
                operation, later = self._divide_scan(operation, needed)
                if later is not None:
                    second.append(later)
                    wanted |= set(later.ins)
            first.append(operation)
            needed |= set(operation.ins)
            made |= dict.fromkeys(operation.outs, operation)
        first.reverse()
        second.reverse()
        kept, again = self._handed_over(wanted, shared, made)
        order = {id(operation): number for number, operation in enumerate(first)}
        return first, sorted(again, key=lambda operation: order[id(operation)]) + second, kept

    def _handed_over(self, wanted: set[int], shared: set[int], made: dict[int, _Operation]) -> tuple[list[int], list[_Operation]]:
        """Of the values that the second half wants, those to keep, and operations to do again instead of keeping more."""
        kept, again, todo, seen = [], [], sorted(wanted), set()
        while todo:
            number = todo.pop()
            if number in seen or number in shared or number in self.known:
                continue
            seen.add(number)
            operation = made.get(number)
            if operation is not None and self._is_cheap(operation, number):
                if operation not in again:
                    again.append(operation)
                todo += operation.ins
            elif operation is not None or number in self.inputs:
                kept.append(number)
        return sorted(kept), again

    def _is_cheap(self, operation: _Operation, number: int) -> bool:
        if jax.dtypes.issubdtype(self.avals[number].dtype, jax.dtypes.extended):       # random keys, which no buffer holds
            return True
        ins = [one for one in operation.ins if one not in self.known]
        if operation.eqn is None or len(ins) > 1:
            return False
        name = operation.eqn.primitive.name
        return not ins or (name in MOVES and _size(self.avals[ins[0]]) <= _size(self.avals[number]))

    def _divide_scan(self, operation: _Operation, needed: set[int]) -> tuple[_Operation, _Operation | None]:
        """A loop as two: the first has the carry and whatever is needed, the second the other outputs of each turn."""
        params = operation.eqn.params
        reverse, length = params["reverse"], params["length"]
        consts, carried = _counts(params)
        program = _Program(*_opened(params["jaxpr"]))
        here = [i for i in range(carried, len(operation.outs)) if operation.outs[i] in needed]
        there = [i for i in range(carried, len(operation.outs)) if operation.outs[i] not in needed]
        given = [*program.inputs[:consts], *program.inputs[consts + carried:]]
        now = {*program.outputs[:carried], *(program.outputs[i] for i in here)}
        first, second, kept = program.divide(now, set(given))
        late = [i for i in there if program.outputs[i] not in now]
        early = [i for i in there if program.outputs[i] in now]

        def run_first(values):
            fixed, start, along = values[:consts], values[consts:consts + carried], values[consts + carried:]

            def turn(carry, along):
                env = program.evaluate(first, dict(zip(program.inputs, [*fixed, *carry, *along])))
                found = [env[number] for number in program.outputs[:carried]]
                return found, ([env[program.outputs[i]] for i in here + early], [env[number] for number in kept])

            end, (found, left) = jax.lax.scan(turn, list(start), list(along), length=length, reverse=reverse)
            return [*end, *found, *left]

        def run_second(values):
            fixed, along = values[:consts], values[consts:]
            split = len(along) - len(kept)

            def turn(_, along):
                env = dict(zip(given, [*fixed, *along[:split]])) | dict(zip(kept, along[split:]))
                env = program.evaluate(second, env)
                return (), [env[program.outputs[i]] for i in late]

            return jax.lax.scan(turn, (), list(along), length=length, reverse=reverse)[1]

        stacked = tuple(self._new(jax.core.ShapedArray((length, *program.avals[number].shape), program.avals[number].dtype))
                        for number in kept)
        outs = (*operation.outs[:carried], *(operation.outs[i] for i in here + early), *stacked)
        one = _Operation(run_first, operation.ins, outs)
        if not late:
            return one, None
        ins = (*operation.ins[:consts], *operation.ins[consts + carried:], *stacked)
        return one, _Operation(run_second, ins, tuple(operation.outs[i] for i in late))

    def evaluate(self, operations: Sequence[_Operation], env: dict[int, Any]) -> dict[int, Any]:
        """All values, by number, once the operations are done."""
        env = self.known | env
        for operation in operations:
            env.update(zip(operation.outs, operation.run([env[number] for number in operation.ins]), strict=True))
        return env


def _bound(eqn: Any) -> Callable[[list], Sequence]:
    def run(values):
        bound = eqn.primitive.get_bind_params(eqn.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)         # a tuple before jax 0.11
        out = eqn.primitive.bind(*functions, *values, **params)
        return out if eqn.primitive.multiple_results else [out]

    return run


def _opened(jaxpr: Any) -> tuple[Any, Sequence]:
    """A jaxpr, closed or not, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _counts(params: Any) -> tuple[int, int]:
    """How many of a loop's operands are constants, and how many are carried."""
    if "ft_in" in params:                      # jax 0.11
        return tuple(map(len, params["ft_in"].unpack()))[:2]
    return params["num_consts"], params["num_carry"]


def _size(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


class Halves:
    """`function(again, once) -> (now, later)` in two halves; `again` and `once` are pytrees like those that it will be given."""

    def __init__(self, function: Callable[[Any, Any], tuple[Any, Any]], again: Any, once: Any):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(again, once)
        self._program = program = _Program(closed.jaxpr, closed.consts)
        (now, later), self._count = shapes, len(jax.tree.leaves(again))
        self._now, self._later = jax.tree.structure(now), jax.tree.structure(later)
        split = self._now.num_leaves
        self._outputs = program.outputs[:split], program.outputs[split:]
        self._first, self._second, kept = program.divide(set(self._outputs[0]), set(program.inputs[:self._count]))
        both = [number for number in self._outputs[1] if number in self._outputs[0] and number not in kept]
        self._kept = kept + both

    def first(self, again: Any, once: Any) -> tuple[Any, list[jax.Array]]:
        """What is wanted now, and what the second half needs of it besides `again`."""
        values = dict(zip(self._program.inputs, jax.tree.leaves((again, once)), strict=True))
        env = self._program.evaluate(self._first, values)
        return self._now.unflatten([env[number] for number in self._outputs[0]]), [env[number] for number in self._kept]

    def second(self, again: Any, kept: list[jax.Array]) -> Any:
        """What is wanted later."""
        values = dict(zip(self._program.inputs[:self._count], jax.tree.leaves(again), strict=True))
        env = self._program.evaluate(self._second, values | dict(zip(self._kept, kept, strict=True)))
        return self._later.unflatten([env[number] for number in self._outputs[1]])
