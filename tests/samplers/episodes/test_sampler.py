"""Episodes: exact tokens, whoever answers; limits and endings; and that nothing waits for a barrier."""

import json
import math
import threading
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.environments.open import EnvironmentSpec
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.errors import Interrupted, QuestionsRefused, RlvrError
from rlvr_cli.models.policy import Policy
from rlvr_cli.runs.turns import broken_turns
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.episodes.sampler import EpisodeSampler
from rlvr_cli.types import Completion, Example, Request, SamplingParams

# Says what the example's ground truth lists, one text after the other; an empty list of it ends the episode.
SCRIPT = """
import json, weakref
from rlvr_cli.environments import Reply

class Script:
    stop = ("e", "a")
    marker = "["
    alive = weakref.WeakSet()

    def begin(self, example, seed):
        self.alive.add(self)
        self.replies, self.seed = json.loads(example.ground_truth), str(seed)
        return example.solution

    def answer(self, turn):
        if not self.replies:
            return Reply(done=True)
        said = self.replies.pop(0)
        if said == "alive":
            return Reply(str(len(self.alive)))
        if said == "raise":
            raise ValueError("no more")
        return Reply(said["text"].replace("SEED", self.seed), reward=said.get("reward"), done=said.get("done", False), role=said.get("role", "tool"))

class Rewards(Script):
    gives_rewards = True
"""
PARAMS = SamplingParams(max_tokens=40, min_tokens=2, stop=("z",))
PROMPTS = ["What is 12 + 30?", "a b c"]


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    file = tmp_path_factory.mktemp("environment") / "mine.py"
    file.write_text(SCRIPT)
    pools = {name: EnvironmentPool(EnvironmentSpec(f"{file}:{name}"), workers=1) for name in ("Script", "Rewards")}
    with closing(pools["Script"]), closing(pools["Rewards"]):
        yield pools


def requests_of(*replies, samples=3, prompt=None):
    truth = json.dumps(replies)
    return [
        Request(p, tuple(100 * i + j for j in range(samples)), name=p, example=Example(p, p, truth, solution=prompt))
        for i, p in enumerate(PROMPTS)
    ]


def longest(tokens):
    return lambda of_the_policy: tokens


def play(sampler, requests, params=PARAMS) -> dict[tuple[int, int], Completion]:
    done = {(c.request_index, c.sample_index): c for c in sampler.sample(requests, params)}
    assert sorted(done) == [(i, j) for i, r in enumerate(requests) for j in range(len(r.seeds))]
    return done


@pytest.fixture
def engine(tiny_model, tiny_tokenizer):
    return TransformersSampler(Policy(tiny_model, tiny_tokenizer))


class Alone:
    """The engine, whose call ends when what it was given at first is answered."""

    def __init__(self, engine):
        self._engine = engine
        self.engine, self.seeding, self.notes, self.policy_version = engine.engine, engine.seeding, engine.notes, 0
        self.context_length = engine.context_length

    def sample(self, requests, params, *, more=None):
        return self._engine.sample(requests, params)


def test_the_engine_is_told_what_prompts_begin_with(pools, engine, tiny_tokenizer):
    asked = []

    class Recording(Alone):
        def sample(self, requests, params, *, more=None):
            asked.extend(requests)
            return super().sample(requests, params)

    sampler = EpisodeSampler(Recording(engine), tiny_tokenizer, pools["Script"], max_turns=1, longest=longest(90))
    play(sampler, [replace(request, common_prefix="of all") for request in requests_of()])
    assert {request.common_prefix for request in asked} == {"of all"}


SAYS = [
    {"text": " SEED is 数学 <|endoftext|>\\n", "reward": 0.25},
    {"text": ""},
    {"text": "[7] ", "role": "environment"},
]


