"""The position of each sampled token in a response's text, to show tokens with their log-probabilities.

Enters: the bytes of a model's tokenizer.json, the ids of a response and its text. Leaves: the length of each token in the
text, or None if the tokens do not spell the text; so a tokenizer that decodes in an unknown way gives no wrong positions.
"""

import codecs
import json
from collections.abc import Mapping, Sequence

# Byte-level vocabularies write each byte as a printable character: most bytes as themselves, the others from U+0100 on.
_THEMSELVES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(b): b for b in _THEMSELVES}
_BYTE_OF |= {chr(0x100 + i): b for i, b in enumerate(sorted(set(range(256)) - set(_THEMSELVES)))}


def token_pieces(tokenizer_json: bytes) -> dict[int, bytes]:
    """The bytes that each id adds to a decoded text; none for special tokens. Empty if the file is not a known tokenizer."""
    try:
        tokenizer = json.loads(tokenizer_json)
        vocabulary = tokenizer["model"]["vocab"]
        tokens = vocabulary if isinstance(vocabulary, dict) else {token: i for i, (token, _) in enumerate(vocabulary)}
        byte_level = '"ByteLevel"' in json.dumps(tokenizer.get("decoder"))
        pieces = {i: (_of_bytes if byte_level else _of_text)(token) for token, i in tokens.items()}
        for added in tokenizer.get("added_tokens") or ():
            pieces[added["id"]] = b"" if added["special"] else added["content"].encode(errors="replace")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return pieces


def _of_bytes(token: str) -> bytes:
    known = all(c in _BYTE_OF for c in token)
    return bytes(_BYTE_OF[c] for c in token) if known else token.encode(errors="replace")


def _of_text(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode(errors="replace")


def token_lengths(ids: Sequence[int], text: str, *, pieces: Mapping[int, bytes]) -> list[int] | None:
    """The length of each token in the text, in UTF-16 code units, as JavaScript counts; they add up to the text's length.

    A character made of several tokens counts for the last of them. The text may end before the tokens do (cut at a stop
    string), and may lack the space that some tokenizers put before the first token.

    Returns:
        The lengths, or None if the ids do not spell the text.
    """
    try:
        tokens = [pieces[i] for i in ids]
    except KeyError:
        return None
    spelled = b"".join(tokens)
    if spelled.isascii():
        whole, lengths = spelled.decode(), [len(token) for token in tokens]
    else:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        parts = [decoder.decode(token) for token in tokens]
        parts[-1] += decoder.decode(b"", final=True)  # U+FFFD if the response ends within a character
        whole, lengths = "".join(parts), [units(part) for part in parts]
    if not whole.startswith(text):
        if not whole.startswith(f" {text}"):
            return None
        lengths[next(i for i, length in enumerate(lengths) if length)] -= 1
    excess = sum(lengths) - units(text)
    for i in reversed(range(len(lengths))):
        cut = min(excess, lengths[i])
        lengths[i] -= cut
        excess -= cut
        if not excess:
            break
    return lengths


def units(text: str) -> int:
    """The length of a text in UTF-16 code units."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2
