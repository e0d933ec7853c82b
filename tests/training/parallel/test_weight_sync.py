"""The weights that lag behind with --async-steps are a copy, and loading them for the sampler leaves the policy as it was."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.policy import Policy, distinct_tensors
from rlvr_cli.process import StopRequest
from rlvr_cli.samplers.open import ENGINES, EngineKind
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.optimizers.optimizer_state import move_state
from rlvr_cli.training.parallel.placement import Placement
from rlvr_cli.training.parallel.ranks import Ranks
from rlvr_cli.training.parallel.replica import Replica
from rlvr_cli.training.parallel.trainers import DividedSampler, Trainers
from rlvr_cli.training.parallel.weight_sync import Snapshot, WeightSync
from rlvr_cli.training.planning.memory import MemoryPlan
from rlvr_cli.types import Request, SamplingParams


@pytest.fixture
def policy(tiny_model, tiny_tokenizer):
    return Policy(tiny_model, tiny_tokenizer)


def weights_of(policy):
    return {name: tensor.detach().clone() for name, tensor in distinct_tensors(policy.weights()).items()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def train(policy):
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.add_(1e-3)


def test_a_snapshot_stays_while_the_policy_is_trained(policy):
    sync = WeightSync(GrpoConfig(), engine="transformers", placement=Placement("cpu", "cpu"), memory=MemoryPlan({}, {}))
    sync.attach(policy)
    before = weights_of(policy)
    sync.snapshot_policy(3)
    train(policy)
    assert sync.snapshot is not None
    assert sync.snapshot.version == 3
    assert same(sync.snapshot.weights, before)
    assert same(Snapshot.from_tensors(sync.snapshot.tensors, version=3).weights, before)


def test_a_loaded_snapshot_gives_the_policy_back(policy):
    lagging = Snapshot(0, weights_of(policy))
    train(policy)
    current = weights_of(policy)
    with lagging.loaded_into(policy):
        assert same(weights_of(policy), lagging.weights)
    assert same(weights_of(policy), current)
    with pytest.raises(KeyError), lagging.loaded_into(policy):
        raise KeyError
    assert same(weights_of(policy), current), "after an error, too"


@pytest.mark.parametrize("keeps", [True, False])
def test_the_embedded_engine_sleeps_where_the_plan_has_no_room_for_what_it_keeps(policy, keeps):
    memory = MemoryPlan({}, {}, keeps_workspace=keeps)
    placement = Placement("cuda:0", "cuda:0")
    sync = WeightSync(GrpoConfig(), engine="transformers", placement=placement, memory=memory)
    sync.attach(policy)
    assert sync._settings.sleep_mode is not keeps
    sync.sync(0)
    sync.sleep()
    assert sync._synced == (0, 0), "it has the weights still: they are the trainer's"


class Engine:
    """An engine with memory of its own that writes down what is asked of it."""

    engine, seeding, notes, arrived, worked_seconds = "own", "per-request", (), (), None

    def __init__(self, settings):
        self.settings, self.asked = settings, []

    def load_weights(self, policy, policy_version):
        self.asked.append(("load", policy_version, [*where_state_is(self.optimizer)]))

    def sleep(self):
        self.asked.append("sleep")

    def close(self):
        self.asked.append("close")


def where_state_is(optimizer):
    return {tensor.device.type for state in optimizer.state.values() for tensor in state.values() if tensor.dim()}


@pytest.fixture
def own_engine(monkeypatch):
    monkeypatch.setitem(ENGINES, "own", EngineKind("own", Engine))
    return "own"


def test_an_engine_on_the_trainers_device_sleeps_and_gets_the_weights_again_when_it_wakes(policy, own_engine):
    sync = WeightSync(
        GrpoConfig(),
        engine=own_engine,
        placement=Placement("cuda:0", "cuda:0"),
        memory=MemoryPlan({}, {}, utilization=0.4),
    )
    engine = sync.sampler
    assert (engine.settings.sleep_mode, engine.settings.device) == (True, "cuda:0")
    assert engine.settings.gpu_memory_utilization == 0.4
    engine.optimizer = make_optimizer(policy, learning_rate=0.1)
    sync.attach(policy, engine.optimizer)
    sync.sync(0)
    sync.sync(0)
    sync.sleep()
    sync.sync(0)
    sync.close()
    assert engine.asked == ["sleep", ("load", 0, []), "sleep", ("load", 0, []), "close"]


def test_an_engine_on_its_own_device_never_sleeps_and_keeps_its_weights(policy, own_engine):
    sync = WeightSync(
        GrpoConfig(), engine=own_engine, placement=Placement("cuda:1", "cuda:0"), memory=MemoryPlan({}, {})
    )
    engine = sync.sampler
    assert not engine.settings.sleep_mode
    engine.optimizer = make_optimizer(policy, learning_rate=0.1)
    sync.attach(policy, engine.optimizer)
    sync.sync(3)
    sync.sleep()
    sync.sync(3)
    assert [asked for asked in engine.asked if asked != "sleep"] == [("load", 3, [])]


def test_the_optimizer_state_is_on_the_host_while_the_engine_samples(own_engine, policy):
    """On fake CUDA tensors, which have a device and no values."""
    sync = WeightSync(
        GrpoConfig(), engine=own_engine, placement=Placement("cuda:0", "cuda:0"), memory=MemoryPlan({}, {}, moves_state=True)
    )  # fmt: skip
    engine = sync.sampler
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(4, device="cuda"))
        optimizer = engine.optimizer = torch.optim.AdamW([weight])
        optimizer.state[weight] = {"step": torch.empty(()), "exp_avg": torch.empty(4, device="cuda")}
        sync.attach(policy, optimizer)
        sync.sync(0)
        assert engine.asked[-1] == ("load", 0, ["cpu"])
        sync.sleep()
        assert where_state_is(optimizer) == {"cuda"}


def test_moving_the_optimizer_state_changes_no_value(policy):
    optimizer = make_optimizer(policy, learning_rate=0.1)
    for parameter in policy.trainable_parameters().values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    before = {id(t): t.clone() for state in optimizer.state.values() for t in state.values()}
    move_state(optimizer, to_host=True)
    move_state(optimizer, to_host=False)
    after = [t for state in optimizer.state.values() for t in state.values()]
    assert all(torch.equal(t, old) for t, old in zip(after, before.values(), strict=True))


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_followers_engine_gives_its_memory_back_when_that_of_rank_0_does(policy, monkeypatch, sleeps):
    """Rank 0 tells it, and the follower's engine is opened so and told to sleep."""
    opened: list[Engine] = []

    class Sampling(Engine):
        policy_version = 0

        def __init__(self, settings):
            super().__init__(settings)
            opened.append(self)

        def sample(self, requests, params):
            self.asked.append("sample")
            yield from ()

    kind = replace(ENGINES["transformers"], share=lambda policy, settings: Sampling(settings))
    monkeypatch.setitem(ENGINES, "transformers", kind)
    config = GrpoConfig()
    trainers = Trainers(config, devices=["cpu"], stop=StopRequest())
    told = []
    monkeypatch.setattr(Trainers, "size", 2)
    monkeypatch.setattr(trainers, "tell", lambda method, *arguments, **how: told.append((method, arguments, how)))
    sync = WeightSync(
        config,
        engine="transformers",
        placement=Placement("cuda:0", "cuda:0", others=("cuda:1",)),
        memory=MemoryPlan({}, {}, keeps_workspace=not sleeps),
    )
    sync.attach(policy, trainers=trainers)
    assert list(sync.sampler.sample([Request("a", (1,))], SamplingParams())) == []
    ((method, arguments, how),) = told
    getattr(Replica(config, device="cpu"), method)(*arguments, **how)
    assert [engine.settings.sleep_mode for engine in opened] == [sleeps, sleeps]
    assert opened[1].asked == ["sample", "sleep"]


