"""The numerics key: everything that changes rounding, and nothing that a plan may choose.

Two runs of one key on one kind of device give the same bits (on CUDA with `deterministic: true`). It follows from
configuration, model and kind of device by fixed rules, and is stored with every checkpoint. `arithmetic` is what a pass
runs under, so that nothing of the caller's changes the bits.
"""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatrain.engine import float8
from megatrain.engine.loss import default_chunk
from megatrain.engine.weight_grads import sums_in_fp32
from megatrain.models.decoder import Decoder
from megatrain.models.varlen_attention import takes_documents
from megatrain.weights.state_format import StateFormat


def key(
    decoder: Decoder,
    device: torch.device,
    *,
    micro_batch: tuple[int, int] | None,
    micro_batches: int | None,
    grad_precision: str,
    state_format: StateFormat,
    loss_chunk: int | None,
    compiled: bool,
    deterministic: bool,
    fragments: str = "whole",  # what layers are computed in: see `Cut.fragments`
    mlp_tiles: int = 1,
    least: bool = True,  # whether compiled layers keep as little as they can
) -> dict[str, Any]:
    """The key as JSON. `micro_batch` (rows, seq) and `micro_batches` are the nominal split of a step; None where the
    engine was made without: it is then the caller's, who gives each step's micro-batches."""
    import transformers

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "precision": decoder.precision,
        **({} if decoder.matmul == "bf16" else {"matmul": float8.NAME}),
        "grad_precision": grad_precision,
        **({} if state_format == StateFormat() else state_format.request()),
        "weight_gradients": "summed in fp32" if sums_in_fp32(decoder.precision) else None,
        "micro_batch": list(micro_batch) if micro_batch is not None else None,
        "micro_batches": micro_batches,
        "loss_chunk": loss_chunk or default_chunk(decoder.vocab_size, device.type),
        "attention": attention(decoder, device.type, deterministic),
        "packed_rows": decoder.packed_rows(device.type),
        "experts": getattr(decoder.config, "_experts_implementation", None),
        "compiled": compiled,
        # a graph of a whole layer does not round what passes from one half to the other; and what is around experts
        # that are spread over units sees the documents of packed rows together
        "fragments": fragments
        if (fragments != "whole" and compiled) or (fragments == "experts" and decoder.mixing_layers)
        else None,
        # what is made again within a kernel is not rounded on its way
        "kept_tensors": "usual" if compiled and not least else None,
        "mlp_tiles": mlp_tiles if mlp_tiles > 1 else None,
        "deterministic": deterministic,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def attention(decoder: Decoder, device: str, deterministic: bool) -> str | None:
    """How attention is computed where no row is packed, on a kind of device: transformers' name of it, and the kernels
    that `arithmetic` holds it to."""
    if decoder.attention != "sdpa" or device != "cuda" or not deterministic:
        return decoder.attention
    return "sdpa: flash or math" if _flash_takes(decoder) else "sdpa: math"


def why_math(decoder: Decoder, masked: int | None) -> str | None:
    """Why a deterministic pass on CUDA does not have flash compute all of its attention, in a sentence; None where it
    has. `masked`: the first of its micro-batches with a dense mask."""
    if decoder.attention != "sdpa":
        return None
    rest = "so torch's math kernel computes attention, slower and with a matrix of seq x seq for each head"
    if not _flash_takes(decoder):
        kind = str(decoder.dtype).removeprefix("torch.")
        width = f" of {decoder.packing.width}" if decoder.packing.width else ""
        return f"the flash kernels take no {kind} heads{width}, {rest}"
    if masked is not None:
        return f"micro-batch {masked} has a dense mask, which the flash kernels do not take, {rest}"
    return None


def _flash_takes(decoder: Decoder) -> bool:
    return takes_documents("cuda", decoder.dtype, decoder.packing.width)


