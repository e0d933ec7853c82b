"""What an answer can be: values, quantities, lists, sets, relations, matrices and words."""

from dataclasses import dataclass

from rlvr_cli.graders.answers.formula import Formula


@dataclass(frozen=True, slots=True)
class Value:
    """One expression."""

    formula: Formula
    loose: Formula | None = None  # read with 1/2x as 1/(2x), if that is another formula


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with a unit, or with a percent sign."""

    value: "Node"
    unit: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Several objects in any order: a list, a set, the two values of a ±."""

    items: tuple["Node", ...]
    braces: bool = False
    alternatives: bool = False  # joined by "or" and nothing else
    together: bool = False  # joined by "and" and nothing else


@dataclass(frozen=True, slots=True)
class Group:
    """Objects in order between brackets: a point, a tuple, an interval."""

    brackets: str  # "(]" and so on
    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Sets:
    r"""Sets joined by one operation (\cup, \cap or \setminus)."""

    operation: str
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """Sides joined by =, <, <=, >, >=, != or `in`; an empty side is None."""

    sides: tuple["Node | None", ...]
    operations: tuple[str, ...]
    named: bool  # the first side is a name (`x`, `f(x)`, `AB`, `\\angle A`, ...), so that the last side is the answer
    unsolved: bool = True  # the first side has both numbers and letters, as in an equation to be solved


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of objects; `determinant` if it is written between bars."""

    rows: tuple[tuple["Node", ...], ...]
    determinant: bool = False


@dataclass(frozen=True, slots=True)
class Ratio:
    """a : b, or a time of day."""

    parts: tuple["Node", ...]
    text: str


@dataclass(frozen=True, slots=True)
class Numeral:
    """Digits in a base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words, case and punctuation dropped."""

    text: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """Notation outside of the grammar: equal only to the same spelling."""

    key: str
    plain: str = ""  # its text, if that is only words, numbers and punctuation


Node = Value | Quantity | Listing | Group | Sets | Relation | Matrix | Ratio | Numeral | Words | Opaque
