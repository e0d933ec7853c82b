"""samplers/stop_strings.py: prompt ids, response text, and where a response ends, against decoding at every token."""

import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlvr_cli.errors import RlvrError
from rlvr_cli.samplers.stop_strings import (
    StopStrings,
    _has_common_decode,
    continued,
    first_stop,
    prompt_token_ids,
    response_text,
)
from rlvr_cli.types import Completion, Request, SamplingParams

LENIENT = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(
    ("text", "stop", "start", "expected"),
    [
        ("2 </answer> x", ("</answer>",), 0, ("</answer>", 11)),
        ("2 </answer", ("</answer>",), 0, None),
        ("ab", ("b", "ab"), 0, ("b", 2)),  # both are complete at 2: the order of the list decides
        ("ab", ("ab", "b"), 0, ("ab", 2)),
        ("xaby", ("aby", "b"), 0, ("b", 3)),  # the one that is complete first, not the one that begins first
        ("stop stop", ("stop",), 4, ("stop", 9)),  # the first ends at 4, which is not after 4
        ("stop stop", ("stop",), 3, ("stop", 4)),
        ("stop", ("stop",), 4, None),
        ("", ("a",), 0, None),
        ("abc", (), 0, None),
    ],
)
def test_first_stop(text, stop, start, expected):
    assert first_stop(text, stop, start=start) == expected


