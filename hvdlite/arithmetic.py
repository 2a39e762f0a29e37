"""The one formula by which every backend reduces: what is summed in which type, scaled and rounded.

Sum over the ranks in ascending order in the compute type, times one factor, rounded once.  A
reduction is compiled to a list of NumPy calls which `run()` executes inside a single C loop: no
byte code runs between two of them, so a signal handler that raises meets a reduction either not
begun or finished, never half done.
"""

import contextvars
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from operator import call
from typing import Any, TypeVar

import numpy as np

from hvdlite.types import Array, ReduceOp

T = TypeVar("T")

Step = tuple[Any, ...]  # a callable and its positional arguments

_HALF_NAMES = ("float16", "bfloat16")
_UFUNCS = {
    ReduceOp.AVERAGE: np.add,
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
_BOOL_UFUNCS = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.MIN: np.logical_and,
    ReduceOp.PRODUCT: np.logical_and,
}


_quiet = contextvars.copy_context()
_quiet.run(np.seterr, all="ignore")  # NumPy keeps these switches in a context variable


def run(steps: Sequence[Step]) -> None:
    """Execute compiled steps without a byte code in between; floating-point warnings are off.

    An overflow of the sum is part of the result (inf), on every rank alike; a warning on the one
    rank that happens to reduce that share would only mislead.
    """
    quietly(at_once, steps)


def quietly(function: Callable[..., T], *args: Any) -> T:
    """Call it with floating-point warnings off; cheaper than `np.errstate`."""
    return _quiet.copy().run(function, *args)