def test_every_token_is_as_it_was_sampled(pools, engine, tiny_model, tiny_tokenizer):
    sampler = EpisodeSampler(engine, tiny_tokenizer, pools["Script"], max_turns=4, longest=longest(90))
    params = replace(PARAMS, min_tokens=0)  # no end is barred
    requests = requests_of(*SAYS)
    first = play(engine, requests, replace(params, stop=("z", "e", "a")))
    ended_by = set()
    for key, found in play(sampler, requests, params).items():
        episode = found.episode
        ended_by.add(episode.ended_by)
        start = len(first[key].token_ids)
        assert found.token_ids[:start] == first[key].token_ids
        said = {"tokens": found.num_tokens, "policy_tokens": episode.num_policy_tokens}
        assert broken_turns(found.turns, found.response_mask, **said) is None
        mask = found.response_mask or (True,) * found.num_tokens
        assert not set(tiny_tokenizer.all_special_ids) & {
            i for i, own in zip(found.token_ids, mask, strict=True) if not own
        }
        with torch.no_grad():
            log_p = tiny_model(torch.tensor([found.prompt_ids + found.token_ids])).logits[0].double().log_softmax(-1)
        entropies = []
        for place, own in enumerate(mask):
            at = len(found.prompt_ids) + place - 1
            expected = float(log_p[at, found.token_ids[place]]) if own else 0.0
            assert found.logprobs[place] == pytest.approx(expected, abs=1e-4)
            entropies += [float(-(log_p[at].exp() * log_p[at]).sum())] if own else []
        assert found.mean_entropy == pytest.approx(sum(entropies) / len(entropies), abs=1e-4)
        own_seed = str(requests[key[0]].seeds[key[1]])
        heard = SAYS[: episode.num_turns - (episode.ended_by != "environment")]
        spoken = [said["text"].replace("SEED", own_seed) for said in heard]
        assert all(text in found.text for text in spoken)
        assert episode.tool_calls == sum(said.get("role") is None for said in SAYS[: len(spoken)])
        assert episode.turn_rewards is None if not spoken else episode.turn_rewards[0] == 0.25
    assert len(ended_by) > 1


def test_without_a_barrier_the_tokens_are_the_same(pools, engine, tiny_tokenizer):
    limits = {"max_turns": 4, "longest": longest(90)}
    joined = EpisodeSampler(engine, tiny_tokenizer, pools["Script"], **limits)
    together = EpisodeSampler(Alone(engine), tiny_tokenizer, pools["Script"], **limits)
    found, expected = play(joined, requests_of(*SAYS)), play(together, requests_of(*SAYS))
    assert {k: (c.token_ids, c.turns) for k, c in found.items()} == {
        k: (c.token_ids, c.turns) for k, c in expected.items()
    }
    assert any(c.episode.num_turns > 2 for c in found.values())


class Told(Alone):
    """Looks for what comes when it has been told that something has."""

    times = 0

    def sample(self, requests, params, *, more):
        told, waiting, number = threading.Event(), [*requests], 0
        more.notify(told.set)
        while waiting:
            for completion in self._engine.sample([waiting.pop(0)], params):
                yield replace(completion, request_index=number)
            number += 1
            if more.awaits((number - 1, 0)):
                assert told.wait(20)
                told.clear()
                self.times += 1
                waiting += more.take(wait=False)


def test_who_waits_for_something_else_is_told_that_the_environment_has_answered(pools, engine, tiny_tokenizer):
    asked = [replace(request, seeds=request.seeds[:1]) for request in requests_of(*SAYS)[:1]]
    told = Told(engine)
    sampler = EpisodeSampler(told, tiny_tokenizer, pools["Script"], max_turns=4, longest=longest(90))
    expected = play(EpisodeSampler(engine, tiny_tokenizer, pools["Script"], max_turns=4, longest=longest(90)), asked)
    found = play(sampler, asked)
    assert found[0, 0].token_ids == expected[0, 0].token_ids
    assert told.times >= found[0, 0].episode.num_turns - 1 > 1


def test_in_bfloat16_what_is_kept_and_what_is_new_go_together(pools, tiny_model, tiny_tokenizer):
    engine = TransformersSampler(Policy(tiny_model, tiny_tokenizer, compute_dtype="bfloat16"))
    limits = {"max_turns": 4, "longest": longest(90)}
    found = play(EpisodeSampler(engine, tiny_tokenizer, pools["Script"], **limits), requests_of(*SAYS))
    assert any(c.episode.num_turns > 2 for c in found.values())
    for c in found.values():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = tiny_model(torch.tensor([c.prompt_ids + c.token_ids])).logits[0].float()
        start = len(c.prompt_ids) - 1
        expected = logits.log_softmax(-1)[start:-1].gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        own = torch.tensor(c.response_mask or [True] * c.num_tokens)
        barred = torch.tensor(c.logprobs)[own] - expected[own]
        assert float(barred.abs().median()) < 0.05


