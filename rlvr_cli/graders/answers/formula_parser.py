"""Parse the tokens of a formula into a tree, by recursive descent; nothing is evaluated as Python.

Enters: tokens. Leaves: a tree of tuples, (kind, operand, ...), or `Unparsed`.
"""

from fractions import Fraction
from typing import Any

from rlvr_cli.graders.answers.notation import FUNCTIONS, GREEK, MAX_DEPTH, Token, is_prose

MAX_BITS = 20_000  # of an exact integer
MAX_FACTORIAL = 1_500
PRECISE_DIGITS = 50  # of the arithmetic that confirms an equality found in floats
FINAL_DIGITS = 400  # of the arithmetic that confirms it again: tiny is not zero

Tree = tuple[Any, ...]


class Unparsed(ValueError):
    """The tokens are not an expression of this grammar."""


class Unbounded(ArithmeticError):
    """A value that is too large to compute."""


_FUNCTION_NAMES = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "Abs": "abs", "factorial": "factorial", "binomial": "binom",
    "nCr": "binom",
}  # fmt: skip
RECIPROCALS = {"cot": "tan", "sec": "cos", "csc": "sin", "coth": "tanh", "sech": "cosh", "csch": "sinh"}
ARC_RECIPROCALS = {"arccot": "arctan", "arcsec": "arccos", "arccsc": "arcsin"}
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_APPLIED = frozenset("fgh")  # letters that are functions if a bracket follows


# Parsing


