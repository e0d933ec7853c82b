"""What each optimizer keeps of a parameter, and where."""

import pytest
import torch

from policies import make_batch, make_policy
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.optimizers.optimizer_state import layout, state_bytes
from rlvr_cli.training.updates.update import train_update


@pytest.mark.parametrize(
    ("how", "dtype", "per_parameter"),
    [
        ({"kind": "adamw"}, torch.float32, 8),
        ({"kind": "adamw"}, torch.bfloat16, 4),
        ({"kind": "adamw_kahan"}, torch.bfloat16, 6),
        ({"kind": "adamw_8bit"}, torch.float32, 8),  # all its tensors are small
        ({"kind": "adamw_8bit"}, torch.bfloat16, 10),
        ({"offload": True}, torch.float32, 8),
        ({"offload": True}, torch.bfloat16, 12),
    ],
)
def test_the_layout_is_what_a_step_makes(how, dtype, per_parameter):
    model = make_policy(dtype)
    optimizer = make_optimizer(model, learning_rate=0.01, **how)
    train_update(model, optimizer, make_batch([(3, 5), (2, 4)]), learning_rate=0.01, micro_batch_size=2)
    parameters = list(model.parameters())
    for parameter in parameters:
        found = {key: (t.shape, t.dtype, t.device) for key, t in optimizer.state[parameter].items()}
        assert found == {key: tuple(slot) for key, slot in layout(optimizer, parameter).items()}
    held = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    assert held == state_bytes(optimizer) == sum(per_parameter * p.numel() + 4 for p in parameters)