@pytest.mark.parametrize(
    ("turns", "mask", "tokens", "policy_tokens", "problem"),
    [
        (None, None, 3, 3, None),
        (None, None, 3, 2, "2 tokens of the policy are said, and there are 3"),
        ([("policy", 0, 2), ("tool", 2, 3)], (True, True, False), 3, 2, None),
        (
            [("policy", 0, 2), ("tool", 2, 3)],
            (True, False, False),
            3,
            1,
            "the mask does not fit the turn of policy at token 0",
        ),
        ([("policy", 0, 1), ("tool", 2, 3)], (True, True, False), 3, 2, "a turn begins at token 2, and not at 1"),
        ([("policy", 0, 2)], (True, True, True), 3, 3, "its turns have 2 tokens, and the response 3"),
        ([("policy", 0, 3)], None, 3, 3, "it has turns or a mask, and not the other"),
    ],
)
def test_turns_that_are_not_the_response_are_named(turns, mask, tokens, policy_tokens, problem):
    assert broken_turns(turns, mask, tokens=tokens, policy_tokens=policy_tokens) == problem


def test_the_grader_reads_the_last_turn_of_the_policy_alone(pools, tiny_tokenizer):
    replies = [{"text": "</think> <answer> 7 </answer>"}, {"text": "</think> <answer> 7 </answer>", "done": True}]
    for turns, rest, ended_by in ((9, 99, "environment"), (1, 99, "turns"), (9, 12, "length")):
        scripted = Scripted(tiny_tokenizer, ["one", "three"])
        sampler = EpisodeSampler(scripted, tiny_tokenizer, pools["Script"], max_turns=turns, longest=longest(rest))
        request = Request("p", (3,), prompt_ids=(5,), example=Example("q", "p", json.dumps(replies)))
        (found,) = sampler.sample([request], PARAMS)
        assert found.episode.ended_by == ended_by
        assert found.graded_text == ("three" if ended_by == "environment" else "one")
        assert found.graded_text in found.text


def test_answers_that_the_policy_forges_are_counted_in_each_turn(pools, tiny_tokenizer):
    scripted = Scripted(tiny_tokenizer, ["[7] e", "[8] [9] no"])
    sampler = EpisodeSampler(scripted, tiny_tokenizer, pools["Script"], max_turns=9, longest=longest(99))
    request = Request("p", (3,), prompt_ids=(5,), example=Example("q", "p", '[{"text": "[7]"}]'))
    (found,) = sampler.sample([request], PARAMS)
    assert (found.episode.forged, found.turn_facts.forged) == (3, (0, 1))


@pytest.mark.parametrize(("context", "room"), [(60, 45), (512, 60)])
def test_the_context_ends_an_episode(pools, tiny_model, tiny_tokenizer, context, room):
    tiny_model.config.max_position_embeddings = context
    engine = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    sampler = EpisodeSampler(engine, tiny_tokenizer, pools["Script"], max_turns=9, longest=longest(90))
    replies = requests_of(*[{"text": "0123456789"}] * 9, samples=8)
    found = play(sampler, [replace(r, prompt_ids=(5,) * 15) for r in replies], replace(PARAMS, max_tokens=30))
    assert {c.num_tokens for c in found.values() if c.episode.ended_by == "length"} >= {room}
    assert max(c.num_tokens for c in found.values()) == room


def test_the_context_holds_what_the_policy_may_sample_or_the_prompt_is_refused(pools, tiny_model, tiny_tokenizer):
    tiny_model.config.max_position_embeddings = 60
    engine = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    sampler = EpisodeSampler(engine, tiny_tokenizer, pools["Script"], max_turns=9, longest=longest(90))
    with pytest.raises(
        RlvrError, match=r"its prompt has 21 tokens and up to 40 are to be sampled, but .* context holds 60"
    ):
        play(sampler, [replace(request, prompt_ids=(5,) * 21) for request in requests_of()])


def test_samples_differ(pools, engine, tiny_tokenizer):
    sampler = EpisodeSampler(engine, tiny_tokenizer, pools["Script"], max_turns=6, longest=longest(200))
    found = play(sampler, requests_of(*[{"text": "!"}] * 5, samples=6))
    assert len({c.token_ids for c in found.values()}) == len(found)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(("turns", "tokens", "replies"), [(2, 99, 5), (9, 12, 5), (9, 99, 1), (9, 99, 0)])
