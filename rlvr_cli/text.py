"""Escape text that a model or a file wrote, so that it is safe in a terminal or in a Parquet file; hide secrets.

Enters: any str, hostile or broken. Leaves: the same text, with only the unsafe characters escaped, or without secrets.
"""

import os
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

_HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]+@")
_SECRET_NAME = re.compile(r"(?i)KEY|TOKEN|SECRET|PASSWORD|PASSWD")
# Keys as the usual providers form them: with a digit, which a name such as `sk-experiments` lacks.
_KEY = re.compile(
    r"(?<![A-Za-z0-9])(?=[A-Za-z_-]*[0-9])(?:(?:sk|pk|gsk|xai|nvapi)-[A-Za-z0-9_-]{10,}|(?:hf|gsk|ghp)_[A-Za-z0-9]{16,})"
)


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""Escape every control, format, surrogate and private-use character but those in `keep`.

    A terminal acts on ESC, C1 controls, bidirectional overrides and the like; escaped as ``\x1b`` or ``\u202e`` they
    are only displayed. Use it for all text that comes from a model, a data file or a file name.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c in keep or unicodedata.category(c) not in _HIDDEN_CATEGORIES else _escape(ord(c)) for c in text
    )


def storable(text: str) -> str:
    r"""Escape lone surrogates as ``\udXXX``: UTF-8, and so Parquet, cannot hold them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join(_escape(ord(c)) if 0xD800 <= ord(c) <= 0xDFFF else c for c in text)
    return text


def with_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """A value of JSON with `change` made to each text in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): with_texts(inner, change) for key, inner in value.items()}
    return [with_texts(inner, change) for inner in value] if isinstance(value, list) else value


def filled_in(text: str, template: str, *, placeholder: str, at: int = 0) -> str | None:
    """Return what stands in a text in each place of the template's placeholder.

    None if the text is not made from the template, or if there is only white space.

    Args:
        at: where in the text what is made from the template begins.
    """
    parts = template.split(placeholder)
    if not text.startswith(parts[0], at) or not text.endswith(parts[-1]):
        return None
    holes = len(parts) - 1
    length, rest = divmod(len(text) - at - sum(map(len, parts)), holes or 1)
    begin = at + len(parts[0])
    inside = text[begin : begin + max(length, 0)]
    return inside if holes and not rest and inside.strip() and inside.join(parts) == text[at:] else None


def redacted(text: str) -> str:
    """Replace by ``***`` user and password in an address, what has the form of an API key, and `environment_secrets`."""
    for _, secret in environment_secrets():
        text = text.replace(secret, "***")
    return _KEY.sub("***", _USER_INFO.sub("***@", text))


def environment_secrets() -> Iterator[tuple[str, str]]:
    """Yield the name and value of each environment variable that is named as a secret and holds one."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and is_secret(value.strip()):
            yield name, value.strip()


def is_secret(key: str) -> bool:
    """Whether a key is so particular that a text which holds it holds a secret, unlike a placeholder such as `none`."""
    return len(key) >= 12 and any(c.isdigit() for c in key) and any(c.isalpha() for c in key)


def _escape(code: int) -> str:
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
