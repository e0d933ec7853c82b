"""The memory of an update on shards: the plan's lines, and the peak of a trace of the same passes, for one of several trainers.

    python tests/helpers/devices/traced_shards.py SIZE TRAINERS ROWS LAYERS CHECKPOINTING

PyTorch's own fake tensors and its fake process group stand in for devices and for the other trainers: they have shapes and no
numbers. Prints JSON.
"""

import json
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from peak import Peak
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.models import log_probs, policy
from rlvr_cli.models.compute import logits, prefixes
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.sharded import ShardedPolicy, empty
from rlvr_cli.training.parallel.placement import place
from rlvr_cli.training.parallel.ranks import Ranks
from rlvr_cli.training.planning.memory import GUESSED_PROMPT, memory_plan
from shapes import qwen, shape_of


class Known(dict):
    """What was found out about any model: numbers, of which there are none here, would have told."""

    def __init__(self, of) -> None:
        super().__init__()
        self._of = of

    def get(self, key, default=None):
        return self._of(key)


def main(size: str, trainers: int, rows: int, layers: int, again: bool) -> None:
    dist.init_process_group("fake", rank=0, world_size=trainers, store=FakeStore())
    mesh = Ranks(0, trainers).mesh(torch.device("cpu"))
    prefixes._shares = Known(lambda _: True)
    policy._linear_heads = Known(lambda model: (model.get_output_embeddings(), True))
    logits._LOGITS_ON_CPU = logits._LOGITS_ON_CUDA
    config = GrpoConfig(trainers=trainers, fsdp=True, gradient_checkpointing=again)
    length = GUESSED_PROMPT + config.sampling_max_tokens
    ids = torch.randint(1, 150_000, (rows, length))
    mask = torch.arange(length).expand(rows, length) >= GUESSED_PROMPT
    wanted = prefixes.wanted_positions(ids, mask, shared=True)
    model = qwen(size, layers=layers)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        shape = shape_of(model)
        model.to_empty(device="cpu").tie_weights()
        whole = Policy(model, compute_dtype="bfloat16")
        divided = ShardedPolicy(whole, mesh)
        empty(whole)
        shards = divided.trainable_parameters()
        moments = [torch.empty_like(shard) for shard in shards.values() for _ in range(2)]
        for shard in shards.values():
            shard.grad = torch.empty_like(shard)
        with Peak(FakeTensor) as peak, divided.autocast(), divided.gradient_checkpointing() if again else nullcontext():
            peak.see([shard.data for shard in shards.values()], moments, [shard.grad for shard in shards.values()])
            scores = log_probs.get_response_log_probs(
                divided, fake.from_tensor(ids), fake.from_tensor(ids), True,
                response_mask=fake.from_tensor(mask), wanted=wanted,
            )  # fmt: skip
            (scores["log_probs"].sum() + scores["token_entropy"].sum()).backward()
            for shard, gradient in divided.take_gradients():
                shard.grad.add_(gradient)
    devices = {f"cuda:{number}": 2.0**60 for number in range(trainers)}
    placement = place("auto", engine="transformers", in_process=True, cuda_devices=[*devices], trainers=trainers)
    plan = memory_plan(config, shape, placement, engine="transformers", rows=rows, capacities=devices)
    planned = {name: bytes for name, bytes in plan.updating.items() if name != "CUDA"}
    print(json.dumps({"planned": planned, "peak": peak.bytes}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "yes")
