"""`rlvr distill`: a student comes near its teacher, the plan says what is minimized, and a wrong teacher is refused.

That a run is what its options and rollouts give is in tests/replay/test_wiring.py.
"""

import json
import re
import shutil

import pytest

from endpoint import Reply, serving
from killed import metrics_of
from rlvr_cli.commands import distill
from rlvr_cli.config.distill import DistillConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.replay.stored import read_stored
from rlvr_cli.runs.readers import read_rollouts
from teachers import write_teacher
from vllm_server import vllm_servers


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tiny_model_dir):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "t", of=tiny_model_dir)


STEPS = 10


def options_of(model, teacher, folder, **given):
    shared = {
        "dataset": "arithmetic:8",
        "eval_dataset": "arithmetic:2",
        "eval_every": 0,
        "n_distill_steps": 2,
        "rollout_batch_size": 4,
        "group_size": 2,
        "sampling_max_tokens": 8,
        "grader_workers": 1,
        "run": "r",
    }
    return shared | {"model": str(model), "teacher": str(teacher), "runs_dir": str(folder)} | given


def trained(*where, **given):
    options = options_of(*where, **given)
    distill.run(resolve(DistillConfig, flags=options, command="distill"))
    return where[-1] / options["run"]


@pytest.fixture(scope="module")
def stepped(tiny_model_dir, teacher, tmp_path_factory):
    """A run of one step, which stays as it is."""
    return trained(tiny_model_dir, teacher, tmp_path_factory.mktemp("runs"), n_distill_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "sampled"])
def test_a_spoiled_student_comes_back_to_its_teacher(divergence, tmp_path):
    """The built-in model, with weights moved at random, from the model as it was; rewards are not used."""
    student = write_teacher(tmp_path / "student", of=builtin_model_path(), by=0.5)
    run = trained(
        student,
        builtin_model_path(),
        tmp_path,
        divergence=divergence,
        dataset="arithmetic:500",
        n_distill_steps=STEPS,
        rollout_batch_size=32,
        micro_batch_size=32,
        sampling_max_tokens=24,
        learning_rate=5e-4,
        checkpoint_every=0,
    )
    found = metrics_of(run)
    divergences = [found["train", step, "policy/divergence_mean"] for step in range(STEPS)]
    assert sum(divergences[-3:]) / 3 < divergences[0] / 3
    likelihoods = [found["train", step, "policy/teacher_log_prob_mean"] for step in range(STEPS)]
    assert likelihoods[-1] > likelihoods[0] + 0.3
    assert all(row["advantage"] is None for row in read_rollouts(run, columns=["advantage"]).to_pylist())


def test_the_plan_comes_before_anything_else(tiny_model_dir, teacher, tmp_path, capsys):
    trained(tiny_model_dir, teacher, tmp_path, dry_run=True, task_reward=0.5, sampling_top_p=0.9)
    said = capsys.readouterr().err
    assert f"teacher        {teacher}" in said
    assert "rollouts       2 batches of 2 questions x 2 samples" in said
    assert "updates        2 of 4 responses, one per batch: on-policy" in said
    assert "objective      (1/T) sum_i,t [KL(p_i,t || q_i,t) - 0.5 rho_i,t R_i];" in said
    assert "note: with --sampling-top-p below 1, responses are sampled from another distribution" in said
    assert ", teacher " in said.partition("memory")[2].partition("\n")[0]
    assert not (tmp_path / "r").exists()


def test_advantages_are_stored_where_they_count(tiny_model_dir, teacher, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def grade(response, truth):\n    r = float(len(response) % 2)\n"
        "    return {'format_reward': r, 'answer_reward': r, 'reward': r}\n"
    )
    grader = f"{tmp_path / 'mine.py'}:grade"
    sizes = {"n_distill_steps": 1, "rollout_batch_size": 16, "group_size": 4}
    run = trained(tiny_model_dir, teacher, tmp_path, task_reward=0.5, grader=grader, **sizes)
    rows = read_rollouts(run, phase="train", columns=["advantage", "reward", "example_id", "step"]).to_pylist()
    by_group = {}
    for row in rows:
        by_group.setdefault((row["step"], row["example_id"]), []).append(row)
    assert any(row["advantage"] for row in rows)
    for group in by_group.values():
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-6)
        assert len({(row["reward"], row["advantage"]) for row in group}) <= 2, "equal rewards, equal advantages"