def test_no_environment_outlives_its_episode(pools, tiny_tokenizer, turns, tokens, replies, closed):
    sampler = EpisodeSampler(
        Scripted(tiny_tokenizer, ["one", "e", "no"]),
        tiny_tokenizer,
        pools["Script"],
        max_turns=turns,
        longest=longest(tokens),
    )
    example = Example("q", "p", json.dumps([{"text": "!"}] * replies))
    completions = sampler.sample([Request("p", (s,), prompt_ids=(5,), example=example) for s in (3, 4)], PARAMS)
    next(completions)
    if closed:
        completions.close()
    assert len([*completions]) == 1 - closed
    alive = pools["Script"].answer(Example("q", "p", '["alive"]'), 5, ["e"]).result().reply.text
    pools["Script"].end(5)
    assert alive == "1"


def test_turns_do_not_repeat_their_draws(pools, tiny_tokenizer):
    scripted = Scripted(tiny_tokenizer, ["one", "more", "e"])
    sampler = EpisodeSampler(scripted, tiny_tokenizer, pools["Script"], max_turns=3, longest=longest(99))
    example = Example("q", "p", json.dumps([{"text": "!"}] * 5))
    for seed in (3, 4):
        list(sampler.sample([Request("p", (seed,), prompt_ids=(5,), example=example)], PARAMS))
    assert scripted.seeds[::3] == [3, 4]
    assert len(set(scripted.seeds)) == len(scripted.seeds) == 6


@pytest.mark.parametrize(("turns", "tokens", "policy_tokens"), [(1, 200, 40), (2, 200, 40), (9, 25, 40), (9, 200, 12)])
def test_limits_end_an_episode(pools, engine, tiny_tokenizer, turns, tokens, policy_tokens):
    sampler = EpisodeSampler(engine, tiny_tokenizer, pools["Script"], max_turns=turns, longest=longest(tokens))
    params = replace(PARAMS, max_tokens=policy_tokens)
    found = play(sampler, requests_of(*[{"text": "0123"}] * 9, samples=8), params)
    for c in found.values():
        assert c.episode.num_turns <= turns
        assert c.num_tokens <= tokens
        assert c.episode.num_policy_tokens <= policy_tokens
        full = c.num_tokens == tokens or c.episode.num_policy_tokens == policy_tokens
        assert (c.episode.ended_by == "length") == (c.finish_reason == "length")
        assert c.episode.ended_by != "length" or full
        assert c.episode.ended_by != "turns" or c.episode.num_turns == turns
        last = c.turns[-1] if c.turns else None
        if last is not None and last.role == "tool":  # its text may be cut
            assert c.text.endswith(tiny_tokenizer.decode(c.token_ids[last.start :]))
    expected = "turns" if turns < 9 else "length"
    assert expected in {c.episode.ended_by for c in found.values()}


def test_the_environment_ends_an_episode_and_gives_the_reward(pools, engine, tiny_tokenizer):
    sampler = EpisodeSampler(engine, tiny_tokenizer, pools["Rewards"], max_turns=2, longest=longest(200))
    found = play(sampler, requests_of({"text": "x", "reward": 0.5}, {"text": "", "reward": 1, "done": True}))
    for c in found.values():
        rewards = c.episode.turn_rewards
        assert c.grade.reward == (sum(r or 0.0 for r in rewards) if rewards else 0.0)
        assert (c.grade.format_reward, c.grade.error) == (None, None)
    assert {1.5} <= {c.grade.reward for c in found.values() if c.episode.ended_by == "environment"}


def test_a_failed_environment_costs_its_own_episode(pools, engine, tiny_tokenizer):
    sampler = EpisodeSampler(engine, tiny_tokenizer, pools["Script"], max_turns=5, longest=longest(200))
    broken, sound = requests_of({"text": "1"}, "raise")[:1], requests_of(*SAYS)[1:]
    found = play(sampler, [*broken, *sound])
    failed = [c for (i, _), c in found.items() if i == 0 and c.episode.ended_by == "error"]
    assert failed
    for c in failed:
        assert (c.grade.reward, c.grade.error) == (None, "ValueError")
        assert "mine.py" in c.grade.error_detail
        assert c.token_ids
    alone = play(EpisodeSampler(engine, tiny_tokenizer, pools["Script"], max_turns=5, longest=longest(200)), sound)
    assert [found[1, j].token_ids for j in range(3)] == [alone[0, j].token_ids for j in range(3)]


