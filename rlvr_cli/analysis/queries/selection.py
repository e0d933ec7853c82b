"""Select rollouts of runs, or examples of a dataset, for a new dataset.

Enters: committed rollouts, or examples, and a `Selection`. Leaves: the items to keep, a random control of the same size, and a
`Stage` per reason to drop items. The stages in order: unusable responses, questions of the evaluation, duplicates (the control
is drawn from what remains here), the condition, correctness, the thinking, difficulty, and the limits.
"""

import random
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from sys import intern
from typing import Any

from rlvr_cli.analysis.queries.database import Database
from rlvr_cli.config.grpo import Language
from rlvr_cli.data.prompts import StoredPrompts
from rlvr_cli.data.traces import CUT_OFF
from rlvr_cli.graders.language import language_share
from rlvr_cli.types import Example

Key = tuple[str, str, int, str, int]  # (run_id, phase, step, example_id, sample_index)

_CHOSEN = "($phase = 'all' OR phase = $phase) AND ($step IS NULL OR step = $step)"
_RIGHT = "coalesce(reward > 0.5 AND NOT isnan(reward), false)"
_GRADED = "coalesce(NOT isnan(reward), false)"
_QUESTION = "md5(concat(prompt, md5(ground_truth)))"  # questions of one text may have different truths
_KEY = "run_id, phase, step, example_id, sample_index"
_WHOLE = f"finish_reason <> 'length' AND coalesce(episode.ended_by NOT IN {CUT_OFF}, true)"
# Whether the environment gave the prompt of a group. Rows of earlier versions do not say it, but a question has one prompt of the dataset.
_ONE_QUESTION = "PARTITION BY run_id, min(phase), min(example_id), min(ground_truth)"
_OWN_PROMPT = f"coalesce(bool_or(own_prompt), count(episode) > 0 AND count(*) OVER ({_ONE_QUESTION}) > 1)"
# The white space of Python's str.strip: the reader of a dataset rejects a response that is blank to it.
_BLANK = r"regexp_full_match(response, '[\s\p{Z}\x0b\x1c-\x1f\x{85}]*')"
_ONE_VOICE = "coalesce(list_bool_and(response_mask), true)"  # the policy has sampled all of the response
# Whether the turns of an episode can be written each with its text and ids. Older rows do not say where the texts end.
_IN_TURNS = 'coalesce(len(turn_facts.ends) = len(turns) AND num_response_tokens = list_sum([t."end" - t.start for t in turns]), false)'
_PARAGRAPHS = re.compile(r"\n\s*\n")
_SIGNS = str.maketrans("−–×·÷", "--**/")
_SAME = r"unhex(md5(lower(trim(regexp_replace(response, '\s+', ' ', 'g')))))"


@dataclass(frozen=True, slots=True)
class Question:
    """One question of the source, and the results of its samples."""

    id: str
    text: str | None  # None if it cannot be extracted from the prompt
    ground_truth: str
    identity: str  # equal for questions that differ only in case and white space
    environment_of: str | None = None  # the run whose environment gave the prompt, which does not tell the question
    has_shots: bool = False  # whether the text has the shots before the question, from which it could not be told
    n: int = 0
    right: int = 0

    @property
    def pass_rate(self) -> float:
        return self.right / self.n

    @property
    def same(self) -> tuple[str, str]:
        """Equal for questions whose samples count together."""
        return self.identity, self.ground_truth


@dataclass(frozen=True, slots=True)
class Item:
    """One row that may be kept: a response, or a question."""

    key: Any  # the response's `Key`, or the question's key
    question: str  # key of its `Question`
    matches: bool = True  # whether the condition holds
    right: bool = False
    tokens: int = 0
    usable: bool = True  # not cut at the length limit or as an episode, not blank, and such that a row can hold it
    digest: str | bytes = ""  # equal for responses that differ only in case and white space
    graded: bool = True  # else it is neither right nor wrong
    faults: frozenset[str] = frozenset()  # of its thinking, of `ThinkingRules`


