"""A sampler in its own process: the same completions as in this process, prefetched or not, and verified weights."""

import os
import signal
from collections import Counter

import pytest
import torch

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import Policy, distinct_tensors
from rlvr_cli.parallel.worker import LocalWorker
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.parallel.process import SamplingProcess
from rlvr_cli.types import Request, SamplingParams

pytestmark = pytest.mark.usefixtures("forked")
PARAMS = SamplingParams(max_tokens=12, min_tokens=0, stop=())
REQUESTS = [Request("What is 12 + 30?", (1, 2, 3)), Request("Solve x^2 - 5x + 6 = 0.", (4, 5))]
OTHERS = [Request("Natalia sold 48 clips", (6,))]


def opened(model, **given) -> SamplingProcess:
    how = {
        "dtype": "auto", "param_dtype": "float32", "compute_dtype": "auto", "device": "cpu", "max_batch_size": None,
        "cuda_graphs": True, "max_model_len": None, "gpu_memory_utilization": 0.3, "seed": 0,
    }  # fmt: skip
    return SamplingProcess("transformers", {"model": str(model), **how, **given})


@pytest.fixture
def start(tiny_model_dir):
    """Start a process for one test: one that is to fail, or to compute in another way."""
    begun = []

    def start(**given):
        begun.append(opened(tiny_model_dir, **given))
        return begun[-1]

    yield start
    for there in begun:
        there.close()
        there.close()


@pytest.fixture(scope="module")
def of_all_tests(tiny_model_dir):
    there = opened(tiny_model_dir)
    yield there
    there.close()


@pytest.fixture
def there(of_all_tests):
    """One process for many tests, as a run has one for many batches."""
    yield of_all_tests
    of_all_tests.cancel_pending()


def moved(model, by):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + by)
    return model


def test_completions_equal_those_of_a_sampler_in_this_process(there, tiny_model_dir, tiny_tokenizer):
    model = moved(load_policy(tiny_model_dir).model, 0.1)
    here = TransformersSampler(Policy(model, tiny_tokenizer))
    there.load_weights(Policy(model), 7)
    assert (there.policy_version, there.seeding, there.notes) == (7, "per-request", [])
    there.prefetch(REQUESTS, PARAMS)
    there.prefetch(OTHERS, PARAMS)
    greedy = SamplingParams(max_tokens=5, temperature=0.0, stop=())
    asked = [(REQUESTS, greedy), (OTHERS, PARAMS), (REQUESTS, PARAMS), (REQUESTS, PARAMS)]  # out of order, one twice
    for requests, params in asked:
        assert list(there.sample(requests, params)) == list(here.sample(requests, params))
    assert there.worked_seconds > 0


def test_the_process_computes_as_the_trainer_does(start, tiny_model_dir):
    policy, there = load_policy(tiny_model_dir, compute_dtype="bfloat16"), start(compute_dtype="bfloat16")
    there.load_weights(policy, 1)
    done = list(there.sample(REQUESTS, PARAMS))
    assert done == list(TransformersSampler(policy, policy_version=1).sample(REQUESTS, PARAMS))
    assert done != list(TransformersSampler(load_policy(tiny_model_dir), policy_version=1).sample(REQUESTS, PARAMS))


def test_token_ids_of_a_request_reach_the_process(there, tiny_model, tiny_tokenizer):
    here = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    there.load_weights(Policy(tiny_model), 0)
    asked = [Request("not what is read", (1, 2), prompt_ids=(40, 41, 42)), REQUESTS[0]]
    there.prefetch(asked, PARAMS)
    answers = list(there.sample(asked, PARAMS))
    assert answers == list(here.sample(asked, PARAMS))
    assert {c.prompt_ids for c in answers if c.request_index == 0} == {(40, 41, 42)}


def test_prefetched_completions_come_from_the_weights_at_that_time(there, tiny_model_dir, tiny_tokenizer):
    first, second = load_policy(tiny_model_dir).model, moved(load_policy(tiny_model_dir).model, 0.3)
    there.load_weights(Policy(first), 0)
    there.prefetch(REQUESTS, PARAMS)
    there.load_weights(Policy(second), 1)
    then = list(there.sample(REQUESTS, PARAMS))
    assert then == list(TransformersSampler(Policy(first, tiny_tokenizer)).sample(REQUESTS, PARAMS))
    assert list(there.sample(REQUESTS, PARAMS)) != then


