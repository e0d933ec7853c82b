"""Token ids, log-probabilities and entropies against hand-worked cases, plain log-softmax and torch.distributions."""

import copy
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    ByT5Tokenizer,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from largest import LargestTensor
from marks import slow
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.log_probs import (
    _linear_log_probs,
    compute_entropy,
    get_response_log_probs,
    wanted_in,
)
from rlvr_cli.models.policy import as_policy
from rlvr_cli.models.tokens.markers import Markers
from rlvr_cli.models.tokens.tokenization import collate, encode, encode_prompts, pad_id_of, tokenize_prompt_and_output

SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
GPT2 = {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
ONE_LINEAR_HEAD = {
    "qwen2 untied": Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen2 tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL),
    "phi, with a bias on its head": PhiConfig(**SMALL),
    "gpt2": GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
}
OTHER_HEADS = {
    "gemma2 caps": Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0),
    "cohere scales": CohereConfig(**SMALL, logit_scale=0.25),
    "granite scales": GraniteConfig(**SMALL, logits_scaling=8.0),
    "opt projects": OPTConfig(
        vocab_size=61,
        hidden_size=16,
        word_embed_proj_dim=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=24,
        max_position_embeddings=64,
        init_std=0.5,
    ),
}


def make_model(config, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).to(dtype).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("lm_head.bias"):
                torch.nn.init.normal_(parameter)
    return model


@pytest.fixture(scope="module")
def policy():
    return make_model(ONE_LINEAR_HEAD["qwen2 tied"])


def make_batch(seed=0, lengths=((3, 4), (1, 6), (5, 1), (2, 0)), vocab=61):
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        return torch.randint(2, vocab, (count,), generator=generator).tolist()

    return collate([draw(p) for p, _ in lengths], [draw(r) for _, r in lengths], pad_id=1)


def plain_scores(model, batch, temperature=1.0):
    """Return the values that the tested functions must equal: cross-entropy of the full logits, torch.distributions."""
    logits = model(batch["input_ids"]).logits / temperature
    nll = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").view_as(batch["labels"])
    return -nll, torch.distributions.Categorical(logits=logits).entropy()


def gradients(model, scalar):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(scalar, parameters, allow_unused=True, materialize_grads=True)


# --- ids