def at_once(steps: Sequence[Step]) -> None:
    """Make calls of C functions inside one C loop, where no signal handler comes between them."""
    deque(starmap(call, steps), maxlen=0)


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is a 16-bit float, which is summed in float32."""
    return dtype.name in _HALF_NAMES


def check_reducible(
    op: ReduceOp, dtype: np.dtype[Any], what: str, prescale: float = 1.0, postscale: float = 1.0
) -> None:
    """Raise TypeError where `op` has no meaning for `dtype`.

    Args:
        op: The reduce op.
        dtype: Type of the array's elements.
        what: Names the call and the tensor in the message.
        prescale: Factor applied before the reduction.
        postscale: Factor applied after it.

    Raises:
        TypeError: Average of bool, Min or Max of complex, scaled bool, a type without arithmetic.
    """
    if dtype.kind not in "biufc" and not is_half(dtype):
        raise TypeError(f"{what}: arrays of dtype {dtype} cannot be reduced; use numbers or bool")
    if dtype.kind == "b":
        if op is ReduceOp.AVERAGE:
            raise TypeError(f"{what}: Average of bool has no meaning; use Sum (any) or Min (all)")
        if (prescale, postscale) != (1.0, 1.0):
            raise TypeError(f"{what}: bool arrays cannot be scaled by {prescale} and {postscale}")
    if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"{what}: complex numbers have no order, so no {op.name.title()}")


class Reduction:
    """One op on one dtype over a fixed number of ranks, ready to be compiled for any blocks.

    Args:
        op: The reduce op; AVERAGE divides by the number of ranks (or by the sum of weights).
        dtype: Element type of the operands and of the result.
        num_ranks: How many operands there will be.
        prescale: Multiplies every operand before the reduction.
        postscale: Multiplies the result.
    """

    def __init__(
        self,
        op: ReduceOp,
        dtype: np.dtype[Any],
        num_ranks: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        self.op, self.dtype, self.num_ranks = op, dtype, num_ranks
        self.prescale, self.postscale = prescale, postscale
        self.is_linear = op in (ReduceOp.SUM, ReduceOp.AVERAGE)
        self.compute = np.dtype(np.float32) if is_half(dtype) else dtype
        self._ufunc = (_BOOL_UFUNCS if dtype.kind == "b" else _UFUNCS)[op]
        self._real = self.compute.type(0).real.dtype if self.compute.kind == "c" else self.compute
        self._scratch: dict[int, list[Array]] = {}
        # Sums of floats in their own type, the usual case, as `reduce` does them.
        self._is_plain_sum = self.is_linear and dtype.kind == "f" and self.compute == dtype
        factor = prescale * postscale / (num_ranks if op is ReduceOp.AVERAGE else 1)
        self._plain_factor: Array | None = None
        if self._is_plain_sum and factor != 1.0:
            with np.errstate(all="ignore"):
                self._plain_factor = np.asarray(factor, self._real)

    def steps(
        self, blocks: Sequence[Array], outs: Sequence[Array], weights: Sequence[float] | None = None
    ) -> list[Step]:
        """Compile the reduction of `blocks` into every array of `outs`.

        Args:
            blocks: One operand a rank, in ascending rank order; 1-D, equal length.
            outs: Where the result goes: all of it into each.  `outs[0]` may be `blocks[0]` and so
                on (in place); otherwise the blocks are left as they are.
            weights: One weight a rank, for AVERAGE only: sum w g / sum w.  None: all equal.

        Returns:
            Calls for `run()`.
        """
        if weights is not None:
            return self._weighted_steps(blocks, outs, weights)
        if self.dtype.kind in "iu":
            return self._integer_steps(blocks, outs)
        if self.dtype.kind == "b":
            return [*self._fold(blocks, outs[0]), *_copies(outs)]
        factor = self.prescale * self.postscale if self.is_linear else self.postscale
        if self.op is ReduceOp.AVERAGE:
            factor /= self.num_ranks
        before = None if self.is_linear or self.prescale == 1.0 else self.prescale
        if before is not None or self.compute != self.dtype:
            factors = None if before is None else [before] * len(blocks)
            return self._wide_steps(blocks, outs, factors, factor)
        steps = self._fold(blocks, outs[0])
        if factor != 1.0:
            steps.append(self._scale(outs[0], factor))
        return [*steps, *_copies(outs)]

    def reduce(self, operands: Sequence[Array], block_elements: int) -> Array:
        """Reduce small operands at once; they are left as they are.

        Args:
            operands: One a rank, in ascending rank order; 1-D, equal length.
            block_elements: Elements that one NumPy call handles.

        Returns:
            A new array.
        """
        if not self._is_plain_sum or operands[0].size > block_elements:
            out = np.empty_like(operands[0])
            run(blocked_steps(self, operands, [out], block_elements))
            return out
        if len(operands) == 1:
            out = operands[0].copy()
        else:
            out = operands[0] + operands[1]
            for operand in operands[2:]:
                np.add(out, operand, out)
        if self._plain_factor is not None:
            np.multiply(out, self._plain_factor, out)
        return out

    def _weighted_steps(
        self, blocks: Sequence[Array], outs: Sequence[Array], weights: Sequence[float]
    ) -> list[Step]:
        """Sum w g / sum w; an operand of weight 0 is left out, for it may hold anything (NaN)."""
        if not any(weights):
            return [(out.fill, 0) for out in outs]
        exponent = math.frexp(max(weights))[1]  # only the ratios count: keep away from the ends
        scaled = [math.ldexp(weight, -exponent) for weight in weights]
        used = [rank for rank, weight in enumerate(scaled) if weight]
        factor, total = self.prescale * self.postscale, sum(scaled)
        chosen = [blocks[rank] for rank in used]
        chosen_weights = [scaled[rank] for rank in used]
        if self.dtype.kind not in "iu":
            return self._wide_steps(chosen, outs, chosen_weights, factor / total)
        # Weights are no integers.  Divided, not multiplied by 1/total: truncation would show it.
        wide = Reduction(self.op, np.dtype(np.float64), self.num_ranks)
        return wide._wide_steps(chosen, outs, chosen_weights, factor, total)

    def _fold(self, blocks: Sequence[Array], out: Array) -> list[Step]:
        """Combine in rank order, straight in the operands' own type."""
        if len(blocks) == 1:
            return [] if out is blocks[0] else [_copy(out, blocks[0])]
        steps = [self._combine(blocks[0], blocks[1], out)]
        return steps + [self._combine(out, block, out) for block in blocks[2:]]

    def _combine(self, first: Array, second: Array, out: Array) -> Step:
        if self.op in (ReduceOp.MIN, ReduceOp.MAX):  # NumPy wants their `out` by keyword
            return (partial(self._ufunc, first, second, out=out),)
        return (self._ufunc, first, second, out)

    def _scale(self, target: Array, factor: float) -> Step:
        """Multiply by a real factor; a complex number's parts each on their own."""
        parts = target.view(self._real) if target.dtype.kind == "c" else target
        with np.errstate(all="ignore"):
            return (np.multiply, parts, np.asarray(factor, self._real), parts)

    def _wide_steps(
        self,
        blocks: Sequence[Array],
        outs: Sequence[Array],
        before: Sequence[float] | None,
        factor: float,
        divisor: float = 1.0,
    ) -> list[Step]:
        """Combine in the compute type, through scratch: 16-bit floats, weights, prescaled Min."""
        total, operand = self._scratch_pair(blocks[0].size)
        steps: list[Step] = []
        for rank, block in enumerate(blocks):
            target = operand if rank else total
            steps.append(_copy(target, block))
            if before is not None and before[rank] != 1.0:
                steps.append(self._scale(target, before[rank]))
            if rank:
                steps.append(self._combine(total, operand, total))
        if factor != 1.0:
            steps.append(self._scale(total, factor))
        if divisor != 1.0:
            steps.append((np.divide, total, np.asarray(divisor, self._real), total))
        return [*steps, _copy(outs[0], total), *_copies(outs)]

    def _integer_steps(self, blocks: Sequence[Array], outs: Sequence[Array]) -> list[Step]:
        """Sums wrap as NumPy's do; an average truncates toward zero, exact for 64 bits."""
        out = outs[0]
        steps: list[Step] = []
        if self.prescale != 1.0:
            # Truncation comes before the sum here, so the two factors cannot be folded into one.
            scaled = [np.empty_like(block) for block in blocks]
            for block, target in zip(blocks, scaled, strict=True):
                steps += self._scale_integers(block, target, self.prescale)
            blocks = scaled
        steps += self._fold(blocks, out)
        if self.op is ReduceOp.AVERAGE and self.postscale == 1.0:
            if self.num_ranks > 1:
                divisor = self.dtype.type(self.num_ranks) if self._holds(self.num_ranks) else None
                if divisor is None:  # int8 over more than 127 ranks
                    steps += self._scale_integers(out, out, 1.0, self.num_ranks)
                else:
                    rest = self._scratch_pair(out.size)[0]
                    steps += [
                        (np.fmod, out, divisor, rest),
                        (np.subtract, out, rest, out),
                        (np.floor_divide, out, divisor, out),
                    ]
        else:
            count = self.num_ranks if self.op is ReduceOp.AVERAGE else 1
            steps += self._scale_integers(out, out, self.postscale, count)
        return [*steps, *_copies(outs)]

    def _holds(self, value: int) -> bool:
        info = np.iinfo(self.dtype)
        return int(info.min) <= value <= int(info.max)

    def _scale_integers(
        self, source: Array, target: Array, factor: float, divisor: int = 1
    ) -> list[Step]:
        """Source times factor / divisor, truncated toward zero."""
        if factor == divisor == 1:
            return [] if source is target else [_copy(target, source)]
        if divisor == 1 and factor.is_integer() and self._holds(int(factor)):
            return [(np.multiply, source, self.dtype.type(int(factor)), target)]
        wide = np.empty(source.shape, np.float64)
        return [
            (np.multiply, source, np.float64(factor), wide),
            (np.divide, wide, np.float64(divisor), wide),
            _copy(target, wide),  # the cast truncates toward zero
        ]

    def _scratch_pair(self, size: int) -> list[Array]:
        """Two work arrays of `size` elements; shared by blocks, which run one after the other."""
        if size not in self._scratch:
            self._scratch[size] = [np.empty(size, self.compute) for _ in range(2)]
        return self._scratch[size]


def blocked_steps(
    reduction: Reduction,
    blocks: Sequence[Array],
    outs: Sequence[Array],
    block_elements: int,
    weights: Sequence[float] | None = None,
) -> list[Step]:
    """Compile a reduction piece by piece, so that each piece is scaled and copied while cached.

    Args:
        reduction: The arithmetic.
        blocks: One operand a rank, 1-D, equal length.
        outs: Where the result goes; the same list as `blocks` for in place.
        block_elements: Elements of a piece.
        weights: As in `Reduction.steps`.
    """
    steps: list[Step] = []
    for i in range(0, blocks[0].size, block_elements):
        j = i + block_elements
        pieces = [block[i:j] for block in blocks]
        targets = pieces if outs is blocks else [out[i:j] for out in outs]
        steps += reduction.steps(pieces, targets, weights)
    return steps


def _copy(target: Array, source: Array) -> Step:
    """Assign, with whatever cast that takes.

    Not `np.copyto`: NumPy calls a Python function of its own before it, where a signal handler may
    run - in the middle of a reduction.
    """
    return (target.__setitem__, ..., source)


def _copies(outs: Sequence[Array]) -> list[Step]:
    return [_copy(out, outs[0]) for out in outs[1:]]
