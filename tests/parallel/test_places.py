"""Where processes are put on nodes: by hand."""

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.parallel.places import Node, device_of, divide, node_of, places_line
from rlvr_cli.training.parallel.placement import place_on, placement_line

CPUS = [Node("n1", "a", "10.0.0.1", 4, 0), Node("n2", "b", "10.0.0.2", 4, 0)]
GPUS = [Node("n1", "a", "10.0.0.1", 8, 2), Node("n2", "b", "10.0.0.2", 8, 4)]


def test_on_cpus_each_goes_where_most_are_left():
    places = divide(CPUS, trainers=2, samplers=3, gpus_for=(False, False))
    assert places == ["n1/cpu", "n2/cpu", "n1/cpu", "n2/cpu", "n1/cpu"]
    uneven = [Node("n1", "a", "10.0.0.1", 1, 0), CPUS[1]]
    assert divide(uneven, trainers=1, samplers=2, gpus_for=(False, False)) == ["n1/cpu", "n2/cpu", "n2/cpu"]


def test_gpus_are_filled_node_by_node_trainers_first():
    places = divide(GPUS, trainers=3, samplers=2, gpus_for=(True, True))
    assert places == ["n1/cuda:0", "n1/cuda:1", "n2/cuda:0", "n2/cuda:1", "n2/cuda:2"]
    mixed = divide(GPUS, trainers=1, samplers=1, gpus_for=(False, True))
    assert mixed == ["n1/cpu", "n1/cuda:0"]


@pytest.mark.parametrize(
    ("nodes", "trainers", "samplers", "on_gpu", "said"),
    [
        (CPUS, 8, 1, False, "8 trainers on CPUs and 1 sampler on CPUs: it has n1 (10.0.0.1): 4 CPUs, 0 GPUs; n2"),
        (GPUS, 4, 3, True, "4 trainers on GPUs and 3 samplers on GPUs"),
        ([CPUS[0], GPUS[1]], 1, 0, True, "1 trainer on GPUs, the first of them here"),
    ],
)
def test_a_cluster_that_has_too_little_says_what_it_has(nodes, trainers, samplers, on_gpu, said):
    with pytest.raises(RlvrError) as error:
        divide(nodes, trainers=trainers, samplers=samplers, gpus_for=(on_gpu, on_gpu))
    assert said in error.value.problem


def test_a_process_on_a_node_sees_its_own_gpu_alone():
    assert [node_of(place) for place in ("n2/cuda:3", "cuda:3", "cpu")] == ["n2", None, None]
    assert [device_of(place) for place in ("n2/cuda:3", "cuda:3", "n1/cpu", "cpu")] == [
        "cuda:0",
        "cuda:3",
        "cpu",
        "cpu",
    ]


def test_who_is_where_on_one_line():
    assert places_line(GPUS, ["cuda:0", "n2/cuda:1"], ["cpu"]) == (
        "n1 (10.0.0.1): trainer 0 on cuda:0; n2 (10.0.0.2): trainer 1 on cuda:1"
    )
    placement = place_on(CPUS, "auto", engine="transformers", in_process=False, trainers=2, samplers=2)
    assert placement_line(placement, engine="transformers") == (
        "n1 (10.0.0.1): trainer 0, sampler 0; n2 (10.0.0.2): trainer 1, sampler 1"
    )
    assert (placement.trainer, placement.others, placement.engines) == ("cpu", ("n2/cpu",), ("n1/cpu", "n2/cpu"))
    assert placement.address == "10.0.0.1"


def test_trainers_of_one_process_sample_on_their_own_device_and_meet_on_this_machine():
    alone = place_on(CPUS, "cpu", engine="transformers", in_process=True, trainers=1, samplers=1)
    assert (alone.trainer, alone.engine, alone.address) == ("cpu", "cpu", "127.0.0.1")
    ahead = place_on(CPUS, "cpu", engine="transformers", in_process=False, trainers=1, samplers=1)
    assert (ahead.trainer, ahead.engine, ahead.address) == ("cpu", "n2/cpu", "127.0.0.1")


def test_what_cannot_be_on_a_cluster():
    with pytest.raises(RlvrError, match="names one device"):
        place_on(CPUS, "cuda:1", engine="transformers", in_process=True, trainers=2, samplers=1)
    with pytest.raises(RlvrError, match="samples for one trainer"):
        place_on(CPUS, "auto", engine="vllm", in_process=True, trainers=2, samplers=1)