def test_abandoned_completions_do_not_reach_the_next_request(there, tiny_model, tiny_tokenizer):
    there.load_weights(Policy(tiny_model), 0)
    answers = there.sample(REQUESTS, PARAMS)
    next(answers)
    answers.close()
    assert list(there.sample(OTHERS, PARAMS)) == list(
        TransformersSampler(Policy(tiny_model, tiny_tokenizer)).sample(OTHERS, PARAMS)
    )


def test_prefetched_requests_can_be_canceled(there, tiny_model, tiny_tokenizer, monkeypatch):
    kinds, receive = Counter(), LocalWorker.receive

    def counted(worker):
        message = receive(worker)
        kinds[message[0]] += 1
        return message

    monkeypatch.setattr(LocalWorker, "receive", counted)
    there.load_weights(Policy(tiny_model), 0)
    long = SamplingParams(max_tokens=150, min_tokens=150, stop=())
    many = [Request(f"What is 12 + {i}?", tuple(range(100 * i, 100 * i + 64))) for i in range(40)]
    there.prefetch(many, long)
    there.prefetch(many[:1], long)
    there.cancel_pending()
    here = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    assert list(there.sample(OTHERS, PARAMS)) == list(here.sample(OTHERS, PARAMS))
    assert kinds["completion"] < 1000, "the process went on with all 2,624 samples"
    assert there._jobs == []
    assert list(there.sample(many[:1], PARAMS)) == list(here.sample(many[:1], PARAMS))


def test_prefetch_does_not_wait_for_earlier_requests(there, tiny_model):
    there.load_weights(Policy(tiny_model), 0)
    many = [Request(f"What is {i}? " + "x" * 60, (i,)) for i in range(3000)]  # more than a socket holds
    for _ in range(3):
        there.prefetch(many, PARAMS)
    done = next(there.sample(many, PARAMS))
    assert done.request_index >= 0
    assert [job.seconds for job in there._jobs][1:] == [None, None]  # all were sent before the first was done


def test_weights_that_did_not_arrive_are_detected(there, tiny_model_dir):
    model = load_policy(tiny_model_dir).model
    there.load_weights(Policy(model), 0)
    hook = model.lm_head.register_forward_hook(lambda module, given, logits: logits * 1.5)
    with pytest.raises(RlvrError, match="does not serve the model's weights"):
        there.load_weights(Policy(model), 1)
    hook.remove()
    assert there.policy_version == 0


def test_weights_of_another_shape_are_refused(start, tiny_model):
    there = start()
    tiny_model.lm_head = torch.nn.Linear(400, 1000, bias=False)
    with pytest.raises(RlvrError, match="do not fit the model in the sampling process"):
        there.load_weights(Policy(tiny_model), 1)


def test_errors_of_the_engine_reach_the_user(start):
    with pytest.raises(RlvrError, match="Unknown parameter precision 'float7'"):
        list(start(param_dtype="float7").notes)
    there = start()
    for _ in range(2):
        there.prefetch(REQUESTS, SamplingParams(max_tokens=510))
    with pytest.raises(RlvrError, match="the model's context holds 512"):  # with another message queued behind it
        list(there.sample(REQUESTS, SamplingParams(max_tokens=510)))


def test_a_process_that_died_is_an_error(start):
    there = start()
    assert there.notes == []
    os.kill(there.worker.pid, signal.SIGKILL)
    with pytest.raises(RlvrError, match="ended with status -9"):
        list(there.sample(REQUESTS, PARAMS))
    with pytest.raises(RlvrError, match="ended with status -9"):
        there.prefetch(REQUESTS, PARAMS)


def test_tied_weights_are_sent_once(tiny_model):
    assert tiny_model.config.tie_word_embeddings
    assert set(distinct_tensors(Policy(tiny_model).weights_for_engine())) == {
        name for name, _ in tiny_model.named_parameters()
    }
