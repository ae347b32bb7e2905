"""The native core: memory, order and the optimizer.

Everything that waits releases the interpreter and honours Ctrl-C.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, Protocol, final, type_check_only

@type_check_only
class SupportsDlpack(Protocol):
    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

__all__ = [
    "Buffer",
    "ComputeOp",
    "Device",
    "DeviceError",
    "DoesNotFit",
    "Engine",
    "EngineBroken",
    "Kept",
    "MegatrainError",
    "Outcome",
    "StorageError",
    "__version__",
    "adamw",
    "conformance",
    "cuda_status",
    "fits",
    "forecast",
    "isa",
    "mappings_made",
    "plan",
    "probe_beside_link",
    "probe_device",
    "probe_host",
    "probe_state_disk",
    "schedule",
    "simulate",
    "split",
]

_Plane = Literal["master", "weights", "residual", "exp_avg", "exp_avg_sq", "gradient"]

__version__: str

class MegatrainError(Exception):
    """Base of every error of ours."""

class DoesNotFit(MegatrainError):
    """A plan needs more than a tier offers. `items` holds the sum, line by line."""

    items: list[dict[str, Any]]

class DeviceError(MegatrainError):
    """A device is missing, or a call on it failed."""

class StorageError(MegatrainError):
    """A file operation failed."""

class EngineBroken(MegatrainError):
    """An operation of a step failed; the engine refuses everything from then on."""

@final
class Device:
    """Where layers are computed."""

    @staticmethod
    def cpu(seed: int | None = None, faults: str | None = None) -> Device:
        """The simulated device: host memory, work that runs only when something waits. With a `seed`, ready work of
        all streams runs in an order drawn from it; without, in order. `faults` is JSON: see `device/sim.rs`."""
    @staticmethod
    def cuda(ordinal: int = 0) -> Device:
        """Raises DeviceError, saying what is missing and what to install, when there is no usable card."""
    @property
    def kind(self) -> Literal["cpu", "cuda"]: ...
    @property
    def ordinal(self) -> int | None:
        """The CUDA device's number; None on the CPU."""
    @property
    def name(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def capability(self) -> tuple[int, int]: ...
    def allocate(self, bytes: int) -> Buffer:
        """Zeroed memory of the device, freed with the last array over it."""
    def allocate_host(self, bytes: int) -> Buffer:
        """Zeroed host memory, registered with the device (pinned) until the last array over it goes."""

@final
class Buffer:
    """Memory as a flat uint8 array; import with `torch.from_dlpack`. It lives until the last array over it goes, also
    after the engine is closed. An engine's regions are exported once a run: the `stream` argument is accepted and not
    waited for, since the engine orders them by its own events, op by op."""

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...

@final
class ComputeOp:
    """What Python must compute next. Offsets are bytes into the regions of the same name."""

    @property
    def id(self) -> int: ...
    @property
    def phase(self) -> Literal["embed", "forward", "loss", "backward", "embed_backward"]: ...
    @property
    def unit(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def first(self) -> bool:
        """Whether this is the unit's first micro-batch of the step (start the sum) …"""
    @property
    def last(self) -> bool:
        """… or its last one (round the sum into the transfer buffer)."""
    @property
    def weights(self) -> int:
        """Region `weights`: the unit's image."""
    @property
    def tied_weights(self) -> int | None:
        """Region `weights`: the embed unit's image, in phase `loss` of a tied model."""
    @property
    def grad(self) -> int | None:
        """Region `grads`: the unit's transfer buffer (transfer precision), in `loss`, `backward`, `embed_backward`."""
    @property
    def accumulator(self) -> int | None:
        """Region `accumulators`: fp32 sum over micro-batches; None: accumulate in (or write straight to) `grad`."""
    @property
    def tied_accumulator(self) -> int | None:
        """Region `accumulators`: fp32 sum of the head's use of a tied weight, in `loss` and `embed_backward`; None: as
        above, in the embed unit's `grad` (`tied_grad`)."""
    @property
    def tied_grad(self) -> int | None:
        """Region `grads`: the embed unit's transfer buffer, in phase `loss` of a tied model."""
    @property
    def round_tied(self) -> bool:
        """Whether `tied_accumulator`, complete now, is to be rounded into `tied_grad`: the rows that the step does not
        look up are landed from there before the embedding's backward."""
    @property
    def activation(self) -> Literal["keep", "offload", "recompute"]: ...
    @property
    def input_on_host(self) -> bool:
        """Whether the layer's input goes to the host (through `stage`) between forward and backward."""
    @property
    def stage(self) -> int | None:
        """Region `stage`: where forward leaves what goes to the host, and backward finds it again."""

@final
class Outcome:
    """What happened to a step's gradients."""

    @property
    def grad_norm(self) -> float:
        """Before clipping; over what was transferred. NaN or infinite when a gradient was."""
    @property
    def clip(self) -> float:
        """The coefficient the gradients were multiplied with; 1.0 when not clipped."""
    @property
    def skipped(self) -> bool:
        """Whether the update was skipped because a gradient was not finite."""

@final
class Kept:
    """The state of a model whose engine was closed by `keep`, for an engine with another plan for what a step works in
    (activations, gradients, buffers, the order of micro-batches)."""

@final
class Engine:
    """The stream engine over one model's units.

    Threads: every method may be called from any thread while others are under way. One lock guards the state of passes;
    it is never held while Python runs, and it does not guard the values. One thread at a time drives a pass (`begin`,
    `next`, `finish`, `apply`, `abandon`), and it may be another one each time. `read` and `write` wait for pending
    updates first. Reads may run concurrently, and so may writes of different tensors. The caller has to keep apart what
    no lock does: a `write` and another access to the same tensor, or a `read` or `write` and a call that starts updates
    (`apply`; `begin` where they are immediate), may otherwise mix two values. A `write` is refused while a pass is
    under way. An interrupted `read` leaves `out` partly filled."""

    def __new__(cls, device: Device, request: str, plan: str, options: str = "{}", kept: Kept | None = None) -> Engine:
        """`request` is what was given to `plan`, `plan` what it returned. `options` is JSON: `threads` (optimizer
        workers, default all permitted less two), `poison`, `synchronous`, `huge_pages`, `trace`, `isa`. With `kept` the
        engine takes over the state of one that was closed; ValueError where some of it would be elsewhere under this
        plan."""
    def layout(self) -> str:
        """JSON list with one object per unit: `{name, elements, image_bytes, tensors: [{spec, element, byte}]}`."""
    def allocated(self) -> str:
        """JSON list of the items as they were allocated; equals the plan's."""
    def warnings(self) -> list[str]:
        """One sentence for everything that could not be provided as requested (pinning refused, huge pages missing)."""
    def region(self, name: Literal["weights", "grads", "accumulators", "stage"]) -> Buffer: ...
    def weights_offset(self, unit: int) -> int | None:
        """Region `weights`: offset of a unit that has a place of its own (embed, head, state on the device)."""
    def begin(
        self,
        kind: Literal["train", "eval"],
        micro_batches: int,
        compute_stream: int = 0,
        groups: list[tuple[float, float, float, float, float]] | None = None,
        accumulate: bool = False,
        rows: tuple[int, Any] | None = None,
        idle: list[int] = ...,
        synchronous: bool = False,
    ) -> None:
        """Starts a pass.

        `compute_stream` is the handle of the stream that Python computes on
        (`torch.cuda.current_stream().cuda_stream`); it must not be destroyed while the engine may use it. `groups` (lr,
        beta1, beta2, eps, weight_decay; one a group) is given for immediate updates only. `accumulate` adds this pass's
        gradients to those of the last one, which have not been applied. `rows` names a trained table of the embed unit
        (index of the tensor; where the head is tied, the table that it uses) and the rows of it that the pass looks up:
        int64, distinct, ascending, anything with DLPack on the CPU. With immediate updates the other rows are updated
        while backward runs; nothing else depends on it. `idle` as in `apply`, for immediate updates.
        `synchronous` runs one operation at a time until the next pass begins."""
    def next(self) -> ComputeOp | None:
        """The next op once its inputs are on their way and the compute stream waits for them; None when the pass has
        no more."""
    def route(self, unit: int, wanted: list[bool]) -> None:
        """Names the experts of `unit` that the micro-batch needs whose forward is being computed, in the unit that
        routes to them (`routed` of a plan request). Raises ValueError at another time, or when not every expert is
        named as wanted or not."""
    def finish(self, op: ComputeOp) -> None:
        """The op's work has been launched on the compute stream."""
    def gradient_norm(self) -> float:
        """Waits until all gradients of the pass have landed; the norm over them."""
    def apply(
        self,
        groups: list[tuple[float, float, float, float, float]],
        max_grad_norm: float | None,
        idle: list[int] = ...,
    ) -> Outcome:
        """The verdict: waits for the norm, forms the clip coefficient, queues the updates (they run while later work
        does) or skips them when a gradient is not finite. In immediate mode it only waits and reports. `idle` are the
        numbers of groups without a gradient in this step: all of such a group stays as it is, counts included."""
    def abandon(self) -> None:
        """Drops a pass that has begun and was not applied (an exception in Python between next and finish); in
        immediate mode, once an update has run, marks the engine broken instead."""
    def check(self) -> None:
        """Raises EngineBroken, with what broke it first, when nothing can be asked any more."""
    def drain(self) -> None:
        """Waits for every pending update and copy."""
    def read(self, unit: int, tensor: int, plane: _Plane, out: SupportsDlpack, start: int = 0) -> None:
        """Copies elements [start, start + len(out)) of a plane into a contiguous CPU array: fp32 for master, moments
        and gradient (widened when bf16), the tensor's own dtype for weights, int16 for residual. Drains first."""
    def write(self, unit: int, tensor: int, plane: _Plane, source: SupportsDlpack, start: int = 0) -> None:
        """The reverse. `master` takes fp32, bf16, fp16 or fp64 and refuses values that are not finite (ValueError)."""
    def step_count(self, unit: int, tensor: int) -> int: ...
    def set_step_count(self, unit: int, tensor: int, count: int) -> None: ...
    def begin_save(
        self, files: list[tuple[str, _Plane, bytes, list[tuple[int, int]]]], chunk_bytes: int, needed: int
    ) -> None:
        """Asks for the state that the passes so far leave, in files that are not there yet: each a path, a plane, the
        file's first bytes and the tensors (unit, index) whose planes follow, units in ascending order. The next pass
        carries it to disk, each unit before its next update. `needed`: bytes of all files, for the words of an error.
        ValueError while a pass or another save is under way."""
    def save_progress(self) -> tuple[int, bool]:
        """Bytes written so far, and whether the save is over, well or not. ValueError when none was begun."""
    def finish_save(self) -> tuple[list[tuple[str, list[int]]], list[list[int]]]:
        """Waits until everything is on the disk (no pass need follow). For each file its CRC32 per chunk, and for each
        tensor of each unit how often it had been updated. StorageError when the disk failed; the engine goes on."""
    def cancel_save(self) -> None:
        """Gives the save up, if there is one. Nothing is written any more when it returns."""
    def keep(self) -> Kept:
        """Waits for pending updates, closes the engine and keeps the model's state where it is: on the host, on the
        device, on disk. What else the engine has is freed with it and with the arrays over it. ValueError between a
        pass and `apply`, and while a save is under way; nothing is closed then."""
    def lanes(self) -> str:
        """JSON of where every lane stands now, whatever has become of the engine: `{completed, lanes: [{lane, running,
        next, waits_for}]}`, operations named as "backward of layers.3, micro-batch 0". `completed` counts operations:
        while it stays the same, nothing goes on."""
    def stats(self) -> str:
        """JSON of the last finished step: seconds busy of each lane (compute, upload, download, host), bytes moved,
        seconds Python waited, and which lane was longest."""
    def trace(self) -> str:
        """Chrome trace (Perfetto) of what was recorded since `trace` was switched on."""
    def close(self) -> None: ...

def plan(request: str) -> str:
    """JSON in, JSON out: see `plan.rs`. Allocates nothing. Raises DoesNotFit with the sum."""

def fits(request: str) -> bool:
    """Whether `plan` finds a plan for this request, without simulating any."""

def simulate(request: str, plan: str, rates: str) -> str:
    """Runs the schedule of one steady step on a virtual clock: `{step_s, lanes: {…: busy_s}, bound, spans: […]}`."""

def forecast(request: str, plan: str) -> str:
    """JSON of what a plan takes at the rates of a request that differs from its own in nothing else: the `estimate` of
    `plan`, with `expected_step_s` and `expected_lanes` at the rates that a whole step sustains. ValueError where the
    plan was made for another request."""

def schedule(request: str, plan: str) -> str:
    """The schedule of one step as JSON, checked."""

def adamw(
    weights: SupportsDlpack,
    residual: SupportsDlpack | None,
    exp_avg: SupportsDlpack,
    exp_avg_sq: SupportsDlpack,
    grad: SupportsDlpack,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    isa: Literal["auto", "scalar", "avx2", "avx512"] = "auto",
    threads: int = 1,
) -> None:
    """The optimizer kernel alone, in place on contiguous CPU arrays of one length that share no memory.

    `weights` is bf16 with an int16 `residual`, or fp32; `grad` is bf16 or fp32. An interrupt leaves the arrays partly
    updated."""

def split(master: SupportsDlpack, weights: SupportsDlpack, residual: SupportsDlpack) -> None:
    """fp32 -> bf16 upper plane and int16 residual, exactly."""

def isa() -> str:
    """The kernels in use: avx512, avx2 or scalar."""

def mappings_made() -> int:
    """How often this process has mapped host memory for engines, the simulated device's included. A step maps none."""

def conformance(device: Device) -> None:
    """Runs the suite that every device passes; raises with the first rule that it breaks."""

def cuda_status() -> str:
    """JSON `{available, reason, driver, devices: [...]}`; never raises, with or without a driver."""

def probe_host(bytes: int, threads: int) -> str:
    """JSON rates of this host: `touch_gbs`, `copy_gbs`, and of the optimizer `adamw_params_per_s` over fp32 moments,
    `adamw_bf16_params_per_s` and `adamw_8bit_params_per_s`."""

def probe_device(device: Device, bytes: int) -> str:
    """JSON rates of the link: `h2d_gbs`, `d2h_gbs`, `bidirectional_gbs`, `pin_gbs`."""

def probe_beside_link(device: Device, bytes: int, threads: int) -> str:
    """JSON rates of the host's optimizer over fp32 moments while the link carries bytes both ways, and of the link
    then, both ways together: `adamw_beside_link_params_per_s`, `link_beside_adamw_gbs`."""

def probe_state_disk(paths: Sequence[str | PathLike[str]], bytes: int) -> str:
    """JSON rates of folders as places for optimizer state, read and written at once: `state_read_gbs`,
    `state_write_gbs`, and by what, `state_io`. StorageError when a file cannot be made or has no room."""