def test_collate_worked_by_hand():
    batch = collate([[5, 6], [7]], [[8, 9], [4]], pad_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 8], [7, 4, 0]]
    assert batch["labels"].tolist() == [[6, 8, 9], [4, 0, 0]]
    assert batch["response_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def test_collate_marks_exactly_the_responses():
    prompts, responses = [[2], [3, 4, 5], [6, 7]], [[8, 9, 10], [], [11]]
    batch = collate(prompts, responses, pad_id=0)
    for row, response in enumerate(responses):
        assert batch["labels"][row][batch["response_mask"][row]].tolist() == response
    assert batch["input_ids"].shape == (3, 3)  # the longest row, less one


def test_collate_refuses_what_cannot_be_scored():
    with pytest.raises(AssertionError, match="row 1"):
        collate([[1], []], [[2], [3]], pad_id=0)
    with pytest.raises(ValueError, match="zip"):
        collate([[1]], [[2], [3]], pad_id=0)


def test_tokenize_prompt_and_output_against_a_slow_loop(tiny_tokenizer):
    prompts = ["Hello, world!", "This is a test.", "This is another test. naïve 😀"]
    outputs = ["Hello, world!</answer>", "", "This is another test."]
    batch = tokenize_prompt_and_output(prompts, outputs, tiny_tokenizer)
    pairs = [(tiny_tokenizer(p).input_ids, tiny_tokenizer(o).input_ids) for p, o in zip(prompts, outputs, strict=True)]
    width = max(len(p) + len(o) for p, o in pairs)
    assert set(batch) == {"input_ids", "labels", "response_mask"}
    assert batch["response_mask"].dtype == torch.bool
    for tensor in batch.values():
        assert tensor.shape == (3, width - 1)
    for row, (prompt, output) in enumerate(pairs):
        ids = prompt + output + [tiny_tokenizer.pad_token_id] * (width - len(prompt) - len(output))
        assert batch["input_ids"][row].tolist() == ids[:-1]
        assert batch["labels"][row].tolist() == ids[1:]
        expected = [len(prompt) <= position < len(prompt) + len(output) for position in range(1, width)]
        assert batch["response_mask"][row].tolist() == expected


def word_tokenizer(template="<s> $A", *, unknown="?", **special):
    vocab = {word: index for index, word in enumerate(["<s>", "</s>", "<pad>", "?", "one", "two"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_only_the_prompt_gets_the_tokenizers_bos():
    batch = tokenize_prompt_and_output(["one"], ["two two"], word_tokenizer(pad_token="<pad>"))
    assert batch["input_ids"].tolist() == [[0, 4, 5]]
    assert batch["labels"].tolist() == [[4, 5, 5]]
    assert batch["response_mask"].tolist() == [[False, True, True]]


@pytest.mark.parametrize(("template", "front"), [("$A </s>", []), ("<s> $A </s>", [0]), ("</s> $A </s>", [1])])
@pytest.mark.parametrize("unknown", ["?", "</s>", "none"])
def test_a_prompt_does_not_get_the_tokenizers_eos(template, front, unknown):
    """As tokenizers have it that were saved with add_eos_token; whatever they make of words that they do not know."""
    tokenizer = word_tokenizer(template, unknown=unknown, eos_token="</s>")
    expected = [[*front, 4], [*front, 4, 1], front]
    assert encode_prompts(tokenizer, ["one", "one</s>", ""]) == expected
    tokenizer.chat_template = "one"
    markers = Markers(tokenizer, name="m")
    assert [markers.prompt_ids(text) for text in ("one", "one</s>", "")] == expected


def test_a_prompt_does_not_get_eos_of_a_tokenizer_without_a_file():
    assert encode_prompts(ByT5Tokenizer(), ["a", ""]) == [[100], []]


def test_eos_is_appended_on_request_and_never_twice():
    tokenizer = word_tokenizer(eos_token="</s>")
    assert encode(["one"] * 2, ["two", "two</s>"], tokenizer) == ([[0, 4]] * 2, [[5], [5, 1]])
    assert encode(["one"] * 2, ["two", "two</s>"], tokenizer, append_eos=True)[1] == [[5, 1], [5, 1]]
    with pytest.raises(RlvrError, match="no EOS"):
        encode(["one"], ["two"], word_tokenizer(), append_eos=True)
    assert encode([], [], tokenizer) == ([], [])


def test_pad_id_is_pad_then_eos_then_an_error():
    assert pad_id_of(word_tokenizer(pad_token="<pad>", eos_token="</s>")) == 2
    assert pad_id_of(word_tokenizer(eos_token="</s>")) == 1
    with pytest.raises(RlvrError, match="neither"):
        pad_id_of(word_tokenizer())


def test_a_prompt_without_a_token_is_named(tiny_tokenizer):
    with pytest.raises(RlvrError, match="Prompt 1 has no tokens"):
        tokenize_prompt_and_output(["a", ""], ["b", "c"], tiny_tokenizer)


# --- entropy


def test_entropy_worked_by_hand():
    logits = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 1.0, 1.0]]]).log()
    torch.testing.assert_close(compute_entropy(logits), torch.tensor([[1.5 * math.log(2), math.log(3)]]))