@dataclass(frozen=True, slots=True)
class ThinkingRules:
    """What the thinking of a response must be, as DeepSeek-R1 (2025, section 2.3.3) chose the traces of its distillation.

    The thinking is what stands before ``</think>``, else the whole response.
    """

    language: Language | None = None  # of at least `min_share` of its words
    min_share: float = 1.0
    max_paragraph_words: int | None = None  # paragraphs end at blank lines
    without_code: bool = False  # in a block of ```

    @property
    def names(self) -> dict[str, str]:
        """The stages that the rules ask for, by name, with what they say of a response that they drop."""
        found = {}
        if self.language:
            found["language"] = f"less than {self.min_share:.0%} of the thinking's words are in {self.language}"
        if self.max_paragraph_words:
            found["paragraphs"] = f"the thinking has a paragraph of more than {self.max_paragraph_words} words"
        if self.without_code:
            found["code"] = "the thinking has a block of code"
        return found

    def faults(self, response: str) -> frozenset[str]:
        """The names of the stages that drop a response."""
        thinking = response.partition("</think>")[0]
        found = set()
        if self.language and language_share(response, self.language) < self.min_share:
            found.add("language")
        most = self.max_paragraph_words
        if most and any(len(paragraph.split()) > most for paragraph in _PARAGRAPHS.split(thinking)):
            found.add("paragraphs")
        if self.without_code and "```" in thinking:
            found.add("code")
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class Selection:
    """The options of a selection; see the config of `rlvr filter`."""

    where: bool = False
    thinking: ThinkingRules = ThinkingRules()
    correct_only: bool = False
    min_pass_rate: float = 0.0
    max_pass_rate: float = 1.0
    max_per_question: int | None = None
    shortest: bool = False
    dedup: bool = False
    for_pairs: bool = False  # of a response that is right once and wrong once, none stays: it is in no pair
    limit: int | None = None
    with_control: bool = False
    seed: int = 0

    @property
    def by_difficulty(self) -> bool:
        """Whether questions are chosen by their pass rates."""
        return (self.min_pass_rate, self.max_pass_rate) != (0.0, 1.0)

    def is_as_hard(self, question: Question) -> bool:
        """Whether the pass rate of a question is what is asked for."""
        return self.min_pass_rate <= question.pass_rate <= self.max_pass_rate

    def takes(self, item: Item, question: Question) -> bool:
        """Whether an item is what the condition, correctness, the rules of the thinking, pairs and the difficulty ask for."""
        fits = (item.matches or not self.where) and (item.right or not self.correct_only) and not item.faults
        is_told = item.graded or not self.for_pairs
        return fits and is_told and (not self.by_difficulty or self.is_as_hard(question))


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the selection: how many items it kept and dropped, and why."""

    name: str
    kept: int
    dropped: int
    why: str


@dataclass
class Selected:
    """The items that are kept so far, the stages so far, and the control."""

    kept: list[Item]
    stages: list[Stage] = field(default_factory=list)
    control: list[Item] = field(default_factory=list)

    def keep(self, name: str, wanted: Callable[[Item], bool], why: str) -> None:
        """Add a stage that keeps only the wanted items."""
        left = [item for item in self.kept if wanted(item)]
        self.stages.append(Stage(name, len(left), len(self.kept) - len(left), why))
        self.kept = left


# Sources


def read_samples(
    database: Database,
    *,
    phase: str,
    step: int | None,
    condition: str,
    prompts: Mapping[str, StoredPrompts],
    rules: ThinkingRules,
    in_turns: bool,
) -> tuple[list[Item], dict[str, Question]]:
    """Read the rollouts of runs as items, and their questions by key.

    Args:
        condition: SQL as returned by `Database.condition`.
        prompts: run id -> how the run has made its prompts.
        rules: what the thinking of a response must be.
        in_turns: whether a row can hold a response that is not the policy's alone, turn by turn.
    """
    chosen = {"phase": phase, "step": step}
    questions: dict[str, Question] = {}
    sql = (
        f"SELECT {_QUESTION}, run_id, prompt, {_OWN_PROMPT}, min(example_id), ground_truth, count(*), count(*) FILTER ({_RIGHT})"
        f" FROM rollouts WHERE {_CHOSEN} GROUP BY run_id, prompt, ground_truth ORDER BY run_id"
    )
    for key, run_id, prompt, own, example_id, truth, n, right in database.rows(sql, chosen):
        known = questions.get(key)  # another run may have asked it too
        of = StoredPrompts() if own else prompts[run_id]
        told = (known and not known.has_shots and known.text) or of.question_in(prompt, ground_truth=truth)
        text = told or (known and known.text) or of.question_with_shots_in(prompt)
        questions[key] = Question(
            id=min(example_id, known.id) if known else example_id,
            text=text,
            ground_truth=truth,
            identity=normalized(text or prompt),
            environment_of=run_id if own and text is None else None,
            has_shots=bool(text and not told),
            n=n + (known.n if known else 0),
            right=right + (known.right if known else 0),
        )
    response = "response" if rules.names else "''"
    sql = (
        f"SELECT {_KEY}, {_QUESTION}, coalesce({condition}, false), {_RIGHT}, policy_tokens(episode, num_response_tokens),"
        f" {_WHOLE} AND NOT {_BLANK} AND ({_ONE_VOICE}{f' OR {_IN_TURNS}' if in_turns else ''}), {_SAME}, {_GRADED}, {response}"
        f" FROM rollouts WHERE {_CHOSEN}"
    )
    items = [
        Item((intern(run), intern(of), at, intern(example), sample), intern(question), *row, faults=rules.faults(text))
        for run, of, at, example, sample, question, *row, text in database.rows(sql, chosen)
    ]
    return items, pooled(questions)


def read_examples(
    database: Database, examples: Sequence[Example], *, condition: str, rules: ThinkingRules
) -> tuple[list[Item], dict[str, Question]]:
    """Turn the examples of a dataset into items, and their questions by key, which is the example's id."""
    matches = {row for row, holds in database.rows(f"SELECT rowid, coalesce({condition}, false) FROM dataset") if holds}
    items = [
        Item(
            e.id,
            e.id,
            matches=row in matches,
            digest=normalized(e.response or ""),
            faults=rules.faults(e.response or ""),
        )
        for row, e in enumerate(examples)
    ]
    return items, {e.id: Question(e.id, e.question, e.ground_truth, normalized(e.question)) for e in examples}


