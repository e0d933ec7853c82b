"""models/compute/device.py on the devices of `fake_cuda`: which one is current, and what is set for all of them."""

import pytest
import torch

from fake_cuda import fake_cuda
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.device import add_product, as_operand, current_device, product, resolve_device
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_not_rounded_and_may_be_added(device, dtype):
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) for shape in ((3, 5), (5, 4)))
    expected = a.float() @ b.float()
    with fake_cuda():
        ours = [as_operand(matrix.to(device), dtype) for matrix in (a, b)]
        total = torch.ones(6, 4, device=device)
        assert product(*ours).dtype == torch.float32
        assert product(*ours).cpu().equal(expected)
        add_product(total[3:], *ours)
        torch.testing.assert_close(total.cpu(), torch.cat((torch.ones(3, 4), 1 + expected)))


@pytest.mark.parametrize(
    ("count", "visible", "hint"),
    [(1, "1 CUDA device is", "Leave --device out"), (0, "0 CUDA devices are", "--device cpu")],
)
def test_a_device_that_is_not_there_says_which_ones_are(monkeypatch, count, visible, hint):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(RlvrError) as refused:
        resolve_device("cuda:1")
    assert refused.value.problem == f"There is no device cuda:1: {visible} visible."
    assert hint in (refused.value.hint or "")
