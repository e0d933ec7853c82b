r"""Tokenize mathematical notation: text of a final answer -> tokens.

Enters: an answer of a model or a dataset, in LaTeX, plain text, Unicode, Markdown or a mixture.
Leaves: a tuple of `Token`s in which everything that only concerns typesetting (``$``, ``\left``, ``\!``, ``\dfrac``,
``\mathbf{8}``) is gone and every operator has one spelling. Nothing is evaluated and nothing is looked up by name.
"""

import re
from typing import NamedTuple

MAX_LENGTH = 1_000  # characters of a final answer
MAX_DEPTH = 40  # nested brackets


def word_set(text: str) -> frozenset[str]:
    """A set of the words in a text."""
    return frozenset(text.split())


FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh log ln lg exp sqrt cbrt abs floor ceil "
    "coth sech csch arccot arcsec arccsc "
    "max min gcd lcm binom binomial factorial Abs nCr"
)
GREEK = word_set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar"
)
SMALL_WORDS = word_set(  # short words that are no products of variables; `a` alone is a variable
    "an the is are was be of or and not no yes to in on at by for it if so as we us he she all any its then than per "
    "two six ten one odd even both true false none east west has had get got you can set sum way day our out new old how who"
)


class Unreadable(ValueError):
    """The text is too long, too deeply nested, or not notation at all."""


class Token(NamedTuple):
    """One symbol."""

    kind: str  # num, word (a run of letters), cmd (a LaTeX command), op, sep (and, or), text, begin, end or bad
    text: str
    gap: bool  # white space stood before it


_TABLE = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "∕": "/",
    "⁄": "/", "∗": "*", "√": r"\sqrt ", "∛": r"\sqrt[3]", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "≤": "<=", "⩽": "<=", "≥": ">=", "⩾": ">=", "≠": "!=", "≈": r"\approx ", "±": r"\pm ",
    "∓": r"\mp ", "°": r"^{\circ}", "º": r"^{\circ}", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "→": r"\to ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "ℝ": r"\mathbb{R}", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ",
    "⌉": r"\rceil ", "∣": "|", "…": "...", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}",
    "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}", "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}",
    "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    "\u2002": " ", "\u2003": " ", "\u2061": "", "\u2062": "", "\u200b": "", "\ufeff": "", "𝑖": "i", "α": r"\alpha ",
    "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta ", "λ": r"\lambda ",
    "μ": r"\mu ", "ρ": r"\rho ", "σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ", "ϕ": r"\phi ", "ω": r"\omega ",
    "Δ": r"\Delta ", "Ω": r"\Omega ", "∖": r"\setminus ",
}  # fmt: skip
_UNICODE = str.maketrans(_TABLE)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_REPEATING = re.compile(r"(\d{0,15})\.(\d{0,15})(?:\\overline|\\bar|\\dot)\{?(\d{1,15})(?:\}|(?!\d))")
SURE_THOUSANDS = re.compile(r"(?<=\d)(?:,\\!|\{,\}|\\!,|,\\,|\\,)\\?\s*(?=\d{3}(?!\d))")
_ORDINAL = re.compile(r"(?<=\d)(?:\^?\{?\\(?:text|mathrm|textrm)\{(?:st|nd|rd|th)\}\}?|(?:st|nd|rd|th)\b)")

_NOON = re.compile(r"\b([ap])\.\s*m\b\.?", re.I)
_DEGREE_LETTER = re.compile(r"(?<=\d)\^\{?[oO]\}?(?![A-Za-z0-9])")
MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed|textit|bf)\b|[${}*]|\\[ ,;!()\[\]]")
BOLD = re.compile(r"(?<![\w)\]}])\*\*(?=\S)([^*]+)(?<=\S)\*\*(?![\w(])")
_STARRED = re.compile(r"(?:^|(?<=[A-Za-z:]\s))\*(?=[^\s*])([^*]*[^\s*])\*(?![\w(])")
_EMPHASIS = re.compile(r"(\*{1,3}|_{1,2})([^\s*_](?:[^*_]*[^\s*_])?)\1")
_ALL_TEXT = re.compile(
    r"\\(?:text|mbox|textbf|textit|textrm|emph)\s*\{([A-Za-z][^{}\\$\s]*+\s[^{}\\$\d]*+\d[^{}\\$]*+)\}"
)
_NEGATED = re.compile(r"\\not\s*(=|\\in(?![A-Za-z]))")
_CURRENCY_CODE = re.compile(r"\b(USD|US\$|EUR|GBP|INR|Rs\.?)\s*(?=\d)")
_CURRENCIES = {"USD": "$", "US$": "$", "EUR": "€", "GBP": "£", "INR": "₹", "Rs": "₹", "Rs.": "₹"}
_SPACED_THOUSANDS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_UNIT_TEXT = re.compile(
    r"[A-Za-z]{2,}(?:\^\{?[23]\}?)|[A-Za-z]+(?:\^\{?-?\d\}?)?(?:\s*/\s*[A-Za-z]+(?:\^\{?-?\d\}?)?)+"
)

