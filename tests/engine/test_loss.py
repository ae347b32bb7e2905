"""The chunked loss against Hugging Face's own loss and autograd."""

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

from megatrain.engine.loss import chunked_loss, default_chunk, token_logprobs, workspace_bytes
from megatrain.names import IGNORED


def problem(
    rows: int, vocab: int, width: int, dtype: torch.dtype, ignored: float = 0.3
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + vocab + width)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64) / width**0.5
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = IGNORED
    return hidden.to(dtype), targets, weight.to(dtype)


def reference(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sum of the loss and the gradients of `scale` times it, in fp64 by autograd."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    bias = bias.double().requires_grad_() if bias is not None else None
    logits = F.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    loss = loss + z_loss * logits.logsumexp(1).square()[targets != IGNORED].sum()
    (loss * scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad, bias.grad if bias is not None else None


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"smoothing": 0.1},
    "z-loss": {"z_loss": 1e-3},
    "smoothed and z-loss": {"smoothing": 0.2, "z_loss": 1e-2},
    "scaled logits": {"logit_scale": 0.125},
    "capped logits": {"softcap": 3.0},
    "everything": {"smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 1.5, "softcap": 5.0},
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_are_those_of_autograd(terms: dict[str, Any], with_bias: bool, dtype: torch.dtype) -> None:
    hidden, targets, weight = problem(37, 53, 16, dtype)
    bias = torch.randn(53, generator=torch.Generator().manual_seed(1)).to(dtype) if with_bias else None
    loss, grad_hidden, grad_weight, grad_bias = reference(hidden, targets, weight, bias, 1 / 29, **terms)
    ours_weight = torch.zeros(53, 16, dtype=dtype)
    ours_bias = torch.zeros(53, dtype=dtype) if with_bias else None
    result = chunked_loss(
        hidden,
        targets,
        weight,
        bias,
        scale=1 / 29,
        chunk=8,
        label_smoothing=terms.get("smoothing", 0.0),
        z_loss=terms.get("z_loss", 0.0),
        logit_scale=terms.get("logit_scale", 1.0),
        softcap=terms.get("softcap"),
        grad_weight=ours_weight,
        grad_bias=ours_bias,
    )
    bound = 1e-13 if dtype == torch.float64 else 2e-6
    assert result.grad_hidden is not None
    assert result.grad_hidden.dtype == dtype
    assert relative(result.loss_sum, loss) < bound
    assert relative(result.grad_hidden, grad_hidden) < bound
    assert relative(ours_weight, grad_weight) < bound
    if ours_bias is not None and grad_bias is not None:
        assert relative(ours_bias, grad_bias) < bound


def test_loss_is_that_of_hugging_face_with_its_shift_and_its_count() -> None:
    hidden, targets, weight = problem(2 * 12, 61, 16, torch.float32)
    hidden, labels = hidden.view(2, 12, 16), targets.view(2, 12)
    theirs = ForCausalLMLoss(hidden @ weight.t(), labels, vocab_size=61)
    shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:].reshape(-1)
    ours = chunked_loss(hidden.reshape(-1, 16), shifted, weight, chunk=5, need_grad=False)
    assert relative(ours.loss_sum / int((shifted != IGNORED).sum()), theirs.double()) < 1e-6
    assert ours.grad_hidden is None


def test_gradients_add_to_what_is_there_and_a_second_call_gives_the_same_bits() -> None:
    hidden, targets, weight = problem(40, 300, 24, torch.float32)
    once, twice = torch.zeros(300, 24), torch.zeros(300, 24)
    first = chunked_loss(hidden, targets, weight, chunk=16, grad_weight=once)
    again = chunked_loss(hidden, targets, weight, chunk=16, grad_weight=twice)
    assert torch.equal(once, twice)
    assert torch.equal(first.loss_sum, again.loss_sum)
    assert first.grad_hidden is not None
    assert again.grad_hidden is not None
    assert torch.equal(first.grad_hidden, again.grad_hidden)
    chunked_loss(hidden, targets, weight, chunk=16, grad_weight=twice)
    assert relative(twice, 2 * once.double()) < 1e-6


def test_grad_hidden_may_overwrite_hidden() -> None:
    hidden, targets, weight = problem(33, 47, 8, torch.float32)
    document_buckets, in_place = torch.zeros(47, 8), torch.zeros(47, 8)
    result = chunked_loss(hidden, targets, weight, chunk=8, grad_weight=document_buckets)
    assert result.grad_hidden is not None
    chunked_loss(hidden, targets, weight, chunk=8, grad_weight=in_place, grad_hidden=hidden)
    assert torch.equal(hidden, result.grad_hidden)
    assert torch.equal(document_buckets, in_place)


def test_rows_that_are_not_supervised_add_nothing() -> None:
    hidden, targets, weight = problem(30, 41, 8, torch.float32, ignored=0.8)
    keep = targets != IGNORED
    all_rows, only_kept = torch.zeros(41, 8), torch.zeros(41, 8)
    result = chunked_loss(hidden, targets, weight, chunk=30, grad_weight=all_rows, label_smoothing=0.1, z_loss=1e-3)
    kept = chunked_loss(
        hidden[keep], targets[keep], weight, chunk=30, grad_weight=only_kept, label_smoothing=0.1, z_loss=1e-3
    )
    assert result.grad_hidden is not None
    assert kept.grad_hidden is not None
    assert relative(result.loss_sum, kept.loss_sum) < 1e-6
    assert relative(all_rows, only_kept.double()) < 1e-6
    assert not result.grad_hidden[~keep].any()


def test_no_supervised_row_is_zero_and_not_nan() -> None:
    hidden, _, weight = problem(6, 11, 4, torch.float32)
    grad = torch.zeros(11, 4)
    result = chunked_loss(hidden, torch.full((6,), IGNORED), weight, chunk=4, grad_weight=grad, need_logprobs=True)
    assert float(result.loss_sum) == 0.0
    assert not grad.any()
    assert result.grad_hidden is not None
    assert not result.grad_hidden.any()
    assert result.logprobs is not None
    assert not result.logprobs.any()
    empty = chunked_loss(hidden[:0], torch.zeros(0, dtype=torch.int64), weight)
    assert float(empty.loss_sum) == 0.0


def test_token_logprobs_are_those_of_log_softmax() -> None:
    hidden, targets, weight = problem(25, 67, 16, torch.float32)
    ours = token_logprobs(hidden, targets, weight, chunk=7)
    theirs = F.log_softmax(hidden.double() @ weight.double().t(), 1)
    theirs = theirs.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1) * (targets != IGNORED)
    assert relative(ours, theirs) < 1e-6
    assert not ours[targets == IGNORED].any()


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor any operation returned, in elements."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_grows_with_the_sequence_beyond_the_hidden_states(dtype: torch.dtype) -> None:
    vocab, width = 32768, 16
    chunk = default_chunk(vocab, "cpu")
    for rows in (1024, 2048):
        hidden, targets, weight = problem(rows, vocab, width, dtype, ignored=0.9)
        grad_weight = torch.zeros(vocab, width)
        with LargestTensor() as mode:
            chunked_loss(hidden, targets, weight, grad_weight=grad_weight)
        assert mode.largest <= max(chunk * vocab, rows * width, vocab * width)
        assert chunk < 512


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most bytes that torch had allocated at a time for `work`, beside what was there before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    return max(itertools.accumulate(bytes_ for _, bytes_ in changes))


