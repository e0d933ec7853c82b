"""Which device computes what, by hand for every kind of machine, and for all of them: no device is given twice by accident."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_cli.errors import RlvrError
from rlvr_cli.training.parallel.placement import Placement, place, place_samplers, placement_line


def gpus(number):
    return [f"cuda:{i}" for i in range(number)]


@pytest.mark.parametrize(
    ("device", "engine", "in_process", "number", "trainer", "sampler"),
    [
        # No GPU: everything on the CPU, whatever the engine.
        ("auto", "transformers", True, 0, "cpu", "cpu"),
        ("auto", "vllm", True, 0, "cpu", "cpu"),
        ("auto", "vllm", False, 0, "cpu", "cpu"),
        ("mps", "transformers", True, 0, "mps", "mps"),
        # One GPU: they take turns.
        ("auto", "transformers", True, 1, "cuda:0", "cuda:0"),
        ("auto", "vllm", True, 1, "cuda:0", "cuda:0"),
        ("auto", "transformers", False, 1, "cuda:0", "cuda:0"),
        ("cpu", "transformers", True, 1, "cpu", "cpu"),
        ("cpu", "transformers", False, 1, "cpu", "cpu"),
        ("cpu", "vllm", True, 1, "cpu", "cuda:0"),
        ("cpu", "vllm", False, 1, "cpu", "cuda:0"),
        # Two: vLLM in this process is always on the first, so the trainer takes the second.
        ("auto", "vllm", True, 2, "cuda:1", "cuda:0"),
        ("cuda", "vllm", True, 2, "cuda:0", "cuda:0"),
        ("cuda:1", "vllm", True, 2, "cuda:1", "cuda:0"),
        ("auto", "transformers", True, 2, "cuda:0", "cuda:0"),
        ("cuda:1", "transformers", True, 2, "cuda:1", "cuda:1"),
        # A process of its own can be anywhere: the device after the trainer's.
        ("auto", "vllm", False, 2, "cuda:0", "cuda:1"),
        ("cuda:1", "vllm", False, 2, "cuda:1", "cuda:0"),
        ("cuda:1", "transformers", False, 8, "cuda:1", "cuda:2"),
        ("cuda:7", "transformers", False, 8, "cuda:7", "cuda:0"),
    ],
)
def test_by_hand(device, engine, in_process, number, trainer, sampler):
    placed = place(device, engine=engine, in_process=in_process, cuda_devices=gpus(number))
    assert (placed.trainer, placed.engine) == (trainer, sampler)
    assert placed.unused == tuple(d for d in gpus(number) if d not in (trainer, sampler))


def test_vllm_in_its_own_process_does_not_sleep_so_it_cannot_share_the_trainers_gpu():
    with pytest.raises(RlvrError, match="cuda:0") as caught:
        place("auto", engine="vllm", in_process=False, cuda_devices=gpus(1))
    assert "--async-steps 0" in caught.value.hint


@given(
    st.sampled_from(["auto", "cpu", "cuda"]),
    st.sampled_from(["transformers", "vllm"]),
    st.booleans(),
    st.integers(0, 9),
)
def test_on_any_machine(device, engine, in_process, number):
    if device == "cuda" and not number:
        return
    try:
        placed = place(device, engine=engine, in_process=in_process, cuda_devices=gpus(number))
    except RlvrError:
        assert (number, engine, in_process) == (1, "vllm", False)
        return
    used = {placed.trainer, placed.engine} - {"cpu"}
    assert used <= set(gpus(number))
    assert used | {*placed.unused} == set(gpus(number))
    if number > 1 and device == "auto" and not (engine == "transformers" and in_process):
        assert placed.trainer != placed.engine, "an engine with weights of its own gets a device of its own"
    assert placed.shared == (placed.trainer == placed.engine and placed.trainer != "cpu")


def test_the_plan_names_the_devices():
    assert placement_line(Placement("cpu", "cpu"), engine="transformers") == "cpu, for training and transformers"
    assert placement_line(Placement("cuda:1", "cuda:0", ("cuda:2", "cuda:3")), engine="vllm") == (
        "cuda:1 for training, cuda:0 for vLLM; cuda:2, cuda:3 not used"
    )


@pytest.mark.parametrize(
    ("number", "trainers", "in_process", "expected"),
    [
        (0, 3, True, Placement("cpu", "cpu", (), ("cpu", "cpu"))),
        (4, 2, True, Placement("cuda:0", "cuda:0", ("cuda:2", "cuda:3"), ("cuda:1",))),
        (4, 3, False, Placement("cuda:0", "cuda:3", (), ("cuda:1", "cuda:2"))),
        (8, 8, True, Placement("cuda:0", "cuda:0", (), tuple(f"cuda:{i}" for i in range(1, 8)))),
    ],
)
def test_several_trainers_take_a_gpu_each(number, trainers, in_process, expected):
    placed = place("auto", engine="transformers", in_process=in_process, cuda_devices=gpus(number), trainers=trainers)
    assert placed == expected
    assert len(placed.trainers) == trainers


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"number": 1, "trainers": 2}, "--trainers 1"),
        (
            {"number": 2, "trainers": 2, "in_process": False},
            "2 trainers and the sampler of --async-steps need a GPU each",
        ),
        ({"number": 4, "trainers": 2, "engine": "vllm"}, "--engine transformers"),
        ({"number": 4, "trainers": 2, "device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_trainers_that_have_no_place(how, said):
    how = {"device": "auto", "engine": "transformers", "in_process": True} | how
    with pytest.raises(RlvrError) as raised:
        place(how.pop("device"), cuda_devices=gpus(how.pop("number")), **how)
    assert said in f"{raised.value.problem} {raised.value.hint}"


def test_a_cpu_has_room_for_so_many_processes(monkeypatch):
    monkeypatch.setattr("rlvr_cli.training.parallel.placement.available_cores", lambda: 6)
    how = {"engine": "transformers", "cuda_devices": ()}
    assert len(place_samplers("cpu", samplers=24, **how)) == 24
    with pytest.raises(RlvrError, match="1000 samplers would be 1,000 processes on 6 cores"):
        place_samplers("cpu", samplers=1000, **how)
    with pytest.raises(RlvrError, match="20 trainers and 5 samplers would be 25 processes"):
        place("cpu", in_process=False, trainers=20, samplers=5, **how)
    monkeypatch.setattr("rlvr_cli.training.parallel.placement.available_cores", lambda: 1)
    assert len(place_samplers("cpu", samplers=16, **how)) == 16


def test_the_line_names_every_trainer():
    placed = Placement("cuda:0", "cuda:0", ("cuda:2",), ("cuda:1",))
    assert placement_line(placed, engine="transformers") == (
        "cuda:0, cuda:1 (2 trainers), for training and transformers; cuda:2 not used"
    )


@pytest.mark.parametrize(
    ("number", "trainers", "samplers", "how", "trained", "sampled"),
    [
        (0, 1, 3, {}, ["cpu"], ["cpu"] * 3),
        (0, 2, 2, {"engine": "vllm"}, ["cpu"] * 2, ["cpu"] * 2),
        (8, 1, 3, {"engine": "vllm"}, [0], [1, 2, 3]),
        (8, 4, 4, {}, [0, 1, 2, 3], [4, 5, 6, 7]),
        (3, 1, 2, {"device": "cuda"}, [0], [1, 2]),
        (3, 2, 2, {"device": "cpu"}, ["cpu"] * 2, ["cpu"] * 2),
        (3, 2, 2, {"device": "cpu", "engine": "vllm"}, ["cpu"] * 2, [0, 1]),  # vLLM computes on a GPU where it sees one
    ],
)
def test_several_samplers_take_a_gpu_each_after_the_trainers(number, trainers, samplers, how, trained, sampled):
    how = {"device": "auto", "engine": "transformers"} | how
    names = [[d if d == "cpu" else f"cuda:{d}" for d in devices] for devices in (trained, sampled)]
    placed = place(
        how.pop("device"), **how, in_process=False, cuda_devices=gpus(number), trainers=trainers, samplers=samplers
    )
    assert [[*placed.trainers], [*placed.engines]] == names
    assert {*placed.trainers, *placed.engines, *placed.unused} - {"cpu"} == {*gpus(number)}
    assert not placed.shared


@pytest.mark.parametrize(
    ("device", "engine", "number", "expected"),
    [
        ("auto", "transformers", 0, ["cpu"] * 3),
        ("auto", "vllm", 4, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cpu", "transformers", 4, ["cpu"] * 3),
    ],
)
def test_samplers_where_nobody_trains(device, engine, number, expected):
    assert place_samplers(device, engine=engine, samplers=3, cuda_devices=gpus(number)) == expected
    assert place_samplers("cuda:1", engine=engine, samplers=1, cuda_devices=gpus(number)) == ["cuda:1"]


def test_samplers_that_have_no_place():
    how = {"engine": "transformers", "cuda_devices": gpus(3)}
    with pytest.raises(RlvrError, match="2 trainers and 2 samplers need a GPU each; 3 can be seen"):
        place("auto", **how, in_process=False, trainers=2, samplers=2)
    with pytest.raises(RlvrError, match="1 trainer and 3 samplers need a GPU each"):
        place("auto", **how, in_process=False, samplers=3)
    with pytest.raises(RlvrError, match="4 samplers need a GPU each; 3 can be seen"):
        place_samplers("auto", **how, samplers=4)
    with pytest.raises(RlvrError, match="--device cuda:1 names one GPU for 2 samplers"):
        place_samplers("cuda:1", **how, samplers=2)


def test_the_line_names_every_sampler():
    placed = Placement("cuda:0", "cuda:2", (), ("cuda:1",), ("cuda:3",))
    assert placement_line(placed, engine="vllm") == (
        "cuda:0, cuda:1 (2 trainers) for training, cuda:2, cuda:3 for vLLM in 2 processes"
    )
    assert placement_line(Placement("cpu", "cpu", other_engines=("cpu",)), engine="transformers") == (
        "cpu, for training and transformers in 2 processes"
    )
