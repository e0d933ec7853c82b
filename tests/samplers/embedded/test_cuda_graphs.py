"""samplers/embedded/cuda_graphs.py on the devices of `fake_cuda`: recorded steps give a CPU's tokens, also where recording fails."""

from unittest import TestCase

import pytest
import torch

from fake_cuda import Graph, fake_cuda
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.load import load_policy
from rlvr_cli.samplers.embedded import cuda_graphs
from rlvr_cli.samplers.embedded.cuda_graphs import FixedShapeStep
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.types import Request, SamplingParams

PROMPTS = ["What is 12 + 30?", "Natalia sold 48 clips in April", "a b c"]
REQUESTS = [Request(p, tuple(1000 * i + j for j in range(2))) for i, p in enumerate(PROMPTS)]
PARAMS = SamplingParams(max_tokens=6, min_tokens=2, stop=("a",))
NO_GRAPHS = "Sampling is slower than it could be, since CUDA graphs do not work here: "
SOME_GRAPHS = "Some steps run without CUDA graphs, which is slower: "
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.19 GiB."


def sampler_on(device, directory):
    return TransformersSampler(load_policy(directory, compute_dtype="float32", device=device), max_batch_size=5)


def tokens_of(sampler):
    return {(c.request_index, c.sample_index): c.token_ids for c in sampler.sample(REQUESTS, PARAMS)}


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    return tokens_of(sampler_on("cpu", tiny_model_dir))


@pytest.mark.parametrize(
    ("device", "first"),
    [
        ("cuda:1", "cuda:0"),
        *(
            pytest.param(d, f, marks=pytest.mark.slow)
            for d, f in (("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:1"))
        ),
    ],
)
def test_recorded_steps_give_the_cpus_tokens_on_any_device(tiny_model_dir, expected, device, first):
    """Whichever device is the current one, and whichever one torch first recorded on."""
    with fake_cuda() as cuda:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream(first)
        policy = load_policy(tiny_model_dir, compute_dtype="float32", device=device)
        cuda.forget()
        sampler = TransformersSampler(policy, max_batch_size=5)
        assert sampler.notes == ()
        found = {}
        for completion in sampler.sample(REQUESTS, PARAMS):
            assert torch.cuda.current_device() == 0, "the consumer's device was changed"
            found[completion.request_index, completion.sample_index] = completion.token_ids
        assert found == expected
        assert not cuda.astray
        assert list(cuda.captured) == [device]
        assert cuda.replayed[device] > PARAMS.max_tokens


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_later_calls_replay_the_graphs_with_the_weights_of_the_time(tiny_model_dir, dtype):
    """Whether the step copies the weights or reads those of the policy, and whatever was sampled before."""

    def fresh(policy):
        return tokens_of(TransformersSampler(policy, max_batch_size=5))

    long = [Request("one two three " * 14, (1, 2))]
    with fake_cuda() as cuda:
        policy = load_policy(tiny_model_dir, compute_dtype=dtype, device="cuda:1")
        sampler = TransformersSampler(policy, max_batch_size=5)
        first = tokens_of(sampler)
        captured, workspace = cuda.captured.total(), sampler._spare
        sampler.sleep()  # without sleep_mode it gives nothing back
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.1)
        second = tokens_of(sampler)
        assert cuda.captured.total() == captured
        assert second != first
        assert second == fresh(policy)
        list(sampler.sample(long, PARAMS))
        assert sampler._spare is not workspace, "it was too small"
        captured = cuda.captured.total()
        assert tokens_of(sampler) == second, "the larger memory changes no token"
        assert cuda.captured.total() > captured, "in shapes of its own"
        policy.model.model.embed_tokens.weight = torch.nn.Parameter(policy.model.model.embed_tokens.weight.detach() * 2)
        assert tokens_of(sampler) == fresh(policy), "weights that moved are found"


