"""Elements of a page, in which text is text whatever it holds.

Enters: names, text that anyone may have written, and data. Leaves: HTML and SVG, and blocks of data that no browser runs.
"""

import base64
import gzip
import html
import json
from collections.abc import Iterable
from typing import Any

from rlvr_cli.text import printable, storable


class Html(str):
    """Text that is markup already."""


def tag(name: str, /, *children: str | Iterable[Html], **attributes: Any) -> Html:
    """An element. Children that are no `Html` are escaped, and so is every attribute; one that is None is left out.

    An attribute's ``class_`` is class, and its ``_`` is ``-``.
    """
    inner = "".join(escaped(c) if isinstance(c, str) else "".join(map(escaped, c)) for c in children)
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>" if name == "meta" else f"<{name}{written}>{inner}</{name}>")


def escaped(text: str) -> str:
    """Text as markup that shows it, its control characters included; `Html` as it is."""
    return text if isinstance(text, Html) else html.escape(printable(text))


def json_block(name: str, value: Any) -> Html:
    """A value as JSON in the page, where nothing in it can end the block."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII, so that U+2028 and the like are escaped
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Html(text), type="application/json", id=name)


def pack(value: Any) -> str:
    """A value as JSON, compressed, in base64."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(storable(text).encode(), 6, mtime=0)).decode()