def test_without_the_log_probabilities_of_a_turn_an_episode_has_none(pools, engine, tiny_tokenizer):
    """As at an endpoint that does not know the distribution that it samples from."""

    class Unscored(Alone):
        def sample(self, requests, params, *, more=None):
            for completion in super().sample(requests, params):
                yield replace(completion, logprobs=())

    sampler = EpisodeSampler(Unscored(engine), tiny_tokenizer, pools["Script"], max_turns=3, longest=longest(90))
    played = play(sampler, requests_of(*SAYS)).values()
    assert max(found.episode.num_turns for found in played) == 3
    for found in played:
        assert found.logprobs == ()
        said = {"tokens": len(found.token_ids), "policy_tokens": found.episode.num_policy_tokens}
        assert broken_turns(found.turns, found.response_mask, **said) is None


def test_an_environment_gives_the_prompt(pools, engine, tiny_tokenizer):
    sampler = EpisodeSampler(engine, tiny_tokenizer, pools["Script"], max_turns=2, longest=longest(200))
    found = play(sampler, requests_of({"text": "1"}, prompt="Its own prompt"))
    assert {c.prompt for c in found.values()} == {"Its own prompt"}
    assert {c.prompt_ids for c in found.values()} == {tuple(tiny_tokenizer("Its own prompt")["input_ids"])}


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("", "ValueError"), ([], "ValueError"), ({"role": "user", "content": "a"}, "TypeError"), ("half \ud83d", None)],
)
def test_a_prompt_that_cannot_be_costs_its_own_episode(pools, engine, tiny_tokenizer, prompt, error):
    sampler = EpisodeSampler(engine, tiny_tokenizer, pools["Script"], max_turns=2, longest=longest(200))
    odd, sound = requests_of(prompt=prompt)[:1], requests_of(prompt="Its own prompt")[1:]
    found = play(sampler, [*odd, *sound])
    assert {c.grade and c.grade.error for (i, _), c in found.items() if i == 0} == {error}
    assert {c.prompt for (i, _), c in found.items() if i == 1} == {"Its own prompt"}


def test_a_prompt_that_leaves_no_room_costs_its_own_episode_and_is_said_once(tmp_path, engine, tiny_tokenizer):
    (tmp_path / "mine.py").write_text(SCRIPT)
    spec, said = EnvironmentSpec(f"{tmp_path}/mine.py:Script"), []
    (long, _), (_, sound) = requests_of(prompt="a" * 1_000), requests_of(prompt="a" * 472)
    with closing(EnvironmentPool(spec, workers=1, report=said.append)) as pool:
        sampler = EpisodeSampler(engine, tiny_tokenizer, pool, max_turns=1, longest=longest(200))
        found = play(sampler, [long, sound])
        with pytest.raises(RlvrError, match="its prompt has 1000 tokens"):
            play(sampler, [replace(request, prompt="a" * 1_000) for request in requests_of()])  # the dataset's
    detail = (
        "begin() returned a prompt of 1,000 tokens; with the 40 that the policy may sample, "
        "they are more than the 512 of the model's context"
    )
    assert [found[0, j].grade.error_detail for j in range(3)] == [detail] * 3
    assert [(found[1, j].grade, found[1, j].num_prompt_tokens) for j in range(3)] == [(None, 472)] * 3
    assert said == [f"the environment {spec.title} failed in an episode: ValueError: {detail}"]


def test_a_call_that_is_closed_leaves_nothing_behind(pools, engine, tiny_tokenizer):
    sampler = EpisodeSampler(engine, tiny_tokenizer, pools["Script"], max_turns=4, longest=longest(90))
    expected = play(sampler, requests_of(*SAYS))
    completions = sampler.sample(requests_of(*SAYS), PARAMS)
    next(completions)
    completions.close()
    assert {k: c.token_ids for k, c in play(sampler, requests_of(*SAYS)).items()} == {
        k: c.token_ids for k, c in expected.items()
    }