def test_peak_memory_grows_by_the_hidden_states_alone() -> None:
    """H09's 1k, 4k and 16k tokens, with a sixteenth of its vocabulary: at 128k they take minutes on one core, and every
    chunk takes the same (the next test measures one at 128k)."""
    vocab, width, peaks = 8192, 64, {}
    for rows in (1024, 4096, 16384):
        hidden, targets, weight = problem(rows, vocab, width, torch.bfloat16, ignored=0.9)
        total = torch.zeros(vocab, width)
        peaks[rows] = peak_bytes(functools.partial(chunked_loss, hidden, targets, weight, chunk=64, grad_weight=total))
    states = {rows: rows * width * 2 for rows in peaks}  # their gradient, which is the result
    beside = {peaks[rows] - states[rows] for rows in peaks}
    assert max(beside) - min(beside) < 64 << 10, peaks
    assert min(beside) >= 64 * vocab * 4, "a chunk of logits was seen"


def test_a_vocabulary_of_128k_takes_one_chunk_and_gives_the_loss_of_fp32() -> None:
    """H09 at its own size: 1k tokens, most of them not supervised, against all their logits at once in fp32."""
    vocab, width, rows = 131072, 64, 1024
    hidden, targets, weight = problem(rows, vocab, width, torch.bfloat16, ignored=0.9)
    counted = targets != IGNORED
    results = []
    grad_weight = torch.zeros(vocab, width)
    peak = peak_bytes(lambda: results.append(chunked_loss(hidden, targets, weight, grad_weight=grad_weight)))
    assert peak < default_chunk(vocab, "cpu") * vocab * 4 + rows * width * 2 + (2 << 20)
    assert peak < rows * vocab * 4 / 10
    states = hidden[counted].float().requires_grad_()
    loss = F.cross_entropy(states @ weight.float().t(), targets[counted], reduction="sum")
    loss.backward()
    (result,) = results
    assert result.grad_hidden is not None
    assert states.grad is not None
    assert abs(float(result.loss_sum - loss.detach())) / int(counted.sum()) < 1e-3
    assert relative(result.grad_hidden[counted], states.grad) < 4e-3
    assert not result.grad_hidden[~counted].any()


