"""What stands out in the gap between sampler and trainer, in words.

Enters: rows of the query `mismatch`, and the runs. Leaves: sentences.
"""

from collections.abc import Iterator, Sequence

from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.types import Table


def mismatch_sentences(result: Table, infos: Sequence[RunInfo]) -> Iterator[str]:
    """Say for each run whether its largest gap is where the sampler forbids the end of a response, which is expected."""
    buckets = [bucket for bucket in result.records() if bucket["measure"] == "position"]
    for info in infos:
        fewest = (info.metadata.get("config") or {}).get("sampling_min_tokens") or 0
        own = [bucket for bucket in buckets if bucket["run_id"] == info.id]
        barred = [bucket["largest"] for bucket in own if bucket["bucket_from"] < fewest]
        free = [bucket["largest"] for bucket in own if bucket["bucket_from"] >= fewest]
        if barred and max(barred) > max(free, default=0.0):
            later = f" (later ones: {max(free):.2g})" if free else ""
            yield (
                f"{info.id}: the largest gap, {max(barred):.2g} nats{later}, is at the first {fewest} positions. The sampler forbids the end of "
                "a response there (--sampling-min-tokens), and the trainer does not: this is expected, and no fault of the engine. Only the "
                "rows by position have these tokens."
            )