def test_a_teacher_is_needed_and_must_be_there(tiny_model_dir, tmp_path):
    for teacher, problem in (("", "rlvr distill needs a teacher."), (tmp_path / "none", "There is no model directory")):
        with pytest.raises(RlvrError) as raised:
            trained(tiny_model_dir, teacher, tmp_path)
        assert raised.value.problem.startswith(problem)
        assert not (tmp_path / "r").exists()


def test_another_vocabulary_is_refused_before_anything_is_stored(tiny_model_dir, tmp_path):
    with pytest.raises(RlvrError, match="different vocabularies"):
        trained(tiny_model_dir, builtin_model_path(), tmp_path)
    assert not (tmp_path / "r").exists()


def test_options_that_do_not_go_together_are_refused(tiny_model_dir, teacher, tmp_path):
    for given, problem in (
        ({"sampling_temperature": 0.0}, "--sampling-temperature 0 is no distribution"),
        ({"task_reward": 0.5, "group_size": 1}, "With --group-size 1 every advantage is 0"),
        ({"group_size": 3}, "--rollout-batch-size 4"),
    ):
        with pytest.raises(RlvrError) as raised:
            DistillConfig(**options_of(tiny_model_dir, teacher, tmp_path, **given))
        assert raised.value.problem.startswith(problem), raised.value.problem