class Scripted:
    """An engine whose turns are the texts that it is given, each as its own bytes' tokens."""

    engine, seeding, notes, policy_version, context_length = "scripted", "per-request", (), 0, None

    def __init__(self, tokenizer, turns):
        self._tokenizer, self._turns, self._asked = tokenizer, turns, 0
        self.seeds = []

    def sample(self, requests, params, *, more=None):
        for index, request in enumerate(requests):
            text = self._turns[min(self._asked, len(self._turns) - 1)]
            self._asked += 1
            self.seeds += request.seeds
            ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])[: request.max_tokens]
            stop = next((stop for stop in params.stop if text.endswith(stop)), None)
            calls = stop is not None and len(ids) < (request.max_tokens or math.inf)
            yield Completion(
                index, 0, text, request.prompt_ids or (5,), ids, (-0.5,) * len(ids), 1, len(ids),
                "stop" if calls else "length", stop if calls else None, 1.0,
            )  # fmt: skip


class Breaking(Scripted):
    """Waits until the environment has answered, and fails."""

    def __init__(self, tokenizer, error):
        super().__init__(tokenizer, ["e"])
        self._error = error

    def sample(self, requests, params, *, more=None):
        yield from super().sample(requests, params)
        assert not more.take(wait=True)
        raise self._error


@pytest.mark.parametrize("error", [QuestionsRefused("no 1"), RlvrError("gone"), AssertionError("a bug"), Interrupted()])
def test_episodes_that_have_ended_outlast_what_fails_then(pools, tiny_tokenizer, error):
    sampler = EpisodeSampler(
        Breaking(tiny_tokenizer, error), tiny_tokenizer, pools["Script"], max_turns=9, longest=longest(99)
    )
    example, kept = Example("q", "p", '[{"text": "1", "done": true}]'), []
    with pytest.raises(type(error)):
        kept.extend(sampler.sample([Request("p", (s,), prompt_ids=(5,), example=example) for s in (3, 4)], PARAMS))
    found = sampler.arrived if isinstance(error, Interrupted) else kept  # Ctrl-C leaves no time
    assert sorted((c.request_index, c.episode.ended_by) for c in found) == [(0, "environment"), (1, "environment")]


said = st.text(alphabet=st.sampled_from("ab e<|>/\n数😀é\x00endoftext[im_start]"), max_size=30) | st.sampled_from(
    ["<|endoftext|>", "<|im_end|>\n<|im_start|>user", "</think> <answer> 1 </answer>", "", "\ufffd"]
)


def keeps_the_invariant(pool, tokenizer, turns, replies, max_turns, max_tokens):
    sampler = EpisodeSampler(
        Scripted(tokenizer, [f"{t}e" for t in turns]), tokenizer, pool, max_turns=max_turns, longest=longest(max_tokens)
    )
    truth = json.dumps([{"text": text} for text in replies])
    request = Request("p", (3,), prompt_ids=(5,), example=Example("q", "p", truth))
    (found,) = sampler.sample([request], replace(PARAMS, max_tokens=max_tokens))
    policy_tokens = found.episode.num_policy_tokens
    assert broken_turns(found.turns, found.response_mask, tokens=found.num_tokens, policy_tokens=policy_tokens) is None
    assert found.num_tokens <= max_tokens
    assert found.mean_entropy in (None, pytest.approx(1.0))
    assert sum(found.logprobs) == pytest.approx(-0.5 * policy_tokens)
    for turn in found.turns or ():
        if turn.role != "policy":
            assert not set(tokenizer.all_special_ids) & set(found.token_ids[turn.start : turn.end])


EPISODES = {
    "turns": st.lists(said, min_size=1, max_size=5),
    "replies": st.lists(said, max_size=5),
    "max_turns": st.integers(1, 6),
    "max_tokens": st.integers(1, 80),
}


@settings(max_examples=40)
@given(**EPISODES)
def test_random_episodes_keep_the_invariant(pools, tiny_tokenizer, turns, replies, max_turns, max_tokens):
    keeps_the_invariant(pools["Script"], tiny_tokenizer, turns, replies, max_turns, max_tokens)


@pytest.mark.full
@settings(max_examples=10_000)
@given(**EPISODES)
def test_ten_thousand_random_episodes_keep_the_invariant(pools, tiny_tokenizer, turns, replies, max_turns, max_tokens):
    keeps_the_invariant(pools["Script"], tiny_tokenizer, turns, replies, max_turns, max_tokens)


# What a tool may answer, and how a policy may call it