def differences(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """The differences between two keys, one sentence per entry."""
    return [
        f"{name}: {stored.get(name)!r} -> {current.get(name)!r}"
        for name in sorted({*stored, *current})
        if not _agree(name, stored.get(name), current.get(name))
    ]


def _agree(name: str, stored: Any, current: Any) -> bool:
    """Whether two values are the same; earlier versions did not name the kernels of attention, and named a split that
    nobody had asked for."""
    if name in ("micro_batch", "micro_batches") and (stored is None or current is None):
        return True
    if name == "attention" and stored == "sdpa" and isinstance(current, str):
        return current.partition(":")[0] == "sdpa"
    return bool(stored == current)


class _FullPrecision:
    """fp32 matmuls and convolutions in fp32, never in TF32 or bf16, whatever the caller has set for the process with
    `torch.set_float32_matmul_precision`, `allow_tf32` or `fp32_precision`.

    Torch keeps these for the whole process, and a loader's thread prepares a step while another one computes: the first
    one in notes what was set, the last one out puts it back. Convolutions are among them because torch's default for
    cuDNN's is TF32 (docs.pytorch.org/docs/stable/notes/cuda.html, TensorFloat-32).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: _Fp32Settings | None = None

    def __enter__(self) -> None:
        with self._lock, _without_advice():
            self._inside += 1
            if self._inside == 1:
                self._before = _Fp32Settings.read()
                ieee = ["ieee"] * len(_fp32_kernels())
                _Fp32Settings("highest", False, ieee, ieee).set()

    def __exit__(self, *_: object) -> None:
        with self._lock, _without_advice():
            self._inside -= 1
            if not self._inside and self._before is not None:
                self._before.set()


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """torch 2.9 warns when its older interface is used first, which is read here to be put back as it was."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings", category=UserWarning)
        yield


class _Fp32Settings(NamedTuple):
    """Torch's settings of fp32 kernels, by its older interface and its newer one: some releases refuse to compute where
    the two disagree, so both are set."""

    matmul: str
    cudnn: bool
    kernels: list[str]
    """Of each kind of kernel, what it resolves to."""
    own: list[str]
    """What to set it to for that: `none` where it is what it follows, which torch does not tell from set alike."""

    @classmethod
    def read(cls) -> "_Fp32Settings":
        """The current settings."""
        try:
            matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        except RuntimeError:  # the caller has used both interfaces, and the newer one counts
            matmul, cudnn = "highest", False
        found = [str(kernel.fp32_precision) for kernel in _fp32_kernels()]
        above = [str(parent.fp32_precision) for parent in _fp32_parents()]
        return cls(
            matmul, cudnn, found, ["none" if one == other else one for one, other in zip(found, above, strict=True)]
        )

    def set(self) -> None:
        """Applies them."""
        torch.set_float32_matmul_precision(self.matmul)
        torch.backends.cudnn.allow_tf32 = self.cudnn
        for kernel, wanted, own in zip(_fp32_kernels(), self.kernels, self.own, strict=True):
            if kernel.fp32_precision != wanted:
                kernel.fp32_precision = own


def _fp32_kernels() -> list[Any]:
    """What holds the precision of each kind of fp32 kernel."""
    of: Any = torch.backends
    return [of.cuda.matmul, of.cudnn.conv, of.cudnn.rnn, of.mkldnn.matmul, of.mkldnn.conv]


def _fp32_parents() -> list[Any]:
    """What each of them follows where it is not set itself."""
    of: Any = torch.backends
    return [of, of.cudnn, of.cudnn, of.mkldnn, of.mkldnn]


full_precision: _FullPrecision = _FullPrecision()


@contextlib.contextmanager
def arithmetic(device: torch.device, deterministic: bool) -> Iterator[None]:
    """Sets random state, arithmetic and determinism for a pass, and restores the caller's afterwards."""
    cuda = device.type == "cuda"
    with contextlib.ExitStack() as stack:
        stack.enter_context(full_precision)
        stack.enter_context(torch.random.fork_rng(devices=[device] if cuda else []))
        # the precision is the engine's own, and a layer is replayed under the one it was computed in
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if cuda:
            # a matmul that is split over its inner dimension adds its parts in fp32 too
            matmul = torch.backends.cuda.matmul
            reduced = matmul.allow_bf16_reduced_precision_reduction
            stack.callback(setattr, matmul, "allow_bf16_reduced_precision_reduction", reduced)
            matmul.allow_bf16_reduced_precision_reduction = False
        if deterministic and cuda:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            before = torch.are_deterministic_algorithms_enabled()
            stack.callback(torch.use_deterministic_algorithms, before)
            torch.use_deterministic_algorithms(True, warn_only=False)
            stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]))
        yield
