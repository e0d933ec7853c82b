"""Published models in small, from the command line: evaluate, fine-tune, reinforce, evaluate what was saved.

What transformers makes of the same directory, and tokenizer.json alone, are the slow references.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from killed import metrics_of
from real_configurations import CONFIGURATIONS, write_model
from rlvr_cli.models.load import load_policy
from rlvr_cli.runs.readers import read_rollouts

OFTEN = ("Llama-3.2-1B-Instruct",)
SAMPLED = ("--prompt", "p.prompt", "--dataset", "arithmetic:8", "--grader", "g.py:grade", "--sampling-max-tokens", 12,
           "--sampling-min-tokens", 0)  # fmt: skip
UPDATES = {"sft": ("--dataset", "t.jsonl", "--train-batch-size", 8, "--sft-epochs", 2),
           "grpo": (*SAMPLED, "--n-grpo-steps", 2, "--rollout-batch-size", 16, "--group-size", 4, "--train-batch-size", 16,
                    "--gradient-accumulation-steps", 2, "--eval-every", 0, "--eval-examples", 4)}  # fmt: skip
TRACES = [(f"Solve: {i} + {i}\nAssistant: <think>", f" {2 * i} </think> <answer> {2 * i} </answer>") for i in range(8)]
METRICS = ("loss/nll", "optimizer/grad_norm", "mismatch/logprob_max_abs")
ROUNDING = 2e-5  # nats, float32


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGURATIONS])
def test_a_published_model_goes_through_the_whole_tool(name, tmp_path: Path, forks):
    published, model = CONFIGURATIONS[name], write_model(name, tmp_path / "m")
    (tmp_path / "p.prompt").write_text("Solve: {question}\nAssistant: <think>")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in TRACES))
    (tmp_path / "g.py").write_text("def grade(response, truth):\n    return {'reward': len(response) % 2}\n")
    own = Tokenizer.from_file(str(model / "tokenizer.json"))
    bos = [own.token_to_id(published.special["bos"])] if published.adds_bos else []
    ends = [own.token_to_id(text) for text in published.ends or (published.special["eos"],)]
    assert load_policy(model, device="cpu").eos_token_ids == tuple(sorted(ends))

    def ids_of(text: str) -> list[int]:
        return own.encode(text, add_special_tokens=False).ids

    def run(command: str, *arguments: object, run: str, model: str = "m") -> str:
        """What a command says on stderr, with nothing in it that the table does not expect."""
        done = forks.run(command, *arguments, "--model", model, "--run", run, cwd=tmp_path, status=0)
        assert "[transformers]" not in done.err
        assert ("padding and shared prompts are computed for every row" in done.err) == (
            command != "eval" and not published.shares and name != "gemma-2-2b"
        )
        assert ("Sampling is slower" in done.err) == (command != "sft" and not published.own_step)
        assert ("Prompts begin with" in done.err) == (published.adds_bos and not published.template and model == "m")
        return done.err

    def check_rollouts(name: str, weights: Path) -> None:
        """Prompts are those of tokenizer.json, EOS ends, and transformers gives sampled tokens the same probabilities."""
        scorer = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation="eager")
        rows = read_rollouts(tmp_path / "runs" / name).to_pylist()
        assert rows
        for row in rows:
            assert row["prompt_ids"] == [*bos, *ids_of(row["prompt"])]
            assert not {*row["response_ids"][:-1]} & {*ends}
            assert (row["response_ids"][-1] in ends) == (row["finish_reason"] == "stop")
            if row["step"] == 0 or name != "grpo":
                log_probs = token_log_probs(scorer, row["prompt_ids"], row["response_ids"])
                assert torch.tensor(row["sampled_logprobs"]) == pytest.approx(log_probs, abs=ROUNDING)

    def metrics(run: str) -> dict[str, list[float]]:
        """The values of some metrics, one per update."""
        found: dict[str, list[float]] = {}
        for (phase, _, name), value in sorted(metrics_of(tmp_path / "runs" / run).items()):
            if phase == "train" and name in METRICS:
                found.setdefault(name, []).append(value)
        return found

    run("eval", *SAMPLED, run="eval")
    check_rollouts("eval", model)
    for command, arguments in UPDATES.items():
        run(command, *arguments, run=command)
        saved = tmp_path / "runs" / command / "model"
        shown = metrics(command)
        assert len(shown["optimizer/grad_norm"]) == 2
        assert min(shown["optimizer/grad_norm"]) > 0
        before, after = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
            for path in (model, saved)
        )
        assert (after.config.tie_word_embeddings, after.dtype) == (before.config.tie_word_embeddings, torch.float32)
        with safe_open(saved / "model.safetensors", framework="pt") as tensors:
            assert ("lm_head.weight" in tensors.keys()) == (not before.config.tie_word_embeddings)  # noqa: SIM118 (it is no mapping)
        assert set(load_policy(saved, device="cpu").eos_token_ids) == {*ends}
        if command == "grpo":
            check_rollouts("grpo", model)
            assert max(shown["mismatch/logprob_max_abs"]) < ROUNDING
            run("eval", *SAMPLED, run="again", model=str(saved))
            check_rollouts("again", saved)
        else:
            eos = own.token_to_id(published.special["eos"])
            losses = [token_log_probs(before, [*bos, *ids_of(p)], [*ids_of(r), eos]) for p, r in TRACES]
            assert shown["loss/nll"][0] == pytest.approx(-float(torch.cat(losses).mean()), abs=ROUNDING)


@torch.no_grad()
def token_log_probs(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    """log p of each response token, from a plain forward pass of one row."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
