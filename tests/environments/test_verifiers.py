"""Environments of verifiers: what they ask and how they are answered, their questions, and runs with them."""

import json
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed")

from chat_models import write_chat_model
from checks import findings
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.packages.verifiers import load, text_of
from rlvr_cli.environments.open import EnvironmentSpec, check_environment, load_environment
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.errors import RlvrError
from rlvr_cli.replay.run import replay_run
from rlvr_cli.replay.stored import read_stored
from rlvr_cli.runs.readers import read_rollouts
from rlvr_cli.types import Example

pytestmark = [pytest.mark.extra("verifiers"), pytest.mark.usefixtures("forked")]

TOOL, GAME = "verifiers:rlvr-mine,kind=tool", "verifiers:rlvr-mine,kind=game"
COMMON = ["--model", "qwen3", "--chat", "--environment-workers", 1, "--sampling-max-tokens", 24]
COMMON += ["--sampling-min-tokens", 0, "--max-turns", 4, "--max-episode-tokens", 400, "--turn-timeout", 60]
GRPO = [
    "--n-grpo-steps",
    2,
    "--rollout-batch-size",
    8,
    "--group-size",
    4,
    "--train-batch-size",
    8,
    "--eval-examples",
    2,
]
GRPO += ["--gradient-accumulation-steps", 2, "--learning-rate", 1e-4, "--checkpoint-every", 1]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model to chat with. The environments, `rlvr_mine`, are beside the tests' other helpers."""
    folder = tmp_path_factory.mktemp("verifiers")
    write_chat_model(folder / "qwen3", "qwen3", likely=("<tool_call>", "</tool_call>", "<|im_end|>", "{", "}"))
    return folder


@pytest.fixture(scope="module")
def rlvr(place, forks):
    return lambda *arguments, status=0, **more: forks.run(*arguments, cwd=place, status=status, **more)


@pytest.fixture(scope="module")
def pools(place):
    made = {
        name: EnvironmentPool(EnvironmentSpec(spec, chat=True), workers=1, timeout=20)
        for name, spec in {"one": "verifiers:rlvr-mine", "tool": TOOL, "game": GAME}.items()
    }
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="module")
def question(place) -> Example:
    return load_dataset("verifiers:rlvr-mine", split="train", limit=1).examples[0]


def turn(text: str, *calls: dict) -> str:
    return json.dumps({"text": text, "calls": calls})


def test_questions_are_the_environments_rows(place):
    training = load_dataset("verifiers:rlvr-mine,step=3,size=5", purpose="train")
    assert [e.question for e in training.examples] == [f"Double {n}." for n in range(1, 6)]
    assert [e.id for e in training.examples][:2] == ["rlvr-mine-train-1", "rlvr-mine-train-2"]
    row = json.loads(training.examples[1].ground_truth)
    system = {"role": "system", "content": "Be brief."}
    assert row["prompt"] == [system, {"role": "user", "content": "Double 2."}]
    assert (row["answer"], row["info"]) == ("6", {"n": 2})
    few = load_dataset(f"{TOOL},num=2,size=3")
    assert len(few.examples) == 2
    assert few.notes == ["rlvr-mine has no questions for evaluations: these are the ones it trains on."]
    assert few.too_few == f"{TOOL},num=2,size=3 has only 2 of the 3 examples asked for."


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("verifiers:no-such-thing", "verifiers cannot load no-such-thing: .*installed"),
        ("verifiers:rlvr-mine,kind=broken", "verifiers cannot load rlvr-mine: .*out of order"),
        ("verifiers:rlvr-mine,grouped=true", "rewards of a whole group"),
        ("verifiers:rlvr-mine,kind=other_tools", "a group of environments with different tools"),
        ("verifiers:rlvr-mine,kind=unscored", "score_rollouts=False: each reward would be 0"),
        ("verifiers:rlvr-mine,kind=game,tokens=9", "ends a rollout by max_total_completion_tokens"),
    ],
)
def test_what_cannot_be_loaded_is_said(place, spec, problem):
    with pytest.raises(RlvrError, match=problem):
        load_dataset(spec)
    with (
        closing(EnvironmentPool(EnvironmentSpec(spec, chat=True), workers=1)) as pool,
        pytest.raises(RlvrError, match=problem),
    ):
        pool.begins  # noqa: B018  # it starts a process