_TOKEN = re.compile(
    r"""(?P<gap>[\s~]+|\\\Z)  # of a `\ ` at the end the space has been cut
      |(?P<num>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![\w^{]))?)
      |(?P<word>[A-Za-z]+)
      |(?P<row>\\\\(?:\[[\d.]+\w*\])?)
      |(?P<fence>\\(?:left|right|[bB]ig{1,2}[lrm]?|mleft|mright)\s*\.?(?![A-Za-z]))
      |(?P<cmd>\\(?:[A-Za-z]+\*?|.))
      |(?P<op>\*\*|<=|>=|(?<![\w)}])!=|==|:=|=>|->|\.\.\.|[-+*/^_()\[\]{}|,;:=<>!'&%?.`"$€₹¥£])
      |(?P<bad>.)""",
    re.X | re.S,
)
_SPELLINGS = {
    "**": "^", "==": "=", ":=": "=", "\\cdot": "*", "\\times": "*", "\\ast": "*", "\\bullet": "*", "\\div": "/",
    "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=", "\\lt": "<", "\\gt": ">", "\\ge": ">=", "\\geq": ">=",
    "\\geqslant": ">=", "\\ne": "!=", "\\neq": "!=", "\\approxeq": "\\approx", "\\simeq": "\\approx", "\\equiv": "\\equiv",
    "\\mid": "|", "\\vert": "|", "\\lvert": "|", "\\rvert": "|", "\\colon": ":", "\\lbrace": "\\{", "\\rbrace": "\\}",
    "\\lbrack": "[", "\\rbrack": "]", "\\lparen": "(", "\\rparen": ")", "\\prime": "'", "\\backslash": "\\setminus",
    "\\ldots": "...", "\\dots": "...", "\\cdots": "...", "\\dotsc": "...", "\\%": "%", "\\$": "$", "\\€": "€", "\\£": "£", "\\₹": "₹", "\\¥": "¥",
    "\\notin": "\\notin", "\\ni": "\\ni", "\\varnothing": "\\emptyset", "\\bigcup": "\\cup", "\\bigcap": "\\cap",
    "\\degree": "\\circ", "\\degrees": "\\circ", "\\lor": "or", "\\vee": "or", "\\land": "and", "\\wedge": "and",
    "\\iff": "\\iff", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom",
    "\\tbinom": "\\binom", "\\varphi": "\\phi", "\\tan": "\\tan",
}  # fmt: skip
_OPERATORS = word_set("^ = * / <= >= < > != | : \\{ \\} [ ] ( ) ' % $ € £ ₹ ¥ ...")
_SPACES = frozenset(
    ["\\,", "\\;", "\\:", "\\>", "\\ ", "\\\n", "\\quad", "\\qquad", "\\enspace", "\\thinspace", "\\space", "\\hfill"]
)
_NOTHING = word_set(
    r"\! \( \) \[ \] \displaystyle \textstyle \limits \nolimits \boxed \fbox \bf \rm \it \bold \mathstrut \hline \tag "
    r"\left \right \negthinspace \ensuremath \mathopen"
)
_TEXT = word_set(r"\text \mbox \textbf \textit \textrm \textsf \texttt \textnormal \emph \hbox")
_FONT = word_set(r"\mathrm \mathbf \mathit \mathsf \mathnormal \operatorname \boldsymbol \bm \mathtt")
_BLACKBOARD = word_set(r"\mathbb \Bbb \mathcal \mathscr \mathfrak")
_OPENERS = word_set("( [ { \\{ \\langle \\lfloor \\lceil")
_CLOSERS = word_set(") ] } \\} \\rangle \\rfloor \\rceil")
_KNOWN_COMMANDS = tuple(
    sorted(
        {f"\\{name}" for name in FUNCTIONS | GREEK | {"pi", "cdot", "times", "infty", "circ"}}, key=len, reverse=True
    )
)
_INLINE_TEXT = re.compile(r"[\s\d.,:/$%\\!{}()+-]*\d[\s\d.,:/$%\\!{}()+-]*")
_SEPARATORS = {"and": "and", "or": "or", "and/or": "or", "&": "and"}


