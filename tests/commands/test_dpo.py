"""`rlvr dpo`: a run is what its options and pairs give, computed again by a plain loop; and it raises held-out reward."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from factories import a_rollout
from marks import slow
from rlvr_cli.commands import dpo
from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.order import batches, next_indices
from rlvr_cli.data.pairs import load_pairs, pair_up
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import trained_adapter
from rlvr_cli.runs.readers import fact_of, read_metadata, read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.optimizers.optimizer import learning_rate_at

BETAS = {"dpo": 0.1, "dpo_norm": 5.0, "simpo": 2.0}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, tiny_tokenizer) -> Path:
    """Eleven pairs; three have sampled ids that their text does not tokenize to."""
    rows = []
    for i in range(11):
        row = {
            "prompt": f"{i} and {i}?",
            "chosen": f" it is {2 * i}" + "!" * (i % 3),
            "rejected": f" {3 * i + 1}, I think",
        }
        if i % 4 == 1:
            row["prompt_ids"] = tiny_tokenizer(row["prompt"]).input_ids
            row |= {
                f"{name}_ids": [j for letter in row[name] for j in tiny_tokenizer(letter).input_ids]
                for name in ("chosen", "rejected")
            }
            assert row["chosen_ids"] != tiny_tokenizer(row["chosen"]).input_ids
        rows.append(row)
    path = tmp_path_factory.mktemp("pairs") / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options_of(pairs, model, folder, **given):
    shared = {
        "warmup_steps": 0,
        "learning_rate": 1e-4,
        "train_batch_size": 4,
        "eval_dataset": "",
        "checkpoint_every": 0,
    }
    return shared | {"dataset": str(pairs), "model": str(model), "runs_dir": str(folder), "run": "r"} | given


def trained(pairs, model, folder, **given) -> Path:
    options = options_of(pairs, model, folder, **given)
    dpo.run(DpoConfig(**options))
    return folder / options["run"]


OWN = """
import torch.nn.functional as F

def dpo_norm(pairs):
    of_chosen = (pairs.chosen - pairs.reference_chosen) / pairs.chosen_tokens
    of_rejected = (pairs.rejected - pairs.reference_rejected) / pairs.rejected_tokens
    return -F.logsigmoid(5.0 * (of_chosen - of_rejected)), {"large": of_chosen.detach() > 0.5}

def wrong_shape(pairs):
    return pairs.chosen.sum()

def not_differentiable(pairs):
    return pairs.chosen.detach()

def taken(pairs):
    return -pairs.chosen, {"margin": pairs.chosen}

def raises(pairs):
    return 1 / 0
