"""A replay refuses what it cannot compute, names what differs, and knows its own rounding; the formulas worked by hand."""

import csv
import io
import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from checks import calls_into
from factories import a_rollout, an_episode
from marks import slow
from rlvr_cli.commands import grpo
from rlvr_cli.commands.store import check
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.store.check import CheckConfig
from rlvr_cli.data.traces import Traces
from rlvr_cli.errors import RlvrError
from rlvr_cli.replay import formulas
from rlvr_cli.replay.run import TOLERANCE, Replay, Update, _replay, allowing, replay_run, token_log_probs
from rlvr_cli.replay.sampling import broken_rule, log_prob_gaps
from rlvr_cli.replay.stored import Response, StoredRun, _trace, batches, read_stored
from rlvr_cli.runs import manifest
from rlvr_cli.runs.readers import metadata_bytes
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.traces import encode_traces
from rlvr_cli.types import Example, SampledIds, SamplingParams

pytestmark = pytest.mark.usefixtures("read_once")

GRADER = """
def grade(response, truth):
    return {"format_reward": 1.0, "answer_reward": 1.0, "reward": len(response) % 3 / 2}
"""


@pytest.fixture(scope="module")
def made(tiny_model_dir, tmp_path_factory) -> Path:
    """A run of two off-policy batches at a learning rate so large that rounding shows; it is not to be changed."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "mine.py").write_text(GRADER)
    (folder / "d.jsonl").write_text("".join(json.dumps({"question": f"{i}?", "answer": "7"}) + "\n" for i in range(9)))
    grpo.run(
        GrpoConfig(
            model=str(tiny_model_dir), dataset=str(folder / "d.jsonl"), prompt="question_only", grader=f"{folder / 'mine.py'}:grade",
            grader_workers=1, n_grpo_steps=2, rollout_batch_size=8, group_size=4, train_batch_size=4, gradient_accumulation_steps=2,
            sampling_max_tokens=8, learning_rate=3e-3, weight_decay=0.1, runs_dir=str(folder), run="made",
        )
    )  # fmt: skip
    return folder / "made"


@pytest.fixture
def run(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


def change(run: Path, **values) -> None:
    """Change options in run.json."""
    metadata = json.loads((run / "run.json").read_text())
    metadata["config"] |= values
    (run / "run.json").write_bytes(metadata_bytes(metadata))


def test_a_run_that_is_as_it_says(run, capsys):
    check.run(CheckConfig(runs=(str(run),), replay="1"))
    table = capsys.readouterr().out
    assert "\n     0 " in table
    assert "\n     1 " not in table
    assert "give the logged objective and gradient norm of its first 1 updates to 1e-6" in table
    check.run(CheckConfig(runs=(str(run),), replay="all"))
    assert "objective, gradient norm and weights to" in capsys.readouterr().out


@pytest.mark.parametrize("replayed", [slow("2"), "9"])
def test_what_a_replay_found_is_one_document(run, capsys, replayed):
    check.run(CheckConfig(runs=(str(run),), replay=replayed, format="json"))
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert [u["update"] for u in found["updates"]] == list(range(min(int(replayed), 4)))
    assert "the stored rollouts and options give" in found["result"][0]["verdict"]
    check.run(CheckConfig(runs=(str(run),), replay=replayed, format="csv"))
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["table"] for row in rows] == ["updates"] * len(found["updates"]) + ["result"]
    assert rows[-1]["verdict"] == found["result"][0]["verdict"]


def test_the_document_of_a_replay_says_what_is_wrong(run, capsys):
    change(run, learning_rate=2e-3)
    with pytest.raises(RlvrError, match="do not give what it logged"):
        check.run(CheckConfig(runs=(str(run),), replay="2", format="json"))
    found = json.loads(capsys.readouterr().out)
    assert "update 0 differs" in found["problems"][0]["problem"]
    assert (len(found["updates"]), found["result"]) == (2, [])
    part = next(iter((run / "rollouts").iterdir()))
    part.write_bytes(b"nothing")
    with pytest.raises(RlvrError, match="is not as it was committed"):
        check.run(CheckConfig(runs=(str(run),), replay="2", format="json"))
    damaged = json.loads(capsys.readouterr().out)
    assert str(part) in damaged["problems"][0]["problem"]
    assert (damaged["updates"], damaged["result"]) == ([], [])


@pytest.mark.slow  # by default as `rlvr check` says it, above
def test_rounding_alone_is_no_difference(run):
    found = replay_run(read_stored(run), most=None)
    assert found.problems == []
    assert [u.number for u in found.updates] == [0, 1, 2, 3]
    assert all(u.difference <= TOLERANCE for u in found.updates[:1])


def test_the_farthest_of_the_nudged_replays_counts():
    update = Update(0, 1.0, 1.001, 2.0, 2.0, difference=1e-3)
    replay = Replay([update], 1, {"the final model": 1e-3})
    near, far = (Replay([replace(update, objective=1.001 + d)], 1, {"1": d}) for d in (1e-6, 2e-4))
    assert len(allowing(replay, near).problems) == 2
    for first, second in ((near, far), (far, near)):
        assert allowing(allowing(replay, first), second).problems == []


def test_nudged_replays_differ(run):
    stored = read_stored(run)
    first, other, again = (_replay(stored, wanted=2, nudged_from={}, seed=seed).updates for seed in (0, 1, 0))
    assert first == again != other


@pytest.mark.slow
def test_steps_that_adamw_makes_of_rounding_are_no_difference(tmp_path):
    """Gradients that cancel leave rests of 1e-9, which the root of the second moment makes steps of a tenth of the rate."""
    options = {"n_grpo_steps": 3, "rollout_batch_size": 32, "group_size": 4, "train_batch_size": 32}
    options |= {"gradient_accumulation_steps": 8, "sampling_temperature": 0.8, "learning_rate": 2e-4}
    grpo.run(
        GrpoConfig(
            **options, dataset="arithmetic:64", sampling_max_tokens=32, eval_examples=8, run="r", runs_dir=str(tmp_path)
        )
    )
    assert replay_run(read_stored(tmp_path / "r"), most=None).problems == []


@pytest.mark.slow
def test_how_a_norm_is_summed_is_no_difference(tmp_path):
    """The norms are above 1, and float32 sums of their squares are 1e-6 too small; the replay's are float64."""
    options = {"n_grpo_steps": 2, "rollout_batch_size": 16, "group_size": 4, "train_batch_size": 8, "eval_examples": 4}
    options |= {"gradient_accumulation_steps": 2, "epochs_per_rollout_batch": 2, "std_normalization": "batch"}
    options |= {"eval_every": 0, "learning_rate": 2e-4, "sampling_max_tokens": 24, "dataset": "arithmetic:64"}
    grpo.run(GrpoConfig(**options, run="r", runs_dir=str(tmp_path)))
    found = replay_run(read_stored(tmp_path / "r"), most=None)
    assert max(u.norm or 0.0 for u in found.updates) > 1
    assert found.problems == []