def tokens_of(text: str) -> tuple[Token, ...]:
    """Split an answer into tokens.

    Raises:
        Unreadable: more than `MAX_LENGTH` characters or `MAX_DEPTH` nested brackets.
    """
    if len(text) > MAX_LENGTH:
        raise Unreadable("too long")
    if not text.isascii():
        text = _RAISED.sub(lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
        text = _LOWERED.sub(lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}", text).translate(_UNICODE)
    text = text.strip()
    if "\\overline" in text or "\\bar" in text or "\\dot" in text:
        text = _REPEATING.sub(_repeating_decimal, text)
    if "\\" in text or "{,}" in text:
        text = SURE_THOUSANDS.sub("", text)
    text = _CURRENCY_CODE.sub(lambda m: _CURRENCIES[m[1]], _ORDINAL.sub(" ", text))
    if " " in text and _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    if "m" in text or "M" in text:
        text = _NOON.sub(r"\1m", text)
    if "\\not" in text:
        text = _NEGATED.sub(lambda m: r"\ne " if m[1] == "=" else r"\notin ", text)
    if "o'" in text:
        text = text.replace("o'clock", "oclock")
    text = _DEGREE_LETTER.sub(r"^\\circ ", text)
    text = _without_markdown(text)
    if text.startswith("\\") and (whole := _ALL_TEXT.fullmatch(text)):
        text = whole[1]
    tokens: list[Token] = []
    _scan(_money_kept(text), tokens, 0)
    return tuple(tokens)


def _repeating_decimal(match: re.Match[str]) -> str:
    whole, fixed, cycle = match[1] or "0", match[2], match[3]
    denominator = 10 ** len(fixed) * (10 ** len(cycle) - 1)
    numerator = int(whole + fixed + cycle) - int(whole + fixed)
    return f"({numerator}/{denominator})"


def _without_markdown(text: str) -> str:
    """Drop the marks of `**bold**` and `*italics*` (not the stars of `x**2`) and the tags or backquotes around the whole text."""
    if "**" in text:
        text = BOLD.sub(r"\1", text)
    if text.startswith(("*", "_")) and (whole := _EMPHASIS.fullmatch(text)):
        text = whole[2]
    elif "*" in text:
        text = _STARRED.sub(r"\1", text)
    for tag in ("math", "b", "i"):
        if text.startswith(f"<{tag}>") and text.endswith(f"</{tag}>"):
            return text[len(tag) + 2 : -len(tag) - 3]
    return text.strip("`") if text.startswith("`") else text


def _money_kept(text: str) -> str:
    """Drop the dollar signs that delimit mathematics; those that mean money become a `$` token."""
    if "$" not in text:
        return text
    escaped = text.count("\\$")
    if escaped == 2 and text.startswith("\\$") and text.rstrip(" .").endswith("\\$"):
        return text.replace("\\$", "")
    if text.count("$") - escaped == 1 and not escaped:
        return text  # unpaired: money
    return re.sub(r"(?<!\\)\$", "", text)


def _scan(text: str, out: list[Token], depth: int) -> None:
    position, end, gap = 0, len(text), False
    while position < end:
        match = _TOKEN.match(text, position)
        assert match is not None, "the last alternative matches any character"
        position = match.end()
        kind, symbol = match.lastgroup, match[0]
        if kind == "gap":
            gap = True
            continue
        if kind == "cmd":
            symbol = _SPELLINGS.get(symbol, symbol)
            if symbol in _SPACES:
                gap = True
                continue
            if symbol in _NOTHING:
                continue
            if symbol in _TEXT or symbol in _FONT or symbol in _BLACKBOARD:
                content, position = _argument(text, position)
                _scan_text(symbol, content, gap, out, depth + 1)
                gap = False
                continue
            if symbol in ("\\begin", "\\end"):
                content, position = _argument(text, position)
                if symbol == "\\begin":
                    depth += 1
                    if content == "array":
                        _, position = _argument(text, position)
                else:
                    depth -= 1
                out.append(Token(symbol[1:], content.strip("*"), gap))
                gap = False
                continue
            if symbol in _OPERATORS:
                kind = "op"
            elif symbol in ("and", "or"):
                kind = "sep"
            elif len(symbol) > 2 or symbol[1:].isalpha():
                _emit_command(symbol, gap, out)
                if symbol in _OPENERS:
                    depth += 1
                elif symbol in _CLOSERS:
                    depth -= 1
                gap = False
                continue
            else:
                kind = "bad"
        elif kind == "op":
            symbol = _SPELLINGS.get(symbol, symbol)
        elif kind == "word":
            lower = symbol.lower()
            if lower in ("and", "or"):
                kind, symbol = "sep", lower
        elif kind == "row":
            kind, symbol = "op", "\\\\"
        elif kind == "fence":
            continue
        if kind == "op":
            if symbol in _OPENERS:
                depth += 1
                if depth > MAX_DEPTH:
                    raise Unreadable("too deep")
            elif symbol in _CLOSERS:
                depth -= 1
        out.append(Token(kind or "bad", symbol, gap))
        gap = False


def _emit_command(command: str, gap: bool, out: list[Token]) -> None:
    r"""Append a command; ``\cotx`` and ``\pir``, which some datasets write without the space, become two tokens."""
    if command[1:] not in FUNCTIONS and command[1:] not in GREEK and len(command) > 3:
        for known in _KNOWN_COMMANDS:
            if command.startswith(known) and 0 < len(command) - len(known) <= 2 and command not in _WHOLE_COMMANDS:
                spelled = _SPELLINGS.get(known, known)
                out.append(Token("op" if spelled in _OPERATORS else "cmd", spelled, gap))
                out.append(Token("word", command[len(known) :], False))
                return
    out.append(Token("cmd", command, gap))


_WHOLE_COMMANDS = word_set(
    "\\setminus \\minus \\infty \\mapsto \\circle \\to \\top \\pitchfork \\min \\pmod \\pm \\log \\lnot"
)


def _argument(text: str, position: int) -> tuple[str, int]:
    """The `{...}` group that starts at `position` (or one character) and the position after it."""
    while position < len(text) and text[position].isspace():
        position += 1
    if position >= len(text):
        return "", position
    if text[position] != "{":
        return text[position], position + 1
    depth, start = 0, position + 1
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position], position + 1
        position += 1
    return text[start:], len(text)


