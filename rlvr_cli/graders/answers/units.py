"""Units of measurement: words after a number -> one spelling per unit, and whether two units are the same.

Enters: tokens, or two units as `canonical_unit` spells them. Leaves: a spelling such as `cm^2`, `mi / h` or `?apple`
(an unknown unit), or True or False.
"""

import re

from rlvr_cli.graders.answers.notation import Token, word_set

_ALIASES = {
    "cm": "cm centimeter centimeters centimetre centimetres cms",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres kms",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards yds",
    "mi": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams gm",
    "kg": "kg kilogram kilograms kgs",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "ton": "ton tons tonne tonnes",
    "ml": "ml mL milliliter milliliters millilitre millilitres",
    "l": "L l liter liters litre litres",
    "gal": "gal gallon gallons",
    "qt": "qt quart quarts",
    "pt": "pint pints",
    "cup": "cup cups",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks wk wks",
    "month": "month months",
    "year": "year years yr yrs",
    "dm": "dm decimeter decimeters",
    "mol": "mol moles",
    "kw": "kW kilowatts",
    "dollar": "$ dollar dollars usd USD bucks",
    "cent": "cent cents ¢",
    "euro": "€ euro euros EUR",
    "rupee": "₹ rupee rupees INR",
    "yen": "¥ yen",
    "sterling": "£ sterling GBP",
    "percent": "% percent pct percents",
    "degree": "degree degrees deg degs",
    "rad": "rad rads radian radians",
    "mph": "mph",
    "am": "am a.m AM A.M",
    "pm": "pm p.m PM P.M",
    "hz": "Hz hertz",
    "n": "N newton newtons",
    "j": "J joule joules",
    "w": "W watt watts",
    "v": "V volt volts",
    "unit": "unit units",
    "square": "square sq",
    "cubic": "cubic cu",
}
UNITS = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
# these may follow a number without a space
GLUED_UNITS = word_set("cm mm km kg mg ml mL ft lbs hrs hr min mph am pm sec AM PM mi yd in oz")
_TAILS = word_set("of in that which for to from total is are were each")  # the unit ends before these words
_SAME = ({"degree", "celsius"}, {"degree", "fahrenheit"}, {"lb", "sterling"})
_OPPOSITES = tuple(
    [word_set(side) for side in sides]
    for sides in (
        ("?clockwise", "?counterclockwise"),
        ("?increase ?increased ?gain ?profit ?rise", "?decrease ?decreased ?los ?fall"),
        ("?north", "?south", "?east", "?west"),
        ("?left", "?right", "?up ?upward", "?down ?downward"),
        ("?above", "?below"),
        ("?forward", "?backward"),
    )
)


def canonical_unit(tokens: list[Token]) -> str:
    """The canonical spelling of a unit; an unknown word becomes `?word`, without a plural s."""
    text = " ".join(token.text for token in tokens)
    text = re.sub(r"\^\s*", "^", text.replace("{", " ").replace("}", " ").replace("'", ""))
    text = re.sub(r"\b(?:counter|anti)(?: ?- ?)?(?=clockwise)", "counter", text)
    found: list[str] = []
    power = ""  # of the unit that follows
    for word in re.findall(r"\^-?\d|[A-Za-z.]+|[$%/¢€₹¥£]", text):
        if word.startswith("^"):
            if found:
                found[-1] += word
            continue
        apples_left = word.lower() == "left" and found and found[-1].startswith("?")
        if apples_left or (found and word.lower() in _TAILS):
            break
        bare = word.strip(".")
        name = UNITS.get(bare) or UNITS.get(bare.lower())
        if name == "square":
            power = "^2"
        elif name == "cubic":
            power = "^3"
        elif word == "/" or bare == "per":
            found.append("/")
        elif name:
            found.extend(("mi", "/", "h") if name == "mph" else (name + power,))
            power = ""
        elif bare:
            found.append("?" + (bare.lower().removesuffix("s") or bare.lower()) + power)
            power = ""
    if power and found:
        found[-1] += power  # 12 cm sq
    return " ".join(name for name in found if name.partition("^")[0] != "unit")


def units_agree(left: str, right: str) -> bool:
    """Whether two units, neither empty, are the same; units of unknown words need only share a word or a beginning."""
    if left == right or {left, right} in _SAME:
        return True
    a, b = left.split(), right.split()
    if _are_opposite(set(a) - set(b), set(b) - set(a)):
        return False
    if all(word.startswith("?") for word in (*a, *b)):
        return bool(set(a) & set(b)) or left.startswith(right) or right.startswith(left)
    known_a, known_b = ([word for word in side if not word.startswith("?")] for side in (a, b))
    return known_a == known_b and bool(known_a)


def _are_opposite(a: set[str], b: set[str]) -> bool:
    """Whether each of two sets of words has a direction, and the two differ."""
    for directions in _OPPOSITES:
        ways = [[index for index, words in enumerate(directions) if words & side] for side in (a, b)]
        if all(ways) and ways[0] != ways[1]:
            return True
    return False
