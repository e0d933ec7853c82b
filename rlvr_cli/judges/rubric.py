"""A rubric: the prompt of a judge, and the scale of its scores.

Enters: a Markdown file. It begins with the line `scale: …`, alone or between two lines `---`; the rest is the prompt, in which
placeholders stand for the question and the response. Leaves: prompts to ask, and from a reply's last line a score and a reward.

Scales:

- `scale: 1-10`: numbers; the first bound has the reward 0, the second 1, so that `5-1` rewards low numbers.
- `scale: yes/no` or `scale: good/fair/bad`: words; the first has the reward 1, the last 0, and those between are evenly spaced.
- `scale: yes=1, partly=0.3, no=0`: words with their rewards.
- `scale: A/B/tie`, of a rubric that compares two responses: the words for the first, the second and, if there is one, for a tie. The
  reward is that of the first response: 1, 0 or 0.5. `scale: tie=0.5, A=1, B=0` says it in another order.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvr_cli.config.parsing.options import nearest
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.storage.files import os_errors_as_user_errors
from rlvr_cli.text import printable

GRADING = ("question", "response", "ground_truth", "reference")  # placeholders; the last two are the same
PAIRWISE = ("question", "response_a", "response_b", "ground_truth", "reference")
_MOST_BYTES = 2**20  # of a rubric's file
_HEAD = re.compile(r"([A-Za-z_]+)[ \t]*:[ \t]*(.*)")
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)"
_RANGE = re.compile(rf"({_NUMBER})\s*(?:-|–|to|\.\.)\s*({_NUMBER})")
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_EXAMPLE = "Write for example, as its first line: scale: 1-10, or: scale: yes/no"
# What stands around a score in a line of Markdown: `**Score: 8/10**`, `[[8]]`, `- Verdict: "yes".`
_LABEL = re.compile(
    r"(?i)(?:[a-z]+ )?(?:score|rating|grade|verdict|answer|judge?ment|winner)\s*(?:is|[:=])\s*(.*)", re.DOTALL
)
_AROUND = " \t*_`#>[](){}\"'“”‘’.,;!"
_BEFORE = _AROUND.replace(".", "").replace(",", "")  # without what a number may begin with
_MARKS_ALONE = re.compile(r"[\s*_`#>~=-]*")  # a line of these is the end of a code fence, a rule, or empty
_WITHIN = str.maketrans("*`", "  ")  # `**Score**: **8**/10`; spaces, so that 2*5 is not 25
_TYPED = {0x2212: "-", 0x200B: None, 0x2060: None, 0xFEFF: None}  # a minus sign, and what has no width
_TIES = {"tie", "draw", "equal", "equally", "same", "both", "neither", "none"}  # words that are no response
_THINKING, _END_OF_THINKING = "<think>", "</think>"
_BULLET = re.compile(r"[-+•]\s+")
_BULLET_OF_SIGNED = re.compile(r"[-+•]\s+(?![\d.])")  # in a scale with negative numbers, `- 1` may be minus one


class NoScore(Exception):
    """A reply whose last line is no score of the scale.

    Attributes:
        kind: "no_score", or "out_of_scale" if it is a number outside of the scale.
    """

    def __init__(self, problem: str, *, kind: str = "no_score") -> None:
        super().__init__(problem)
        self.problem, self.kind = problem, kind


@dataclass(frozen=True, slots=True)
class Score:
    """A score: as it is written in the scale, and the reward that it means, from 0 to 1."""

    text: str
    reward: float


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers between two bounds, or words with their rewards."""

    text: str  # as the file has it
    bounds: tuple[float, float] | None  # rewards 0 and 1
    words: Mapping[str, float]  # as `_plain` gives them -> reward

    def score_of(self, reply: str) -> Score:
        """Read the score in the last line of a reply's answer that is more than marks, or a word of the scale. Raises NoScore if there is none."""
        _, thought, answer = reply.translate(_TYPED).rpartition(_END_OF_THINKING)
        if not thought and answer.lstrip().startswith(_THINKING):
            raise NoScore("the reply's thinking does not end")
        lines = [line for line in answer.splitlines() if not _MARKS_ALONE.fullmatch(line) or _plain(line) in self.words]
        if not lines:
            raise NoScore("the reply is empty")
        said = _bare(lines[-1])
        bullet = _BULLET_OF_SIGNED if self._is_signed else _BULLET
        if found := bullet.match(said):
            said = said[found.end() :]
        said = _bare(said.translate(_WITHIN))
        if labeled := _LABEL.fullmatch(said):
            said = _bare(labeled[1])
        return self._number(said) if self.bounds else self._word(said)

    @property
    def _is_signed(self) -> bool:
        numbers = self.bounds or [float(word) for word in self.words if re.fullmatch(_NUMBER, word)]
        return min(numbers, default=0) < 0

    def _number(self, said: str) -> Score:
        assert self.bounds is not None
        first, last = self.bounds
        found = re.fullmatch(rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?", said)
        if found is None or (found[2] and float(found[2]) != max(first, last)):
            raise NoScore(f"the reply's last line is no number of the scale {self.text}: {_brief(said)}")
        value = float(found[1])
        if not min(first, last) <= value <= max(first, last):
            raise NoScore(f"the score {found[1]} is outside of the scale {self.text}", kind="out_of_scale")
        return Score(found[1], (value - first) / (last - first))

    def _word(self, said: str) -> Score:
        word = _plain(said)
        if word not in self.words:
            raise NoScore(f"the reply's last line is none of {', '.join(self.words)}: {_brief(said)}")
        return Score(word, self.words[word])


@dataclass(frozen=True, slots=True)
class Rubric:
    """A rubric's file, read."""

    name: str  # the path, as it was given
    text: str  # of the whole file
    sha256: str  # of the file, hex
    prompt: str
    scale: Scale

    @property
    def facts(self) -> dict[str, str]:
        """For run.json."""
        return {"name": self.name, "sha256": self.sha256, "text": self.text}

    def fill(self, values: Mapping[str, str | None]) -> str:
        """Return the prompt with the values of its placeholders; what a value holds is no placeholder. None is "(none)"."""
        return _PLACEHOLDER.sub(lambda m: m[0] if m[1] not in values else _given(values[m[1]]), self.prompt)


def read_rubric(path: str, *, placeholders: Sequence[str] = GRADING) -> Rubric:
    """Read a rubric.

    Args:
        placeholders: that its prompt may have; those that begin with `response` it must have.

    Raises:
        RlvrError: it cannot be read, has no scale, or lacks a placeholder.
    """
    with os_errors_as_user_errors(Path(path), "read"):
        data = Path(path).read_bytes()
    shown = printable(path)
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except ValueError as error:
        raise RlvrError(f"The rubric {shown} is not UTF-8 text.", "A rubric is a Markdown file.") from error
    if len(data) > _MOST_BYTES:
        raise RlvrError(f"The rubric {shown} has {len(data):,} bytes.", "A rubric is a prompt of a page or two.")
    head, prompt = _split(text)
    if unknown := [key for key in head if key != "scale"]:
        raise RlvrError(f"The rubric {shown} begins with {unknown[0]}: …, which means nothing.", _EXAMPLE)
    if "scale" not in head:
        raise RlvrError(f"The rubric {shown} does not begin with its scale.", _EXAMPLE)
    for name in _PLACEHOLDER.findall(prompt):
        if name not in placeholders and (near := nearest(name, placeholders)):
            raise RlvrError(f"The rubric {shown} has {{{name}}}.", f"Did you mean {{{near[0]}}}?")
    for name in placeholders:
        if name.startswith("response") and f"{{{name}}}" not in prompt:
            needed = " and ".join(f"{{{p}}}" for p in placeholders if p.startswith("response"))
            raise RlvrError(f"The rubric {shown} does not show the judge {{{name}}}.", f"Put {needed} into it.")
    scale = read_scale(head["scale"], where=f"The rubric {shown}")
    if placeholders == PAIRWISE:
        scale = _of_pairs(scale, where=f"The rubric {shown}")
    return Rubric(path, text, hashlib.sha256(data).hexdigest(), prompt, scale)


def read_scale(text: str, *, where: str) -> Scale:
    """Read a scale. Raises RlvrError, which begins with `where`, if it is none."""
    text = text.translate(_TYPED)
    if bounds := _RANGE.fullmatch(text):
        first, last = float(bounds[1]), float(bounds[2])
        if first == last:
            raise RlvrError(f"{where} has the scale {printable(text)}, which has one score.", _EXAMPLE)
        return Scale(text, (first, last), {})
    parts = re.split(r"[/,]", text)
    rewards = [_reward(part) for part in parts if "=" in part]
    words = [_plain(part.partition("=")[0]) for part in parts]
    if len(words) < 2 or "" in words or len(set(words)) < len(words) or 0 < len(rewards) < len(words):
        raise RlvrError(f"{where} has the scale {printable(text)!r}, which is none.", _EXAMPLE)
    if not rewards and all(re.fullmatch(_NUMBER, word) for word in words):
        raise RlvrError(
            f"{where} has the scale {printable(text)!r}, which does not say which number is the best.",
            "Write a range, worst-best, as in scale: 1-10; or each with its reward, as in scale: 0=0, 1=1",
        )
    if not rewards:
        rewards = [1 - i / (len(words) - 1) for i in range(len(words))]
    known = [reward for reward in rewards if reward is not None]
    if len(known) < len(rewards):
        raise RlvrError(f"{where} has a reward in its scale {printable(text)!r} that is not from 0 to 1.", _EXAMPLE)
    return Scale(text, None, dict(zip(words, known, strict=True)))


def _of_pairs(scale: Scale, *, where: str) -> Scale:
    """A scale whose rewards are those of the first response: as the text says, else by the places of its words."""
    words, rewards, stated = list(scale.words), (1.0, 0.0, 0.5)[: len(scale.words)], "=" in scale.text
    says_which = (
        sorted(scale.words.values()) == sorted(rewards) if stated else _TIES.isdisjoint(" ".join(words[:2]).split())
    )
    if scale.bounds or not says_which or not 2 <= len(words) <= 3:
        raise RlvrError(
            f"{where} compares two responses, and its scale {printable(scale.text)} does not say which is better.",
            "Write for example, as its first line: scale: A/B/tie; or with the rewards 1, 0 and, for a tie, 0.5: scale: A=1, B=0, tie=0.5",
        )
    return scale if stated else Scale(scale.text, None, dict(zip(words, rewards, strict=True)))


def _split(text: str) -> tuple[dict[str, str], str]:
    """Return the front lines `key: value`, and the prompt after them."""
    lines = text.split("\n")
    fenced = lines[0].strip() == "---"
    head: dict[str, str] = {}
    at = int(fenced)
    while at < len(lines) and (found := _HEAD.fullmatch(lines[at].strip())):
        if not fenced and found[1] != "scale":
            break  # the prompt may have such a line
        head[found[1]] = found[2].strip()
        at += 1
    if fenced and at < len(lines) and lines[at].strip() == "---":
        at += 1
    return head, "\n".join(lines[at:]).strip("\n")


def _reward(part: str) -> float | None:
    try:
        reward = float(part.partition("=")[2])
    except ValueError:
        return None
    return reward if math.isfinite(reward) and 0 <= reward <= 1 else None


def _bare(text: str) -> str:
    """A text without the marks around it; a dot or a comma at its beginning is left, since it may be a number's."""
    return text.lstrip(_BEFORE).rstrip(_AROUND)


def _plain(word: str) -> str:
    """A word of a scale or of a reply as they are compared: in lower case, without marks around it and `*` in it; `.5` keeps its dot."""
    bare = _bare(word.lower().translate(_WITHIN))
    return " ".join((bare if re.fullmatch(_NUMBER, bare) else bare.lstrip(_AROUND)).split())


def _given(value: str | None) -> str:
    return "(none)" if value is None else value


def _brief(text: str) -> str:
    text = printable(text, keep="")
    return repr(text if len(text) <= 80 else text[:80] + "…")
