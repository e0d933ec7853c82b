"""Build the requests for the sampler: the samples that a run lacks, each with a seed derived from its key."""

import hashlib
import os.path
from collections.abc import Iterator, Sequence

from rlvr_cli.data.prompts import PromptTemplate, prompt_of
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Example, Phase, PrefetchingSampler, Request, SamplingParams

SLICE_ROWS = 2048  # training rollouts that are committed together, all or none


def request_seed(seed: int, *, phase: Phase, step: int, example_id: str, sample_index: int) -> int:
    """Derive the 63-bit seed of one sample from its key and the run's seed, independently of the order of work."""
    identity = f"{seed}\0{phase}\0{step}\0{sample_index}\0{example_id}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1


def common_prefix(prompts: Sequence[str]) -> str:
    """Return what all of several prompts begin with; nothing for one alone."""
    return os.path.commonprefix(prompts) if len(prompts) > 1 else ""  # noqa: RUF071  (prompts are no paths)


def missing_samples(
    run: RunDir,
    *,
    phase: Phase,
    step: int,
    examples: Sequence[Example],
    template: PromptTemplate,
    num_samples: int,
    seed: int,
) -> tuple[list[tuple[Example, list[int]]], list[Request]]:
    """Return the samples of (phase, step) that the run lacks, as (example, sample indices) and as requests, in one order."""
    prompts = [prompt_of(e, template) for e in examples]
    common = common_prefix(prompts)  # of the stored ones too: what an interrupted run lacks is computed in the same way
    missing = [run.missing_indices(phase, step, e.id, num_samples=num_samples) for e in examples]
    requests = [
        Request(
            prompt,
            tuple(request_seed(seed, phase=phase, step=step, example_id=e.id, sample_index=i) for i in indices),
            name=e.id,
            common_prefix=common,
            example=e,
        )
        for e, prompt, indices in zip(examples, prompts, missing, strict=True)
        if indices
    ]
    wanted = [(e, indices) for e, indices in zip(examples, missing, strict=True) if indices]
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
    """Prefetch the samples that `sample_groups` will request for that step."""
    for part in slice_examples(examples, num_samples=num_samples):
        _, requests = missing_samples(
            run, phase="train", step=step, examples=part, template=template, num_samples=num_samples, seed=seed
        )
        if requests:
            sampler.prefetch(requests, params)


def slice_examples(
    examples: Sequence[Example], *, num_samples: int, rows: int = SLICE_ROWS
) -> Iterator[Sequence[Example]]:
    size = max(rows // num_samples, 1)
    for start in range(0, len(examples), size):
        yield examples[start : start + size]