"""


def test_a_loss_of_ones_own_trains_as_the_built_in_one_of_its_formula(pairs, tiny_model_dir, tmp_path):
    more = {"micro_batch_size": 1}
    (tmp_path / "own.py").write_text(OWN)
    spec = f"{tmp_path / 'own.py'}:dpo_norm"
    own = trained(pairs, tiny_model_dir, tmp_path / "own", loss_type=spec, **more)
    built_in = trained(pairs, tiny_model_dir, tmp_path / "built-in", loss_type="dpo_norm", **more)
    weights = [load_file(run / "model" / "model.safetensors") for run in (own, built_in)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=0, atol=1e-6)
    losses = [metrics_of(run)["loss/objective"] for run in (own, built_in)]
    assert losses[0] == pytest.approx(losses[1], abs=5e-6)  # two ways to write it round differently
    assert len(metrics_of(own)["policy/large_mean"]) == len(losses[0])
    assert metrics_of(own)["policy/accuracy_mean"][0] == 0.0, "before the first update every margin is 0"
    facts = read_run(own).metadata["facts"]["loss"]
    assert facts["name"] == spec
    assert len(facts["sha256"]) == 64


@pytest.mark.parametrize(
    ("function", "more", "problem"),
    [
        ("wrong_shape", {}, r"the loss has shape \(\), where \(pairs,\) is \(3,\)"),
        ("not_differentiable", {}, "does not depend on the policy's log-probabilities"),
        ("taken", {}, "rlvr itself has a statistic margin"),
        ("raises", {}, r"own.py:\d+: the loss raised ZeroDivisionError"),
        ("none", {}, "defines no function none"),
        ("dpo_norm", {"beta": 0.2}, "--beta 0.2 is of the built-in losses"),
        ("dpo_norm", {"nll_coef": 0.2}, "--nll-coef 0.2 is of the built-in losses"),
        ("dpo_norm", {"gamma": 0.2}, "--gamma 0.2 is of simpo"),
    ],
)
def test_a_loss_of_ones_own_is_tried_before_anything(pairs, tiny_model_dir, tmp_path, function, more, problem):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(RlvrError, match=problem):
        trained(pairs, tiny_model_dir, tmp_path / "runs", loss_type=f"{tmp_path / 'own.py'}:{function}", **more)
    assert not (tmp_path / "runs").exists()


def metrics_of(run) -> dict[str, list[float]]:
    """Name -> its values, by update."""
    import pyarrow.parquet as pq

    rows = sorted(pq.read_table(read_run(run).path / "metrics.parquet").to_pylist(), key=lambda r: r["step"])
    return {name: [r["value"] for r in rows if r["name"] == name] for name in {r["name"] for r in rows}}


def replayed(pairs, model, tokenizer, **given):
    """The weights after the same updates by the definitions, one response at a time, and the loss of each update."""
    own = DpoConfig(**options_of(pairs, model, Path(), **given))
    beta = own.beta if own.beta is not None else BETAS[own.loss_type]
    gamma = 0.0 if own.loss_type != "simpo" else beta / 2 if own.gamma is None else own.gamma
    end = [tokenizer.eos_token_id] * own.append_eos
    data = []
    for row in map(json.loads, pairs.read_text().splitlines()):
        prompt = tokenizer(row["prompt"]).input_ids
        data.append(
            [(prompt, row.get(f"{n}_ids") or [*tokenizer(row[n]).input_ids, *end]) for n in ("chosen", "rejected")]
        )
    policy = load_policy(model).model

    def log_prob(prompt, response):
        ids = torch.tensor([[*prompt, *response]])
        of_next = policy(ids).logits[0, :-1].double().log_softmax(-1)
        return of_next[torch.arange(len(prompt) - 1, ids.shape[1] - 1), response].sum()

    with torch.no_grad():
        reference = [[float(log_prob(*response)) for response in pair] for pair in data]
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=1.0, betas=(own.adam_beta1, own.adam_beta2), weight_decay=own.weight_decay, eps=1e-8
    )
    total, losses = own.dpo_epochs * math.ceil(len(data) / own.train_batch_size), []
    for epoch in range(own.dpo_epochs):
        for chosen in batches(range(len(data)), batch_size=own.train_batch_size, seed=own.seed, epoch=epoch):
            of_pairs = []
            for pair in chosen:
                scores, likelihoods = [], []
                for (prompt, response), of_reference in zip(data[pair], reference[pair], strict=True):
                    likelihood = log_prob(prompt, response)
                    likelihoods.append(likelihood / len(response))
                    score = likelihood - (0 if own.loss_type == "simpo" else of_reference)
                    scores.append(score if own.loss_type == "dpo" else score / len(response))
                preferred = torch.log1p(torch.exp(gamma - beta * (scores[0] - scores[1])))
                of_pairs.append(preferred - own.nll_coef * likelihoods[0])
            loss = torch.stack(of_pairs).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), own.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(
                    len(losses),
                    peak=own.learning_rate,
                    num_steps=total,
                    warmup_steps=own.warmup_steps,
                    schedule=own.lr_schedule,
                )
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return policy.state_dict(), losses


@pytest.mark.parametrize(
    "given",
    [
        {"dpo_epochs": 2, "seed": 3, "beta": 0.7},
        {"loss_type": "dpo_norm", "train_batch_size": 3, "micro_batch_size": 1, "append_eos": False},
        {"loss_type": "simpo", "lr_schedule": "cosine", "warmup_steps": 2, "learning_rate": 3e-4},
        slow({"loss_type": "simpo", "beta": 3.0, "gamma": 0.2, "micro_batch_size": 3}),
        {"nll_coef": 0.4},
        {},
    ],
    ids=["dpo", "norm", "simpo", "gamma", "nll", "defaults"],
)
def test_a_run_is_what_its_options_and_pairs_give(given, pairs, tiny_model_dir, tiny_tokenizer, tmp_path):
    run = trained(pairs, tiny_model_dir, tmp_path, **given)
    expected, losses = replayed(pairs, tiny_model_dir, tiny_tokenizer, **given)
    metrics = metrics_of(run)
    assert metrics["loss/objective"] == pytest.approx(losses, rel=1e-5)
    weights = load_policy(run / "model").model.state_dict()
    before = load_policy(tiny_model_dir).model.state_dict()
    gap, moved = (
        math.sqrt(sum(float((weights[name] - other[name]).double().square().sum()) for name in weights))
        for other in (expected, before)
    )
    assert gap < 2e-3 * moved
    size, micro = given.get("train_batch_size", 4), given.get("micro_batch_size", 4)
    assert metrics["update/rows"][:2] == [2 * size] * 2
    assert metrics["update/micro_batches"][0] == math.ceil(size / micro), "pairs are never split"
    if given.get("loss_type") != "simpo":
        likelihood = given.get("nll_coef", 0.0) * metrics["policy/chosen_nll_mean"][0]
        assert metrics["loss/objective"][0] == pytest.approx(math.log(2) + likelihood, abs=1e-6 if likelihood else 1e-8)
        for name in ("chosen_log_ratio", "rejected_log_ratio", "margin", "accuracy"):
            assert metrics[f"policy/{name}_mean"][0] == 0, "the first policy is its own reference"
        assert metrics["policy/margin_mean"][-1] > 0


GRADER = """
def grade(response, truth):
    return {"format_reward": 1.0, "answer_reward": len(response) % 2, "reward": len(response) % 2}