class Parser:
    """Recursive descent over one token list; `index` is the next token."""

    def __init__(self, tokens: list[Token] | tuple[Token, ...], *, loose: bool) -> None:
        self.tokens = list(tokens)
        self.index = 0
        self.names: set[str] = set()
        self.features: set[str] = set()
        self.loose = loose
        self.bars = 0  # open |...|
        # sympy prints the imaginary unit as I
        self.imaginary = "I" if any(t.kind == "word" and t.text in ("sqrt", "Abs") for t in tokens) else "i"

    def peek(self, ahead: int = 0) -> Token | None:
        at = self.index + ahead
        return self.tokens[at] if at < len(self.tokens) else None

    def text(self, ahead: int = 0) -> str:
        at = self.index + ahead
        return self.tokens[at].text if at < len(self.tokens) else ""

    def accept(self, text: str) -> bool:
        if self.index < len(self.tokens) and self.tokens[self.index].text == text:
            self.index += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise Unparsed(f"{text} expected")

    def expression(self, depth: int) -> Tree:
        if depth > 4 * MAX_DEPTH:
            raise Unparsed("too deep")
        terms = [self.term(depth + 1)]
        while True:
            if self.accept("+"):
                terms.append(self.term(depth + 1))
            elif self.accept("-"):
                terms.append(("neg", self.term(depth + 1)))
            elif self.text() == "\\over":
                self.index += 1
                return ("/", _sum(terms), self.expression(depth + 1))
            elif self.text() == "\\choose":
                self.index += 1
                return ("binom", _sum(terms), self.expression(depth + 1))
            else:
                return _sum(terms)

    def term(self, depth: int) -> Tree:
        result = self.unary(depth)
        while True:
            if self.accept("*"):
                result = ("*", result, self.unary(depth))
            elif self.accept("/"):
                divisor = self.unary(depth)
                while self.loose and self.starts_factor():
                    divisor = ("*", divisor, self.power(depth))
                result = ("/", result, divisor)
            elif self.starts_factor():
                before = self.tokens[self.index - 1]
                if self.peek_kind() == "num" and before.kind == "num":
                    raise Unparsed("two numbers side by side")
                result = ("*", result, self.power(depth))
            else:
                return result

    def unary(self, depth: int) -> Tree:
        if depth > 4 * MAX_DEPTH:
            raise Unparsed("too deep")
        if self.accept("-"):
            return ("neg", self.unary(depth + 1))
        if self.accept("+"):
            return self.unary(depth + 1)
        return self.power(depth)

    def peek_kind(self) -> str:
        return self.tokens[self.index].kind if self.index < len(self.tokens) else ""

    def starts_factor(self) -> bool:
        token = self.peek()
        if token is None:
            return False
        if token.kind in ("num", "word"):
            return True
        if token.kind == "cmd":
            return token.text not in ("\\rangle", "\\rfloor", "\\rceil", "\\over", "\\choose", "\\circ")
        if token.text == "|":
            return self.bars == 0
        return token.text in ("(", "[", "{")

    def power(self, depth: int) -> Tree:
        base = self.postfix(depth + 1)
        while self.accept("^"):
            if self.text() == "\\circ" or [self.text(i) for i in range(3)] == ["{", "\\circ", "}"]:
                self.index += 1 if self.text() == "\\circ" else 3
                base = ("deg", base)
                continue
            if self.text() == "'" or [self.text(i) for i in range(3)] == ["{", "'", "}"]:
                raise Unparsed("prime")
            base = ("^", base, self.exponent(depth + 1))
            while self.accept("!"):
                base = ("factorial", base)
        return base

    def exponent(self, depth: int) -> Tree:
        if depth > 4 * MAX_DEPTH:
            raise Unparsed("too deep")
        if self.accept("-"):
            return ("neg", self.exponent(depth + 1))
        if self.accept("+"):
            return self.exponent(depth + 1)
        if self.accept("{"):
            inner = self.expression(depth + 1)
            self.expect("}")
        elif (
            self.peek_kind() == "word"
            and self.text() not in FUNCTIONS
            and self.text() not in GREEK
            and self.text() != "pi"
        ):
            inner = self.variable(self.first_letter())
        else:
            inner = self.postfix(depth + 1)
        if self.accept("^"):
            return ("^", inner, self.exponent(depth + 1))
        return inner

    def first_letter(self) -> str:
        token = self.tokens[self.index]
        if len(token.text) == 1:
            self.index += 1
        else:
            self.tokens[self.index] = Token("word", token.text[1:], False)
        return token.text[0]

    def postfix(self, depth: int) -> Tree:
        result = self.primary(depth)
        while True:
            if self.text() == "!":
                self.index += 1
                if self.text() == "!":
                    raise Unparsed("!!")
                result = ("factorial", result)
            elif self.text() == "%":
                self.index += 1
                result = ("/", result, ("n", Fraction(100)))
            elif self.text() == "\\circ":
                self.index += 1
                result = ("deg", result)
            else:
                return result

    def primary(self, depth: int) -> Tree:
        if depth > 4 * MAX_DEPTH:
            raise Unparsed("too deep")
        token = self.peek()
        if token is None:
            raise Unparsed("something expected")
        if token.kind == "num":
            return self.number()
        if token.kind == "word":
            return self.word(depth)
        if token.kind == "cmd":
            return self.command(depth)
        text = token.text
        if text in ("(", "[", "{"):
            self.index += 1
            outer, self.bars = self.bars, 0
            inner = self.expression(depth + 1)
            self.bars = outer
            self.expect({"(": ")", "[": "]", "{": "}"}[text])
            return inner
        if text == "|":
            self.index += 1
            self.bars += 1
            inner = self.expression(depth + 1)
            self.expect("|")
            self.bars -= 1
            self.features.add("abs")
            return ("abs", inner)
        raise Unparsed(text)

    def number(self) -> Tree:
        token = self.tokens[self.index]
        self.index += 1
        value = number_value(token.text)
        if self.text() == "_":
            raise Unparsed("a number in another base")
        if self.text() == "C" and not self.tokens[self.index].gap and self.kind_at(1) == "num":
            self.index += 1
            return ("binom", ("n", value), self.number())
        fraction = self.mixed_fraction() if value.denominator == 1 and "." not in token.text else None
        return ("n", value) if fraction is None else ("n", value + fraction)

    def kind_at(self, ahead: int) -> str:
        token = self.peek(ahead)
        return token.kind if token else ""

    def mixed_fraction(self) -> Fraction | None:
        r"""Parse the fraction of a mixed number such as `2 3/4` or `2\frac{3}{4}`; None if no proper one follows."""
        start = self.index
        top = bottom = None
        if self.text() == "\\frac":
            saved = self.tokens[:]
            self.index += 1
            top, bottom = self.plain_integer(), self.plain_integer()
            if top is None or bottom is None or top >= bottom:
                self.tokens = saved
        elif self.peek_kind() == "num" and self.tokens[start].gap and self.text(1) == "/" and self.kind_at(2) == "num":
            top, bottom = int_or_none(self.text()), int_or_none(self.text(2))
            self.index += 3
        if top is not None and bottom is not None and top < bottom:
            return Fraction(top, bottom)
        self.index = start
        return None

    def plain_integer(self) -> int | None:
        if self.text() == "{" and self.kind_at(1) == "num" and self.text(2) == "}":
            self.index += 3
            return int_or_none(self.tokens[self.index - 2].text)
        if self.peek_kind() != "num" or not self.text().isdigit():
            return None
        digits = self.text()
        if len(digits) == 1:
            self.index += 1
        else:
            self.tokens[self.index] = Token("num", digits[1:], False)
        return int(digits[0])

    def word(self, depth: int) -> Tree:
        token = self.tokens[self.index]
        text = token.text
        if text in FUNCTIONS:
            self.index += 1
            return self.function(text, depth)
        if text == "pi":
            self.index += 1
            self.features.add("pi")
            return ("pi",)
        if text in GREEK:
            self.index += 1
            return self.variable(text)
        if is_prose(text):
            for name in ("sqrt", "sin", "cos", "tan", "log", "ln", "pi"):
                if text.startswith(name) and len(text) <= len(name) + 2:
                    self.tokens[self.index : self.index + 1] = [
                        Token("word", name, token.gap),
                        Token("word", text[len(name) :], False),
                    ]
                    return self.word(depth)
            raise Unparsed(text)
        if text == "C" and self.text(1) == "(":
            start = self.index
            self.index += 2
            top = self.expression(depth + 1)
            if self.accept(","):
                bottom = self.expression(depth + 1)
                self.expect(")")
                return ("binom", top, bottom)
            self.index = start
        if len(text) == 3 and text[:2] == "ln":
            self.tokens[self.index : self.index + 1] = [Token("word", "ln", token.gap), Token("word", text[2:], False)]
            return self.word(depth)
        letter = self.first_letter()
        if len(text) == 1 and self.text() == "(" and (letter in _APPLIED or self.holds_one_number()):
            return self.applied(letter, depth)
        return self.variable(letter)

    def holds_one_number(self) -> bool:
        """Whether `(0)` comes next: I(0) is a value of I, not a product that vanishes."""
        return self.kind_at(1) == "num" and self.text(2) == ")" and not self.tokens[self.index].gap

    def applied(self, name: str, depth: int) -> Tree:
        self.expect("(")
        arguments = [self.expression(depth + 1)]
        while self.accept(","):
            arguments.append(self.expression(depth + 1))
        self.expect(")")
        return ("applied", name, *arguments)

    def variable(self, name: str) -> Tree:
        if name == self.imaginary and self.text() != "_":
            return ("i",)
        if name == "i" and self.text() != "_":
            return ("i",)
        if name == "e" and self.text() != "_":
            return ("e",)
        if self.accept("_"):
            name += "_" + self.subscript()
        while self.accept("'"):
            name += "'"
        self.names.add(name)
        return ("v", name)

    def subscript(self) -> str:
        if self.accept("{"):
            parts = []
            while not self.accept("}"):
                token = self.peek()
                if token is None or len(parts) > 12:
                    raise Unparsed("subscript")
                parts.append(token.text)
                self.index += 1
            return "".join(parts)
        token = self.peek()
        if token is None or token.kind not in ("num", "word", "cmd", "text"):
            raise Unparsed("subscript")
        if token.kind == "word":
            return self.first_letter()
        self.index += 1
        return token.text

    def command(self, depth: int) -> Tree:
        text = self.text()
        self.index += 1
        name = text[1:]
        if name == "frac":
            return ("/", self.argument(depth), self.argument(depth))
        if name == "sqrt":
            degree: Tree | None = None
            if self.accept("["):
                degree = self.expression(depth + 1)
                self.expect("]")
            return ("root", self.radicand(depth), degree or ("n", Fraction(2)))
        if name == "binom":
            return ("binom", self.argument(depth), self.argument(depth))
        if name == "pi":
            self.features.add("pi")
            return ("pi",)
        if name in FUNCTIONS:
            return self.function(name, depth)
        if name in GREEK or name in ("infty", "emptyset"):
            return self.variable(name)
        if name in ("lfloor", "lceil"):
            outer, self.bars = self.bars, 0
            inner = self.expression(depth + 1)
            self.bars = outer
            self.expect("\\r" + name[1:])
            self.features.add("floor")
            return ("floor" if name == "lfloor" else "ceil", inner)
        if name in (
            "overline",
            "vec",
            "hat",
            "bar",
            "overrightarrow",
            "tilde",
            "angle",
            "triangle",
            "widehat",
            "mathbbR",
        ):
            if self.text() == "{":
                self.index += 1
                parts = []
                while not self.accept("}"):
                    token = self.peek()
                    if token is None or token.text == "{":
                        raise Unparsed(name)
                    parts.append(token.text)
                    self.index += 1
                return self.variable(f"{name} {' '.join(parts)}")
            if self.peek_kind() == "word":
                word = self.text()
                self.index += 1
                return self.variable(f"{name} {word}")
        raise Unparsed(text)

    def argument(self, depth: int) -> Tree:
        r"""Parse a TeX argument: a `{...}` group, one digit, one letter or one command."""
        if self.accept("{"):
            outer, self.bars = self.bars, 0
            inner = self.expression(depth + 1)
            self.bars = outer
            self.expect("}")
            return inner
        token = self.peek()
        if token is None:
            raise Unparsed("argument expected")
        if token.kind == "num":
            if len(token.text) == 1:
                self.index += 1
            else:
                self.tokens[self.index] = Token("num", token.text[1:], False)
            if not token.text[0].isdigit():
                raise Unparsed(token.text)
            return ("n", Fraction(int(token.text[0])))
        if token.kind == "word":
            return self.variable(self.first_letter())
        if token.kind == "cmd":
            return self.command(depth + 1)
        raise Unparsed(token.text)

    def radicand(self, depth: int) -> Tree:
        r"""What a root sign covers: `{...}`, `(...)`, a whole number (`\sqrt13`), a letter or a command."""
        if self.peek_kind() == "num":
            value = number_value(self.text())
            self.index += 1
            return ("n", value)
        if self.text() == "(":
            return self.primary(depth + 1)
        return self.argument(depth)

    def function(self, name: str, depth: int) -> Tree:
        name = _FUNCTION_NAMES.get(name, name)
        if name in ("sqrt", "cbrt"):
            return ("root", self.radicand(depth), ("n", Fraction(2 if name == "sqrt" else 3)))
        base: Tree | None = None
        exponent: Tree | None = None
        if name == "log" and self.accept("_"):
            base = self.argument_whole(depth)
        if self.accept("^"):
            exponent = self.exponent(depth + 1)
            if exponent == ("neg", ("n", Fraction(1))) and name in _INVERSES:
                name, exponent = _INVERSES[name], None
        arguments = self.arguments(depth)
        if name in ("max", "min", "gcd", "lcm"):
            self.features.add("order")
            tree: Tree = (name, *arguments)
        elif name in ("binom",):
            if len(arguments) != 2:
                raise Unparsed(name)
            tree = ("binom", *arguments)
        elif name == "log":
            if len(arguments) == 2 and base is None:
                base = arguments.pop()
            if len(arguments) != 1:
                raise Unparsed(name)
            if base is None:
                self.features.add("log")
            tree = ("log", arguments[0], base)
        else:
            if len(arguments) != 1:
                raise Unparsed(name)
            if name in ("abs", "floor", "ceil"):
                self.features.add("abs" if name == "abs" else "floor")
            tree = ("log", arguments[0], ("n", Fraction(10))) if name == "lg" else (name, arguments[0])
        return tree if exponent is None else ("^", tree, exponent)

    def argument_whole(self, depth: int) -> Tree:
        if self.peek_kind() == "num":
            return self.radicand(depth)
        return self.argument(depth)

    def arguments(self, depth: int) -> list[Tree]:
        """`(a, b)`, `{a}`, or a product of factors up to the next operator or function, as in `sin 2x cos x`."""
        if self.text() in ("(", "{", "[", "\\{"):
            close = {"(": ")", "{": "}", "[": "]", "\\{": "\\}"}[self.text()]
            self.index += 1
            outer, self.bars = self.bars, 0
            found = [self.expression(depth + 1)]
            while self.accept(","):
                found.append(self.expression(depth + 1))
            self.bars = outer
            self.expect(close)
            return found
        negative = self.accept("-")
        result = self.power(depth + 1)
        while self.starts_factor() and not self.is_function():
            if self.text() in ("(", "[", "|"):
                break
            result = ("*", result, self.power(depth + 1))
        if self.text() == "/" and self.kind_at(1) == "num" and result[0] in ("pi", "*", "n"):
            self.index += 1  # sin pi/3
            result = ("/", result, self.number())
        return [("neg", result) if negative else result]

    def is_function(self) -> bool:
        text = self.text()
        return (text[1:] if text.startswith("\\") else text) in FUNCTIONS


def _sum(terms: list[Tree]) -> Tree:
    return terms[0] if len(terms) == 1 else ("+", *terms)


def number_value(text: str) -> Fraction:
    """The exact value of a decimal literal. Raises `Unparsed` if it has too many digits or none."""
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > MAX_BITS // 8 or len(exponent) > 4 or not mantissa.isascii():
        raise Unparsed("too many digits")
    if mantissa.isdigit() and not exponent:
        return Fraction(int(mantissa))
    try:
        return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    except ValueError:  # `\frac` took the digits before the e
        raise Unparsed("no digits") from None


def int_or_none(text: str) -> int | None:
    """The integer that plain digits spell, or None."""
    return int(text) if text.isdigit() and len(text) < 1_000 else None