def _scan_text(command: str, content: str, gap: bool, out: list[Token], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise Unreadable("too deep")
    word = content.strip()
    inner_gap = gap or content[:1].isspace()
    if command in _BLACKBOARD:
        out.append(Token("cmd", f"\\mathbb{word}", gap))
        return
    if not word:
        return
    separator = _SEPARATORS.get(word.strip(" ,").lower())
    if separator:
        out.append(Token("sep", separator, True))
        return
    if _UNIT_TEXT.fullmatch(word) or re.fullmatch("~[A-Za-z]", word):
        out.append(Token("text", word.lstrip("~"), inner_gap or word[0] == "~"))
        return
    mathematical = word[0].isdigit() or _INLINE_TEXT.fullmatch(word) or "\\" in word or "$" in word or "^" in word
    if mathematical or (
        command in _FONT and (len(word) == 1 or word in FUNCTIONS or not word.replace(" ", "").isalpha())
    ):
        before = len(out)
        _scan(word, out, depth)
        if len(out) > before:
            out[before] = out[before]._replace(gap=inner_gap or out[before].gap or len(word) == 1)
        return
    if len(word) == 1 and word.isalpha() and word.islower() and command != "\\text":
        out.append(Token("word", word, inner_gap))
        return
    for index, piece in enumerate(re.split(r"\s*,\s*|\s+(?:and|or)\s+", word)):
        if index:
            out.append(Token("op", ",", False))
        if piece:
            out.append(Token("text", piece, inner_gap or bool(index)))


def is_prose(word: str) -> bool:
    """Whether a run of letters is a word, not a function or a product of variables."""
    if word in FUNCTIONS or word in GREEK or word == "pi" or len(word) == 1:
        return False
    return len(word) >= 4 or word.lower() in SMALL_WORDS


def key_of(tokens: tuple[Token, ...] | list[Token]) -> str:
    """One string per spelling: white space and the braces around a single token do not matter."""
    texts = [token.text for token in tokens]
    if "{" not in texts:
        return " ".join(texts)
    kept: list[str] = []
    index, count = 0, len(texts)
    while index < count:
        if texts[index] == "{" and index + 2 < count and texts[index + 2] == "}" and texts[index + 1] not in "{}":
            kept.append(texts[index + 1])
            index += 3
            continue
        kept.append(texts[index])
        index += 1
    return " ".join(kept)
