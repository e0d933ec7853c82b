"""helpers/devices/fake_cuda.py is what CUDA is, as far as tests rely on it; on a machine with a device, the device itself too."""

from contextlib import nullcontext

import pytest
import torch

from fake_cuda import FakeCuda, fake_cuda, freeing_as_it_goes
from rlvr_cli.models.compute.prefixes import gather


@pytest.fixture(
    params=[
        "fake",
        pytest.param(
            "real",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ]
)
def cuda(request):
    with fake_cuda() if request.param == "fake" else nullcontext() as cuda:
        yield cuda


def test_tensors_of_two_devices_do_not_mix(cuda):
    x = torch.ones(2, 3, device="cuda")
    for mixed in (lambda: x + torch.ones(2, 3), lambda: torch.cat([x, torch.ones(2, 3)]), lambda: x @ torch.ones(3, 2)):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    assert (x + torch.tensor(1.0)).device == x.device  # a single number may come from the host
    assert x[torch.tensor([1])].tolist() == [[1.0] * 3]  # and so may indices


WAITS = {
    "item": (True, lambda x, mask: x.sum().item()),
    "bool": (True, lambda x, mask: bool(mask.any())),
    "tolist": (True, lambda x, mask: x.tolist()),
    "cpu": (True, lambda x, mask: x.cpu()),
    "mask": (True, lambda x, mask: x[mask]),
    "nonzero": (True, lambda x, mask: mask.nonzero()),
    "equal": (True, lambda x, mask: torch.equal(x, x)),
    "masked_fill": (False, lambda x, mask: x.masked_fill(mask, 0)),
    "masked_scatter": (False, lambda x, mask: x.masked_scatter(mask, x.flatten())),
    "set by a mask": (False, lambda x, mask: x.__setitem__(mask, 0.0)),
    "where": (False, lambda x, mask: torch.where(mask, x, 0.0)),
    "column": (False, lambda x, mask: x[:, 1]),
    "upload": (True, lambda x, mask: torch.ones(3).to(x.device)),
    "upload, not to wait": (False, lambda x, mask: torch.ones(3).pin_memory().to(x.device, non_blocking=True)),
    "upload of what was made pinned": (
        False,
        lambda x, mask: x.copy_(torch.ones(2, 3, pin_memory=True), non_blocking=True),
    ),
    "index of the host": (True, lambda x, mask: x[torch.tensor([1])]),
    "download, not to wait": (False, lambda x, mask: x.to("cpu", non_blocking=True)),
    "synchronize": (True, lambda x, mask: torch.cuda.current_stream().synchronize()),
    "sort": (False, lambda x, mask: x.sort()),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_the_host_waits_for(cuda, name):
    expected, work = WAITS[name]
    x = torch.arange(6.0, device="cuda").view(2, 3)
    mask = x > 2
    if isinstance(cuda, FakeCuda):
        cuda.forget()
        work(x, mask)
        assert bool(cuda.waits) == expected
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz") if expected else nullcontext():
            work(x, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_runs_when_it_is_replayed_on_the_same_memory(cuda):
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        total += 2 * x
    assert total.tolist() == [0.0] * 3
    for run, number in enumerate((1.0, 10.0, 100.0)):
        x.fill_(number)
        graph.replay()
        assert total.tolist() == [2 * sum((1.0, 10.0, 100.0)[: run + 1])] * 3


def test_a_graph_holds_nothing_of_another_device():
    with fake_cuda() as cuda:
        x, graph = torch.zeros(3, device="cuda:1"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # on cuda:0, the current device
            x += 1
        graph.replay()
        assert x.tolist() == [1.0] * 3
        assert cuda.captured == {"cuda:0": 1}
        with (
            torch.cuda.device(1),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()),
            pytest.raises(RuntimeError, match="capturing"),
        ):
            x.sum().item()
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_autograds(cuda, autocast):
    """Broadcasting, a parameter used twice, and a function written in Python."""

    def loss(device):
        generator = torch.Generator().manual_seed(0)
        weight, bias, x = (torch.randn(*size, generator=generator).to(device) for size in ((4, 4), (4,), (5, 4)))
        weight.requires_grad_()
        bias.requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            hidden = (x @ weight + bias).relu()
            rows = gather(hidden.float(), torch.tensor([0, 2, 2, 4], device=device))
            value = (rows @ weight).float().square().mean() + hidden.float().logsumexp(-1).sum() * bias.exp().sum()
        value.backward()
        return value.item(), weight.grad.cpu(), bias.grad.cpu()

    for ours, expected in zip(loss("cuda"), loss("cpu"), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2 if autocast else 1e-5, atol=1e-3 if autocast else 1e-5)


def test_hooks_see_each_gradient_when_it_has_been_added(cuda):
    weight = torch.ones(3, device="cuda", requires_grad=True)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.tolist()))
    for _ in range(2):
        (weight * 2 + weight).sum().backward()
    assert seen == [[3.0] * 3, [6.0] * 3]


def test_bytes_are_counted_while_a_tensor_has_them():
    with fake_cuda(compute=False) as cuda:
        x = torch.empty(1000, device="cuda")
        view = x[:10]
        assert (cuda.allocated, cuda.peak) == (4000, 4000)
        y = x.to(torch.bfloat16)
        assert (cuda.allocated, cuda.peak) == (6000, 6000)
        x.add_(1)
        del x, y
        assert (cuda.allocated, cuda.peak) == (4000, 6000)
        del view
        cuda.forget()
        assert (cuda.allocated, cuda.peak) == (0, 0)


def test_a_backward_pass_frees_what_was_saved_as_it_goes():
    """Each of ten layers keeps its output for its backward pass, which makes a tensor of that size and no parameter's."""
    peaks = []
    for free in (nullcontext, freeing_as_it_goes):
        with fake_cuda(compute=False) as cuda, free():
            x = torch.empty(1000, device="cuda", requires_grad=True)
            y = x
            for _ in range(10):
                y = y.exp()
            total = y.sum()
            del y
            kept = cuda.allocated
            assert kept == (10 + 1) * 4000 + 4
            cuda.forget()
            total.backward()
            peaks.append(cuda.peak - kept)
            assert cuda.allocated == (kept if free is nullcontext else 4000 + 4) + 4000
    assert peaks[1] < peaks[0]


def test_the_backward_pass_of_silu_is_one_kernel(cuda):
    """As in a build for CUDA; in others, torch computes it there from seven operators."""
    x = torch.linspace(-3, 3, 7, device="cuda", requires_grad=True)
    torch.nn.functional.silu(x).sum().backward()
    assert cuda.kernels["silu_backward"] == 1
    assert not cuda.kernels["sigmoid"]
    expected = torch.linspace(-3, 3, 7, requires_grad=True)
    torch.nn.functional.silu(expected).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), expected.grad)


def test_the_process_is_left_as_it_was():
    functions = torch.tensor, torch.as_tensor, torch.Tensor.to, torch.Tensor.backward, torch.cuda.is_available
    with fake_cuda(), torch.device("meta"):
        assert torch.tensor([1.0]).is_meta
    assert functions == (torch.tensor, torch.as_tensor, torch.Tensor.to, torch.Tensor.backward, torch.cuda.is_available)
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta  # torch keeps a table of its own functions, filled when it is first needed
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_without_numbers_shapes_and_types_are_the_same():
    def work():
        x = torch.randn(4, 6).to("cuda").requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = x @ torch.ones(6, 3, device="cuda")
        places = torch.arange(4, device="cuda")
        picked = y[places > 1].float().log_softmax(-1)
        picked.sum().backward()
        return [(t.shape, t.dtype, t.device) for t in (y, picked, x.grad)], places.tolist()

    found = []
    for compute in (True, False):
        with fake_cuda(compute=compute) as cuda:
            found.append((work(), cuda.kernels, cuda.waits))
    assert found[0] == found[1]
