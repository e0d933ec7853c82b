r"""Expressions: tokens -> `Formula`, and whether two formulas have the same value.

Enters: tokens of one expression, as `notation.tokens_of` makes them. Leaves: a `Formula`, or `Unparsed`.

The parser is a recursive descent over a closed grammar; nothing in the text is ever looked up, imported or executed.
Values are exact `Fraction`s as long as the operations allow it, else complex floats; variables take fixed
pseudo-random rational values (Schwartz-Zippel: two different polynomials of degree d agree at a random point out of N
with probability at most d / N). Where floats agree, arithmetic with 50 and, if tiny values can occur, with 400 digits decides, so that neither an
approximation nor a tiny difference counts as equal; where a root or a logarithm of negative numbers could matter, so do
negative values of the variables. Every operation is bounded: exponents, factorials and integers that are too large raise `Unbounded`, and
the formula has no value.
"""

import cmath
import math
import zlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rlvr_cli.graders.answers.formula_parser import (
    ARC_RECIPROCALS,
    FINAL_DIGITS,
    MAX_BITS,
    MAX_FACTORIAL,
    PRECISE_DIGITS,
    RECIPROCALS,
    Parser,
    Tree,
    Unbounded,
    Unparsed,
)
from rlvr_cli.graders.answers.notation import Token, key_of

POINTS = (0, 1, 2)  # variables lie between 1 and 4 here; at points 3 and 4 they may be negative, from 6 on larger
_FAST = frozenset(["exp", "factorial", "binom", "sinh", "cosh", "tanh", "coth", "sech", "csch"])
# All variables are negative at the first, where their order is the reverse of that at point 1, and each at one of the other two.
_NEGATIVE_POINTS = (-1, -2, -3)


class Formula:
    """One expression: its tree, its variables, and its values at the evaluation points, each computed once."""

    __slots__ = ("_memo", "features", "key", "names", "tree")

    def __init__(self, tree: Tree, key: str, names: frozenset[str], features: frozenset[str]) -> None:
        self.tree = tree
        self.key = key  # the spelling: equal keys are equal formulas
        self.names = names
        self.features = features  # which of "abs", "floor", "log", "order", "pi" occur
        self._memo: dict[tuple[int, bool], Any] = {}

    def value(self, point: int, *, natural: bool = False) -> Fraction | complex | None:
        """The value at an evaluation point; None where there is none (a division by zero, too large).

        Args:
            natural: read a logarithm without a base as natural; by default its base is 10.
        """
        memo = (point, natural)
        if memo not in self._memo:
            try:
                self._memo[memo] = _finite(_evaluate(self.tree, point, natural, _FLOATS))
            except (ArithmeticError, ValueError, RecursionError):
                self._memo[memo] = None
        return self._memo[memo]

    def real(self, point: int) -> Fraction | complex | None:
        """The value in real numbers, where negative numbers have no even root and no logarithm; None if there is none."""
        try:
            return _finite(_evaluate(self.tree, point, False, _REALS))
        except (ArithmeticError, ValueError, RecursionError):
            return None

    def precise(self, point: int, *, natural: bool, digits: int) -> Any:
        """The value with so many digits (an mpmath number or a Fraction), or None."""
        try:
            return _evaluate(self.tree, point, natural, _precise_backend(digits))
        except (ArithmeticError, ValueError, RecursionError):
            return None


def parse_formula(tokens: list[Token] | tuple[Token, ...], *, loose: bool = False) -> Formula:
    """Parse one expression.

    Args:
        loose: read `1/2x` as 1/(2x); by default it is (1/2)x.

    Raises:
        Unparsed: the tokens are not an expression.
    """
    parser = Parser(tokens, loose=loose)
    tree = parser.expression(0)
    if parser.index < len(parser.tokens):
        raise Unparsed(parser.tokens[parser.index].text)
    return Formula(tree, key_of(tokens), frozenset(parser.names), frozenset(parser.features))


def constant(number: int) -> Formula:
    """The formula of a whole number."""
    return Formula(("n", Fraction(number)), str(number), frozenset(), frozenset())