TOOLS = """
import time

def think(text): return "</think> <answer> 7 </answer>"
def marker(text): return "<|endoftext|><|im_end|>"
def flood(text): return "x" * 10_000_000
def surrogate(text): return b"\\xff\\xfe".decode(errors="surrogateescape")
def raw(text): return b"\\xff"
def nothing(text): return ""
def none(text): return None
def late(text): time.sleep(60)
"""
ANSWERED = {
    "think": "</think> <answer> 7 </answer>",
    "marker": "<|endoftext|><|im_end|>",
    "flood": f"{'x' * 3_995}\n[cut: {10_000_000 + 11 - 8_000:,} characters]\n{'x' * 3_994}",
    "surrogate": "\\udcff\\udcfe",
    "raw": "b'\\xff'",
    "nothing": "",
    "none": "None",
}
CALLS = {
    "1,000 calls": ("<calc>1+1</calc>" * 999 + "<calc>2+2</calc>", "4", 0),
    "a call inside a call": ("<calc>1+<calc>2+2</calc>", "4", 0),
    "another tool inside": ("<think><calc>2+2</calc>", "4", 0),
    "no call before": ("2+2</calc>", "error: there is no <calc> before </calc>", 0),
    "its own answer": ("<calc>2+2</calc> <out>5</out> <calc>3+3</calc>", "6", 1),
    "many answers": ("<out>" * 1_000 + "<calc>3+3</calc>", "6", 1_000),
}


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    file = tmp_path_factory.mktemp("tools") / "mine.py"
    file.write_text(TOOLS)
    names = tuple(f"{file}:{name}" for name in (*ANSWERED, "late"))
    with closing(EnvironmentPool(EnvironmentSpec("calculator", names), workers=1, timeout=1.0)) as pool:
        yield pool


def called(pool, tokenizer, turn, *, seed) -> Completion:
    """The episode in which the policy calls a tool, and then answers."""
    engine = Scripted(tokenizer, [turn, " </think> <answer> 8 </answer>"])
    sampler = EpisodeSampler(engine, tokenizer, pool, max_turns=3, longest=longest(100_000))
    request = Request("p", (seed,), prompt_ids=(5,), example=Example("q", "p", "8"))
    (found,) = sampler.sample([request], replace(PARAMS, max_tokens=50_000))
    said = {"tokens": found.num_tokens, "policy_tokens": found.episode.num_policy_tokens}
    assert broken_turns(found.turns, found.response_mask, **said) is None
    return found


def heard(found: Completion) -> str:
    """What the environment said in an episode of three turns."""
    assert [turn.role == "policy" for turn in found.turns] == [True, False, True]
    return found.text[found.turn_facts.ends[0] : found.turn_facts.ends[1]]


@pytest.mark.parametrize("name", ANSWERED)
def test_whatever_a_tool_answers_is_text_and_is_not_graded(tools, tiny_tokenizer, name):
    found = called(tools, tiny_tokenizer, f"<{name}>x</{name}>", seed=len(name))
    assert heard(found) == f"<out>{ANSWERED[name]}</out>"
    turn = found.turns[1]
    assert not set(tiny_tokenizer.all_special_ids) & set(found.token_ids[turn.start : turn.end])
    assert found.graded_text == " </think> <answer> 8 </answer>"
    assert (found.episode.tool_calls, found.episode.tool_errors, found.episode.forged) == (1, 0, 0)


@pytest.mark.parametrize("name", CALLS)
def test_however_a_policy_calls_the_last_call_is_answered_once(tools, tiny_tokenizer, name):
    turn, answer, forged = CALLS[name]
    found = called(tools, tiny_tokenizer, turn, seed=100 + len(name))
    assert heard(found) == f"<out>{answer}</out>"
    assert (found.episode.tool_calls, found.episode.forged) == (1, forged)
    assert found.turn_facts.forged == ((0,) if forged else ())
    assert found.turn_facts.failed == ((0,) if "error" in answer else ())
    assert all(found.response_mask[: found.turns[0].end])  # what it forged is its own


def test_a_tool_that_is_late_costs_its_own_episode(tools, tiny_tokenizer):
    found = called(tools, tiny_tokenizer, "<late>x</late>", seed=3)
    assert (found.episode.ended_by, found.grade.error, found.turns) == ("error", "timeout", None)
    assert heard(called(tools, tiny_tokenizer, "<calc>2+2</calc>", seed=4)) == "<out>4</out>"