def test_what_does_not_go_together_is_refused():
    for spec, problem in {
        EnvironmentSpec("verifiers:a"): "Add --chat",
        EnvironmentSpec("verifiers:a,path=b.py"): "Add --chat",
        EnvironmentSpec("verifiers:a,size=3", chat=True): "size, which is for --dataset",
        EnvironmentSpec("verifiers:a", ("x.py:f",), chat=True): "--tool does not go",
    }.items():
        with pytest.raises(RlvrError) as found:
            check_environment(spec)
        assert problem in f"{found.value.problem} {found.value.hint}"


def test_one_turn_is_judged_by_the_rubric(pools, question):
    pool = pools["one"]
    assert (pool.gives_rewards, pool.begins, pool.stop, pool.schemas) == (True, True, (), [])
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Double 1."}]
    assert pool.begin(question, 1).result().prompt == prompt
    found = pool.answer(question, 1, [turn("It is 2.")]).result().reply
    assert (found.done, found.reward) == (True, pytest.approx(1 + 0.1 * 8 / 40))
    measured = found.measured or {}
    assert (measured["right"], measured["longer"]) == pytest.approx(
        (1.0, 8 / 40)
    )  # of each function, without its weight
    assert pool.answer(question, 2, [turn("?")]).result().reply.reward == pytest.approx(0.25 + 0.1 / 40)


def test_a_question_of_another_dataset_gets_the_environments_system_prompt(pools):
    other = Example("x", "Double 7.", "14")
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Double 7."}]
    assert pools["one"].begin(other, 1).result().prompt == prompt
    assert pools["game"].answer(other, 1, [turn("a")]).result().reply.calls[0].role == "environment"


def test_a_prompt_with_calls_of_tools_is_refused(pools, question):
    call = {"id": "a", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = [asked, {"role": "tool", "content": "99", "tool_call_id": "a"}, {"role": "user", "content": "And?"}]
    shown = Example("x", "And?", json.dumps(json.loads(question.ground_truth) | {"prompt": prompt}))
    assert "the prompt holds tool calls, which are not shown" in pools["one"].begin(shown, 1).result().detail


def test_a_tool_answers_its_calls_and_a_turn_without_one_ends(pools, question):
    pool = pools["tool"]
    (schema,) = pool.schemas
    assert (schema["type"], schema["function"]["name"]) == ("function", "lookup")
    assert schema["function"]["parameters"]["required"] == ["key"]
    pool.begin(question, 1).result()
    calls = [
        {"name": "lookup", "arguments": {"key": "moon"}},
        {"name": "nothing", "arguments": {}},
        {"name": "lookup", "problem": "no JSON"},
        {"name": "lookup", "arguments": {"key": "sun"}},
    ]
    first = turn("Let me see.", *calls)
    replies = pool.answer(question, 1, [first]).result().reply.calls
    assert [reply.role for reply in replies] == ["lookup", "tool", "lookup", "lookup"]
    assert replies[0].text == "1738"
    assert [reply.error for reply in replies] == [
        None,
        "there is no tool nothing",
        "no JSON",
        "'sun'",
    ]
    last = pool.answer(question, 1, [first, turn("2")]).result().reply
    assert (last.done, last.reward) == (True, pytest.approx(1 + 0.1 / 40))


@pytest.fixture
def made():
    """Returns what makes an environment of this kind in this process, for an episode after the other."""
    with ExitStack() as loops:

        def make(kind):
            new = load_environment(EnvironmentSpec(f"verifiers:rlvr-mine,kind={kind}", chat=True))
            loops.callback(new()._loop.close)
            return new

        yield make


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("raises", "the reward function judged raised OSError: no judge answers"),
        ("none", "the reward function nothing raised TypeError"),
    ],
)
def test_a_reward_function_that_raises_fails_the_episode(made, question, kind, problem):
    """For verifiers it is a reward of 0."""
    playing = made(kind)()
    playing.begin(question, 1)
    with pytest.raises(RuntimeError, match=problem):
        playing.answer(turn("It is 2."))


def test_the_environments_of_a_group_have_the_same_tools(made, question):
    playing = made("same_tools")()
    assert [schema["function"]["name"] for schema in playing.schemas] == ["lookup"]
    row = json.loads(question.ground_truth)
    routed = Example("x", "Double 1.", json.dumps(row | {"info": row["info"] | {"env_id": "env_1"}}))
    playing.begin(routed, 1)
    (reply,) = playing.answer(turn("", {"name": "lookup", "arguments": {"key": "moon"}})).calls
    assert (reply.role, reply.text, reply.error) == ("lookup", "1738", None)
    playing.give_up()


