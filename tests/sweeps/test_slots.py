"""Where runs of a sweep are made, without a cluster: on this machine, and what is refused before one is joined."""

from dataclasses import replace

import pytest

from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.parallel.places import Node, divide, places_line
from rlvr_cli.sweeps.slots import Slot, gpus_of, slots_here, slots_on

NODES = [Node("n1", "a", "10.0.0.1", 4, 1), Node("n2", "b", "10.0.0.2", 4, 1)]


def test_each_value_of_devices_is_a_slot():
    assert slots_here(1, ["0", "3"], []) == [Slot("cpu", "0"), Slot("cpu", "3")]
    assert slots_here(2, [], []) == [Slot("cpu", ""), Slot("cpu", "")]


@pytest.mark.parametrize(
    ("kind", "given", "gpus"),
    [
        (GrpoConfig, {}, 1),
        (GrpoConfig, {"trainers": 2}, 2),
        (GrpoConfig, {"trainers": 2, "samplers": 3}, 5),
        (GrpoConfig, {"async_steps": 1}, 2),
        (GrpoConfig, {"trainers": 2, "sampler_urls": "http://a:8000"}, 2),
        (GrpoConfig, {"trainers": 2, "device": "cpu"}, 0),
        (SftConfig, {}, 1),
        (EvalConfig, {"samplers": 4}, 4),
        (EvalConfig, {"base_url": "http://a/v1", "model": "m"}, 0),
    ],
)
def test_trainers_and_samplers_of_their_own_want_a_gpu_each(kind, given, gpus):
    assert gpus_of(kind(dataset="arithmetic:4", **given)) == gpus


def test_runs_that_want_several_gpus_do_not_get_one_each():
    config = GrpoConfig(dataset="arithmetic:4", run="x", trainers=2)
    with pytest.raises(RlvrError, match="With --devices each run of a sweep has one GPU, and x wants several"):
        slots_here(1, ["0", "1"], [config])
    beside = GrpoConfig(dataset="arithmetic:4", run="x", async_steps=1, engine="vllm")
    with pytest.raises(RlvrError, match="x wants several: --trainers, --samplers or --async-steps"):
        slots_here(1, ["0", "1"], [beside])
    assert len(slots_here(1, ["0", "1"], [replace(beside, engine="transformers")])) == 2
    assert len(slots_here(1, [], [config])) == 1
    assert len(slots_here(1, ["0", "1"], [replace(config, device="cpu")])) == 2


@pytest.mark.parametrize(
    "config",
    [
        EvalConfig(dataset="arithmetic:4", run="x", samplers=2),
        GrpoConfig(dataset="arithmetic:4", run="x", trainers=2, model="m"),
    ],
)
def test_runs_of_several_processes_are_refused(config):
    with pytest.raises(RlvrError, match="each run of a sweep has one place, and x wants several"):
        slots_on("127.0.0.1:1", 2, [config])


def test_runs_that_would_give_a_server_their_weights_in_turn_are_not_made_at_once():
    """Each would sample from the other's. Adapters have names of their own, and evaluations load nothing."""
    one, other = (
        GrpoConfig(dataset="arithmetic:4", run=name, sampler_urls=urls)
        for name, urls in (("x", "http://a:8000,http://b:8000"), ("y", "http://c:8000, http://b:8000/"))
    )
    for refused in (
        lambda: slots_here(2, [], [one, other]),
        lambda: slots_here(1, ["0", "1"], [one, replace(other, lora_rank=4)]),
        lambda: slots_on("127.0.0.1:1", 2, [one, other]),
    ):
        with pytest.raises(RlvrError, match="x gives the server http://b:8000 its weights while another run") as raised:
            refused()
        assert "--lora-rank" in raised.value.hint
    assert len(slots_here(1, [], [one, other])) == 1
    evaluated = EvalConfig(dataset="arithmetic:4", sampler_urls=one.sampler_urls)
    for fine in ([one, replace(other, sampler_urls="http://c:8000")], [replace(one, lora_rank=4)] * 2, [evaluated] * 2):
        assert len(slots_here(2, [], fine)) == 2


def test_runs_are_called_so():
    places = divide(NODES, trainers=0, samplers=2, gpus_for=(True, True), called="run")
    line = places_line(NODES, (), places, called="run")
    assert line == "n1 (10.0.0.1): run 0 on cuda:0; n2 (10.0.0.2): run 1 on cuda:0"
    with pytest.raises(RlvrError, match="too little for 3 runs on GPUs: it has n1"):
        divide(NODES, trainers=0, samplers=3, gpus_for=(True, True), called="run")
