"""A store in plain tensors with the core's read and write, for tests of what goes into files and comes out of them."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from megatrain.models.decoder import Decoder
from megatrain.models.types import TensorRef
from megatrain.system import atomic
from megatrain.weights.state_format import StateFormat


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> bf16 upper plane and int16 residual, by the formula of the state layout."""
    bits = master.contiguous().view(torch.int32)
    upper = ((bits.to(torch.int64) + 0x8000) >> 16).to(torch.int16)
    lower = (bits & 0xFFFF).to(torch.int16)
    return upper.view(torch.bfloat16), lower


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The reverse, in 64-bit integers."""
    bits = (upper.view(torch.int16).to(torch.int64) << 16) + lower.to(torch.int64)
    return bits.to(torch.int32).view(torch.float32)


@dataclasses.dataclass
class Planes:
    """Flat planes of one tensor."""

    weights: Tensor
    residual: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    count: int = 0


class MemoryCore:
    """`megatrain._core.Engine` as far as reading, writing, step counts and saving go."""

    def __init__(self, decoder: Decoder) -> None:
        self.precision = decoder.precision
        self.planes: dict[tuple[int, int], Planes] = {}
        for ref in decoder.tensors.values():
            count = torch.Size(ref.shape).numel()
            planes = Planes(torch.zeros(count, dtype=ref.dtype))
            if ref.role == "trainable":
                planes.exp_avg, planes.exp_avg_sq = torch.zeros(count), torch.zeros(count)
                if self.precision == "bf16":
                    planes.residual = torch.zeros(count, dtype=torch.int16)
            self.planes[ref.unit, ref.tensor] = planes

    def read(self, unit: int, tensor: int, plane: str, out: Tensor, start: int = 0) -> None:
        planes = self.planes[unit, tensor]
        end = start + out.numel()
        if plane == "master":
            assert out.dtype == torch.float32
            values = planes.weights[start:end].float()
            if planes.residual is not None:
                values = join(planes.weights[start:end], planes.residual[start:end])
        else:
            values = getattr(planes, plane)[start:end]
            assert values.dtype == out.dtype
        out.view(-1).copy_(values)

    def write(self, unit: int, tensor: int, plane: str, source: Tensor, start: int = 0) -> None:
        planes = self.planes[unit, tensor]
        source = source.detach().contiguous().view(-1)
        end = start + source.numel()
        if plane == "master":
            if not source.isfinite().all():
                raise ValueError("not finite")
            if planes.residual is None:
                planes.weights[start:end] = source.float()
            else:
                planes.weights[start:end], planes.residual[start:end] = split(source.float())
        else:
            target = getattr(planes, plane)
            assert target is not None
            assert target.dtype == source.dtype
            assert end <= target.numel()
            target[start:end] = source

    def step_count(self, unit: int, tensor: int) -> int:
        return self.planes[unit, tensor].count

    def set_step_count(self, unit: int, tensor: int, count: int) -> None:
        self.planes[unit, tensor].count = count

    def begin_save(
        self, files: list[tuple[str, str, bytes, list[tuple[int, int]]]], chunk_bytes: int, needed: int
    ) -> None:
        self.saving = files, chunk_bytes, needed

    def save_progress(self) -> tuple[int, bool]:
        return 0, False

    def finish_save(self) -> tuple[list[tuple[str, list[int]]], list[list[int]]]:
        files, chunk_bytes, needed = self.saving
        sums = []
        for path, plane, header, tensors in files:
            planes = (getattr(self.planes[key], plane) for key in tensors)
            data = header + b"".join(values.view(torch.uint8).numpy().tobytes() for values in planes)
            try:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                try:
                    done = 0
                    while done < len(data):
                        done += os.pwrite(file, data[done : done + chunk_bytes], done)
                    os.fsync(file)
                finally:
                    os.close(file)
            except OSError as error:
                raise atomic.storage_error(error, Path(path), needed) from None
            sums.append((path, atomic.crc_per_chunk(data)))
        counts: list[list[int]] = [[] for _ in range(1 + max(unit for unit, _ in self.planes))]
        for (unit, _), values in sorted(self.planes.items()):
            counts[unit].append(values.count)
        return sums, counts

    def cancel_save(self) -> None:
        pass

    def master(self, ref: TensorRef) -> Tensor:
        out = torch.empty(ref.shape)
        self.read(ref.unit, ref.tensor, "master", out)
        return out

    def fill(self, decoder: Decoder, seed: int, count: int = 7) -> None:
        """Random weights and moments in every trainable plane, small integers and floats in the others."""
        generator = torch.Generator().manual_seed(seed)
        for ref in decoder.tensors.values():
            planes = self.planes[ref.unit, ref.tensor]
            values = torch.randn(ref.shape, generator=generator) * 0.05
            if ref.role != "trainable":
                planes.weights.copy_(values.view(-1).to(ref.dtype))
                continue
            self.write(ref.unit, ref.tensor, "master", values)
            assert planes.exp_avg is not None
            assert planes.exp_avg_sq is not None
            planes.exp_avg.copy_(torch.randn(values.numel(), generator=generator) * 1e-3)
            planes.exp_avg_sq.copy_(torch.rand(values.numel(), generator=generator) * 1e-6)
            planes.count = count

    def equals(self, other: "MemoryCore") -> bool:
        """Whether every bit of every plane and every count is the same."""

        def same(a: Tensor | None, b: Tensor | None) -> bool:
            if a is None or b is None:
                return a is b
            return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))

        return self.planes.keys() == other.planes.keys() and all(
            same(mine.weights, theirs.weights)
            and same(mine.residual, theirs.residual)
            and same(mine.exp_avg, theirs.exp_avg)
            and same(mine.exp_avg_sq, theirs.exp_avg_sq)
            and mine.count == theirs.count
            for mine, theirs in ((self.planes[key], other.planes[key]) for key in self.planes)
        )


def llama(tied: bool = False, **changes: object) -> dict[str, object]:
    """A tiny Llama configuration, as `model.config` has it."""
    return {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        **changes,
    }


def engine(precision: str = "bf16", tied: bool = False, seed: int | None = None, **options: object) -> SimpleNamespace:
    """Decoder and store together, as `checkpoint` and `export` take them; filled when a seed is given."""
    freeze = options.pop("freeze", ())
    decoder = Decoder.from_config(llama(tied, **options), precision=precision, freeze=freeze)
    core = MemoryCore(decoder)
    if seed is not None:
        core.fill(decoder, seed)
    return SimpleNamespace(decoder=decoder, core=core, state_format=StateFormat())