@pytest.mark.parametrize(
    ("changed", "named", "most"),
    [
        slow({"weight_decay": 0.5}, "update 1 differs", 2),
        slow({"seed": 1}, "update 0 differs", 1),
        slow({"learning_rate": 1e-3}, "update 0 differs", 1),  # by default: its document, above
        slow({"max_grad_norm": 0.1}, "update 1 differs", 2),
        slow({"sampling_temperature": 0.9}, "policy 0 sampled differs", 1),
        ({"sampling_max_tokens": 7}, "but at most 7 were allowed", 1),
        slow(
            {"async_steps": 1, "importance_correction": "none"},
            "policy 2 sampled train rollouts of step 2, and policy 0",
            None,
        ),
    ],
)
def test_another_option_is_named(run, changed, named, most):
    change(run, **changed)
    problems = replay_run(read_stored(run), most=most).problems
    assert any(named in problem for problem in problems), problems


@pytest.mark.slow  # also of a document, above
def test_a_run_that_differs_is_an_error(run):
    change(run, seed=1)
    with pytest.raises(RlvrError, match="do not give what it logged"):
        check.run(CheckConfig(runs=(str(run),), replay="1"))


@pytest.mark.parametrize(("own", "end"), [(True, None), (True, 3), (False, None)])
def test_a_trace_has_the_tokens_that_training_gives_it(own, end, tiny_tokenizer):
    prompt, response = tiny_tokenizer("Q").input_ids, tiny_tokenizer(" 9, right").input_ids
    example = Example("a", "Q", "9", prompt="Q", response=" 9, right")
    sampled = {"a": SampledIds(prompt, response, [True] * (len(response) - 1) + [own])}
    traces = Traces("t", "", [example], None, [], sampled, {})
    prompts, responses, masks = encode_traces([example], sampled, tiny_tokenizer, append_eos=True, end=end)
    found = _trace(example, traces, tiny_tokenizer, append_eos=True, end=end)
    assert (found.prompt, found.tokens, found.learned) == (list(prompts[0]), list(responses[0]), masks[0])
    assert (responses[0][-1] == (end or tiny_tokenizer.eos_token_id)) == own
    ends = {"append_eos": True, "other_ends": response[-1:]}  # nothing comes after it
    assert list(encode_traces([example], sampled, tiny_tokenizer, **ends)[1][0]) == response
    assert _trace(example, traces, tiny_tokenizer, **ends).tokens == response