def by_question(items: Sequence[Item], questions: Mapping[str, Question]) -> list[Item]:
    """Merge the items of each question, in order of first appearance.

    Each has the samples of all questions that are equal to it, and is right if one of these that matches the condition is right.
    """
    matching = [item for item in items if item.matches]
    matches = {questions[item.question].same for item in matching}
    right = {questions[item.question].same for item in matching if item.right}
    same = {item.question: questions[item.question].same for item in items}
    return [Item(key, key, matches=of in matches, right=of in right) for key, of in same.items()]


def pooled(questions: Mapping[str, Question]) -> dict[str, Question]:
    """Give equal questions, which different prompts may have asked, the samples of all of them."""
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for question in questions.values():
        counts[question.same][0] += question.n
        counts[question.same][1] += question.right
    return {key: replace(q, n=counts[q.same][0], right=counts[q.same][1]) for key, q in questions.items()}


def response_rows(
    database: Database, keys: Collection[Key], *, phase: str, step: int | None, also: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the texts of these rollouts, in the order of the runs, each with its `Key` and the key of its question.

    Args:
        also: columns to read besides.
    """
    columns = ("prompt", "response", "ground_truth", "reward", "grader", *also)
    sql = f"SELECT {_KEY}, {_QUESTION}, {', '.join(columns)} FROM rollouts WHERE {_CHOSEN}"
    for row in database.rows(sql, {"phase": phase, "step": step}):
        if tuple(row[:5]) in keys:
            yield {"key": tuple(row[:5]), "question": row[5]} | dict(zip(columns, row[6:], strict=True))


def has_several_voices(database: Database, *, phase: str, step: int | None) -> bool:
    """Whether there is a response that the policy has not sampled alone."""
    sql = f"SELECT bool_or(NOT {_ONE_VOICE}) FROM rollouts WHERE {_CHOSEN}"
    ((found,),) = database.rows(sql, {"phase": phase, "step": step})
    return bool(found)


# What is kept


def select(
    items: Sequence[Item],
    questions: Mapping[str, Question],
    selection: Selection,
    *,
    seen: Mapping[str, str] | None = None,
    source: str = "",
) -> Selected:
    """Apply a selection.

    Args:
        seen: result of `find_contaminated`; None without decontamination.
        source: a description of the source, for the first row of the table.
    """
    s = selection
    selected = Selected(list(items), [Stage("source", len(items), 0, source)])
    if any(not item.usable for item in items):
        selected.keep(
            "whole",
            lambda i: i.usable,
            "cut at the length limit or as an episode, empty, or not sampled by the policy alone",
        )
    if seen is not None:
        counts = {how: sum(seen.get(i.question) == how for i in selected.kept) for how in sorted(set(seen.values()))}
        found = "; ".join(f"{count} {how}" for how, count in counts.items() if count)
        selected.keep("decontaminate", lambda i: i.question not in seen, found or "its question is in the evaluation")
    if s.dedup:
        one: dict[tuple[str, str | bytes], Item] = {}
        both_ways: set[tuple[str, str | bytes]] = set()
        # Those that pass come first: else a later stage may drop the only copy.
        for item in sorted(selected.kept, key=lambda i: not s.takes(i, questions[i.question])):
            same = questions[item.question].identity, item.digest
            first = one.setdefault(same, item)
            if s.for_pairs and item.right != first.right and s.takes(item, questions[item.question]):
                both_ways.add(same)
        stay = {item.key for same, item in one.items() if same not in both_ways}
        why = "a duplicate, ignoring case and white space"
        if both_ways:
            why += "; none is left of those that are right once and wrong once"
        selected.keep("dedup", lambda i: i.key in stay, why)
    pool = selected.kept
    if s.where:
        selected.keep("where", lambda i: i.matches, "the condition does not hold")
    if s.correct_only:
        selected.keep("correct", lambda i: i.right, "not rewarded")
    for name, why in s.thinking.names.items():
        selected.keep(name, lambda i, name=name: name not in i.faults, why)
    if s.by_difficulty:
        selected.keep(
            "pass rate",
            lambda i: s.is_as_hard(questions[i.question]),
            f"the question's pass rate is not within {s.min_pass_rate:g} to {s.max_pass_rate:g}",
        )
    how = "the shortest are kept" if s.shortest else f"chosen at random, seed {s.seed}"
    if s.max_per_question:
        groups: dict[str, list[Item]] = defaultdict(list)
        for item in selected.kept:
            groups[questions[item.question].identity].append(item)
        draw = random.Random(f"per question {s.seed}")
        few = {i.key for g in groups.values() for i in _some(g, s.max_per_question, shortest=s.shortest, draw=draw)}
        selected.keep("per question", lambda i: i.key in few, f"more than {s.max_per_question}; {how}")
    if s.limit:
        draw = random.Random(f"limit {s.seed}")
        some = {i.key for i in _some(selected.kept, s.limit, shortest=s.shortest, draw=draw)}
        selected.keep("limit", lambda i: i.key in some, f"more than {s.limit}; {how}")
    if s.with_control:
        drawn = {i.key for i in random.Random(f"control {s.seed}").sample(pool, len(selected.kept))}
        selected.control = [i for i in pool if i.key in drawn]
    return selected


def _some(items: Sequence[Item], count: int, *, shortest: bool, draw: random.Random) -> Sequence[Item]:
    if len(items) <= count:
        return items
    return sorted(items, key=lambda i: i.tokens)[:count] if shortest else draw.sample(items, count)


# Contamination


def normalized(text: str) -> str:
    """Normalize a text: NFKC, case folded, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def find_contaminated(questions: Mapping[str, Question], evaluation: Sequence[str], *, ngram: int) -> dict[str, str]:
    """Find questions that an evaluation contains: key -> in which way. Either equal, or with `ngram` consecutive words in common.

    Questions are equal if their letters, numbers and signs of arithmetic are, whatever their case, spaces and punctuation.
    A question of fewer words must be equal, because short questions can share all their words by chance.
    """
    texts = [normalized(text) for text in evaluation]
    equal, grams = set(map(_bare, texts)), {gram for text in texts for gram in _grams(text, ngram)}
    found: dict[str, str] = {}
    for key, question in questions.items():
        text = question.identity
        if _bare(text) in equal:
            found[key] = "equal to one of the evaluation"
        elif any(gram in grams for gram in _grams(text, ngram)):
            found[key] = f"with {ngram} words in common with one of the evaluation"
    return found


def _bare(text: str) -> str:
    """A normalized text without spaces and punctuation, but with signs of arithmetic, and a space between two numbers.

    1 + 23 and 12 + 3 are not 1 - 23 or 123: without the signs, other questions would count as equal. A text of nothing
    but punctuation stays.
    """
    text = re.sub(
        r"(?<=\d),(?=\d{3}(?!\d))|(?<![\w)])\*\*|\*\*(?![\w(])", "", text.translate(_SIGNS)
    )  # 1,000; **bold**
    pieces = re.findall(r"\d+|[^\W\d_]+|[-+*/^<>%]", text)
    return re.sub(r"(?<=\d)\0(?=\d)", " ", "\0".join(pieces)).replace("\0", "") or text


def _grams(text: str, n: int) -> Iterator[tuple[str, ...]]:
    """All n consecutive words, without the punctuation around each; a word of punctuation only, such as +, is kept."""
    words = [re.sub(r"^[^\w\s]+|[^\w\s]+$", "", word) or word for word in text.split()]
    return (tuple(words[i : i + n]) for i in range(len(words) - n + 1))
