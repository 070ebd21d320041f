"""Is what mpitrain makes of a program right?

Values against the naive implementation, gradients against PyTorch and against differences, other ways to walk the tape
against the plain one, lower precision against float64.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fuzz.differences import slope
from fuzz.program import EPS, OPS, Program, evaluate, naive_value, same_choices
from fuzz.run import Allowance, Broken, Run, run, run_torch

LEAST = {"float64": 1e-300, "float32": 1e-37, "float16": 2.0**-22}  # what may be lost where numbers end
TIGHT = 64  # roundings that need no explanation


class Wrong(Exception):
    """A difference that rounding errors do not explain.

    kind: what was compared; name: of the value or leaf; expected: what it should be, where that is known; sort: what
    two failures share if they have the same cause.
    """

    def __init__(self, kind: str, text: str, name: str = "", expected: np.ndarray | None = None) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.name, self.expected = kind, name, expected
        self.sort = (kind, text.split(":")[0] if kind == "exception" else "")


@dataclass
class Judge:
    """Counts what it compares.

    Args:
        torch: the module, or None.
        differences: whether to take finite differences.
    """

    torch: Any = None
    differences: bool = True
    checks: Counter[str] = field(default_factory=Counter)
    undecided: Counter[str] = field(default_factory=Counter)

    def check(self, program: Program) -> None:
        """Everything about one program.

        Raises:
            Wrong: the first thing that is not as it should be.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Of finite products, from lanes of a vector that BLAS does not use: github.com/numpy/numpy/issues/24067.
            warnings.filterwarnings("ignore", "invalid value encountered in matmul")
            try:
                self._check(program)
            except Broken as broken:
                raise Wrong("contract", str(broken)) from None
            except Wrong:
                raise
            except Exception as error:
                raise Wrong("exception", f"{type(error).__name__}: {error}") from error

    def _check(self, program: Program) -> None:
        double = program.doubled()
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            naive = evaluate(double.steps, {leaf.name: naive_value(leaf) for leaf in double.leaves})
        exact = run(double, "backward")
        compare = Comparison(double, exact, "float64")
        for step in double.steps:
            for name in step.outputs:
                self.checks["values, naive"] += 1
                compare.value("value, naive", name, exact.values[name], naive[name])
        one_output = all(len(step.outputs) == 1 for step in double.steps)  # of several one may not depend on all inputs
        for leaf in double.leaves if one_output else ():
            if leaf.has_gradient and leaf.name in double.used and leaf.name not in exact.grads:
                raise Wrong("contract", f"{leaf.name} got no gradient", leaf.name)
        if self.torch is not None:
            self._check_torch(double, exact, compare)
        if self.differences:
            self._check_differences(double, exact, naive, compare)
        if program.walk != "backward":
            self.checks[f"gradients, {program.walk}"] += len(exact.grads)
            other = run(double)
            compare.all_gradients(f"gradient, {program.walk}", other.grads, exact.grads)
        if program is not double:
            self._check_precision(program, double, exact)

    def _check_torch(self, double: Program, exact: Run, compare: Comparison) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = run_torch(double, self.torch)
        if same_choices(double, exact.values, theirs.values):
            self.checks["gradients, torch"] += len(exact.grads)
            compare.all_gradients("gradient, torch", exact.grads, theirs.grads)
        else:
            self.undecided["torch: a tie but for rounding"] += 1

    def _check_differences(self, double: Program, exact: Run, naive: dict[str, Any], compare: Comparison) -> None:
        rng = np.random.default_rng(0)
        for leaf in double.leaves:
            grad = exact.grads.get(leaf.name)
            if grad is None or not grad.size:
                continue
            if not np.isfinite(grad).all():
                raise Wrong("gradient, differences", f"{leaf.name} has a gradient that is not finite", leaf.name)
            direction = rng.standard_normal(grad.shape)
            terms = grad * direction
            scale = float(np.abs(terms).sum())
            value = float(terms.sum())
            for costly in (False, True):  # the second only where the first does not agree
                noise = compare.noise() if costly else None
                with np.errstate(all="ignore"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = slope(double, naive, leaf.name, direction, scale, noise)
                if found is None or abs(value - found.value) <= 4 * found.error + 1e-9 * scale:
                    break
            if found is None:
                self.undecided["differences: a kink, or too few digits"] += 1
                continue
            self.checks["gradients, differences"] += 1
            if not abs(value - found.value) <= 4 * found.error + 1e-9 * scale:
                text = (
                    f"{leaf.name}: along one direction backward gives {value:.12g},"
                    f" differences {found.value:.12g} +- {found.error:.2g}"
                )
                raise Wrong("gradient, differences", text, leaf.name)

    def _check_precision(self, program: Program, double: Program, exact: Run) -> None:
        """The program in its own dtypes against itself in float64."""
        dtype = program.coarsest
        compare = Comparison(double, exact, dtype)
        highest = max([float(np.abs(v).max(initial=0)) for v in exact.values.values()], default=0.0)
        if dtype == "float16" and max(highest, compare.allowance().largest) > 2**14:
            self.undecided["float16: out of range"] += 1
            return
        with np.errstate(under="ignore"):
            low = run(program)
        expected = program.dtypes()
        self._check_halves(program, low)
        for step in program.steps:
            for name in step.outputs:
                self.checks[f"values, {dtype}"] += 1
                if NUMPY_2 and str(low.values[name].dtype) != expected[name]:
                    raise Wrong("dtype", f"{name} is {low.values[name].dtype}, not {expected[name]}", name)
                compare.value(f"value, {dtype}", name, low.values[name], exact.values[name])
        if not same_choices(double, exact.values, {n: np.asarray(v, float) for n, v in low.values.items()}):
            self.undecided["precision: a tie but for rounding"] += 1
            return
        self.checks[f"gradients, {dtype}"] += len(exact.grads)
        compare.all_gradients(f"gradient, {dtype}", low.grads, exact.grads)

    def _check_halves(self, program: Program, low: Run) -> None:
        """Half precision is storage only: each op is right to the one rounding of its result, or its few."""
        low_values: dict[str, Any] = {leaf.name: naive_value(leaf) for leaf in program.leaves if leaf.role == "number"}
        low_values.update({name: array.astype(float) for name, array in low.values.items()})
        for step in program.steps:
            roundings = OPS[step.op].roundings
            if low.values[step.outputs[0]].dtype != np.float16 or roundings is None:
                continue
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                env = evaluate([step], dict(low_values))
            inputs = [env[name] for name in step.inputs if env[name] is not None]
            sizes = [float(np.abs(v).max(initial=0)) for v in inputs]
            size = max([1.0, *sizes])
            for name in step.outputs:
                self.checks["values, float16 op by op"] += 1
                largest = float(np.abs(env[name]).max(initial=0))
                worst = float(np.abs(low.values[name] - env[name]).max(initial=0))
                # What was rounded earlier may have been as large as what was then added to it.
                half = EPS["float16"] * (largest + (roundings - 1) * (largest + sum(sizes)))
                if worst > 1.01 * half + 16 * EPS["float32"] * size * size:
                    text = f"{name} = {step.op}(...) is off by {worst:.3g}, its largest element is {largest:.3g}"
                    raise Wrong("value, float16 op by op", text, name)


NUMPY_2 = int(np.__version__.split(".")[0]) >= 2  # before, the dtype of a sum depended on the value of a 0-d operand


class Comparison:
    """Two runs of a program that differ by rounding errors only.

    A difference of a few roundings of the largest element is taken as it is; of a larger one an `Allowance` says
    whether this program explains it.
    """

    def __init__(self, program: Program, exact: Run, dtype: str) -> None:
        self.program, self.exact, self.dtype = program, exact, dtype
        self._allowance: Allowance | None = None

    def allowance(self) -> Allowance:
        if self._allowance is None:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._allowance = Allowance(self.program, self.exact, self.dtype)
        return self._allowance

    def noise(self) -> float:
        """What rounding errors do to the sum of all seeds times their values."""
        moved = self.allowance().values
        sizes = [float(np.abs(s.values).sum()) * moved.get(s.name, 0.0) for s in self.program.seeds]
        return sum(sizes) / self.allowance().MARGIN

    def value(self, kind: str, name: str, got: np.ndarray, expected: np.ndarray) -> None:
        if got.shape != np.shape(expected):
            raise Wrong(kind, f"{name} has shape {got.shape}, expected is {np.shape(expected)}", name)
        self._compare(kind, name, got, expected, lambda: self.allowance().values)

    def all_gradients(self, kind: str, got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
        """A gradient that is missing on one side is zero on the other."""
        for name in sorted(got.keys() | expected.keys()):
            zero = np.zeros(())
            one, other = got.get(name, zero), expected.get(name, zero)
            if name in got and name in expected and one.shape != other.shape:
                raise Wrong(kind, f"that of {name} has shape {one.shape}, expected is {other.shape}", name)
            self._compare(kind, name, one, other, lambda: self.allowance().grads)

    def _compare(self, kind: str, name: str, got: Any, expected: Any, allowed: Any) -> None:
        if not np.size(got) or not np.size(expected):
            return
        off = np.abs(np.asarray(got, float) - expected)
        worst = float(off.max())
        if worst <= TIGHT * EPS[self.dtype] * float(np.abs(expected).max()) + LEAST[self.dtype]:
            return
        # Products of two rounding errors are of no account; where a kink holds the estimate still it has none.
        limit = allowed().get(name, 0.0) + EPS[self.dtype] ** 2 * self.allowance().largest
        if not worst <= limit:
            at = np.unravel_index(int(np.argmax(np.where(np.isnan(off), np.inf, off))), off.shape)
            got, expected = np.broadcast_to(got, off.shape), np.broadcast_to(expected, off.shape)
            place = f"{name}{list(map(int, at))}"
            text = f"{place} is {got[at]:.9g}, expected {expected[at]:.9g} (rounding explains {limit:.2g})"
            raise Wrong(kind, text, name, np.array(expected))
