"""A tokenizer is the one of its tokenizer.json, and the tags that graders look for show in what it decodes."""

import json
from pathlib import Path
from unittest import TestCase

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from llamas import CHAT_TEMPLATE, write_byte_level_llama
from real_configurations import CONFIGURATIONS, write_model
from rlvr_cli.graders.r1_zero import r1_zero_reward_fn
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.tokens.own_tokenizer import TAGS, corrected, read_tokenizer
from rlvr_cli.models.tokens.tokenization import encode_prompts
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.stop_strings import StopStrings, response_text
from rlvr_cli.types import Request, SamplingParams

TEXT = "What is 1 + 2?\nAssistant: <think>"


def own_ids(directory: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False).ids


@pytest.fixture
def misnamed(tmp_path: Path) -> Path:
    """deepseek-math-7b in small: byte-level, and says that it is a LlamaTokenizerFast."""
    return write_byte_level_llama(tmp_path / "misnamed", kind="LlamaTokenizerFast")


def test_a_byte_level_tokenizer_that_calls_itself_llama_keeps_its_spaces(misnamed: Path):
    assert AutoTokenizer.from_pretrained(misnamed)(TEXT, add_special_tokens=False).input_ids != own_ids(misnamed, TEXT)
    with TestCase().assertLogs(level="WARNING") as logged:
        policy = load_policy(misnamed)
    tokenizer = policy.tokenizer
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert ids == own_ids(misnamed, TEXT)
    assert tokenizer.decode(ids) == response_text(tokenizer, ids) == TEXT
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert "is read from its tokenizer.json alone: LlamaTokenizer of transformers would read" in logged.output[0]
    assert "Whatis1+2?" in logged.output[0]


def test_what_was_corrected_is_saved_so(misnamed: Path, tmp_path: Path):
    load_policy(misnamed).save(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(TEXT, add_special_tokens=False).input_ids == own_ids(misnamed, TEXT)
    assert corrected(again, str(tmp_path / "saved")) is None


@pytest.mark.parametrize("name", ["R1-Distill-Qwen-1.5B", "deepseek-math-7b"])
def test_bos_begins_prompts_where_only_tokenizer_config_json_asks_for_it(name, tmp_path: Path):
    directory = write_model(name, tmp_path / "m")
    assert AutoTokenizer.from_pretrained(directory)("").input_ids == []
    with TestCase().assertLogs(level="WARNING") as logged:
        policy = load_policy(directory, device="cpu")
    bos = CONFIGURATIONS[name].special["bos"]
    assert any(f"Prompts begin with {bos}" in line for line in logged.output)
    expected = [policy.tokenizer.bos_token_id, *own_ids(directory, TEXT)]
    assert encode_prompts(policy.tokenizer, [TEXT, bos + TEXT]) == [expected, expected]
    policy.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(TEXT).input_ids == expected


@pytest.mark.parametrize("asks", [False, None])
def test_bos_that_nobody_asks_for_is_not_added(asks, tmp_path: Path):
    directory = write_model("R1-Distill-Qwen-1.5B", tmp_path / "m")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": asks}))
    assert corrected(AutoTokenizer.from_pretrained(directory), str(directory)) is None


def test_a_prompt_is_sampled_from_with_the_ids_of_its_own_file(misnamed: Path):
    policy = load_policy(misnamed, device="cpu")
    (completion,) = TransformersSampler(policy).sample([Request(TEXT, (5,))], SamplingParams(max_tokens=6))
    assert list(completion.prompt_ids) == own_ids(misnamed, TEXT)


def test_special_tags_show_in_a_response_and_keep_their_ids(tmp_path: Path):
    directory = write_byte_level_llama(tmp_path / "m", special=(*TAGS, "<|user|>"))
    text = "so </think> <answer> 3 </answer>"
    plain = AutoTokenizer.from_pretrained(directory)
    ids = plain(text, add_special_tokens=False).input_ids
    assert response_text(plain, ids) == "so   3 "  # what a grader would have got
    tokenizer = read_tokenizer(str(directory), local=True)
    assert tokenizer(text, add_special_tokens=False).input_ids == ids
    assert response_text(tokenizer, [*ids, plain.eos_token_id]) == text
    assert r1_zero_reward_fn(response_text(tokenizer, ids), "3")["reward"] == 1.0
    assert response_text(tokenizer, tokenizer("a<|user|>b", add_special_tokens=False).input_ids) == "ab"
    stops = StopStrings(tokenizer, ["</answer>"], vocab_size=320)
    assert stops.candidates[ids[-1]]
    assert stops.find(ids, min_tokens=0) == (text, "</answer>")


def test_a_tokenizer_that_is_its_own_stays(tiny_model_dir: Path, tmp_path: Path):
    for directory in (tiny_model_dir, builtin_model_path(), write_byte_level_llama(tmp_path / "m")):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert corrected(tokenizer, str(directory)) is None


def test_without_a_file_there_is_nothing_to_compare_with(tiny_tokenizer, tmp_path: Path):
    assert corrected(tiny_tokenizer, "nobody/has-this") is None
    assert corrected(tiny_tokenizer, str(tmp_path)) is None