@pytest.mark.parametrize(("exported", "threads"), [(None, 3), ("5", 4)])
def test_trainers_divide_the_cores_that_they_may_use_unless_it_is_said(monkeypatch, exported, threads):
    before = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(7)))
    monkeypatch.setattr("rlvr_cli.models.load.TINY_PARAMETERS", 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if exported:
        monkeypatch.setenv("OMP_NUM_THREADS", exported)
    torch.set_num_threads(4)
    try:
        Replica(GrpoConfig(), device="cpu", ranks=Ranks(0, 2))
        assert torch.get_num_threads() == threads, "4 is what torch has from elsewhere"
    finally:
        torch.set_num_threads(before)


def test_what_fails_here_is_said_also_if_the_other_trainers_failed_too():
    class Failing:
        policy_version = 0

        def sample(self, requests, params):
            yield from ()
            raise RlvrError("The environment is no function.", "")

    class Lost:
        replica = SimpleNamespace(ranks=SimpleNamespace(rank=0, size=2, post=lambda key: None))
        given_up = False

        def tell(self, method, *arguments, **how):
            pass

        def gathered(self, canceled):
            raise RlvrError("The trainers lost each other.", "")

    with pytest.raises(RlvrError, match="no function"):
        list(DividedSampler(Failing(), Lost(), sleep_mode=False).sample([Request("a", (1,))], SamplingParams()))
