"""What the sampler is asked for: the samples that a run lacks, each with a seed that is a function of who it is."""

import hashlib
from collections.abc import Iterator, Sequence

from rlvr_cli.data.prompts import PromptTemplate, prompt_of
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Example, Phase, PrefetchingSampler, Request, SamplingParams

SLICE_ROWS = 2048  # training rollouts that are committed together, or not at all


def request_seed(seed: int, *, phase: Phase, step: int, example_id: str, sample_index: int) -> int:
    """The 63-bit seed of one sample: a pure function of who it is, so that no order of work can change its tokens."""
    identity = f"{seed}\0{phase}\0{step}\0{sample_index}\0{example_id}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1


def missing(
    run: RunDir,
    *,
    phase: Phase,
    step: int,
    examples: Sequence[Example],
    template: PromptTemplate,
    num_samples: int,
    seed: int,
) -> tuple[list[tuple[Example, list[int]]], list[Request]]:
    """The samples of (phase, step) that the run does not hold: by example, and as requests."""
    wanted = [(e, run.missing(phase, step, e.id, num_samples=num_samples)) for e in examples]
    wanted = [(e, indices) for e, indices in wanted if indices]
    requests = [
        Request(
            prompt_of(e, template),
            tuple(request_seed(seed, phase=phase, step=step, example_id=e.id, sample_index=i) for i in indices),
            name=e.id,
        )
        for e, indices in wanted
    ]
    return wanted, requests


def prefetch_groups(
    run: RunDir,
    *,
    step: int,
    examples: Sequence[Example],
    num_samples: int,
    template: PromptTemplate,
    sampler: PrefetchingSampler,
    params: SamplingParams,
    seed: int,
) -> None:
    """Have the sampler begin with what `sample_groups` will ask of it for that step."""
    for part in slices_of(examples, num_samples=num_samples):
        _, requests = missing(
            run, phase="train", step=step, examples=part, template=template, num_samples=num_samples, seed=seed
        )
        if requests:
            sampler.prefetch(requests, params)


def slices_of(examples: Sequence[Example], *, num_samples: int, rows: int = SLICE_ROWS) -> Iterator[Sequence[Example]]:
    size = max(rows // num_samples, 1)
    for start in range(0, len(examples), size):
        yield examples[start : start + size]