@pytest.mark.parametrize("last", [None, 3])
def test_a_trace_of_turns_has_the_tokens_that_training_gives_it(last, tiny_tokenizer):
    end, turns = tiny_tokenizer.eos_token, (("policy", " 4?"), ("environment", " no<eos>"), ("policy", " 9"))
    turns = tuple((role, text.replace("<eos>", end)) for role, text in turns)
    example = Example("a", "Q", "9", prompt="Q", response="".join(text for _, text in turns), turns=turns)
    prompt, longer = (tiny_tokenizer(text).input_ids for text in ("Q", " 4? and 9, right"))
    cut = len(tiny_tokenizer(" 4? and").input_ids)
    stopped = SampledIds(prompt, longer, [True] * len(longer), [(cut, 3), (len(longer), len(" 4? 9"))])
    plain = replace(example, response=" 4? 9", turns=None)
    for trace, sampled in ((example, {}), (plain, {"a": stopped})):
        ends = {"append_eos": True, "end": last}
        prompts, responses, masks = encode_traces([trace], sampled, tiny_tokenizer, **ends)
        found = _trace(trace, Traces("t", "", [trace], None, [], sampled, {}), tiny_tokenizer, **ends)
        assert (found.prompt, found.tokens, found.learned) == (list(prompts[0]), list(responses[0]), masks[0])
        assert found.tokens[-1] == (last or tiny_tokenizer.eos_token_id)
    assert found.tokens[:-1] == longer


@pytest.mark.slow
def test_other_weights_are_named(run, tiny_model_dir):
    shutil.copy(tiny_model_dir / "model.safetensors", run / "model/model.safetensors")
    problems = replay_run(read_stored(run), most=None).problems
    assert len(problems) == 1
    assert "the weights of the final model differ" in problems[0]


def test_what_cannot_be_replayed_is_refused(run, tmp_path):
    with pytest.raises(RlvrError, match="Give a whole number, or all"):
        CheckConfig(replay="some")
    change(run, loss_type="mine.py:loss")
    with pytest.raises(RlvrError, match="cannot be replayed: its loss is a function of your own"):
        read_stored(run)
    change(run, loss_type="no_baseline", model=str(tmp_path / "nothing"))
    with pytest.raises(RlvrError, match="its first weights are not here"):
        read_stored(run)
    change(run, model="")
    with pytest.raises(RlvrError, match="its first weights, of the built-in model, are not those"):
        read_stored(run)


def test_a_run_on_pairs_is_refused_by_the_right_name(tmp_path):
    """Those of an on-policy run are stored in it."""
    with RunDir.create(tmp_path, "dpo", name="r", metadata={"config": {"n_dpo_steps": 2}, "facts": {}}):
        pass
    with pytest.raises(RlvrError, match="it is a run of rlvr dpo, and the replay knows no pairs"):
        read_stored(tmp_path / "r")


