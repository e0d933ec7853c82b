"""An episode as a conversation: the turns of a response, for the page.

Enters: a row of the rollouts, the bytes of its tokenizer's tokens. Leaves: for each turn who wrote it, how long it is in tokens and in
the text, and what is particular about it; the length of each token.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from rlvr_cli.analysis.report.token_spans import token_lengths, units

Turns = list[dict[str, Any]]


def turns_of(row: Mapping[str, Any], *, pieces: Mapping[int, bytes]) -> tuple[Turns | None, list[int] | None]:
    """The turns of a response, and the length of each of its tokens, see `token_lengths`.

    Returns:
        `role`, `tokens`, `length` (of its text, in UTF-16 code units), `reward` and `marks` of each turn; None of a response of one turn,
        and where the text of the turns is unknown: a thinking budget stores no more than their tokens.
    """
    ids, text, turns, episode = row["response_ids"], row["response"], row["turns"], row["episode"]
    if turns and episode and _fit(turns, episode):
        ends = [0, *episode["turn_ends"]]
        parts = [
            token_lengths(ids[turn["start"] : turn["end"]], text[start:end], pieces=pieces)
            for turn, (start, end) in zip(turns, pairwise(ends), strict=True)
        ]
        texts = [units(text[start:end]) for start, end in pairwise(ends)]
        known = [part for part in parts if part is not None]
        return _described(turns, texts, episode), [*chain(*known)] if len(known) == len(parts) else None
    lengths = token_lengths(ids, text, pieces=pieces)
    if not turns or episode or lengths is None:
        return None, lengths
    return _described(turns, [sum(lengths[turn["start"] : turn["end"]]) for turn in turns], None), lengths


def _fit(turns: Sequence[Mapping[str, Any]], episode: Mapping[str, Any]) -> bool:
    """Whether an episode has what is said of its turns; `rlvr check` says of a file of another program what is wrong."""
    own = sum(turn["role"] == "policy" for turn in turns)
    rewards = episode["turn_rewards"]
    return len(episode["turn_ends"]) == len(turns) and (rewards is None or len(rewards) == own)


def _described(turns: Sequence[Mapping[str, Any]], texts: Sequence[int], episode: Mapping[str, Any] | None) -> Turns:
    described: Turns = []
    own = -1  # number of the policy's turn
    for turn, length in zip(turns, texts, strict=True):
        reward, marks = None, []
        if turn["role"] == "policy" and episode:
            own += 1
            reward = (episode["turn_rewards"] or [None] * len(turns))[own]
            reward = reward if reward is None or math.isfinite(reward) else str(reward)
            marks += ["forged answer"] * (own in episode["forged_turns"])
            marks += ["its call failed"] * (own in episode["failed_turns"])
        tokens = turn["end"] - turn["start"]
        described.append({"role": turn["role"], "tokens": tokens, "length": length, "reward": reward, "marks": marks})
    return described