def combined(kind: str, left: Formula, right: Formula) -> Formula:
    """`left * right` or `left / right`."""
    key = f"( {left.key} ) {kind} ( {right.key} )"
    return Formula((kind, left.tree, right.tree), key, left.names | right.names, left.features | right.features)


DEGREE = Formula(("/", ("pi",), ("n", Fraction(180))), "\\pi / 180", frozenset(), frozenset())  # in radians


def same_value(left: Formula, right: Formula) -> bool:
    """Whether two formulas are the same function of their variables or, without variables, the same number."""
    if left.key == right.key:
        return True
    features = left.features | right.features
    bases = (False, True) if "log" in features else (False,)
    return any(_same_at_points(left, right, natural) for natural in bases) and _same_at_negatives(left, right)


def _same_at_negatives(left: Formula, right: Formula) -> bool:
    r"""Whether two formulas that agree at positive values agree at negative ones, too: \sqrt{x^2} and |x| are not x."""
    if not (left.names | right.names) or not (_minds_signs(left) or _minds_signs(right)):
        return True
    for point in _NEGATIVE_POINTS:
        a, b = left.real(point), right.real(point)
        if a is not None and b is not None and not _close(complex(a), complex(b), 1e-7, 1e-11):
            return False
    return True


def _minds_signs(formula: Formula) -> bool:
    """Whether negative values of its names may tell it from a formula that equals it at positive ones."""
    return bool({"abs", "order"} & formula.features) or _has_root(formula.tree)


def _has_root(tree: Tree) -> bool:
    if tree[0] == "root" or (tree[0] == "^" and tree[2][0] not in ("n", "neg", "v")):
        return True
    if tree[0] == "^" and tree[2][0] == "n" and tree[2][1].denominator != 1:
        return True
    return any(isinstance(part, tuple) and _has_root(part) for part in tree[1:])


def _same_at_points(left: Formula, right: Formula, natural: bool) -> bool:
    names = left.names | right.names
    features = left.features | right.features
    points = POINTS[:1] if not names else POINTS
    if names and "abs" in features:
        points += (3, 4)
    if names and {"floor", "order"} & features:
        points += (6, 7, 8)
    agreed: list[int] = []
    exact = True
    for point in points:
        a, b = left.value(point, natural=natural), right.value(point, natural=natural)
        if a is None or b is None:
            if (a is None) != (b is None) and not names:
                return False
            continue
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            if a != b:
                return False
        else:
            x, y = to_complex(a), to_complex(b)
            if x is None or y is None or not _close(x, y, 1e-7, 1e-11):
                return False
            exact = False
        agreed.append(point)
    if not agreed:
        return False
    return exact or all(_confirmed(left, right, point, natural) for point in agreed[:2])


def _confirmed(left: Formula, right: Formula, point: int, natural: bool) -> bool:
    a, b = (side.precise(point, natural=natural, digits=PRECISE_DIGITS) for side in (left, right))
    if a is None or b is None:
        return False
    lift = _precise_backend(PRECISE_DIGITS)["lift"]
    a, b = lift(a), lift(b)
    difference, size = abs(a - b), max(abs(a), abs(b))
    if difference > size * 1e-30 and (size >= 1e-12 or difference >= 1e-35):
        return False
    if not _may_be_tiny(left.tree) and not _may_be_tiny(right.tree):
        return True
    a, b = (side.precise(point, natural=natural, digits=FINAL_DIGITS) for side in (left, right))
    if a is None or b is None:
        return True  # too much work, as a gamma function
    backend = _precise_backend(FINAL_DIGITS)
    a, b = backend["lift"](a), backend["lift"](b)
    return bool(abs(a - b) <= max(abs(a), abs(b), 1) * backend["tolerance"])


def _may_be_tiny(tree: Tree) -> bool:
    """Whether a value can be closer to another than 50 digits tell: long numbers, large exponents, fast functions."""
    kind = tree[0]
    if kind == "n":
        return max(tree[1].numerator.bit_length(), tree[1].denominator.bit_length()) > 40
    if kind == "^" and not (tree[2][0] == "n" and abs(tree[2][1]) <= 12):
        return True
    return kind in _FAST or any(isinstance(part, tuple) and _may_be_tiny(part) for part in tree[1:])