def test_the_turns_of_episodes_have_their_rewards_from_there_on(tmp_path):
    """Two episodes, of a grader and of an environment that gives rewards; and what a group without differing sums is to dynamic sampling."""
    judged = [an_episode(2, 1, 1, 1, 1, reward=1.0), an_episode(1, 2, 2, reward=0.0)]
    given = [an_episode(1, 1, 1, turn_rewards=rewards) for rewards in ((0.0, 1.0), (1.0, None))]
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        rows = [(name, i, r) for name, group in (("a", judged), ("b", given)) for i, r in enumerate(group)]
        own = {"run_id": "r", "phase": "train"}
        run.commit_rollouts("train", 0, [replace(r, example_id=n, sample_index=i, **own) for n, i, r in rows])
    options = asdict(
        GrpoConfig(
            environment="calculator", credit="turn", group_size=2, use_std_normalization=False, dynamic_sampling=True
        )
    )
    stored = StoredRun(tmp_path / "r", "grpo", options, "auto", {}, [{}], {})
    (batch,) = batches(stored, None)
    assert [r.advantages for r in batch.responses] == [
        [0.5, 0.5, 0, 0.5, 0, 0], [-0.5, 0, 0, -0.5, -0.5], [0, 0, 0.5], [0, 0, -0.5],
    ]  # fmt: skip
    (batch,) = batches(replace(stored, options=options | {"credit": "episode"}), None)
    assert [r.advantages for r in batch.responses] == [[0.5] * 6, [-0.5] * 5]


def test_equal_terms_make_no_advantage_of_a_turn(tmp_path):
    episodes = [an_episode(1, 1, 1, turn_rewards=(first, 0.0), format_reward=0.1) for first in (1.0, 0.0)]
    own = {"run_id": "r", "phase": "train"}
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        run.commit_rollouts("train", 0, [replace(r, sample_index=i, **own) for i, r in enumerate(episodes)])
    options = asdict(
        GrpoConfig(environment="calculator", credit="turn", group_size=2, advantage_eps=0, format_weight=1.0)
    )
    (batch,) = batches(StoredRun(tmp_path / "r", "grpo", options, "auto", {}, [{}], {}), None)
    assert [r.advantages for r in batch.responses] == [[pytest.approx(sign * 0.5**0.5), 0, 0] for sign in (1, -1)]


def test_a_replay_reads_the_manifest_once(tmp_path):
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        for step in range(3):
            row = a_rollout(run_id="r", phase="train", step=step, reward=float(step))
            run.commit_rollouts("train", step, [row])
            run.commit_rollouts("train", step, [replace(row, sample_index=1, reward=3.0)])
    options = asdict(GrpoConfig(group_size=2, train_batch_size=2, use_std_normalization=False))
    with calls_into(manifest) as calls:
        found = [*batches(StoredRun(tmp_path / "r", "grpo", options, "auto", {}, [{}] * 3, {}), None)]
    assert [batch.responses[1].advantages[0] for batch in found] == [1.5, 1, 0.5]
    assert calls["parse_manifest"] == 1


