"""models/compute/device.py on the devices of `fake_cuda`: which one is current, and what is set for all of them."""

import pytest
import torch

from fake_cuda import fake_cuda
from rlvr_cli.models.compute.device import current_device
from rlvr_cli.models.load import load_policy


def test_a_device_is_the_current_one_only_within_the_context():
    with fake_cuda():
        torch.cuda.set_device(0)
        with current_device(torch.device("cuda:1")):
            assert torch.cuda.current_device() == 1
            with current_device(torch.device("cpu")):
                assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0
        with pytest.raises(ZeroDivisionError), current_device(torch.device("cuda:1")):
            raise ZeroDivisionError
        assert torch.cuda.current_device() == 0
    with current_device(torch.device("cpu")):
        pass  # nothing asks for a CUDA device


@pytest.mark.parametrize(("device", "planned"), [("cpu", True), ("cuda", False), ("cuda:1", False)])
def test_cudnn_plans_no_attention_of_a_policy(tiny_model_dir, device, planned):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with fake_cuda():
            load_policy(tiny_model_dir, device=device)
        assert torch.backends.cuda.cudnn_sdp_enabled() == planned
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
