"""Grading by a judge, in the place of the processes of `graders.pool`: a rubric is filled in, asked, and its reply read.

Enters: (response, ground truth) pairs and their examples. Leaves: one `Grade` per pair, in order, with the judge's whole reply. A
reply without a score, or none at all, is a failed grade, whose reward is None: never 0.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from rlvr_cli.config.parsing.options import JUDGE
from rlvr_cli.config.shared.prompt import JudgeOptions
from rlvr_cli.graders.custom import example_of_truth
from rlvr_cli.graders.pool import described_error
from rlvr_cli.judges.judge import Heard, Judge, Reply
from rlvr_cli.judges.rubric import GRADING, NoScore, Rubric, read_rubric
from rlvr_cli.runs.manifest import GRADES, ROLLOUTS
from rlvr_cli.runs.readers import part_tables, read_index
from rlvr_cli.samplers.openai_client import Unanswered
from rlvr_cli.text import printable, storable
from rlvr_cli.types import Grade, Judgement

FAILURES = (
    "timeout",
    "refused",
    "unavailable",
    "cut_off",
    "no_score",
    "out_of_scale",
)  # of a grade's `error`; its failure kind is judge_…
ENDS = ("stop", "length")  # of a reply; an endpoint's own word for another end is a refusal, such as content_filter
_REPORTED = 3  # different failures of which the first is reported


class JudgePool:
    """Grades with a rubric and a judge. See `types.Graders`.

    Args:
        spec: judge:RUBRIC.md.
        options: which judge, and how it is asked.
        placeholders: of the rubric; those of pairs are filled in by who calls `ask`.
        report: gets a sentence on the first failed grade of each kind, from any thread.

    Raises:
        RlvrError: as `read_rubric` and `Judge`.
    """

    batch_size = 1  # each answer is paid for

    def __init__(
        self,
        spec: str,
        options: JudgeOptions,
        *,
        placeholders: Sequence[str] = GRADING,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.spec, self.rubric = spec, read_rubric(spec.removeprefix(JUDGE), placeholders=placeholders)
        self.failed = 0
        self._judge = Judge(options, report=report)
        self._report, self._reported = report, set[str]()
        self._recalled: set[Path] = set()
        self._lock = threading.Lock()

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the grader, for run.json: the rubric with its text. The options of the run say which judge."""
        return {"grader": self.spec, "rubric": self.rubric.facts}

    @property
    def sha256(self) -> str:
        """Of the rubric, the model and how it is sampled, hex: a change of these makes another grader."""
        return hashlib.sha256(f"{self.rubric.sha256} {self._judge.sha256_of('')}".encode()).hexdigest()

    @property
    def price(self) -> str:
        """The requests and tokens so far, in words."""
        spent = self._judge.spent
        return (
            f"{spent['asked']:,} texts asked, {spent['cached']:,} known; {spent['prompt_tokens']:,} tokens of prompts, "
            f"{spent['reply_tokens']:,} of replies"
        )

    def grade(
        self, pairs: Sequence[tuple[str, str]], *, example_of: Callable[[int], Mapping[str, Any]] | None = None
    ) -> list[Grade]:
        """The verdicts on (response, ground truth) pairs, in order.

        Args:
            example_of: index of a pair -> the fields of its example; the question of one without is its prompt.

        Raises:
            RlvrError: the judge answers nothing, see `Judge.hear`.
        """
        return self.submit(pairs, example_of=example_of).result()

    def submit(
        self, pairs: Sequence[tuple[str, str]], *, example_of: Callable[[int], Mapping[str, Any]] | None = None
    ) -> Future[list[Grade]]:
        """Run `grade` in the background, with other calls. The future holds its grades or its exception."""
        examples = [
            example_of_truth(truth) if example_of is None else example_of(i) for i, (_, truth) in enumerate(pairs)
        ]
        texts = [
            asked_text(self.rubric, response, example) for (response, _), example in zip(pairs, examples, strict=True)
        ]
        return self.ask(texts)

    def ask(self, texts: Sequence[str]) -> Future[list[Grade]]:
        """Ask these texts, of the rubric that is filled in. The future holds a grade for each, or an exception."""
        return self._judge.begin(self._grade_all(texts))

    def recall(self, run: Path) -> None:
        """Take the replies that a run has stored for known, once: the same text is not asked again after a run was cut off."""
        if run not in self._recalled:
            self._recalled.add(run)
            self._judge.remember(stored_replies(run))

    def close(self) -> None:
        self._judge.close()

    def __enter__(self) -> "JudgePool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _grade_all(self, texts: Sequence[str]) -> list[Grade]:
        return await asyncio.gather(*map(self._grade, texts))

    async def _grade(self, text: str) -> Grade:
        try:
            heard = await self._judge.hear(text)
        except Unanswered as failure:
            return self._failure(failure.kind, failure.problem)
        judgement = judgement_of(heard, model=self._judge.model, score=None)
        reply = heard.reply
        if reply.finish == "length":
            return self._failure("cut_off", "the reply was cut off at --judge-max-tokens", judgement)
        if reply.finish not in ENDS:
            return self._failure("refused", f"the reply ended with {printable(reply.finish, keep='')}", judgement)
        try:
            score = self.rubric.scale.score_of(reply.text)
        except NoScore as problem:
            return self._failure(problem.kind, problem.problem, judgement)
        return Grade(
            None,
            None,
            score.reward,
            extracted_answer=score.text,
            failure_kind=None if score.reward > 0.5 else "low_reward",
            judgement=judgement._replace(score=score.text),
        )

    def _failure(self, kind: str, problem: str, judgement: Judgement | None = None) -> Grade:
        assert kind in FAILURES, kind
        self.failed += 1
        if kind not in self._reported and len(self._reported) < _REPORTED:
            self._reported.add(kind)
            self._report(f"the judge gave no grade: {described_error(kind, printable(problem, keep=''))}")
        return Grade(
            None,
            None,
            None,
            failure_kind=f"judge_{kind}",
            error=kind,
            error_detail=problem,
            judgement=judgement,
        )


def asked_text(rubric: Rubric, response: str, example: Mapping[str, Any]) -> str:
    """The rubric's prompt for a response. A question that is not known is the prompt that the policy got."""
    truth = example.get("ground_truth") or None
    question = example.get("question") or example.get("prompt")
    return rubric.fill({"question": question, "response": response, "ground_truth": truth, "reference": truth})


def judgement_of(heard: Heard, *, model: str, score: str | None) -> Judgement:
    """What is stored of a reply."""
    reply, tokens = heard.reply, (heard.reply.prompt_tokens, heard.reply.reply_tokens)
    return Judgement(
        storable(reply.text),
        score and storable(score),
        storable(model),
        reply.asked_sha256,
        *tokens,
        cached=heard.cached,
    )


def stored_replies(run: Path) -> Iterator[Reply]:
    """The replies among the rows of a run, of its rollouts and of later grades."""
    entries = read_index(run).entries
    for folder in (ROLLOUTS, GRADES):
        columns = ("judgement", "grade_error")
        for part in part_tables(run, entries, phase=None, step=None, columns=columns, folder=folder):
            for row in part.to_pylist():
                said = row["judgement"]
                if said is not None and row["grade_error"] != "refused":
                    finish = "length" if row["grade_error"] == "cut_off" else "stop"
                    counts = (said["prompt_tokens"], said["reply_tokens"])
                    yield Reply(said["reply"], said["asked_sha256"], *counts, finish)