def test_the_formulas_worked_by_hand():
    own = {"loss_type": "grpo_clip", "use_std_normalization": True, "std_normalization": None, "advantage_eps": 0.5}
    assert formulas.advantages([1.0, 0.0, 0.0], own) == pytest.approx(
        [v / (3**-0.5 + 0.5) for v in (2 / 3, -1 / 3, -1 / 3)]
    )
    assert formulas.advantages([0.3, 0.3], own) == [0.0, 0.0]
    for over, expected in (("none", [0.75, -0.25, -0.25, -0.25]), ("batch", [0.75, -0.25, -0.25, -0.25])):
        assert formulas.advantages([1.0, 0.0, 0.0, 0.0], own | {"std_normalization": over}) == expected
    centered = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]
    divided = [1.620185, *[-0.540062] * 3, *[0.540062] * 3, -1.620185]
    assert formulas.over_the_batch(centered, own | {"advantage_eps": 0.0}) == pytest.approx(divided, abs=6e-7)
    assert formulas.over_the_batch([0.0, 0.0], own | {"advantage_eps": 0.0}) == [0.0, 0.0]
    plain = {"format_weight": 0.0, "length_reward": 0.0, "length_reward_after": 0, "overlong": "none"}
    punished = plain | {"overlong": "soft_punish", "sampling_max_tokens": 10, "overlong_buffer": 4}

    def shaped(rewards, lengths, options, number=0):
        terms = formulas.reward_terms(rewards, lengths, [0.5] * len(rewards), options, number=number)
        return formulas.shaped_rewards(rewards, terms)

    assert shaped([1.0, 1.0, 1.0], [6, 7, 10], punished) == [1.0, 0.75, 0.0]
    assert shaped([1.0, 0.0], [6, 7], plain | {"format_weight": 0.5}) == [1.25, 0.25]
    short = plain | {"length_reward": 2.0, "length_reward_after": 3}
    assert shaped([1.0, 1.0, 0.0, 0.0], [10, 20, 40, 50], short, number=3) == [2.0, 1.5, -0.5, -1.0]
    assert shaped([1.0, 1.0, 0.0, 0.0], [10, 20, 40, 50], short, number=2) == [1.0, 1.0, 0.0, 0.0]
    assert shaped([0.0, 0.0], [10, 20], short, number=3) == [0.0, 0.0]
    assert formulas.divisors([2, 0, 3], normalization="token_mean", constant=7) == [5, 5, 5]
    assert formulas.divisors([2, 0, 3], normalization="masked_mean", constant=7) == [4, 0, 6]
    assert formulas.divisors([2, 0, 3], normalization="masked_normalize", constant=7) == [21, 21, 21]
    rates = {"learning_rate": 1.0, "warmup_steps": 2, "lr_schedule": "cosine"}
    assert [formulas.learning_rate(k, rates, num_updates=5) for k in range(6)] == pytest.approx(
        [0.5, 1, 1, 0.55, 0.1, 0.1]
    )
    new, old = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -1.0]).double()
    how = {
        "cliprange": 0.2,
        "cliprange_high": 0.3,
        "importance_correction": "truncated",
        "importance_cap": 1.5,
        "importance_floor": 0.0,
        "async_steps": 0,
        "kl_coef": 2.0,
        "kl_type": "k3",
        "cispo_cap": 1.2,
        "kimi_tau": 0.1,
    }

    def losses(**given):
        tensors = {"learned": torch.tensor([True, True]), "old": old, "sampled": old - 1, "reference": new + 1}
        return formulas.policy_gradient_loss(new, own | how | given, advantage=1.0, **tensors).tolist()

    k3, e = math.e - 2, math.e
    assert losses() == pytest.approx([-1.5 * 1.3 + 2 * k3, -1.5 / e + 2 * k3])
    assert losses(kl_type="k2") == pytest.approx([-1.5 * 1.3 + 1, -1.5 / e + 1])
    assert losses(kl_type="unbiased") == pytest.approx([-1.5 * 1.3 + 2 * k3 * e**0.5, -1.5 / e + 2 * k3 / e])
    assert losses(importance_correction="masked") == pytest.approx([2 * k3] * 2)
    assert losses(importance_correction="masked", importance_cap=3.0) == pytest.approx([-e * 1.3 + 2 * k3, -1 + 2 * k3])
    none = {"importance_correction": "none", "kl_coef": 0.0}
    assert losses(**none, loss_type="gspo") == pytest.approx([-math.exp(-0.25)] * 2)
    assert losses(**none, loss_type="cispo") == pytest.approx([1.2, 2 / e])
    assert sum(losses(**none, loss_type="kimi")) == pytest.approx(3 + 0.05 * 0.25)
    assert sum(losses(importance_correction="none", loss_type="kimi")) == pytest.approx(3 + 0.05 * 0.25 + 2 * k3)
    for given, expected in (((None, None), (3e-4, 4e-4)), ((0.1, None), (0.1, 0.1)), ((None, 0.2), (3e-4, 0.2))):
        ranges = dict(zip(("cliprange", "cliprange_high"), given, strict=True))
        assert formulas.clip_range(ranges, (3e-4, 4e-4)) == expected
    assert formulas.divisors([2, 0, 3], normalization="rows", constant=7) == [2, 2, 2]