@pytest.mark.parametrize(("kind", "own"), [("own_tools", "peek"), ("late_tools", "lookup, repeat")])
def test_tools_that_the_policy_is_not_told_of_fail_the_episode(made, kind, own):
    row = load_dataset(f"verifiers:rlvr-mine,kind={kind}", split="train", limit=1).examples[0]
    new = made(kind)
    for _ in range(2):  # also where the environment keeps them from an episode before
        with pytest.raises(RuntimeError, match=f"tools of its own for this row: {own}.*; the policy is told of lookup"):
            new().begin(row, 1)


def test_episodes_of_one_process_go_on_side_by_side_and_are_played_again(pools, question):
    pool = pools["game"]
    for seed in (1, 2):
        pool.begin(question, seed).result()
    said = {seed: pool.answer(question, seed, [turn("a")]).result().reply.calls[0].text for seed in (1, 2)}
    more = {seed: pool.answer(question, seed, [turn("a"), turn("b")]).result().reply.calls[0].text for seed in (2, 1)}
    assert said[1] != said[2]
    for seed in (1, 2):
        assert said[seed].split()[0] == more[seed].split()[0]  # the secret of an episode
        again = pool.play_again(question, seed, [turn("a"), turn("b")]).result()
        assert [reply.calls[0].text for reply in again.replies] == [said[seed], more[seed]]


def test_a_time_limit_of_the_environments_own_does_not_count_while_the_policy_samples(pools, question):
    pool = pools["game"]
    for seed in (1, 2):
        assert pool.begin(question, seed).result().error is None
    time.sleep(0.1)
    for seed in (1, 2):
        reply = pool.answer(question, seed, [turn("a")]).result().reply
        assert reply is not None
        assert not reply.done
    assert [one.timeout_seconds for one in load("verifiers:rlvr-mine,kind=group").envs] == [None]


def test_the_rollout_of_an_episode_that_has_ended_ends(place, question):
    with closing(EnvironmentPool(EnvironmentSpec(GAME, chat=True), workers=1)) as pool:
        for seed in (1, 2, 3):
            assert pool.begin(question, seed).result().error is None
        asked = turn("rollouts")
        before = pool.answer(question, 1, [asked]).result().reply.calls[0].text
        pool.end(2)
        after = pool.answer(question, 1, [asked, asked]).result().reply.calls[0].text
        assert int(before) - int(after) == 1


def test_an_episode_that_fails_or_hangs_costs_itself(place, question):
    with closing(EnvironmentPool(EnvironmentSpec(GAME, chat=True), workers=1, timeout=3)) as pool:
        pool.begins  # noqa: B018  # it starts a process
        for seed in (1, 2, 3):
            pool.begin(question, seed).result()
        failed = pool.answer(question, 1, [turn("fail")]).result()
        assert (failed.error, failed.detail) == ("ValueError", "a game that fails")
        hung = pool.answer(question, 2, [turn("hang")]).result()
        assert hung.error == "timeout"
        found = pool.answer(question, 3, [turn("found 2")]).result().reply
        assert found is not None
        assert found.done


def test_text_is_all_that_a_message_holds():
    assert text_of(None) == ""
    assert text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    with pytest.raises(TypeError, match="something else than text"):
        text_of([{"type": "image_url", "image_url": {}}])