@given(
    text=st.text("ab", max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    start=st.integers(0, 12),
)
def test_first_stop_is_the_first_completed(text, stop, start):
    expected = next(
        ((s, end) for end in range(start + 1, len(text) + 1) for s in stop if text[:end].endswith(s)),
        None,
    )
    assert first_stop(text, stop, start=start) == expected


def slow_end(tokenizer, ids, stop, min_tokens):
    """Decode after every token; return length, text and stop string where one is first complete."""
    protected = len(response_text(tokenizer, ids[:min_tokens]).rstrip("\ufffd")) if min_tokens else 0
    for length in range(min_tokens + 1, len(ids) + 1):
        text = response_text(tokenizer, ids[:length])
        for end in range(protected + 1, len(text) + 1):
            for string in stop:
                if text[:end].endswith(string):
                    return length, text[:end], string
    return None


def fast_end(stops, ids, min_tokens):
    for length in range(1, len(ids) + 1):
        if stops.candidates[ids[length - 1]] and (found := stops.find(ids[:length], min_tokens=min_tokens)):
            return length, *found
    return None


@LENIENT
@given(data=st.data())
def test_stop_strings_equal_decoding_at_every_token(tiny_tokenizer, data):
    # Whole words, single bytes and special tokens, so that characters and stop strings are split in every possible way.
    words = [i for s in ("</answer>", " 😀数é", "42 </", "user") for i in tiny_tokenizer(s)["input_ids"]]
    ids = data.draw(st.lists(st.sampled_from(words) | st.integers(0, len(tiny_tokenizer) - 1), min_size=1, max_size=14))
    text = response_text(tiny_tokenizer, ids)
    cut = data.draw(st.integers(0, max(0, len(text) - 1)))
    piece = text[cut : cut + data.draw(st.integers(1, 4))].replace("\ufffd", "")
    stop = tuple(s for s in (piece, "</answer>", "😀", "\n") if s)
    min_tokens = data.draw(st.integers(0, 5))
    stops = StopStrings(tiny_tokenizer, stop, vocab_size=len(tiny_tokenizer))
    assert fast_end(stops, ids, min_tokens) == slow_end(tiny_tokenizer, ids, stop, min_tokens)


@LENIENT
@given(data=st.data())
def test_a_response_in_two_parts_ends_where_it_would_in_one(tiny_tokenizer, data):
    """The engine of the second part sees only its tokens."""
    words = [i for s in ("</answer>", " 42 </", "answer>", "user") for i in tiny_tokenizer(s)["input_ids"]]
    ids = tuple(data.draw(st.lists(st.sampled_from(words), min_size=2, max_size=14)))
    text = response_text(tiny_tokenizer, ids)
    cut = data.draw(st.integers(0, len(text) - 1))
    stop = (text[cut : cut + data.draw(st.integers(1, 6))], "</answer>")
    begun, min_tokens = data.draw(st.integers(1, len(ids) - 1)), data.draw(st.integers(0, 5))
    before = slow_end(tiny_tokenizer, ids[:begun], stop, min_tokens)
    if before is not None:
        return  # it ended in the first part
    length, _, reason = slow_end(tiny_tokenizer, ids[begun:], stop, max(min_tokens - begun, 0)) or (
        len(ids) - begun,
        "",
        None,
    )
    seen = Completion(
        request_index=0,
        sample_index=0,
        text="only of the new tokens",
        prompt_ids=(9, *ids[:begun]),
        token_ids=ids[begun : begun + length],
        logprobs=tuple(-float(i) for i in range(length)),
        num_prompt_tokens=1 + begun,
        num_tokens=length,
        finish_reason="stop" if reason else "length",
        stop_reason=reason,
        mean_entropy=None,
    )
    found = continued(seen, tiny_tokenizer, SamplingParams(stop=stop, min_tokens=min_tokens), begun=begun)
    expected = slow_end(tiny_tokenizer, ids, stop, min_tokens) or (len(ids), text, None)
    assert (begun + found.num_tokens, found.text, found.stop_reason) == expected
    assert found.token_ids == ids[begun : expected[0]]
    assert len(found.logprobs) == found.num_tokens
    assert found.logprobs == seen.logprobs[: found.num_tokens]
    assert found.finish_reason == ("stop" if found.stop_reason else "length")


def test_a_stop_string_split_over_tokens_is_kept_and_the_rest_of_its_token_cut(tiny_tokenizer):
    ids = [i for c in "x </answer" for i in tiny_tokenizer(c)["input_ids"]] + tiny_tokenizer(">.")["input_ids"][:1]
    assert len(ids) > 10
    stops = StopStrings(tiny_tokenizer, ("</answer>",), vocab_size=len(tiny_tokenizer))
    assert not stops.candidates[ids[:-1]].any()
    assert stops.candidates[ids[-1]]
    assert stops.find(ids, min_tokens=4) == ("x </answer>", "</answer>")
    # A token that goes on after the stop string: " and" in this vocabulary ends "a" and holds more.
    longer = next(i for t, i in tiny_tokenizer.get_vocab().items() if len(t) > 2 and t.isalpha() and "a" in t[:-1])
    text = tiny_tokenizer.decode([longer])
    stops = StopStrings(tiny_tokenizer, ("a",), vocab_size=len(tiny_tokenizer))
    assert stops.find([longer], min_tokens=0) == (text[: text.index("a") + 1], "a")


def test_min_tokens_protects_what_was_complete_by_then(tiny_tokenizer):
    ids = [i for c in "b.a.a" for i in tiny_tokenizer(c)["input_ids"]]
    stops = StopStrings(tiny_tokenizer, (".a",), vocab_size=len(tiny_tokenizer))
    assert fast_end(stops, ids, 0) == (3, "b.a", ".a")
    assert fast_end(stops, ids, 2) == (3, "b.a", ".a")  # begins in the protected part, ends after it
    assert fast_end(stops, ids, 3) == (5, "b.a.a", ".a")
    assert fast_end(stops, ids, 5) is None


def test_half_a_character_within_min_tokens_does_not_hide_the_whole_one(tiny_tokenizer):
    ids = tiny_tokenizer("😀")["input_ids"]
    assert len(ids) > 2
    stops = StopStrings(tiny_tokenizer, ("😀",), vocab_size=len(tiny_tokenizer))
    assert fast_end(stops, ids, 2) == (len(ids), "😀", "😀")


def test_candidates_are_few_and_a_padded_head_has_none_of_them(tiny_tokenizer):
    stops = StopStrings(tiny_tokenizer, ("</answer>",), vocab_size=400)
    assert stops.candidates.shape == (400,)
    assert 0 < stops.candidates.sum() < 10
    assert not stops.candidates[len(tiny_tokenizer) :].any()
    assert not StopStrings(tiny_tokenizer, (), vocab_size=400).candidates.any()


def test_candidates_with_a_tokenizer_that_strips_the_first_space():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["a", "▁a", "▁", "b", ">", "▁>"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    stops = StopStrings(tokenizer, ("a ",), vocab_size=6)
    assert stops.candidates.tolist() == [False, True, True, False, False, True]
    assert stops.find([3, 0, 1], min_tokens=0) == ("ba ", "a ")


def test_only_tokens_in_which_a_stop_string_may_end_are_candidates():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["a", "▁x>", "▁</think>", "answer>", ">", "r>▁b>", "▁<b></answer>▁c>", "</answer"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    stops = StopStrings(PreTrainedTokenizerFast(tokenizer_object=inner), ("</answer>",), vocab_size=8)
    assert stops.candidates.tolist() == [False, False, False, True, True, True, True, False]


def asked(tokenizer, prompts):
    return prompt_token_ids(tokenizer, [Request(prompt, ()) for prompt in prompts], vocab_size=320)


def test_an_empty_stop_string_is_refused(tiny_tokenizer):
    with pytest.raises(RlvrError, match="stop string is empty"):
        StopStrings(tiny_tokenizer, ("x", ""), vocab_size=10)


@LENIENT
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_text_survives_tokenization(tiny_tokenizer, text):
    if text:
        (ids,) = asked(tiny_tokenizer, [text])
        composed = unicodedata.normalize("NFC", text)  # as Qwen's tokenizers do
        assert response_text(tiny_tokenizer, [*ids, tiny_tokenizer.eos_token_id]) == composed


@LENIENT
@given(ids=st.lists(st.integers(0, 300), max_size=12))
def test_text_is_what_the_tokenizer_decodes(tiny_tokenizer, ids):
    plain = tiny_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert response_text(tiny_tokenizer, ids) == plain


def test_the_decoder_of_a_custom_tokenizer_is_used(tiny_tokenizer):
    class Loud(type(tiny_tokenizer)):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    assert _has_common_decode(type(tiny_tokenizer))
    ids = tiny_tokenizer("no")["input_ids"]
    tiny_tokenizer.__class__ = Loud
    try:
        assert response_text(tiny_tokenizer, ids) == "NO"
        assert StopStrings(tiny_tokenizer, ("O",), vocab_size=320).find(ids, min_tokens=0) == ("NO", "O")
        assert StopStrings(tiny_tokenizer, ("O",), vocab_size=320).candidates[ids[-1]]
    finally:
        tiny_tokenizer.__class__ = Loud.__base__


def test_an_incomplete_character_shows_only_if_it_stays_incomplete(tiny_tokenizer):
    ids = tiny_tokenizer("😀!")["input_ids"]
    assert len(ids) > 2
    assert response_text(tiny_tokenizer, ids) == "😀!"
    assert "\ufffd" in response_text(tiny_tokenizer, ids[:1])


def test_prompts_get_the_special_tokens_of_their_tokenizer(tiny_model_dir):
    from tokenizers import processors
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    plain = asked(tokenizer, ["1 + 1", "2"])
    assert plain == [tokenizer("1 + 1")["input_ids"], tokenizer("2")["input_ids"]]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert asked(tokenizer, ["1 + 1"]) == [[0, *plain[0]]]
    assert asked(tokenizer, []) == []


@pytest.mark.parametrize(
    ("prompt", "message"), [("", "Prompt 1 is empty"), ("a\ud83d", "Prompt 1 is not valid Unicode")]
)
def test_prompts_without_tokens_or_meaning_are_refused(tiny_tokenizer, prompt, message):
    with pytest.raises(RlvrError, match=message):
        asked(tiny_tokenizer, ["fine", prompt])


def test_prompt_ids_of_a_request_are_used_unchanged(tiny_tokenizer):
    spelled = tuple(i for character in "1 + 1" for i in tiny_tokenizer(character)["input_ids"])
    assert list(spelled) != tiny_tokenizer("12 + 30")["input_ids"]
    mixed = [
        Request("12 + 30", ()),
        Request("12 + 30", (), prompt_ids=spelled),
        Request("a\ud83d", (), prompt_ids=(7,)),
    ]
    expected = [tiny_tokenizer("12 + 30")["input_ids"], list(spelled), [7]]
    assert prompt_token_ids(tiny_tokenizer, mixed, vocab_size=320) == expected
    with pytest.raises(RlvrError, match="Prompt 1 is empty"):
        prompt_token_ids(tiny_tokenizer, [Request("a", ()), Request("a", (), prompt_ids=())], vocab_size=320)
    for wrong in (320, -1):
        with pytest.raises(
            RlvrError, match="Prompt 0 has a token id that the model does not have: its ids are 0 to 319"
        ):
            prompt_token_ids(tiny_tokenizer, [Request("a", (), prompt_ids=(5, wrong))], vocab_size=320)