def test_what_rounding_decides_at_the_border_of_the_clip_range_is_decided_the_other_way_in_a_nudged_replay():
    options = {
        "loss_type": "grpo_clip", "cliprange": 0.2, "cliprange_high": 0.3, "importance_correction": "none",
        "importance_floor": 0.0, "importance_cap": 2.0, "async_steps": 0,
    }  # fmt: skip
    ratios = [1.3 - 3e-6, 1.3 + 3e-6, 1.3 - 3e-5, 1.3 + 3e-5, 0.8 + 3e-6]

    def learned_from(*, nudged, advantage=1.0):
        new = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
        tensors = {"old": torch.zeros(5, dtype=torch.float64), "sampled": new.detach(), "reference": None}
        how = {"learned": torch.ones(5, dtype=torch.bool), "advantage": advantage, "nudged": nudged}
        formulas.policy_gradient_loss(new, options, **how, **tensors).sum().backward()
        return new.grad.ne(0).tolist()

    assert learned_from(nudged=False) == [True, False, True, False, True]
    assert learned_from(nudged=True) == [False, True, True, False, True]
    assert learned_from(nudged=False, advantage=-1.0)[-1]
    assert not learned_from(nudged=True, advantage=-1.0)[-1]


def test_sampled_log_probabilities_worked_by_hand():
    logits = (
        torch.tensor([[4.0, 2.0, 1.0, 0.0]] * 2).log().double().nan_to_num(neginf=-1e9)
    )  # probabilities 4/7, 2/7, 1/7, 0
    row = a_rollout(response_ids=(1, 1), sampled_logprobs=(math.log(2 / 3), math.log(2 / 6)))

    def gaps(row, **given):
        params = SamplingParams(**({"min_tokens": 0} | given))
        return log_prob_gaps(row, params, logits=logits.clone(), ends=(2,)).tolist()

    assert gaps(row, min_tokens=1, top_p=0.5)[0] == math.inf  # outside the nucleus, which is token 0 alone
    assert gaps(row, top_p=0.8)[1] == pytest.approx(0, abs=1e-6)  # 4/7 + 2/7: renormalized to 2/6
    barred = a_rollout(response_ids=(1, 1), sampled_logprobs=(math.log(2 / 6), math.log(2 / 7)))
    assert gaps(barred, min_tokens=1) == pytest.approx([0, 0], abs=1e-6)
    assert gaps(barred)[0] == pytest.approx(math.log(7 / 6), abs=1e-6)
    assert gaps(barred, temperature=0.0, min_tokens=1)[0] == pytest.approx(
        math.log(2), abs=1e-6
    )  # not the most probable
    flat = a_rollout(response_ids=(1,), sampled_logprobs=(math.log(2**0.5 / (4**0.5 + 2**0.5 + 1)),))
    assert gaps(flat, temperature=2.0)[0] == pytest.approx(0, abs=1e-4)
    masked = a_rollout(response_ids=(1, 1), sampled_logprobs=(math.log(2 / 7), 0.0), response_mask=(True, False))
    assert gaps(masked) == pytest.approx([0], abs=1e-6)


@pytest.mark.parametrize("given", [{}, {"temperature": 0.0}, {"top_p": 0.5}])
def test_a_response_without_tokens_has_no_log_probabilities(given):
    """Such as of an episode whose environment failed as it began."""
    row, logits = a_rollout(response_ids=(), sampled_logprobs=()), torch.zeros(0, 4, dtype=torch.float64)
    assert log_prob_gaps(row, SamplingParams(**given), logits=logits, ends=(2,)).shape == (0,)
    assert token_log_probs(logits, Response((1,), (), (), (), ())).shape == (0,)


def test_rules_of_sampling():
    params = SamplingParams(max_tokens=3, min_tokens=2, stop=("x",))
    row = {"num_response_tokens": 3, "finish_reason": "stop", "stop_reason": "x"}
    assert broken_rule(a_rollout(**row), params) is None
    assert broken_rule(a_rollout(**row | {"stop_reason": "eos"}), params) is None
    assert "no stop string" in (broken_rule(a_rollout(**row | {"stop_reason": "y"}), params) or "")
    assert "at most 3" in (broken_rule(a_rollout(**row | {"num_response_tokens": 4}), params) or "")
    assert "had to have 2" in (broken_rule(a_rollout(**row | {"num_response_tokens": 1}), params) or "")
    short = row | {"finish_reason": "length", "num_response_tokens": 2}
    assert "was cut after 2" in (broken_rule(a_rollout(**short), params) or "")