"""


def sampled(model, folder, **given) -> Path:
    """A run on pairs that it samples."""
    (folder / "mine.py").write_text(GRADER)
    questions = "".join(json.dumps({"question": f"{i} and {i}?", "answer": "7"}) + "\n" for i in range(9))
    (folder / "q.jsonl").write_text(questions)
    options = options_of(folder / "q.jsonl", model, folder) | {
        "n_dpo_steps": 2, "rollout_batch_size": 16, "group_size": 4, "grader": f"{folder / 'mine.py'}:grade", "grader_workers": 1,
        "sampling_max_tokens": 9, "sampling_min_tokens": 0, "stop": ("e", "a", "1", " "), "prompt": "question_only",
    }  # fmt: skip
    dpo.run(DpoConfig(**options | given))
    return folder / (options | given)["run"]


@pytest.mark.parametrize(
    "given",
    [
        {"seed": 3, "beta": 0.7, "pairs_per_question": 2},
        {"loss_type": "dpo_norm", "train_batch_size": 3, "micro_batch_size": 1, "sampling_temperature": 0.7, "group_size": 8, "dpo_epochs": 2},
        slow({"loss_type": "simpo", "gamma": 0.2, "dpo_epochs": 2, "rollout_batch_size": 32}),
    ],
    ids=["dpo", "norm", "simpo"],
)  # fmt: skip
def test_a_run_on_its_own_pairs_is_what_its_rollouts_give(given, tiny_model_dir, tmp_path):
    assert_losses_are_those_of_its_rollouts(sampled(tiny_model_dir, tmp_path, **given))


def test_a_run_goes_on_with_the_thinking_that_it_began_with(tiny_model_dir, tmp_path):
    """Runs of earlier versions kept a <think> that their prompt had opened."""
    row = {"question": "1 + 1?", "chosen": "<think> a </think> 2", "rejected": "<think> b </think> 3"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    run = trained(tmp_path / "p.jsonl", tiny_model_dir, tmp_path, prompt="r1_zero")
    metadata = read_metadata(run)
    once = fact_of(metadata, "dataset")
    assert once["thinking_opened"] == "once"
    template = load_prompt("r1_zero")
    before = load_pairs(str(tmp_path / "p.jsonl"), template, pairs_per_question=1, seed=0, opened_twice=True)
    twice = {"name": once["name"], "rows": 1, "fingerprint": before.fingerprint}
    for name, began in (("once", once), ("twice", twice)):
        recorded = {key: metadata[key] for key in ("config", "sources")} | {
            "facts": metadata["facts"] | {"dataset": began}
        }
        with RunDir.create(tmp_path, "dpo", name=name, metadata=recorded):
            pass
        dpo.run(resolve(DpoConfig, flags={"resume": name, "runs_dir": str(tmp_path)}, command="dpo"))
    assert [len(metrics_of(tmp_path / name)["loss/objective"]) for name in ("once", "twice")] == [1, 1]


def test_the_reference_of_a_run_on_from_an_adapter_is_that_adapter(pairs, tiny_model_dir, tmp_path, capsys):
    """After updates, and after the run was resumed, too."""
    adapter = {"lora_rank": 4, "learning_rate": 1e-2}
    trained(pairs, tiny_model_dir, tmp_path, **adapter, run="first")
    capsys.readouterr()
    run = sampled(tmp_path / "first/model", tmp_path, **adapter, n_dpo_steps=1, run="again")
    assert "reference      with the first weights of the adapter\n" in capsys.readouterr().err
    more = {"resume": "again", "runs_dir": str(tmp_path), "n_dpo_steps": 2}
    dpo.run(resolve(DpoConfig, flags=more, command="dpo"))
    assert len(metrics_of(run)["pairs/count"]) == 2
    assert_losses_are_those_of_its_rollouts(run)


def assert_losses_are_those_of_its_rollouts(run: Path) -> None:
    """Compute the losses of a run on its own pairs again, by a plain loop."""
    own = DpoConfig(**json.loads((run / "run.json").read_text())["config"])
    first, learner = load_policy(own.model), load_policy(own.model, lora=trained_adapter(own))
    first, policy = first.model, learner.model
    parameters = learner.trainable_parameters().values()
    optimizer = torch.optim.AdamW(parameters, lr=own.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def log_prob(model, row):
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        of_next = (model(ids).logits[0, :-1].double() / own.sampling_temperature).log_softmax(-1)
        return of_next[torch.arange(len(row["prompt_ids"]) - 1, ids.shape[1] - 1), row["response_ids"]].sum()

    rows = sorted(read_rollouts(run, phase="train").to_pylist(), key=lambda r: (r["step"], r["sample_index"]))
    beta, losses = own.scale, []
    for number, step in enumerate(sorted({r["step"] for r in rows})):
        of_step = [r for r in rows if r["step"] == step]
        assert len(of_step) == own.rollout_batch_size
        assert len({r["example_id"] for r in of_step}) * own.group_size == own.rollout_batch_size
        pairs = []
        for question in order_of(own, number):
            group = [
                r
                for r in of_step
                if r["example_id"] == question and r["finish_reason"] == "stop" and r["response"].strip()
            ]
            pairs += pair_up(group, count=own.pairs_per_question, seed=own.seed) if group else []
        assert pairs
        for epoch in range(number * own.dpo_epochs, (number + 1) * own.dpo_epochs):
            for chosen in batches(pairs, batch_size=own.train_batch_size, seed=own.seed, epoch=epoch):
                of_pairs = []
                for pair in chosen:
                    scores = []
                    for row in pair:
                        score = log_prob(policy, row)
                        if own.loss_type != "simpo":
                            score = score - log_prob(first, row).detach()
                        scores.append(score if own.loss_type == "dpo" else score / len(row["response_ids"]))
                    of_pairs.append(torch.log1p(torch.exp(own.target_margin - beta * (scores[0] - scores[1]))))
                loss = torch.stack(of_pairs).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, own.max_grad_norm)
                optimizer.step()
                losses.append(loss.item())
    assert len(losses) > 2
    logged = metrics_of(run)
    assert logged["loss/objective"] == pytest.approx(losses, rel=1e-5)
    assert len(logged.get("scoring/seconds", [])) == len(losses) * (own.loss_type != "simpo")


def order_of(own: DpoConfig, number: int) -> list[str]:
    """The questions of a round."""
    ids = [e.id for e in load_dataset(own.dataset, purpose="train").examples]
    size = own.rollout_batch_size // own.group_size
    start = 0
    for _ in range(number + 1):
        indices, start = next_indices(len(ids), size, seed=own.seed, start=start)
    return [ids[i] for i in indices]


def test_questions_without_a_pair_are_an_update_that_is_skipped(tiny_model_dir, tmp_path):
    run = sampled(tiny_model_dir, tmp_path, grader="r1_zero", run="none")
    metrics = metrics_of(run)
    assert metrics["update/skipped"] == [1.0, 1.0]
    assert metrics["pairs/count"] == [0.0, 0.0]


def test_only_responses_to_the_same_prompt_are_a_pair(pairs, tiny_model_dir, tmp_path):
    """An environment gives the rollouts of a question different ones where it draws them from the seed."""
    config = DpoConfig(**options_of(pairs, tiny_model_dir, tmp_path), pairs_per_question=4)
    sampled = [("a", 1.0), ("b", 0.0), ("c", 1.0), ("b", 1.0), ("c", 1.0)]
    rollouts = [a_rollout(prompt=p, response=f" {i}", reward=reward) for i, (p, reward) in enumerate(sampled)]
    assert dpo.pairs_of_question(config, rollouts) == [(rollouts[3], rollouts[1])]
    more = [*rollouts, a_rollout(prompt="a", response=" 9", reward=0.0)]
    assert len(dpo.pairs_of_question(config, more)) == 2
    assert len(dpo.pairs_of_question(replace(config, pairs_per_question=1), more)) == 1


def test_rounds_have_their_rules(pairs, tiny_model_dir, tmp_path):
    for given, problem in (
        ({"n_dpo_steps": 2, "sampling_temperature": 0.0}, "--sampling-temperature 0 makes all responses to a question identical."),
        ({"n_dpo_steps": 2, "group_size": 3}, "--rollout-batch-size 256 is not a multiple of --group-size 3."),
        ({"n_dpo_steps": 2, "lr_schedule": "cosine"}, "--lr-schedule cosine needs the number of updates, but that depends on the pairs."),
    ):  # fmt: skip
        with pytest.raises(RlvrError) as raised:
            DpoConfig(**options_of(pairs, tiny_model_dir, tmp_path, **given))
        assert raised.value.problem == problem


def test_options_of_rounds_are_refused_where_pairs_are_given(pairs, tiny_model_dir, tmp_path):
    with pytest.raises(RlvrError, match="--group-size is for sampling, and pairs that are given need none"):
        resolve(DpoConfig, flags=options_of(pairs, tiny_model_dir, tmp_path, group_size=4), command="dpo")


def test_options_without_effect_on_the_pairs_are_refused(pairs, tiny_model_dir, tmp_path, capsys):
    """Of a run, the field is that of the evaluation questions alone."""
    with RunDir.create(tmp_path, "eval", name="e", metadata={}) as run:
        rows = [a_rollout(run_id=run.id, sample_index=i, response=f" {i}", reward=float(i)) for i in (0, 1)]
        run.commit_rollouts("eval", 0, rows)
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"q": "1+1?", "answer": "2"}))

    def planned(dataset, **given):
        options = options_of(dataset, tiny_model_dir, tmp_path, dry_run=True, **given)
        dpo.run(resolve(DpoConfig, flags=options, command="dpo"))

    for source, given, problem in (
        (pairs, {"pairs_per_question": 1}, "--pairs-per-question is of a run, and .* is none"),
        ("e", {"question_field": "q"}, "--question-field has no effect: e is a run"),
        ("e", {"question_field": "q", "eval_dataset": "arithmetic"}, "--question-field has no effect: e is a run"),
        (pairs, {"question_field": "q"}, "no prompt: looked for q"),
    ):
        with pytest.raises(RlvrError, match=problem):
            planned(source, **given)
    for source, count in (("e", 1), (pairs, 11)):
        planned(source, question_field="q", eval_dataset=str(tmp_path / "held-out.jsonl"), prompt="question_only")
        assert f"pairs          {count} of " in capsys.readouterr().err


def test_an_adapted_policy_is_its_own_reference(pairs, tiny_model_dir, tmp_path):
    adapter = {"lora_rank": 4, "learning_rate": 1e-2}
    trained(pairs, tiny_model_dir, tmp_path, **adapter, run="first")
    again = trained(pairs, tmp_path / "first/model", tmp_path, **adapter, run="again")
    for run in (tmp_path / "first", again):
        assert metrics_of(run)["policy/margin_mean"][0] == 0
        assert metrics_of(run)["policy/margin_mean"][-1] > 0


def test_the_reference_is_in_every_checkpoint(pairs, tiny_model_dir, tmp_path):
    run = trained(pairs, tiny_model_dir, tmp_path, checkpoint_every=1, dpo_epochs=2)
    kept = [load_file(path)["reference_log_probs"] for path in run.glob("checkpoints/*/tensors.safetensors")]
    assert len(kept) == 2
    assert torch.equal(*kept)
    without = trained(pairs, tiny_model_dir, tmp_path, checkpoint_every=1, loss_type="simpo", run="simpo")
    assert not list(without.glob("checkpoints/*/tensors.safetensors"))


def test_options_that_do_not_go_together_are_refused(pairs, tiny_model_dir, tmp_path):
    for given, problem in (
        ({"gamma": 1.0}, "--gamma 1 is of simpo, and --loss-type is dpo."),
        ({"split": "train"}, "--split train: pairs are one file or a run, without splits."),
        ({"beta": 0.0}, "--beta is 0.0."),
    ):
        with pytest.raises(RlvrError) as raised:
            DpoConfig(**options_of(pairs, tiny_model_dir, tmp_path, **given))
        assert raised.value.problem == problem


def test_a_pair_longer_than_the_context_is_refused(tiny_model_dir, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"id": "x", "prompt": "a", "chosen": "b", "rejected": "c" * 5000}))
    with pytest.raises(RlvrError, match=r"Trace x, rejected has \d+ \+ \d+ tokens"):
        trained(path, tiny_model_dir, tmp_path)


def test_the_plan_comes_before_anything_else(pairs, tiny_model_dir, tmp_path, capsys):
    config = {"dry_run": True, "loss_type": "simpo", "gamma": 0.3}
    dpo.run(resolve(DpoConfig, flags=options_of(pairs, tiny_model_dir, tmp_path, **config), command="dpo"))
    said = capsys.readouterr().err
    assert "pairs          11 of " in said
    assert "updates        3 of 4 pairs; 1 epochs" in said
    assert "note: 3 updates change a model little; a smaller --train-batch-size or more --dpo-epochs" in said
    assert "log sigma(2 (h_w - h_l) - 0.3);  h = (1/|o|) log p of" in said
    assert "reference " not in said
    assert not (tmp_path / "r").exists()


def test_rows_are_read_as_the_options_say(tmp_path, tiny_model_dir, capsys):
    rows = [{"q": "a?", "chosen": " b", "rejected": " c"}, {"q": "d?", "chosen": " e"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = trained(tmp_path / "p.jsonl", tiny_model_dir, tmp_path, question_field="q", skip_bad_lines=True)
    assert json.loads((run / "run.json").read_text())["facts"]["dataset"]["rows"] == 1
    assert "skipped: " in capsys.readouterr().err


@pytest.mark.parametrize(("questions", "samples", "is_better"), [(12, 6, False), slow(64, 8, True)])
def test_rollouts_become_pairs_and_pairs_a_better_policy(tmp_path, forks, questions, samples, is_better):
    """Also in docs/algorithms.md, with more of everything. Few pairs teach nothing that can be measured."""

    def rlvr(*arguments):
        return forks.run(*arguments, cwd=tmp_path, status=0)

    sampling = ("--sampling-max-tokens", 48 if is_better else 32)
    evaluated = 64 if is_better else 2
    rlvr("eval", "--dataset", f"arithmetic:{questions}", "--num-samples", samples, *sampling, "--run", "samples")
    rlvr("filter", "samples", "--emit", "pairs", "--out", "pairs.jsonl")
    command = ["dpo", "--eval-dataset", "arithmetic", "--eval-examples", evaluated, *sampling, "--train-batch-size", 16]
    rlvr(*command, "--learning-rate", 1e-4, "--dataset", "pairs.jsonl", "--run", "r")
    rows = read_rollouts(tmp_path / "runs/r").to_pylist()
    before, after = (
        sum(r["reward"] for r in rows if r["step"] == step) / evaluated for step in sorted({r["step"] for r in rows})
    )
    if is_better:
        assert after > before + 0.1
        assert metrics_of(tmp_path / "runs/r")["policy/accuracy_mean"][-1] > 0.6

    def pairs_of_plan(*arguments):
        said = rlvr(*command, "--dataset", "samples", *arguments, "--dry-run").err
        return int(re.findall(r"^pairs +(\d+) of", said, re.MULTILINE)[0])

    count = read_run(tmp_path / "runs/r").metadata["facts"]["dataset"]["rows"]
    assert count == pairs_of_plan() > pairs_of_plan("--pairs-per-question", 1) > questions / 3