def test_a_version_without_such_environments_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "verifiers-0.4.0.dist-info").mkdir()
    (tmp_path / "verifiers-0.4.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: verifiers\nVersion: 0.4.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for use in (lambda: check_environment(EnvironmentSpec(GAME, chat=True)), lambda: load_dataset(GAME)):
        with pytest.raises(
            RlvrError, match=r"verifiers 0\.4\.0 is installed, and episodes are played with .* verifiers 0\.3"
        ):
            use()


def rows_of(run: Path) -> list[dict]:
    rows = read_rollouts(run).to_pylist()
    assert rows
    return rows


def test_eval_of_one_turn(place, rlvr):
    spec = "verifiers:rlvr-mine"
    given = ["--dataset", f"{spec},size=3", "--environment", spec, "--num-samples", 2, "--run", "one"]
    assert "3 questions; rewards of the environment" in rlvr("eval", *COMMON, *given).err
    rows = rows_of(place / "runs/one")
    assert len(rows) == 6
    assert findings(place / "runs/one") == []
    for row in rows:
        ended = row["episode"]["ended_by"]
        assert ended in ("environment", "length")
        assert (row["reward"] >= 0.25) == (ended == "environment")
        assert "Be brief." in row["prompt"]
    assert any(row["episode"]["ended_by"] == "environment" for row in rows)


@pytest.mark.parametrize(
    "command", ["eval --dataset verifiers:rlvr-mine", "grpo --dataset arithmetic --eval-dataset verifiers:rlvr-mine"]
)
def test_questions_without_their_environment_are_refused(rlvr, command):
    done = rlvr(*command.split(), *COMMON[:3], "--dry-run", status=2)
    assert "The questions of verifiers are graded by their environment alone." in done.err


@pytest.mark.slow
def test_training_with_a_tool_replays_and_resumes(place, rlvr, monkeypatch):
    monkeypatch.chdir(place)
    arguments = ["grpo", *COMMON, *GRPO, "--dataset", TOOL, "--environment", TOOL]
    rlvr(*arguments, "--run", "g")
    assert findings(place / "runs/g") == []
    assert replay_run(read_stored(place / "runs/g"), most=None).problems == []
    rows = rows_of(place / "runs/g")
    assert all('"name": "lookup"' in row["prompt"] for row in rows)
    assert any(row["episode"]["tool_calls"] for row in rows)
    assert any(row["episode"]["ended_by"] == "environment" and row["reward"] >= 0.25 for row in rows)
    rlvr(*arguments, "--run", "cut", fault="update:2", status=-signal.SIGKILL)
    rlvr("grpo", "--resume", "cut")
    assert [row["response_ids"] for row in rows_of(place / "runs/cut")] == [row["response_ids"] for row in rows]


# Questions of a file: then the environment alone imports the library, in each of its processes.
STEP = ["--rollout-batch-size", 8, "--train-batch-size", 8]
COMMANDS = {
    "ei": ["--ei-batch-size", 2, "--group-size", 4, "--n-ei-steps", 1, "--train-batch-size", 4],
    "ppo": [*STEP, "--n-ppo-steps", 1, "--micro-batch-size", 8],
    "distill": [*STEP[:2], "--n-distill-steps", 1, "--teacher", "qwen3"],
    "dpo": [*STEP, "--group-size", 4, "--n-dpo-steps", 1],
}
APART = {name: ["--n-grpo-steps", 1, *GRPO[2:], f"--{name}", 2] for name in ("samplers", "trainers")}
APART["async-steps"] = [*GRPO, "--async-steps", 1]


@pytest.fixture(scope="module")
def files(place) -> list:
    lines = [json.dumps({"question": f"Double {n}.", "answer": str(2 * n)}) for n in range(1, 17)]
    (place / "questions.jsonl").write_text("\n".join(lines[:8]))
    (place / "held-out.jsonl").write_text("\n".join(lines[8:]))
    return [
        "--dataset",
        "questions.jsonl",
        "--eval-dataset",
        "held-out.jsonl",
        "--environment",
        "verifiers:rlvr-mine,wrong=0.75",
    ]


def check_trained(run: Path) -> list[dict]:
    """What every run of training with these episodes has: rows that fit, judged by the rubric alone."""
    assert findings(run) == []
    rows = rows_of(run)
    for row in rows:
        judged = row["episode"]["ended_by"] == "environment"
        assert row["grader"] == "environment"
        assert (row["reward"] >= 0.75) == judged
        assert {measured["name"] for measured in row["measured"] or ()} >= ({"right", "longer"} if judged else set())
    assert any(row["reward"] for row in rows if row["phase"] == "train")
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_samples_plays_them(place, rlvr, files, command):
    given = [*COMMON, *files, *COMMANDS[command], "--learning-rate", 1e-4, "--eval-examples", 2]
    rlvr(command, *given, "--run", command)
    check_trained(place / "runs" / command)


@pytest.mark.slow
@pytest.mark.parametrize("apart", APART)
def test_processes_apart_play_them(place, rlvr, files, apart):
    rlvr("grpo", *COMMON, *files, *APART[apart], "--run", apart)
    rows = check_trained(place / "runs" / apart)
    if apart == "async-steps":
        assert {row["step"]: row["policy_version"] for row in rows if row["phase"] == "train"} == {0: 0, 1: 0}


@pytest.mark.slow
def test_the_arms_of_a_sweep_play_them(place, rlvr, files):
    given = [*COMMON, *files, "--n-grpo-steps", 1, *GRPO[2:]]
    rlvr("sweep", "grpo_baselines", "--seeds", "0", "--vary", "loss_type=no_baseline", *given)
    check_trained(place / "runs/grpo_baselines/no_baseline-s0")
