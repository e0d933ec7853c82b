"""A judge and a policy in a real vLLM server: what it writes is graded, counted and asked once, and what has no score gives no reward."""

import json
import urllib.request

import pytest
from transformers import AutoTokenizer

from checks import findings
from forks import Forks
from judging import write_rubric
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.judges.rubric import PAIRWISE, read_rubric
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.runs.readers import read_rollouts, read_run
from vllm_server import real_servers

pytestmark = [
    pytest.mark.vllm,
]

BASE = str(builtin_model_path())
ALONE = "scale: 1-10\nIs this right? {question} <r>{response}</r>\nScore:"
BESIDE = "scale: A/B/tie\nWhich one? <r>{response_a}</r> <r>{response_b}</r>\nWinner:"
SAYS = {"rubric.md": " so.\n8", "pairs.md": " so.\nA"}  # what the judge is taught to say
FEW = ("--dataset", "arithmetic:6", "--num-samples", 4, "--sampling-max-tokens", 20, "--model", BASE)


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks: Forks):
    """A folder with rubrics and a judge that was taught to answer them, and the address of a server of policy and judge."""
    folder = tmp_path_factory.mktemp("judge")
    rubrics = {
        "rubric.md": read_rubric(str(write_rubric(folder, ALONE))),
        "pairs.md": read_rubric(str(write_rubric(folder, BESIDE, "pairs.md")), placeholders=PAIRWISE),
    }
    texts = [f" it looks like {i} </think> <answer> {i} </answer>" for i in range(0, 40, 5)]
    rows = [
        {
            "prompt": rubric.fill({"question": f"{i} + {i}?", "response": a, "response_a": a, "response_b": texts[-i]}),
            "response": SAYS[name],
        }
        for name, rubric in rubrics.items()
        for i, a in enumerate(texts)
    ]
    (folder / "taught.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    forks.run(
        *("sft", "--dataset", "taught.jsonl", "--lora-rank", 8, "--learning-rate", "1e-2", "--sft-epochs", 40),
        *("--train-batch-size", 8, "--micro-batch-size", 8, "--eval-dataset", "arithmetic", "--eval-examples", 1),
        *("--sampling-max-tokens", 4, "--eval-every", 0, "--run", "taught"), cwd=folder, status=0,
    )  # fmt: skip
    (folder / "plain.jinja").write_text("{{ messages[0]['content'] }}")
    flags = ("--chat-template", str(folder / "plain.jinja"), "--enable-lora", "--max-lora-rank", "8")
    with real_servers(forks, folder) as start:
        ((url, _),) = start(1, *flags, "--lora-modules", f"judge={folder / 'runs/taught/model'}")
        yield folder, f"{url}/v1"


COUNTERS = {
    "asked": "vllm:request_success_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "reply_tokens": "vllm:generation_tokens_total",
}


def counted(url: str) -> dict[str, float]:
    """What the server itself has counted since it started."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as page:
        lines = page.read().decode().splitlines()
    return {
        name: sum(float(line.split()[-1]) for line in lines if line.startswith(counter + "{"))
        for name, counter in COUNTERS.items()
    }


@pytest.fixture
def judged(forks: Forks, place):
    """Calls `rlvr` with a model of the server as the judge; returns what it said, and what the server counted meanwhile."""
    folder, url = place

    def call(*arguments, model="judge", status=0):
        before = counted(url)
        asking = ("--judge-url", url, "--judge-model", model, "--judge-max-tokens", 12)
        done = forks.run(*arguments, *asking, cwd=folder, status=status)
        return done, {name: value - before[name] for name, value in counted(url).items()}

    return call


def price(run, table: str = "rollouts") -> dict[str, float]:
    """What the rows say that was paid."""
    with open_runs([read_run(run)]) as database:
        table = database.select(
            "SELECT count(*) AS asked, sum(judgement.prompt_tokens) AS prompt_tokens, "
            f"sum(judgement.reply_tokens) AS reply_tokens FROM {table} WHERE NOT judgement.cached"
        )
        return next(table.records())


def test_vllm_grades_what_vllm_has_sampled(judged, place):
    folder, url = place
    rubric, tokenizer = read_rubric(str(folder / "rubric.md")), AutoTokenizer.from_pretrained(BASE)
    judged("eval", *FEW, "--base-url", url, "--grader", "judge:rubric.md", "--run", "graded")
    rows = read_rollouts(folder / "runs/graded").to_pylist()
    questions = {e.id: e.question for e in load_dataset("arithmetic:6").examples}
    texts = [rubric.fill({"question": questions[r["example_id"]], "response": r["response"]}) for r in rows]
    assert len(rows) == 24
    for text, row in zip(texts, rows, strict=True):
        said = row["judgement"]
        graded = said["reply"].splitlines()[-1].strip() == "8" and row["grade_error"] != "cut_off"
        assert row["reward"] == (pytest.approx(7 / 9) if graded else None)
        assert (said["score"], said["model"]) == ("8" if graded else None, "judge")
        assert said["prompt_tokens"] == len(tokenizer(text).input_ids)
        assert 0 < said["reply_tokens"] <= 12
    assert sum(row["reward"] is not None for row in rows) > 6
    assert sum(not row["judgement"]["cached"] for row in rows) == len(set(texts)) < 24
    assert findings(folder / "runs/graded") == []

    # A model that was not taught to: no reward at all, and never 0.
    done, meanwhile = judged("grade", "graded", "--grader", "judge:rubric.md", model=BASE, status=1)
    with open_runs([read_run(folder / "runs/graded")]) as database:
        found = database.select("SELECT reward, failure_kind, judgement.reply FROM grades").rows
    assert len(found) == 24
    assert {reward for reward, _, _ in found} == {None}
    assert {kind for _, kind, _ in found} <= {"judge_no_score", "judge_cut_off", "judge_out_of_scale"}
    assert all(reply for _, _, reply in found)
    assert price(folder / "runs/graded", "grades") == meanwhile
    assert meanwhile["asked"] == len(set(texts))
    assert "Not one of the 24 responses could be graded" in done.err
    assert f"{len(set(texts))} texts asked, {24 - len(set(texts))} known" in done.err


def test_vllm_compares_what_vllm_has_sampled(forks: Forks, judged, place):
    folder, url = place
    for name, seed in (("one", 1), ("two", 2)):
        forks.run("eval", *FEW, "--base-url", url, "--seed", seed, "--run", name, cwd=folder, status=0)
    done, meanwhile = judged("pairwise", "one", "two", "--rubric", "pairs.md", "--run", "both", "--format", "json")
    (table,) = json.loads(done.out)
    rows = read_rollouts(folder / "runs/both").to_pylist()
    assert len(rows) == 48
    for row in rows:
        first_is_a = row["sample_index"] % 2 == 0
        score = row["judgement"]["score"]
        wins = {"a": float(first_is_a), "b": float(not first_is_a), "tie": 0.5, None: None}
        assert row["reward"] == wins[score]
        assert (score is None) == (row["judgement"]["reply"].splitlines()[-1].strip() not in ("A", "B", "tie"))
    pairs = [[row["reward"] for row in rows[i : i + 2]] for i in range(0, 48, 2)]
    whole = [pair for pair in pairs if None not in pair]
    assert 0 < len(whole) == table["pairs"] == 24 - table["left_out"]
    assert table["a_wins"] == pytest.approx(sum(map(sum, whole)) / (2 * len(whole)))
    assert price(folder / "runs/both") == meanwhile
    assert findings(folder / "runs/both") == []
