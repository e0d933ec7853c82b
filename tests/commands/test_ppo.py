"""`rlvr ppo`: a run is what its options and rollouts give, computed again by a plain loop; what is refused; and that it teaches."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from rlvr_cli.commands import ppo
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.ppo import PpoConfig
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.order import epoch_order
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.runs.metrics_log import MetricsLog
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.optimizers.optimizer import learning_rate_at

SMALL = {
    "dataset": "arithmetic:64",
    "n_ppo_steps": 2,
    "rollout_batch_size": 8,
    "train_batch_size": 4,
    "sampling_max_tokens": 32,
    "learning_rate": 3e-4,
    "critic_learning_rate": 1e-3,
    "eval_examples": 1,
    "grader_workers": 1,
    "eval_every": 0,
    "checkpoint_every": 0,
    "micro_batch_size": 4,
    "run": "r",
}

FEW = {"rollout_batch_size": 4, "train_batch_size": 2}


def trained(folder, **given) -> Path:
    ppo.run(PpoConfig(**{**SMALL, **given, "runs_dir": str(folder)}))
    return folder / given.get("run", "r")


def metrics_of(run) -> dict[str, dict[int, float]]:
    """Name -> step -> value, of training."""
    import pyarrow.parquet as pq

    found: dict[str, dict[int, float]] = {}
    for r in pq.read_table(read_run(run).path / "metrics.parquet").to_pylist():
        if r["phase"] == "train":
            found.setdefault(r["name"], {})[r["step"]] = r["value"]
    return found


def replayed(run, **given):
    """The weights after the same updates by the definitions, one response at a time, and what each update and batch was like."""
    own = PpoConfig(**{**SMALL, **given})
    rollouts = read_rollouts(run, phase="train").to_pylist()
    questions = [e.id for e in load_dataset(own.dataset, split="train").examples]
    policy, critic, reference = (load_policy(builtin_model_path()).model for _ in range(3))
    body = (critic if own.critic == "own" else policy).base_model
    head = torch.nn.Linear(policy.config.hidden_size, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    of_critic = [*head.parameters(), *(body.parameters() if own.critic == "own" else ())]
    groups = [([*policy.parameters()], own.learning_rate), (of_critic, own.critic_learning_rate)]
    optimizer = torch.optim.AdamW(
        [{"params": parameters} for parameters, _ in groups], lr=1.0, betas=(0.9, 0.95), weight_decay=own.weight_decay
    )
    per_batch = own.rollout_batch_size // own.group_size
    updates_per_batch = own.epochs_per_rollout_batch * own.rollout_batch_size // own.train_batch_size
    total = own.n_ppo_steps * updates_per_batch

    def log_probs_of(model, row):
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        first = len(row["prompt_ids"]) - 1
        of_next = (model(ids).logits[0, first:-1].double() / own.sampling_temperature).log_softmax(-1)
        return of_next[torch.arange(len(row["response_ids"])), row["response_ids"]]

    def values_of(row):
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        return head(body(ids).last_hidden_state[0, len(row["prompt_ids"]) - 1 : -1]).squeeze(-1).double()

    done, losses, kls, explained = 0, [], [], []
    for step in range(own.n_ppo_steps):
        of_step = {(r["example_id"], r["sample_index"]): r for r in rollouts if r["step"] == done}
        order = epoch_order(len(questions), seed=own.seed, epoch=0)  # all batches together are one epoch at most
        asked = [questions[i] for i in order[step * per_batch : (step + 1) * per_batch]]
        rows = [of_step[name, sample] for name in asked for sample in range(own.group_size)]
        credit = []
        with torch.no_grad():
            for row in rows:
                old, values, ref = log_probs_of(policy, row), values_of(row), log_probs_of(reference, row)
                kl = (old - ref).clamp(min=0) if own.kl_clamp else old - ref
                rewards = -own.kl_coef * kl if own.kl_in == "reward" else torch.zeros_like(old)
                rewards[-1] += row["reward"]
                following = [*values[1:].tolist(), 0.0]
                advantages, ahead = [0.0] * len(old), 0.0
                for t in reversed(range(len(old))):
                    delta = float(rewards[t]) + own.gamma * following[t] - float(values[t])
                    advantages[t] = ahead = delta + own.gamma * own.gae_lambda * ahead
                a = torch.tensor(advantages, dtype=torch.float64)
                credit.append([old, values, ref, a, a + values, kl])
        tokens = torch.cat([c[3] for c in credit])
        returns, before = (torch.cat([c[i] for c in credit]) for i in (4, 1))
        explained.append(1 - float((returns - before).var() / returns.var()))
        kls.append(float(torch.cat([c[5] for c in credit]).mean()))
        if own.whiten_advantages:
            for c in credit:
                c[3] = (c[3] - tokens.mean()) / tokens.std()
        cuts = [
            order[first : first + own.train_batch_size]
            for epoch in range(own.epochs_per_rollout_batch)
            for order in [epoch_order(len(rows), seed=own.seed, epoch=step * own.epochs_per_rollout_batch + epoch)]
            for first in range(0, len(rows), own.train_batch_size)
        ]
        for cut in cuts:
            of_tokens = []
            for i in cut:
                old, old_values, ref, a, target, _ = credit[i]
                new, values = log_probs_of(policy, rows[i]), values_of(rows[i])
                ratio = (new - old).exp()
                loss = -torch.minimum(ratio * a, ratio.clamp(1 - own.cliprange, 1 + own.cliprange) * a)
                if own.kl_in == "loss" and own.kl_coef:
                    loss = loss + own.kl_coef * ((ref - new).exp() - 1 - (ref - new))
                error = (values - target) ** 2
                if own.vf_cliprange:
                    near = old_values + (values - old_values).clamp(-own.vf_cliprange, own.vf_cliprange)
                    error = torch.maximum(error, (near - target) ** 2)
                if step < own.critic_warmup_steps:
                    loss = loss.detach()
                of_tokens.append(loss + own.vf_coef * error / 2)
            value = torch.cat(of_tokens).mean()
            value.backward()
            for (parameters, peak), group in zip(groups, optimizer.param_groups, strict=True):
                torch.nn.utils.clip_grad_norm_(parameters, own.max_grad_norm)
                schedule = {"warmup_steps": own.warmup_steps, "schedule": own.lr_schedule}
                group["lr"] = learning_rate_at(len(losses), peak=peak, num_steps=total, **schedule)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        done += updates_per_batch
    return policy.state_dict(), {"loss": losses, "kl": kls, "explained": explained}


@pytest.mark.parametrize(
    "given",
    [
        {
            "epochs_per_rollout_batch": 2,
            "seed": 3,
            "gae_lambda": 0.9,
            "gamma": 0.97,
            "vf_coef": 0.3,
            "micro_batch_size": 3,
        },
        {**FEW, "critic": "shared", "cliprange": 0.05, "group_size": 2, "critic_learning_rate": 5e-3},
        {**FEW, "kl_coef": 0.5, "vf_cliprange": 0.05, "whiten_advantages": False, "sampling_temperature": 0.8},
        {**FEW, "kl_coef": 0.5, "kl_clamp": True, "critic_warmup_steps": 1, "weight_decay": 0.1, "n_ppo_steps": 3},
        {
            **FEW,
            "kl_coef": 2.0,
            "kl_in": "loss",
            "learning_rate": 1e-3,
            "lr_schedule": "cosine",
            "warmup_steps": 1,
            "epochs_per_rollout_batch": 2,
        },
    ],
    ids=["discounted", "shared", "kl", "clamp", "kl-in-loss"],
)
def test_a_run_is_what_its_options_and_rollouts_give(given, tmp_path):
    run = trained(tmp_path, **given)
    weights, found = replayed(run, **given)
    metrics = metrics_of(run)
    by_update = [metrics["loss/objective"][step] for step in sorted(metrics["loss/objective"])]
    assert by_update == pytest.approx(found["loss"], rel=2e-3, abs=2e-4)
    by_batch = [metrics["critic/explained_variance"][step] for step in sorted(metrics["critic/explained_variance"])]
    assert by_batch == pytest.approx(found["explained"], abs=5e-3)
    if given.get("kl_coef") and given.get("kl_in") != "loss":
        assert list(metrics["reward/kl"].values()) == pytest.approx(found["kl"], abs=1e-4)
    else:
        assert "reward/kl" not in metrics
    assert ("policy/kl" in metrics) == (given.get("kl_in") == "loss")
    ours, start = (load_policy(path).model.state_dict() for path in (run / "model", builtin_model_path()))
    gap, moved = (
        math.sqrt(sum(float((ours[name] - other[name]).double().square().sum()) for name in ours))
        for other in (weights, start)
    )
    assert gap < 0.02 * moved
    own = PpoConfig(**{**SMALL, **given})
    assert metrics["update/micro_batches"][0] == math.ceil(own.train_batch_size / own.micro_batch_size)


def test_what_is_logged_and_stored(tmp_path):
    run = trained(tmp_path, n_ppo_steps=2, critic_warmup_steps=1, kl_coef=0.1, vf_cliprange=0.2, checkpoint_every=3)
    metrics = metrics_of(run)
    for name in (
        "critic/loss",
        "critic/value_mean",
        "critic/clip_fraction",
        "critic/grad_norm",
        "policy/clip_fraction",
        "policy/kl",
    ):
        assert set(metrics.get(name, ())) == ({0, 1, 2, 3} if name != "policy/kl" else set()), name
    for name in ("critic/explained_variance", "critic/return_mean", "reward/kl", "reward/mean", "scoring/seconds"):
        assert set(metrics[name]) == {0, 2}, name
    assert metrics["critic/value_mean"][0] == 0
    assert metrics["critic/explained_variance"][0] == pytest.approx(0, abs=1e-6), "the first values are 0"
    assert metrics["reward/kl"] == pytest.approx({0: 0, 2: 0}, abs=1e-6), "the policy has not learned yet"
    assert [metrics["optimizer/grad_norm"][step] > 0 for step in range(4)] == [False, False, True, True]
    assert metrics["policy/ratio_max"][1] == 1, "in a second update, too"
    rows = read_rollouts(run, phase="train").to_pylist()
    assert {(r["step"], r["advantage"]) for r in rows} == {(0, None), (2, None)}
    checkpoint = run / "checkpoints/step-000003"
    stored = load_file(checkpoint / "policy.safetensors")
    assert {"critic.head.weight", "critic.head.bias", "critic.body.norm.weight"} <= set(stored)
    moments = load_file(checkpoint / "optimizer.safetensors")
    assert moments["critic.head.weight/step"] == 3
    assert moments["model.norm.weight/step"] == 1, "none of the warm-up"
    assert set(load_file(checkpoint / "tensors.safetensors")) == {"old_log_probs", "old_values"}
    assert set(load_policy(run / "model").weights()) == set(load_policy(builtin_model_path()).weights()), "no critic"
    assert not list(run.glob("model/policy.safetensors"))


def test_the_mismatch_leaves_out_the_tokens_before_the_minimum(tmp_path):
    metrics = metrics_of(trained(tmp_path, **FEW, n_ppo_steps=1, sampling_min_tokens=32))
    assert {name for name in metrics if name.startswith("mismatch/")} == {
        f"mismatch/position/{n}" for n in (0, 1, 4, 16)
    }


@pytest.mark.parametrize("tokens", [1, 0])
def test_a_batch_without_a_token_of_the_policy_has_no_mean_over_tokens(tmp_path, tokens):
    """All its episodes failed; the first batch cannot be such a one, since the run then ends."""
    mask = torch.tensor([[False, tokens > 0]] * 2)
    batch = {"response_mask": mask} | {
        name: torch.zeros(2, 2) for name in ("old_values", "old_log_probs", "reference_log_probs")
    }
    with RunDir.create(tmp_path, "ppo", name="r", metadata={}) as run:
        log = MetricsLog(run)
        ppo.credit(PpoConfig(kl_coef=0.1), SimpleNamespace(metrics=log), batch, torch.ones(2), step=0)
        log.add(0, {"reward/mean": 1.0})
        log.flush()
    found = {"reward/mean": {0: 1.0}} | ({"reward/kl": {0: 0.0}, "critic/return_mean": {0: 1.0}} if tokens else {})
    assert metrics_of(tmp_path / "r") == found


@pytest.mark.slow
def test_returns_that_do_not_differ_have_no_explained_variance(tmp_path):
    (tmp_path / "g.py").write_text(
        "def grade(response, truth):\n    return {'format_reward': 1.0, 'answer_reward': 1.0, 'reward': 1.0}\n"
    )
    metrics = metrics_of(trained(tmp_path, n_ppo_steps=1, grader=f"{tmp_path}/g.py:grade"))
    assert metrics["critic/return_mean"] == {0: 1.0}
    assert "critic/explained_variance" not in metrics


@pytest.mark.parametrize(
    ("given", "problem", "hint"),
    [
        ({"gae_lambda": 1.5}, "--gae-lambda is 1.5.", "at most 1"),
        ({"gamma": 2.0}, "--gamma is 2.", "at most 1"),
        ({"sampling_temperature": 0.0}, "--sampling-temperature 0 always takes the likeliest token", "Use 1"),
        ({"kl_clamp": True}, "--kl-clamp is of a KL penalty in the reward, and there is none.", "--kl-coef 0.01"),
        (
            {"kl_clamp": True, "kl_coef": 0.1, "kl_in": "loss"},
            "--kl-clamp is of a KL penalty in the reward",
            "leave --kl-clamp",
        ),
        ({"critic": "shared", "critic_warmup_steps": 2}, "it cannot learn alone", "--critic own"),
        ({"trainers": 2, "fsdp": True}, "--fsdp divides the weights of one model", "Leave it out"),
        ({"group_size": 3}, "--rollout-batch-size 8", "--group-size"),
        ({"train_batch_size": 7}, "--rollout-batch-size 8", "--train-batch-size"),
        (
            {"rollout_batch_size": 128, "train_batch_size": 128},
            "A batch needs 128 different questions",
            "smaller batch",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(given, problem, hint, tmp_path):
    with pytest.raises(RlvrError) as raised:
        trained(tmp_path, **given)
    assert problem in raised.value.problem
    assert hint in raised.value.hint
    assert not (tmp_path / "r").exists()


def test_the_plan_says_what_is_minimized_and_comes_before_anything_else(tmp_path, capsys):
    def plan(**given):
        flags = {**SMALL, **given, "dry_run": True, "runs_dir": str(tmp_path)}
        ppo.run(resolve(PpoConfig, flags=flags, command="ppo"))
        lines = capsys.readouterr().err.splitlines()
        return {line[:14].strip(): line[15:] for line in lines}

    own = plan()
    assert own["rollouts"] == "2 batches of 8 questions x 1 samples"
    assert own["updates"].startswith("2 per batch (1 epochs, 4 responses each), 4 in all")
    assert own["reward"] == "r_i,t = [t is the last token] r_i"
    assert own["advantage"].startswith("A_i,t = d_i,t + A_i,t+1, d_i,t = r_i,t + V_i,t+1 - V_i,t")
    assert own["objective"].startswith(
        "(1/T) sum_i,t [-min(rho_i,t A_i,t, clip(rho_i,t, 1-0.2, 1+0.2) A_i,t) + 0.5 (V_i,t - R_i,t)^2];  rho = p/p_old"
    )
    assert "no value follows its last token" in own["overlong"]
    assert "critic 2 MiB" in own["memory"]
    other = plan(
        critic="shared",
        kl_coef=0.1,
        kl_clamp=True,
        gamma=0.9,
        gae_lambda=0.5,
        vf_coef=0.1,
        vf_cliprange=0.3,
        whiten_advantages=False,
    )
    assert other["reward"] == "r_i,t = [t is the last token] r_i - 0.1 max(log p_old - log p_ref, 0)_i,t"
    assert (
        other["advantage"]
        == "A_i,t = d_i,t + 0.45 A_i,t+1, d_i,t = r_i,t + 0.9 V_i,t+1 - V_i,t, 0 after the last token"
    )
    assert "0.05 max((V - R)^2, (V_old + clip(V - V_old, -0.3, 0.3) - R)^2)_i,t" in other["objective"]
    assert other["critic"].startswith("a linear head on the policy's model, 0 at first")
    assert "critic" not in other["memory"]
    assert other["KL penalty"].endswith("KL(p || p_ref) of whole responses; clamped, the estimate is too large")
    in_loss = plan(kl_coef=0.2, kl_in="loss")
    assert "+ 0.2 k3(p_ref, p)];" in in_loss["objective"]
    assert in_loss["KL penalty"].endswith("d = log p_ref - log p; its gradient descends KL(p_ref || p)")
    assert "KL penalty" not in own
    assert "it learns alone on the first 4 rollout batches" in plan(critic_warmup_steps=4)["critic"]
    assert list(tmp_path.iterdir()) == []


def test_with_an_adapter_the_critic_has_one_too(tmp_path):
    run = trained(
        tmp_path, **FEW, n_ppo_steps=1, lora_rank=4, checkpoint_every=1, learning_rate=1e-2, critic_learning_rate=1e-2
    )
    stored = load_file(run / "checkpoints/step-000002/policy.safetensors")
    of_body = {name for name in stored if name.startswith("critic.body.")}
    assert of_body
    assert all(".lora_" in name for name in of_body)
    assert set(stored) - of_body == {"critic.head.weight", "critic.head.bias"}
    assert any(stored[name].abs().max() > 0 for name in of_body if ".lora_B." in name), "it learns"
    assert (run / "model/adapter_config.json").is_file()


@pytest.mark.slow
def test_a_run_cannot_be_replayed_and_says_so(forks, tmp_path):
    trained(tmp_path, n_ppo_steps=1)
    done = forks.run("check", tmp_path / "r", "--replay", 2, cwd=tmp_path, status=1)
    assert "it is a run of rlvr ppo, and the replay knows no critic" in done.err
    assert forks.run("check", tmp_path / "r", cwd=tmp_path, status=0)


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["own", "shared"])
def test_the_reward_rises(tmp_path, critic):
    """The built-in model, which guesses, learns to work the answer out."""
    run = trained(
        tmp_path,
        dataset="arithmetic:3000",
        n_ppo_steps=8,
        rollout_batch_size=128,
        train_batch_size=32,
        micro_batch_size=32,
        sampling_max_tokens=64,
        critic=critic,
        vf_coef=0.1 if critic == "shared" else 1.0,
        warmup_steps=4,
    )
    rewards = list(metrics_of(run)["reward/mean"].values())
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2
