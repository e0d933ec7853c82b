"""What the site needs otherwise than the pages of docs/ read as files; `mkdocs build` calls `on_page_markdown` for each page."""

import re
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")
CODE = re.compile(r"`[^`\n]+`")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A link to a file outside of docs/ becomes its text, because the site does not have that file. In the code of a table `|` stands as it
    is: Python-Markdown would show the backslash that a repository's viewer needs."""
    folder = PurePosixPath(page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        return found[1] if normpath(folder / found[2]).startswith("..") else found[0]

    lines = LINK.sub(link, markdown).splitlines()
    return "\n".join(
        CODE.sub(lambda code: code[0].replace(r"\|", "|"), line) if line.startswith("|") else line for line in lines
    )
