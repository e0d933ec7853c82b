"""What changes with another objective, in words.

Enters: rows of the query `objective`. Leaves: sentences.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rlvr_cli.types import Table

SAME = 0.005  # a change of a share that is not worth a word

Bucket = Mapping[str, Any]


def objective_sentences(result: Table) -> Iterator[str]:
    """Say for each run whose responses another objective would push more, and whose less."""
    for run, group in groupby(result.records(), key=lambda bucket: bucket["run_id"]):
        buckets = [bucket for bucket in group if bucket["kind"] != "response"]
        if not buckets or any(bucket["push_share"] is None for bucket in buckets):
            continue
        if any(bucket["other_push_share"] is None for bucket in buckets):
            yield f"{run}: the other objective pushes no response at all."
            continue
        changed = sorted(buckets, key=_gain)
        least, most = changed[0], changed[-1]
        if max(abs(_gain(least)), abs(_gain(most))) < SAME:
            yield f"{run}: the other objective gives each of these the same share of the push, to half a point of 100."
            continue
        yield f"{run}: {_told(most)}; {_told(least)}."
        if sentence := _right_and_wrong(buckets):
            yield f"{run}: {sentence}"


def _gain(bucket: Bucket) -> float:
    return bucket["other_push_share"] - bucket["push_share"]


def _told(bucket: Bucket) -> str:
    name = bucket["bucket"] + (" responses" if bucket["kind"] == "correctness" else "")
    shares = f"{bucket['other_push_share']:.0%} of the push instead of {bucket['push_share']:.0%}"
    return f"{name} ({bucket['tokens']:.0f} tokens on average) would get {shares}"


def _right_and_wrong(buckets: Sequence[Bucket]) -> str:
    """How much harder a token of a wrong response is pushed than one of a right one."""
    of = {bucket["bucket"]: bucket for bucket in buckets if bucket["kind"] == "correctness"}
    if of.keys() != {"correct", "wrong"}:
        return ""

    def ratio(name: str) -> float:
        up, down = of["correct"][name], of["wrong"][name]
        return -down / up if up > 0 > down else 0.0

    own, other = ratio("token_weight"), ratio("other_token_weight")
    if not own or not other:
        return ""
    return (
        f"a token of a wrong response is pushed down {own:.2g} times as hard as one of a right response is pushed up; with the other "
        f"objective {other:.2g} times."
    )