def proportionality_constant(
    left: tuple[Formula, Formula], right: tuple[Formula, Formula]
) -> Fraction | complex | None:
    """The constant c != 0 with left[0] - left[1] == c * (right[0] - right[1]) at all points; None if there is none.

    Points at which a side has no value are skipped. Two equations with such a c are the same equation; with c > 0, two
    inequalities are the same. With absolute values, roots, `max` or `min` the points have negative numbers, too.
    """
    names = left[0].names | left[1].names | right[0].names | right[1].names
    constant: Fraction | complex | None = None
    agreed = 0
    formulas = (*left, *right)
    points = (*POINTS, 5)
    if names and any(map(_minds_signs, formulas)):
        points += _NEGATIVE_POINTS
    for point in points:
        values = [formula.real(point) if point < 0 else formula.value(point) for formula in formulas]
        if any(value is None for value in values):
            continue
        a, b, c, d = values
        try:
            above, below = _difference(a, b), _difference(c, d)
            if above == below == 0 and point < 0:
                continue  # |x| + x = 0
            if above == 0 or below == 0:
                return None
            ratio = above / below
            if constant is not None:
                if isinstance(ratio, Fraction) and isinstance(constant, Fraction):
                    if ratio != constant:
                        return None
                elif not _close(complex(ratio), complex(constant), 1e-9, 0.0):
                    return None
        except OverflowError:  # an exact number too large for a float, beside an inexact one
            return None
        constant = ratio
        agreed += 1
    return constant if agreed >= (2 if names else 1) else None


def _difference(a: Any, b: Any) -> Any:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a - b
    difference = complex(a) - complex(b)
    return 0 if abs(difference) <= 1e-12 * max(abs(a), abs(b)) else difference


def to_complex(value: Fraction | complex) -> complex | None:
    """The number in floating point; None for a fraction that is too large for it."""
    try:
        return complex(value)
    except OverflowError:
        return None


def _close(a: complex, b: complex, relative: float, absolute: float) -> bool:
    return abs(a - b) <= relative * max(abs(a), abs(b)) + absolute


# Evaluation


def _point_value(name: str, point: int) -> Fraction:
    """A fixed pseudo-random rational for every variable and point."""
    hashed = zlib.crc32(f"{abs(point)}|{name}".encode("utf-8", "replace"))
    value = Fraction(4_097 + hashed % 12_281, 4_096)
    if point < 0:
        half = (zlib.crc32(name.encode("utf-8", "replace")) >> 16) % 2
        return value if (point, half) in ((-2, 0), (-3, 1)) else -value
    if point > 5:
        return value * (10 * point)
    return -value if point in (3, 4) and (hashed >> 16) % 4 != 0 else value


def _finite(value: Any) -> Fraction | complex:
    if isinstance(value, Fraction):
        return value
    number = complex(value)
    if not cmath.isfinite(number):
        raise Unbounded
    return number