def test_prompts_must_fit_the_context_of_the_teacher(tiny_model_dir, teacher, tmp_path):
    small = tmp_path / "small"
    shutil.copytree(teacher, small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    with pytest.raises(RlvrError, match="the context holds 20"):
        trained(tiny_model_dir, small, tmp_path)
    with pytest.raises(RlvrError, match="with 500 for the response") as raised:  # the policy's context would hold it
        trained(tiny_model_dir, small, tmp_path, environment="calculator", max_episode_tokens=500, run="episodes")
    assert raised.value.hint.endswith("shorter responses: --max-episode-tokens.")


def test_a_token_that_the_teacher_lacks_is_named(tiny_model_dir, teacher, stepped, tmp_path):
    """The student's embedding has padding rows; untrained, it samples them too."""
    from rlvr_cli.models.load import load_policy

    policy = load_policy(tiny_model_dir, device="cpu")
    policy.model.resize_token_embeddings(640, mean_resizing=False)
    policy.save(tmp_path / "padded")
    with pytest.raises(RlvrError, match=r"The student sampled token \d+, and the teacher has 320 tokens"):
        trained(tmp_path / "padded", teacher, tmp_path)
    policy = load_policy(teacher, device="cpu")
    policy.model.resize_token_embeddings(640, mean_resizing=False)
    policy.save(tmp_path / "padded-teacher")
    padded = trained(tiny_model_dir, tmp_path / "padded-teacher", tmp_path, n_distill_steps=1, run="other")
    first, other = (read_stored(run).logged for run in (stepped, padded))
    for name in ("policy/divergence_mean", "optimizer/grad_norm"):
        assert other[0][name] == pytest.approx(first[0][name], rel=1e-5), "as if it had no other rows"


def test_another_teacher_is_not_the_one_of_the_run(tiny_model_dir, teacher, stepped, tmp_path):
    run = shutil.copytree(stepped, tmp_path / "r")

    def go_on(with_teacher):
        flags = {"resume": str(run), "teacher": str(with_teacher), "n_distill_steps": 2}
        distill.run(resolve(DistillConfig, flags=flags, command="distill"))

    with pytest.raises(RlvrError, match="r was made from other inputs: its teacher sha256 was"):
        go_on(write_teacher(tmp_path / "other", of=tiny_model_dir, by=0.2))
    go_on(shutil.copytree(teacher, tmp_path / "moved"))
    assert len(read_stored(run).logged) == 2


def test_a_replay_needs_the_teacher(tiny_model_dir, teacher, tmp_path):
    own = tmp_path / "teacher"
    shutil.copytree(teacher, own)
    run = trained(tiny_model_dir, own, tmp_path, n_distill_steps=1)
    assert read_stored(run).command == "distill"
    write_teacher(own, of=tiny_model_dir, by=0.2)
    with pytest.raises(RlvrError, match=r"its teacher's weights, .*, are not those that it started from \(sha256\)"):
        read_stored(run)


@pytest.mark.slow
def test_an_adapted_student_learns_and_its_base_stays(tiny_model_dir, teacher, tmp_path):
    run = trained(
        tiny_model_dir, teacher, tmp_path, lora_rank=4, learning_rate=5e-3, n_distill_steps=8, rollout_batch_size=16
    )
    logged = read_stored(run).logged
    assert logged[-1]["policy/divergence_mean"] < logged[0]["policy/divergence_mean"]
    assert (run / "model/adapter_config.json").is_file()


def test_the_teacher_has_the_precision_of_the_student(tiny_model_dir, teacher, tmp_path):
    """Rounded weights and products give other numbers, which the replay finds again."""
    from rlvr_cli.models.load import load_policy
    from rlvr_cli.training.parallel.ranks import Ranks
    from rlvr_cli.training.parallel.replica import Replica

    for given, dtype, compute_dtype in (
        ({"param_dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"compute_dtype": "bfloat16"}, "float32", "bfloat16"),
    ):
        config = DistillConfig(**options_of(tiny_model_dir, teacher, tmp_path, **given))
        found = Replica(config, device="cpu", ranks=Ranks()).teacher
        assert found is not None
        assert (str(found.dtype), str(found.compute_dtype)) == (f"torch.{dtype}", f"torch.{compute_dtype}")
        assert not any(p.requires_grad for p in found.model.parameters())
        same = load_policy(teacher, dtype=dtype, device="cpu").model.state_dict()
        assert all(tensor.equal(same[name]) for name, tensor in found.model.state_dict().items())


@pytest.mark.slow
def test_traces_of_a_teacher_behind_an_endpoint(forks, tmp_path):
    """Its thinking, given apart, is graded, filtered by the rules of R1, and learned."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")

    def answer(body):
        i = int(re.findall(r"(\d+) plus", body["messages"][0]["content"])[-1])
        thinking = ["twice the number", "twice the number", "两个数字", "twice\n```\nprint(2)\n```"][i % 4]
        said = f"<answer> {2 * i + (i % 4 == 1)} </answer>"
        message = {"role": "assistant", "content": said, "reasoning": f"\n{thinking} {i}\n"}
        choice = {"message": message, "finish_reason": "stop", "stop_reason": "</answer>"}
        return Reply({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 9}})

    rows = [{"question": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(16)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(answer) as endpoint:
        command = ["eval", "--model", "m", "--base-url", endpoint.url, "--endpoint", "chat", "--dataset", "q.jsonl"]
        done = forks.run(*command, "--run", "t", cwd=tmp_path, status=0)
    assert "The endpoint returns its thinking apart from the answer" in done.err
    rules = ["--correct-only", "--language", "en", "--max-paragraph-words", 50, "--without-code", "--dedup"]
    done = forks.run("filter", "t", *rules, "--out", "traces.jsonl", "--format", "json", cwd=tmp_path, status=0)
    stages = {stage["stage"]: (stage["kept"], stage["dropped"]) for stage in json.loads(done.out)}
    assert stages == {
        "source": (16, 0),
        "dedup": (16, 0),
        "correct": (12, 4),
        "language": (8, 4),
        "paragraphs": (8, 0),
        "code": (4, 4),
    }
    traces = [json.loads(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    assert {t["response"] for t in traces} == {
        f" twice the number {i} </think> <answer> {2 * i} </answer>" for i in range(0, 16, 4)
    }
    sampling = ["--sampling-max-tokens", 8, "--eval-dataset", "arithmetic:2", "--train-batch-size", 2]
    forks.run("sft", "--dataset", "traces.jsonl", *sampling, "--run", "s", cwd=tmp_path, status=0)
    nll = [value for (_, _, name), value in sorted(metrics_of(tmp_path / "runs/s").items()) if name == "loss/nll"]
    assert len(nll) == 2


def test_a_teacher_on_a_server_teaches_the_same(tmp_path, tiny_model_dir, teacher):
    """In episodes: what their environment says, it reads and does not teach."""
    says = "from rlvr_cli.environments import Reply\nclass Says:\n    stop = ('e', 'a', '1')\n    def begin(self, example, seed): pass\n"
    (tmp_path / "mine.py").write_text(f"{says}    def answer(self, turn): return Reply(' 12')\n")
    given = {
        "divergence": "sampled",
        "learning_rate": 1e-3,
        "environment": f"{tmp_path}/mine.py:Says",
        "environment_workers": 1,
    }
    here = trained(tiny_model_dir, teacher, tmp_path, **given)
    with vllm_servers(teacher, 1) as (server,):
        there = trained(tiny_model_dir, teacher, tmp_path, **given, teacher_url=server.url, run="there")
    for name in ("policy/divergence_mean", "policy/teacher_log_prob_mean", "loss/objective"):
        ours, theirs = (
            [v for (phase, _, n), v in metrics_of(run).items() if n == name and phase == "train"]
            for run in (here, there)
        )
        assert len(ours) == 2
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name
    assert any(row["turns"] for row in read_rollouts(there, phase="train").to_pylist())
    with pytest.raises(RlvrError, match="its teacher was on a server"):
        read_stored(there)


def test_prompts_must_fit_the_context_of_the_teachers_server(tiny_model_dir, teacher, tmp_path, capsys):
    """Before the first step; and with as much as the error asks for, the longest response is scored."""
    rows = [{"question": "7" * n, "answer": "7"} for n in (3, 40, 9)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with vllm_servers(teacher, 1) as (server,):
        given = {
            "dataset": f"{tmp_path}/q.jsonl",
            "divergence": "sampled",
            "rollout_batch_size": 6,
            "sampling_min_tokens": 8,
            "n_distill_steps": 1,
            "teacher_url": server.url,
        }

        def refused(context):
            server.context = context
            with pytest.raises(RlvrError, match=f"the teacher's server at {server.url} takes {context - 1}") as raised:
                trained(tiny_model_dir, teacher, tmp_path, **given, run=f"of-{context}")
            assert server.answered == 0
            assert "Question q-2 has a prompt of" in raised.value.problem, "the longest one"
            return int(re.findall(r"--max-model-len (\d+) or more", raised.value.hint)[0])

        needed = refused(20)
        assert refused(needed - 1) == needed
        server.context = needed
        run = trained(tiny_model_dir, teacher, tmp_path, **given)
        assert server.answered == 6
    assert {row["num_response_tokens"] for row in read_rollouts(run, phase="train").to_pylist()} == {8}


@pytest.mark.slow  # a fresh run by default
def test_a_run_goes_on_with_a_server_of_a_larger_context(tiny_model_dir, teacher, tmp_path, capsys):
    """Its options stay; an error asks for what it can have. Responses may all be shorter, so that it is only warned at first."""
    given = {"divergence": "sampled", "sampling_min_tokens": 8, "n_distill_steps": 1}
    with vllm_servers(teacher, 1) as (server,):
        run = trained(tiny_model_dir, teacher, tmp_path, **given, teacher_url=server.url)
        capsys.readouterr()
        more = {"resume": str(run), "teacher_url": server.url, "n_distill_steps": 2}
        server.context = 20
        with pytest.raises(RlvrError, match="takes 19") as raised:
            distill.run(resolve(DistillConfig, flags=more, command="distill"))
        assert raised.value.hint == "Start it with a larger --max-model-len."
        (needed,) = re.findall(
            r"warning: Question .* takes 19\. Start it with --max-model-len (\d+) or more\.", capsys.readouterr().err
        )
        server.context = int(needed)
        distill.run(resolve(DistillConfig, flags=more, command="distill"))
    assert len(read_rollouts(run, phase="train").to_pylist()) == 8


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"teacher_url": "http://a:8000"}, "needs the teacher's probabilities of all tokens"),
        ({"teacher_url": "http://a:8000", "divergence": "sampled", "sampling_temperature": 0.7}, "at temperature 1"),
        ({"teacher_url": "http://a:8000/v1", "divergence": "sampled"}, "--teacher-url is http://a:8000/v1"),
        ({"teacher_url": "a:8000", "divergence": "sampled"}, "--teacher-url is not the address"),
    ],
)
def test_a_server_cannot_teach_everything(tmp_path, tiny_model_dir, teacher, given, problem):
    with pytest.raises(RlvrError, match=problem):
        trained(tiny_model_dir, teacher, tmp_path, **given)


def test_an_address_is_no_teacher(tmp_path, tiny_model_dir):
    with pytest.raises(RlvrError, match="--teacher http://a:8000 is an address"):
        trained(tiny_model_dir, "http://a:8000", tmp_path)