def test_a_bf16_head_has_no_coarse_grid() -> None:
    """H09: the loss within 1e-3 of fp32 on the same operands, far finer than bf16's step at this size (0.03)."""
    hidden, targets, weight = problem(200, 4000, 64, torch.bfloat16, ignored=0.5)
    hidden = hidden * 2
    loss, grad_hidden, grad_weight, _ = reference(hidden, targets, weight, None, 1.0)
    ours_weight = torch.zeros(4000, 64)
    result = chunked_loss(hidden, targets, weight, chunk=64, grad_weight=ours_weight, need_logprobs=True)
    assert result.grad_hidden is not None
    assert result.grad_hidden.dtype == torch.bfloat16
    assert relative(result.loss_sum, loss) < 1e-6
    assert relative(result.grad_hidden, grad_hidden) < 4e-3
    assert relative(ours_weight, grad_weight) < 4e-3
    assert result.logprobs is not None
    document_buckets = result.logprobs[targets != IGNORED].double()
    assert torch.equal(document_buckets.float().bfloat16().double(), document_buckets) is False


def test_the_chunk_follows_vocabulary_and_kind_of_device_alone() -> None:
    assert default_chunk(151936, "cuda") == default_chunk(151936, "cuda:0") == 2048
    assert default_chunk(151936, "cpu") == 64
    # Smaller cards compute fewer rows at a time: at most a 32nd of their memory is logits.
    assert [default_chunk(151936, "cuda", gib << 30) for gib in (141, 79, 24, 16, 8)] == [2048, 2048, 1024, 512, 256]
    assert default_chunk(1000, "cpu") == 2048
    assert workspace_bytes(32768, 151936, 2048, 2048, torch.bfloat16, "cuda") < 32768 * 2048 * 2 + (2 << 30)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets must be int64"),
        ({"weight": torch.zeros(5, 9)}, r"\(N, H\) and \(V, H\)"),
        ({"weight": torch.zeros(5, 4, dtype=torch.bfloat16)}, "must agree"),
        ({"grad_weight": torch.zeros(5, 4, dtype=torch.bfloat16)}, "summed in fp32"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"softcap": 0.0}, "softcap"),
    ],
)
def test_arguments_that_do_not_belong_together_are_refused(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(6, 4),
        "targets": torch.zeros(6, dtype=torch.int64),
        "weight": torch.zeros(5, 4),
    }
    with pytest.raises(ValueError, match=words):
        chunked_loss(**(arguments | change))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("capped", [False, True])
def test_the_kernel_compiles_for_an_h100_without_one(capped: bool, weighted: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatrain.engine.loss_triton import _cross_entropy_kernel

    numbers = ("scale", "smoothing", "z_loss", "logit_scale", "softcap")
    signature = {"logits": "*fp32", "gradient": "*bf16", "targets": "*i64", "bias": "*bf16", "losses": "*fp32"}
    signature |= {
        "row_weights": "*fp32",
        "logprobs": "*fp32",
        "vocab": "i32",
        "logits_stride": "i32",
        "gradient_stride": "i32",
        "ignore": "i32",
    }
    signature |= dict.fromkeys(numbers, "fp32")
    constants = {"HAS_BIAS": True, "HAS_WEIGHTS": weighted, "HAS_CAP": capped, "HAS_GRADIENT": True, "BLOCK": 4096}
    source = ASTSource(_cross_entropy_kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert ".target sm_90" in compiled.asm["ptx"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_agrees_with_autograd(terms: dict[str, Any], dtype: torch.dtype) -> None:
    hidden, targets, weight = (tensor.cuda() for tensor in problem(70, 9001, 64, dtype))
    loss, grad_hidden, grad_weight, _ = reference(hidden, targets, weight, None, 1 / 50, **terms)
    ours = torch.zeros(9001, 64, device="cuda")
    result = chunked_loss(
        hidden,
        targets,
        weight,
        scale=1 / 50,
        chunk=32,
        label_smoothing=terms.get("smoothing", 0.0),
        z_loss=terms.get("z_loss", 0.0),
        logit_scale=terms.get("logit_scale", 1.0),
        softcap=terms.get("softcap"),
        grad_weight=ours,
    )
    bound = 2e-6 if dtype == torch.float32 else 5e-3
    assert result.grad_hidden is not None
    assert relative(result.loss_sum, loss) < 2e-6
    assert relative(result.grad_hidden, grad_hidden) < bound
    assert relative(ours, grad_weight) < bound
