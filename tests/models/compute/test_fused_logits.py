"""The kernels for logits give what PyTorch's operators give, but for rounding; where they do not, or fail, they are not used.

Where there is no GPU, Triton's interpreter runs the kernels on the CPU (tests/conftest.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlvr_cli.errors import RlvrError
from rlvr_cli.models import log_probs
from rlvr_cli.models.compute import logits
from rlvr_cli.models.log_probs import _linear_log_probs
from rlvr_cli.models.policy import Policy
from triton_on_cpu import mend_interpreter

pytest.importorskip("liger_kernel", reason="needs liger-kernel")
fused_logits = pytest.importorskip("rlvr_cli.models.compute.fused_logits")
pytestmark = pytest.mark.slow
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if DEVICE == "cpu":
        mend_interpreter(monkeypatch)


def computed(dtype, *, vocabulary, scale=1.0, with_entropy=True, autocast=False, **how):
    """Log-probabilities and entropies of 7 positions, and the gradients of a sum of them."""
    draw = torch.Generator().manual_seed(vocabulary)
    hidden = (scale * torch.randn(7, 16, generator=draw)).to(DEVICE, dtype).requires_grad_()
    weight = torch.randn(vocabulary, 16, generator=draw).to(DEVICE, dtype).requires_grad_()
    labels = torch.tensor([0, 1, vocabulary - 1, vocabulary // 2, 63, 64, 65], device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        found, entropy = _linear_log_probs(hidden, weight, None, labels, with_entropy=with_entropy, **how)
    total = (found * torch.linspace(-1, 1, 7, device=DEVICE)).sum()
    if entropy is not None:
        total = total + (entropy * torch.linspace(2, -1, 7, device=DEVICE)).sum()
    total.backward()
    return [t.detach() for t in (found, entropy, hidden.grad, weight.grad) if t is not None]


@pytest.mark.parametrize("kept", [0, 7 * 64, 2**20], ids="kept {}".format)
@pytest.mark.parametrize(
    ("vocabulary", "chunk", "how"),
    [
        (200, 64, {}),  # the last chunk is narrower
        (200, 200, {"temperature": 0.6}),
        (200, 64, {"with_entropy": False, "temperature": 1.5}),
        (4500, 4500, {}),  # more columns than a program reads at a time
        (200, 64, {"scale": 300.0}),  # probabilities that underflow
    ],
)
def test_they_are_as_near_to_float64_as_pytorch(monkeypatch, kept, vocabulary, chunk, how):
    monkeypatch.setattr(log_probs, "_KEPT_LOGITS", kept)
    how = {"temperature": 1.0, "vocabulary": vocabulary, "chunk_size": chunk} | how
    exact, plain, fused = (
        computed(d, **how, fused=f) for d, f in (("64", 0), ("32", 0), ("32", 1)) for d in [getattr(torch, f"float{d}")]
    )
    for one, theirs, ours in zip(exact, plain, fused, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - one).norm() <= 2 * (theirs - one).norm() + 1e-6 * one.norm()


def test_in_half_precision_the_gradient_is_rounded_as_pytorch_rounds_it():
    how = {"temperature": 1.0, "vocabulary": 200, "chunk_size": 64, "autocast": True}
    exact, plain, fused = (
        computed(torch.float64, **how | {"autocast": False}),
        *(computed(torch.float32, **how, fused=f) for f in (False, True)),
    )
    for one, theirs, ours in zip(exact, plain, fused, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
        assert (ours - one).norm() <= 1.1 * (theirs - one).norm()


def test_the_gradient_of_a_rounded_weight_is_added_to_the_one_that_is_there(monkeypatch):
    """In each chunk, of those that are kept and those that are computed again."""
    monkeypatch.setattr(log_probs, "_KEPT_LOGITS", 3 * 8)
    weight = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
    hidden, labels = torch.ones(3, 4, device=DEVICE), torch.tensor([1, 9, 19], device=DEVICE)

    def backward(**how):
        with torch.autocast(DEVICE, torch.bfloat16):
            found, _ = _linear_log_probs(hidden, weight, None, labels, temperature=1.0, chunk_size=8, **how)
        found.sum().backward()
        return weight.grad

    first = backward(rounded=weight.detach().bfloat16()).clone()
    place = weight.grad
    assert backward(rounded=weight.detach().bfloat16(), fused=True) is place
    torch.testing.assert_close(place, 2 * first, atol=1e-6, rtol=1e-2)


def test_equal_logits_have_the_entropy_of_a_uniform_distribution():
    z = torch.full((2, 3000), 1e4, device=DEVICE)
    shift, normalizer, entropy = fused_logits.statistics(z, with_entropy=True)
    assert shift.tolist() == [0, 0]
    torch.testing.assert_close(entropy, torch.full_like(entropy, 3000.0).log())
    torch.testing.assert_close(normalizer, 1e4 + entropy)


def test_a_policy_uses_them_only_within_the_block_and_not_for_logits_with_a_bias(tiny_model, monkeypatch):
    launched = []
    for name in ("statistics", "logits_gradient"):
        own = getattr(fused_logits, name)
        monkeypatch.setattr(
            fused_logits, name, lambda *a, _own=own, _name=name, **k: launched.append(_name) or _own(*a, **k)
        )
    policy = Policy(tiny_model.to(DEVICE))
    policy.use_kernels("liger")
    ids = torch.tensor([[3, 1, 4, 1]], device=DEVICE)

    def score():
        launched.clear()
        log_probs.get_response_log_probs(policy, ids, ids)["log_probs"].sum().backward()
        return launched

    assert score() == []
    with policy.fused_kernels():
        assert score() == ["statistics", "logits_gradient"]
        policy.model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(policy.model.lm_head.weight), device=DEVICE))
        assert score() == []
        policy.model.lm_head.bias = None
    assert score() == []


def wrong_entropy(z, **how):
    found = logits.statistics(z.clone(), **how)
    return found._replace(shift=torch.zeros_like(found.shift), entropy=found.entropy * 1.01)


def gradient_of_another_label(z, normalizer, toward, label, *, in_place, dtype):
    return logits.logits_gradient(z, normalizer, toward, (label[0], (label[1] - 1).clamp(min=0)), in_place=in_place).to(
        dtype
    )


@pytest.mark.parametrize(
    ("name", "wrong"), [("statistics", wrong_entropy), ("logits_gradient", gradient_of_another_label)]
)
def test_kernels_that_compute_something_else_are_not_used(tiny_model, monkeypatch, name, wrong):
    monkeypatch.setattr(fused_logits, name, wrong)
    with pytest.raises(
        RlvrError, match="--fused-kernels liger: what they make of logits differs by more than rounding"
    ):
        Policy(tiny_model.to(DEVICE)).use_kernels("liger")


def test_what_triton_cannot_compile_is_not_used(tiny_model, monkeypatch):
    from triton.errors import TritonError

    def fails(*_, **__):
        raise TritonError("no such instruction\non this device")

    monkeypatch.setattr(fused_logits, "statistics", fails)
    with pytest.raises(RlvrError, match="they fail here with TritonError: no such instruction"):
        Policy(tiny_model.to(DEVICE)).use_kernels("liger")


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget

from rlvr_cli.models.compute import fused_logits

vectors = dict.fromkeys(("normalizers", "towards", "places", "entropies", "gs"), "*fp32") | {"places": "*i64"}

def compiled(kernel, known, capability, **types):
    signature = {name: types.get(name) or vectors.get(name) or "constexpr" for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in known.items()}
    source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]

for capability in (80, 90):
    assert compiled(fused_logits._statistics, {"BLOCK": fused_logits._COLUMNS}, capability, z="*fp32", columns="i32")
    for with_entropy in (False, True):
        known = {"WITH_ENTROPY": with_entropy, "BLOCK": fused_logits._COLUMNS}
        for kind in ("*bf16", "*fp32"):
            assert compiled(fused_logits._gradient, known, capability, z="*fp32", grad=kind, columns="i32")
"""


def test_they_compile_for_an_a100_and_an_h100(tmp_path):
    """Which needs no GPU, and no interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[3])
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("*.cubin"))) == 10