@pytest.mark.slow
def test_sleep_gives_the_workspace_back_if_so_asked(tiny_model_dir, expected):
    with fake_cuda() as cuda:
        policy = load_policy(tiny_model_dir, compute_dtype="float32", device="cuda:0")
        sampler = TransformersSampler(policy, max_batch_size=5, sleep_mode=True)
        assert tokens_of(sampler) == expected
        captured = cuda.captured.total()
        sampler.sleep()
        assert tokens_of(sampler) == expected
        assert cuda.captured.total() > captured


def test_graphs_that_do_nothing_are_found(tiny_model_dir, expected, monkeypatch):
    with fake_cuda() as cuda:
        monkeypatch.setattr(Graph, "replay", lambda self: None)
        sampler = sampler_on("cuda:1", tiny_model_dir)
        assert sampler.notes == (f"{NO_GRAPHS}they give different logits.",)
        before = cuda.captured.total()
        assert tokens_of(sampler) == expected
        assert cuda.captured.total() == before
        assert len(sampler.notes) == 1, "the faster step must be kept: it is right"


@pytest.mark.slow
def test_graphs_that_cannot_be_recorded_at_the_start_are_not_used(tiny_model_dir, expected):
    def fail(name):
        if cuda.graph is not None:
            raise RuntimeError("CUDA error: too bad\nAdvice.")

    with fake_cuda() as cuda:
        cuda.before_kernel = fail
        sampler = sampler_on("cuda:0", tiny_model_dir)
        assert sampler.notes == (f"{NO_GRAPHS}CUDA error: too bad.",)
        before = cuda.captured.total()
        assert tokens_of(sampler) == expected
        assert cuda.captured.total() == before


@pytest.mark.slow
@pytest.mark.parametrize("ending_fails", [False, True])
def test_a_recording_that_fails_later_costs_no_token(tiny_model_dir, expected, monkeypatch, ending_fails):
    """Every second shape fails; it runs without a graph from then on, and the others with one."""
    monkeypatch.setattr(cuda_graphs, "COLUMNS", 8)
    monkeypatch.setattr(cuda_graphs, "ROWS", 2)
    begun, failed, tried = [], set(), []
    recorded, ended = FixedShapeStep._recorded, Graph.capture_end

    def record(step, shape, stream):
        tried.append((step, shape))
        return recorded(step, shape, stream)

    monkeypatch.setattr(FixedShapeStep, "_recorded", record)
    with fake_cuda() as cuda:
        sampler = sampler_on("cuda:1", tiny_model_dir)
        streams = list(cuda.streams)

        def fail(name):
            if cuda.graph is None:
                return
            if cuda.graph not in begun:
                begun.append(cuda.graph)
            if begun.index(cuda.graph) % 2 and name == "mm":
                failed.add(cuda.graph)
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)

        def end(graph):
            ended(graph)
            if ending_fails and graph in failed:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

        cuda.before_kernel = fail
        monkeypatch.setattr(Graph, "capture_end", end)
        with TestCase().assertLogs() as logged:
            assert tokens_of(sampler) == expected
        assert len(failed) > 1
        assert len(set(tried)) == len(tried), "a shape that failed was tried again"
        assert cuda.replayed["cuda:1"] > 0
        assert cuda.streams == streams
        assert torch.cuda.current_device() == 0
    reason = (
        "CUDA error: operation failed due to a previous error during capture" if ending_fails else "CUDA out of memory"
    )
    assert sampler.notes == (f"{SOME_GRAPHS}{reason}.",)
    assert [record.getMessage() for record in logged.records] == list(sampler.notes)


@pytest.mark.parametrize("graphs", [True, False])
def test_too_little_memory_without_recording_is_a_user_error(tiny_model_dir, graphs):
    def fail(name):
        if name == "mm":
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    with fake_cuda() as cuda:
        policy = load_policy(tiny_model_dir, compute_dtype="float32", device="cuda:1")
        sampler = TransformersSampler(policy, max_batch_size=5, cuda_graphs=graphs)
        stream = sampler.sample(REQUESTS, PARAMS)
        cuda.before_kernel = fail
        with pytest.raises(RlvrError, match="ran out of memory while sampling") as info:
            next(stream)
        assert "--max-batch-size" in info.value.hint
        assert torch.cuda.current_device() == 0