@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(0.01, 300))
@settings(max_examples=50, deadline=None)
def test_entropy_equals_that_of_torch_distributions(seed, vocab, spread):
    logits = spread * torch.randn(2, 3, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(compute_entropy(logits), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(compute_entropy(logits.float()).double(), expected, rtol=1e-4, atol=1e-5)


def test_entropy_is_float32_and_survives_large_and_masked_logits():
    assert compute_entropy(torch.zeros(1, 1, 4, dtype=torch.bfloat16)).dtype == torch.float32
    assert compute_entropy(torch.tensor([1e30, 1e30, -1e30])).item() == pytest.approx(math.log(2))
    nearly_certain = torch.tensor([1000.0, 990.0])  # logsumexp(z) - sum(p z) would cancel to 3 digits here
    p = 1 / (1 + math.exp(10))
    expected = -p * math.log(p) - (1 - p) * math.log1p(-p)
    assert compute_entropy(nearly_certain).item() == pytest.approx(expected, rel=1e-4)


def test_a_token_that_cannot_be_sampled_adds_nothing_to_entropy_or_gradient():
    free = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64, requires_grad=True)
    masked = torch.tensor([0.3, -torch.inf, -1.2, 2.0], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(compute_entropy(masked), compute_entropy(free))
    compute_entropy(free).backward()
    compute_entropy(masked).backward()
    torch.testing.assert_close(masked.grad[[0, 2, 3]], free.grad)
    assert masked.grad[1] == 0


# --- log-probabilities


@pytest.fixture(params=[0, 100, None], ids=["none kept", "some kept", "as usual"])
def kept(request, monkeypatch):
    """How many logits are kept for the backward pass, which recomputes the others."""
    if request.param is not None:
        monkeypatch.setattr("rlvr_cli.models.log_probs._KEPT_LOGITS", request.param)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", ONE_LINEAR_HEAD)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_scores_and_gradients_equal_the_plain_ones(name, temperature):
    model, batch = make_model(ONE_LINEAR_HEAD[name]), make_batch()
    mask = batch["response_mask"]
    expected, expected_entropy = plain_scores(model, batch, temperature)
    weights = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    scores = get_response_log_probs(
        model, batch["input_ids"], batch["labels"], True, response_mask=mask, temperature=temperature, chunk_size=3
    )
    torch.testing.assert_close(scores["log_probs"], expected * mask, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores["token_entropy"], expected_entropy * mask, rtol=1e-12, atol=1e-12)
    for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, -0.3)):  # gradients of log-probabilities, of entropies, of both
        got = gradients(model, (weights * (a * scores["log_probs"] + b * scores["token_entropy"])).sum())
        plain = gradients(model, (weights * mask * (a * expected + b * expected_entropy)).sum())
        scores = get_response_log_probs(
            model, batch["input_ids"], batch["labels"], True, response_mask=mask, temperature=temperature, chunk_size=3
        )
        expected, expected_entropy = plain_scores(model, batch, temperature)
        for left, right in zip(got, plain, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("kept")
def test_one_output_alone_can_be_differentiated(policy):
    batch = make_batch()
    scores = get_response_log_probs(policy, batch["input_ids"], batch["labels"], True)
    entropy_only = gradients(policy, scores["token_entropy"].sum())
    plain = gradients(policy, plain_scores(policy, batch)[1].sum())
    for left, right in zip(entropy_only, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


@given(
    st.integers(1, 40),
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_no_chunk_size_or_mask_changes_the_scores(policy, chunk_size, seed, lengths):
    lengths = [*lengths, (1, 1)]
    batch = make_batch(seed, lengths)
    with torch.no_grad():
        expected, expected_entropy = plain_scores(policy, batch)
        mask = torch.rand(expected.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
        scores = get_response_log_probs(
            policy, batch["input_ids"], batch["labels"], True, response_mask=mask, chunk_size=chunk_size
        )
    torch.testing.assert_close(scores["log_probs"], expected * mask, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores["token_entropy"], expected_entropy * mask, rtol=1e-12, atol=1e-12)


def test_the_handouts_form_scores_every_position_and_returns_entropy_only_when_asked(policy):
    batch = make_batch()
    scores = get_response_log_probs(policy, batch["input_ids"], batch["labels"])
    assert set(scores) == {"log_probs"}
    torch.testing.assert_close(scores["log_probs"], plain_scores(policy, batch)[0])
    scores = get_response_log_probs(
        model=policy, input_ids=batch["input_ids"], labels=batch["labels"], return_token_entropy=True
    )
    assert set(scores) == {"log_probs", "token_entropy"}
    assert scores["log_probs"].shape == scores["token_entropy"].shape == batch["labels"].shape


def test_padding_and_neighbors_do_not_change_a_row(policy):
    prompts, responses = [[5, 6, 7], [8]], [[9, 10], [11, 12, 13, 14]]
    together = collate(prompts, responses, pad_id=1)
    scores = get_response_log_probs(
        policy, together["input_ids"], together["labels"], True, response_mask=together["response_mask"]
    )
    for row in range(2):
        alone = collate(prompts[row : row + 1], responses[row : row + 1], pad_id=1)
        wide = collate([*prompts[row : row + 1], [2] * 20], [*responses[row : row + 1], [3]], pad_id=33)
        for other in (alone, wide):
            single = get_response_log_probs(
                policy, other["input_ids"], other["labels"], True, response_mask=other["response_mask"]
            )
            for key in scores:
                torch.testing.assert_close(
                    single[key][0][other["response_mask"][0]],
                    scores[key][row][together["response_mask"][row]],
                    rtol=1e-12,
                    atol=1e-12,
                )


def test_what_the_mask_leaves_out_has_no_influence(policy):
    batch = make_batch()
    mask = batch["response_mask"]
    labels = torch.where(mask, batch["labels"], 17)
    left, right = (
        get_response_log_probs(policy, batch["input_ids"], ids, response_mask=mask)["log_probs"]
        for ids in (batch["labels"], labels)
    )
    assert torch.equal(left, right)
    assert (left[~mask] == 0).all()
    gradient = torch.autograd.grad(left[~mask].sum(), policy.lm_head.weight)[0]
    assert (gradient == 0).all()


def test_an_empty_mask_gives_zeros_and_zero_gradients(policy):
    batch = make_batch()
    scores = get_response_log_probs(
        policy, batch["input_ids"], batch["labels"], True, response_mask=torch.zeros_like(batch["response_mask"])
    )
    assert (scores["log_probs"] == 0).all()
    assert all((gradient == 0).all() for gradient in gradients(policy, scores["log_probs"].sum()))


def test_a_temperature_of_zero_is_refused(policy):
    batch = make_batch()
    with pytest.raises(AssertionError, match="greedy"):
        get_response_log_probs(policy, batch["input_ids"], batch["labels"], temperature=0.0)


@pytest.mark.parametrize("name", OTHER_HEADS)
def test_a_head_that_is_not_one_linear_map_is_scored_whole_and_says_so_once(name):
    model, batch = make_model(OTHER_HEADS[name]), make_batch()
    mask = batch["response_mask"]
    with pytest.warns(UserWarning, match="not one linear map"):
        scores = get_response_log_probs(
            model, batch["input_ids"], batch["labels"], True, response_mask=mask, temperature=0.7
        )
    expected, entropy = plain_scores(model, batch, 0.7)
    torch.testing.assert_close(scores["log_probs"], expected * mask)
    torch.testing.assert_close(scores["token_entropy"], entropy * mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_response_log_probs(model, batch["input_ids"], batch["labels"])


@pytest.mark.parametrize("change", ["scales what its head gets", "scales its logits in place"])
def test_a_model_that_does_more_around_its_head_is_noticed(change):
    class Unusual(Qwen2ForCausalLM):
        def forward(self, input_ids, **_):
            hidden = self.model(input_ids).last_hidden_state
            if change == "scales what its head gets":
                return SimpleNamespace(logits=self.lm_head(hidden / 4))
            logits = self.lm_head(hidden)
            logits *= 0.5
            return SimpleNamespace(logits=logits)

    model, batch = Unusual(ONE_LINEAR_HEAD["qwen2 tied"]).eval(), make_batch()
    with pytest.warns(UserWarning, match="Unusual"):
        scores = get_response_log_probs(model, batch["input_ids"], batch["labels"])
    torch.testing.assert_close(scores["log_probs"], plain_scores(model, batch)[0])


def test_any_module_that_returns_logits_can_be_scored():
    class Bigram(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(61, 61)

        def forward(self, input_ids):
            return SimpleNamespace(logits=self.table(input_ids))

    model, batch = Bigram(), make_batch()
    with pytest.warns(UserWarning, match="Bigram"):
        scores = get_response_log_probs(model, batch["input_ids"], batch["labels"])
    torch.testing.assert_close(scores["log_probs"], plain_scores(model, batch)[0])


def test_probing_the_head_changes_no_state():
    model, batch = (
        make_model(GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0)).train(),
        make_batch(),
    )  # active dropout
    state = torch.random.get_rng_state()
    expected = model.transformer(input_ids=batch["input_ids"]).last_hidden_state.sum().item()
    torch.random.set_rng_state(state)
    get_response_log_probs(
        model, batch["input_ids"], batch["labels"]
    )  # probes, and draws the dropout of one forward pass
    after = torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    assert model.transformer(input_ids=batch["input_ids"]).last_hidden_state.sum().item() == expected
    assert torch.equal(torch.random.get_rng_state(), after)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_a_replaced_head_is_probed_again():
    model, batch = make_model(ONE_LINEAR_HEAD["qwen2 untied"]), make_batch()
    get_response_log_probs(model, batch["input_ids"], batch["labels"])
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Tanh())
    with pytest.warns(UserWarning, match="not one linear map"):
        scores = get_response_log_probs(model, batch["input_ids"], batch["labels"])
    torch.testing.assert_close(scores["log_probs"], plain_scores(model, batch)[0])


@pytest.mark.usefixtures("kept")
def test_extreme_and_impossible_logits_of_a_linear_head():
    generator = torch.Generator().manual_seed(3)
    hidden = (30 * torch.randn(6, 4, dtype=torch.float64, generator=generator)).requires_grad_()
    weight = (10 * torch.randn(11, 4, dtype=torch.float64, generator=generator)).requires_grad_()
    bias = torch.zeros(11, dtype=torch.float64)
    bias[[0, 1, 2, 5]] = -torch.inf  # with chunks of 3: all of the first one, and one of the second
    bias.requires_grad_()
    labels = torch.tensor([3, 4, 6, 7, 8, 10])
    log_p = (hidden @ weight.T + bias).log_softmax(dim=-1)
    picked, entropies = log_p.gather(-1, labels[:, None]).squeeze(-1), compute_entropy(log_p)
    scores = _linear_log_probs(hidden, weight, bias, labels, temperature=1.0, chunk_size=3)
    torch.testing.assert_close(scores, (picked, entropies), rtol=1e-12, atol=1e-12)
    for ours, plain in zip(scores, (picked, entropies), strict=True):
        assert ours is not None
        got = torch.autograd.grad(ours.sum(), (hidden, weight, bias), retain_graph=True)
        expected = torch.autograd.grad(plain.sum(), (hidden, weight, bias), retain_graph=True)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
        again = torch.autograd.grad(ours.sum(), (hidden, weight, bias), retain_graph=True)
        torch.testing.assert_close(again, got, rtol=0, atol=0)
    impossible, _ = _linear_log_probs(hidden, weight, bias, torch.full((6,), 5), temperature=1.0, chunk_size=3)
    assert (impossible == -torch.inf).all()


@pytest.mark.parametrize("masked", [True, slow(False)])
def test_the_logits_of_a_batch_never_exist(masked, monkeypatch):
    """Except for those that are kept, at most `_KEPT_LOGITS`."""
    monkeypatch.setattr("rlvr_cli.models.log_probs._KEPT_LOGITS", 0)
    vocab, chunk_size = 3001, 4
    model = make_model(Qwen2Config(**{**SMALL, "vocab_size": vocab, "hidden_size": 8}), torch.float32)
    batch = make_batch(0, [(4, 20)] * 4, vocab)
    positions = batch["response_mask"].sum().item() if masked else batch["labels"].numel()
    mask = batch["response_mask"] if masked else None
    get_response_log_probs(model, batch["input_ids"], batch["labels"])  # so that the probe is not measured
    with LargestTensor() as largest:
        scores = get_response_log_probs(
            model, batch["input_ids"], batch["labels"], True, response_mask=mask, chunk_size=chunk_size
        )
        (scores["log_probs"] + 0.1 * scores["token_entropy"]).sum().backward()
    weight = model.lm_head.weight.numel()
    assert largest.numel == max(weight, chunk_size * vocab)
    assert largest.numel < positions * vocab / 5
    room = int(positions * chunk_size * 10.5)
    monkeypatch.setattr("rlvr_cli.models.log_probs._KEPT_LOGITS", room)
    with LargestTensor() as largest:
        log_probs = get_response_log_probs(
            model, batch["input_ids"], batch["labels"], response_mask=mask, chunk_size=chunk_size
        )["log_probs"]
    assert log_probs.requires_grad
    assert largest.numel == positions * chunk_size * 10
    with LargestTensor() as largest:  # a check of the measure itself: it sees the full logits
        plain_scores(model, batch)[0].sum().backward()
    assert largest.numel == batch["labels"].numel() * vocab


@pytest.mark.usefixtures("kept")
def test_the_weights_gradient_is_made_once_and_taken_over_by_autograd():
    class Storages(TorchDispatchMode):
        """Records the addresses of all tensors of one size that operators return."""

        def __init__(self, numel):
            super().__init__()
            self.numel, self.found, self.kept = numel, set(), []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() == self.numel:
                self.kept.append(result.untyped_storage())  # so that no address is reused
                self.found.add(result.untyped_storage().data_ptr())
            return result

    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(3001, 8, requires_grad=True)
    log_probs, _ = _linear_log_probs(hidden, weight, None, torch.arange(5), temperature=1.0, chunk_size=100)
    with Storages(weight.numel()) as storages:
        log_probs.sum().backward()
    assert weight.grad is not None
    assert storages.found - {weight.data_ptr()} == {weight.grad.data_ptr()}


def test_log_probs_of_a_half_precision_model_are_not_rounded_to_it():
    model, batch = make_model(ONE_LINEAR_HEAD["qwen2 untied"], torch.bfloat16), make_batch()
    with torch.no_grad():
        scores = get_response_log_probs(model, batch["input_ids"], batch["labels"], True)
        hidden = hidden_states_of(model, batch["input_ids"])
        logits = hidden.float() @ model.lm_head.weight.float().T
        expected = logits.log_softmax(-1).gather(-1, batch["labels"][..., None]).squeeze(-1)
    assert scores["log_probs"].dtype == scores["token_entropy"].dtype == torch.float32
    torch.testing.assert_close(scores["log_probs"], expected)
    rounded = (hidden @ model.lm_head.weight.T).float().log_softmax(-1).gather(-1, batch["labels"][..., None])
    assert (rounded.squeeze(-1) - expected).abs().max() > 1e-3  # the effect of rounding the logits


def test_autocast_keeps_float32_results_and_gradients():
    model, batch = make_model(ONE_LINEAR_HEAD["qwen2 tied"], torch.float32), make_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = get_response_log_probs(model, batch["input_ids"], batch["labels"], True)
    assert scores["log_probs"].dtype == scores["token_entropy"].dtype == torch.float32
    scores["log_probs"].sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    expected = plain_scores(model, batch)[0]
    assert (scores["log_probs"] - expected).abs().max() < 0.5  # bfloat16 in the body
    assert not torch.equal(scores["log_probs"], expected)


def hidden_states_of(model, ids):
    """The policy's last hidden states at all positions, which differ from the model's own by rounding in bfloat16."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    return as_policy(model).hidden_states(ids, wanted_in(model, ids, mask)).view(*ids.shape, -1)


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_products_are_kept_in_float32(device):
    model, batch = make_model(ONE_LINEAR_HEAD["qwen2 tied"], torch.float32).to(device), make_batch()
    ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        scores = get_response_log_probs(model, ids, labels, True, chunk_size=5)
        hidden = hidden_states_of(model, ids)
    leaf = hidden.detach().requires_grad_()
    weight = model.lm_head.weight.detach().clone().requires_grad_()
    logits = leaf.bfloat16().float() @ weight.bfloat16().float().T
    expected = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    assert scores["log_probs"].dtype == torch.float32
    torch.testing.assert_close(scores["log_probs"], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores["token_entropy"], compute_entropy(logits), rtol=1e-4, atol=1e-4)
    scores["log_probs"].sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_size", [61, 7])
def test_under_autocast_the_head_rounds_its_operands_and_not_its_results(device, chunk_size):
    """Logits and gradients are sums, in float32, of products of bfloat16 numbers; here they are summed in float64."""
    generator, temperature = torch.Generator().manual_seed(3), 0.7
    hidden, weight, upstream = (torch.randn(*s, generator=generator) for s in ((9, 16), (61, 16), (2, 9)))
    labels = torch.randint(61, (9,), generator=generator)
    leaves = hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        ours = _linear_log_probs(
            *leaves, None, labels.to(device), temperature=temperature, with_entropy=True, chunk_size=chunk_size
        )
    grad_hidden, grad_weight = torch.autograd.grad(ours, leaves, [*upstream.to(device)])

    h, w = hidden.bfloat16().double(), weight.bfloat16().double()
    z = (h @ w.T).requires_grad_()
    log_probs = (z / temperature).log_softmax(-1)
    expected = log_probs.gather(-1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)
    (unrounded,) = torch.autograd.grad(expected, z, [*upstream.double()])
    grad = unrounded.bfloat16().double()
    found = [ours[0], ours[1], grad_hidden, grad_weight]
    for one, other in zip(found, [*expected, grad @ w, grad.T @ h], strict=True):
        torch.testing.assert_close(one.detach().cpu().double(), other.detach(), rtol=1e-5, atol=1e-5)
    assert (grad @ w - unrounded @ w).abs().max() > 1e-4, "the test would not see a gradient that is not rounded"