def _checked(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > 4 * MAX_BITS:
        raise Unbounded
    return value


def _evaluate(tree: Tree, point: int, natural: bool, backend: dict[str, Any]) -> Any:
    """The value of a tree: a Fraction as long as it is exact, else a number of the type of `backend["lift"]`."""
    kind = tree[0]
    if kind == "n":
        return tree[1]
    if kind == "v":
        return _point_value(tree[1], point)
    lift = backend["lift"]
    if kind == "neg":
        return -_evaluate(tree[1], point, natural, backend)
    if kind == "+":
        total = _evaluate(tree[1], point, natural, backend)
        for part in tree[2:]:
            value = _evaluate(part, point, natural, backend)
            both_exact = isinstance(total, Fraction) and isinstance(value, Fraction)
            total = _checked(total + value) if both_exact else lift(total) + lift(value)
        return total
    if kind == "pi" or kind == "e" or kind == "i":
        return backend[kind]
    if kind == "log":
        argument = lift(_evaluate(tree[1], point, natural, backend))
        if argument == 0:
            raise ZeroDivisionError
        if tree[2] is None:
            return backend["ln"](argument) if natural else backend["ln"](argument) / backend["ln"](lift(Fraction(10)))
        base = lift(_evaluate(tree[2], point, natural, backend))
        return backend["ln"](argument) / backend["ln"](base)
    if kind == "applied":
        values = [_evaluate(part, point, natural, backend) for part in tree[2:]]
        name = " ".join([tree[1], *(f"{complex(v):.9g}" if not isinstance(v, Fraction) else str(v) for v in values)])
        return _point_value(name, point)
    values = [_evaluate(part, point, natural, backend) for part in tree[1:]]
    exact = all(isinstance(value, Fraction) for value in values)
    if kind == "*":
        return _checked(values[0] * values[1]) if exact else lift(values[0]) * lift(values[1])
    if kind == "/":
        if values[1] == 0:
            raise ZeroDivisionError
        return _checked(values[0] / values[1]) if exact else lift(values[0]) / lift(values[1])
    if kind == "^":
        return _power(values[0], values[1], backend)
    if kind == "root":
        if isinstance(values[1], Fraction) and values[1].denominator == 1 and 0 < values[1] <= 1_000:
            return _root(values[0], int(values[1]), backend)
        return _power(values[0], 1 / values[1], backend)
    if kind == "deg":
        return lift(values[0]) * backend["pi"] / 180
    return _apply(kind, values, exact, backend)


def _apply(kind: str, values: list[Any], exact: bool, backend: dict[str, Any]) -> Any:
    first = values[0]
    if kind == "abs":
        return abs(first)
    if kind == "factorial":
        if isinstance(first, Fraction):
            if first.denominator == 1:
                if not 0 <= first <= MAX_FACTORIAL:
                    raise Unbounded
                return Fraction(math.factorial(int(first)))
            return (
                backend["gamma"](float(first) + 1)
                if backend is _FLOATS
                else backend["gamma"](backend["lift"](first) + 1)
            )
        raise Unbounded
    if kind == "binom":
        return _binomial(values, backend)
    if kind in ("floor", "ceil"):
        if isinstance(first, Fraction):
            return Fraction(math.floor(first) if kind == "floor" else math.ceil(first))
        number = complex(first)
        if abs(number.imag) > 1e-12 or abs(number.real) > 1e15:
            raise Unbounded
        return Fraction(math.floor(number.real) if kind == "floor" else math.ceil(number.real))
    if kind in ("max", "min"):
        if exact:
            return max(values) if kind == "max" else min(values)
        return (max if kind == "max" else min)(values, key=lambda value: complex(value).real)
    if kind in ("gcd", "lcm"):
        if not exact or any(value.denominator != 1 for value in values):
            raise Unbounded
        return Fraction((math.gcd if kind == "gcd" else math.lcm)(*(int(value) for value in values)))
    argument = backend["lift"](first)
    if kind == "ln" and argument == 0:
        raise ZeroDivisionError
    if kind in RECIPROCALS:
        below = backend[RECIPROCALS[kind]](argument)
        if abs(below) < 1e-13:
            raise ZeroDivisionError
        return 1 / below
    if kind in ARC_RECIPROCALS:
        return backend[ARC_RECIPROCALS[kind]](1 / argument)
    if kind == "tan" and abs(backend["cos"](argument)) < 1e-13:
        raise ZeroDivisionError
    return backend[kind](argument)


def _power(base: Any, exponent: Any, backend: dict[str, Any]) -> Any:
    if isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            count = int(exponent)
            if isinstance(base, Fraction):
                if base == 0 and count < 0:
                    raise ZeroDivisionError
                size = max(base.numerator.bit_length(), base.denominator.bit_length())
                if abs(count) > MAX_BITS or size * abs(count) > MAX_BITS:
                    if base in (0, 1, -1):
                        return base if count % 2 else base * base
                    raise Unbounded
                return base**count
            if abs(count) > 10_000:
                raise Unbounded
            return base**count
        if exponent.denominator <= 100 and abs(exponent.numerator) <= 1_000:
            root = _root(base, exponent.denominator, backend)
            return _power(root, Fraction(exponent.numerator), backend)
    lift = backend["lift"]
    left, right = lift(base), lift(exponent)
    if left == 0:
        if complex(right).real <= 0:
            raise ZeroDivisionError
        return Fraction(0)
    if abs(complex(backend["ln"](left)) * complex(right)) > 600:
        raise Unbounded
    return left**right


def _root(value: Any, degree: int, backend: dict[str, Any]) -> Any:
    """The principal root; for a negative real number and an odd degree the real root, as schools define it."""
    if backend is _REALS and degree % 2 == 0 and complex(value).real < 0:
        raise ValueError("no real root")
    if isinstance(value, Fraction):
        if value < 0 and degree % 2:
            return -_root(-value, degree, backend)
        if value >= 0:
            top, bottom = _integer_root(value.numerator, degree), _integer_root(value.denominator, degree)
            if top is not None and bottom is not None:
                return Fraction(top, bottom)
    else:
        number = complex(value)
        if degree % 2 and number.real < 0 and abs(number.imag) <= 1e-12 * abs(number.real):
            return -_root(-value, degree, backend)
    if degree == 2:
        return backend["sqrt"](backend["lift"](value))
    return backend["lift"](value) ** (backend["lift"](Fraction(1)) / degree)


def _integer_root(value: int, degree: int) -> int | None:
    """The integer whose power of this degree is `value`, or None."""
    if value < 2:
        return value
    if degree == 2:
        root = math.isqrt(value)
    else:
        if value.bit_length() > 1_000:
            return None
        root = round(value ** (1 / degree))
    return root if root**degree == value else None


def _binomial(values: list[Any], backend: dict[str, Any]) -> Any:
    top, bottom = values
    if not isinstance(top, Fraction) or not isinstance(bottom, Fraction):
        raise Unbounded
    if top.denominator == 1 and bottom.denominator == 1:
        if not (0 <= top <= MAX_FACTORIAL and 0 <= bottom <= MAX_FACTORIAL):
            raise Unbounded
        return Fraction(math.comb(int(top), int(bottom)))
    gamma, lift = backend["gamma"], (float if backend is _FLOATS else backend["lift"])
    return gamma(lift(top) + 1) / gamma(lift(bottom) + 1) / gamma(lift(top - bottom) + 1)


_FLOATS: dict[str, Any] = {
    "lift": complex, "pi": complex(math.pi), "e": complex(math.e), "i": 1j, "ln": cmath.log, "sqrt": cmath.sqrt,
    "gamma": math.gamma, "exp": cmath.exp, "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "arcsin": cmath.asin,
    "arccos": cmath.acos, "arctan": cmath.atan, "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh,
}  # fmt: skip


def _real_logarithm(value: complex) -> complex:
    if value.real < 0:
        raise ValueError("no real logarithm")
    return cmath.log(value)


_REALS: dict[str, Any] = {**_FLOATS, "ln": _real_logarithm}
_PRECISE: dict[int, dict[str, Any]] = {}


def _precise_backend(digits: int) -> dict[str, Any]:
    """The functions of `_FLOATS` with so many digits, by mpmath, which is imported on first use."""
    if digits not in _PRECISE:
        import mpmath

        context = mpmath.mp.clone()
        context.dps = digits

        def gamma(value: Any) -> Any:
            if digits > PRECISE_DIGITS:
                raise Unbounded  # the first call would take seconds
            return context.gamma(value)

        def lift(value: Any) -> Any:
            return context.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

        functions: dict[str, Callable[[Any], Any]] = {
            "ln": context.log, "sqrt": context.sqrt, "gamma": gamma, "exp": context.exp, "sin": context.sin,
            "cos": context.cos, "tan": context.tan, "arcsin": context.asin, "arccos": context.acos,
            "arctan": context.atan, "sinh": context.sinh, "cosh": context.cosh, "tanh": context.tanh,
        }  # fmt: skip
        constants = {
            "pi": +context.pi,
            "e": +context.e,
            "i": context.mpc(0, 1),
            "tolerance": context.mpf(10) ** (-digits * 8 // 10),
        }
        _PRECISE[digits] = {**functions, **constants, "lift": lift}
    return _PRECISE[digits]
