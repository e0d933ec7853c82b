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
        and where the text of the turns is unknown, since no more than their tokens is stored: of a thinking budget, and of older runs.
    """
    ids, text, turns, facts = row["response_ids"], row["response"], row["turns"], row["turn_facts"]
    if turns and facts and len(facts["ends"]) == len(turns):
        ends = [0, *facts["ends"]]
        parts = [
            token_lengths(ids[turn["start"] : turn["end"]], text[start:end], pieces=pieces)
            for turn, (start, end) in zip(turns, pairwise(ends), strict=True)
        ]
        texts = [units(text[start:end]) for start, end in pairwise(ends)]
        known = [part for part in parts if part is not None]
        return _described(turns, texts, row), [*chain(*known)] if len(known) == len(parts) else None
    lengths = token_lengths(ids, text, pieces=pieces)
    if not turns or lengths is None:
        return None, lengths
    return _described(turns, [sum(lengths[turn["start"] : turn["end"]]) for turn in turns], row), lengths


def _described(turns: Sequence[Mapping[str, Any]], texts: Sequence[int], row: Mapping[str, Any]) -> Turns:
    described: Turns = []
    facts = row["turn_facts"] or {"failed": (), "forged": ()}
    rewards = dict(enumerate((row["episode"] or {}).get("turn_rewards") or ()))
    own = -1  # number of the policy's turn
    for turn, length in zip(turns, texts, strict=True):
        reward, marks = None, []
        if turn["role"] == "policy":
            own += 1
            reward = rewards.get(own)
            reward = reward if reward is None or math.isfinite(reward) else str(reward)
            marks += ["forged answer"] * (own in facts["forged"])
            marks += ["its call failed"] * (own in facts["failed"])
        tokens = turn["end"] - turn["start"]
        described.append({"role": turn["role"], "tokens": tokens, "length": length, "reward": reward, "marks": marks})
    return described
