"""The planned core of a model: made when it is first needed, filled, and given templates over its memory."""

import contextlib
import dataclasses
import gc
import json
import logging
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megatrain import _core
from megatrain.engine import options as arguments
from megatrain.engine.cuts import Cut, cuts, planned, planned_when_idle
from megatrain.engine.devices import current
from megatrain.engine.host_heap import HeapLimit, anonymous_bytes
from megatrain.engine.inputs import StepInputs
from megatrain.engine.interrupt_guard import under_way
from megatrain.engine.loss import default_chunk
from megatrain.engine.optimizer import AdamW, CoreGroup
from megatrain.engine.profile import RATES, REQUESTS, core_groups, plan_request
from megatrain.engine.step import StepTemplates
from megatrain.engine.step_templates import step_templates, torch_bytes
from megatrain.errors import ConfigError, DoesNotFit, EngineBroken
from megatrain.models.decoder import Decoder
from megatrain.models.types import PRECISIONS
from megatrain.names import nearest, suggest
from megatrain.system import hardware
from megatrain.units import parse_size
from megatrain.weights import initialize
from megatrain.weights.planes import read_plane, set_step_count, step_count, write_plane
from megatrain.weights.state_format import StateFormat

if TYPE_CHECKING:
    from megatrain.engine.state_dict import Plane

log: logging.Logger = logging.getLogger(__name__)

Load = Callable[[Decoder, _core.Engine], None]
"""Fills the store: called once with the decoder and the core. With an attribute `held_bytes`, so much host memory is
left free for what it holds meanwhile."""

_OPTIONS = ("threads", "poison", "synchronous", "huge_pages", "trace", "isa")
PLAN_KEYS = frozenset(
    {
        *REQUESTS,
        *_OPTIONS,
        "loss_chunk",
        "loss_workspace",
        "more_workspace",
        "hold_torch",
        "compile",
        "fragments",
        "mlp_tiles",
        "expert_groups",
        "sent_experts",
        "kept_tensors",
    }
)
"""What `plan` of an engine may give."""
_DEFAULT_SEQ = 4096


class Runtime:
    """A core, the plan it was made by, and the templates over its regions.

    With sizes given, all of it is made at once. Without, at first use, and again for anything larger.
    """

    def __init__(
        self,
        decoder: Decoder,
        optimizer: AdamW,
        core_device: _core.Device,
        device: torch.device,
        *,
        update: str,
        grad_precision: str,
        memory: Mapping[str, Any] | None,
        plan: Mapping[str, Any] | None,
        micro_batch: tuple[int, int] | None,
        micro_batches: int | None,
        load: Load | None,
        rates: Mapping[str, float] | None,
        seed: int,
        state_format: StateFormat,
    ) -> None:
        arguments.check_rates(rates, RATES)
        unknown = sorted(set(plan or {}) - PLAN_KEYS)
        if unknown:
            meant = suggest(unknown[0], sorted(PLAN_KEYS))
            if nearest(unknown[0], (*PLAN_KEYS, "micro_batch")) == "micro_batch":  # a key of a configuration's section
                meant = "an engine's micro-batch is an argument of its own, micro_batch=(rows, tokens)"
            raise ConfigError(f"plan: unknown key {unknown[0]!r}; {meant}")
        self._whole = decoder
        self.cut: Cut = Cut(decoder)
        """How the present plan cuts the model into units and tiles."""
        self.set_optimizer(optimizer)
        self._core_device = core_device
        self.device: torch.device = device
        self._update = update
        self.grad_precision: str = grad_precision if decoder.precision == "bf16" else "fp32"
        self._limits = arguments.memory_limits(memory)
        self._disk = arguments.state_disk(memory)
        self.settings: dict[str, Any] = {k: v for k, v in (plan or {}).items() if v is not None}
        """Numbers of the plan and switches that were asked for."""
        if device.type == "cuda":
            chunk = default_chunk(decoder.vocab_size, "cuda", core_device.total_bytes)
            self.settings.setdefault("loss_chunk", chunk)
        self._holds_torch = device.type == "cuda" and bool(self.settings.get("hold_torch"))
        self._torch_beside = torch.cuda.memory_allocated(device) if self._holds_torch else 0
        self._rates = dict(rates or {})
        declared = self.settings.get("loss_workspace")
        self._loss_fn: bool | int = False if declared is None else parse_size(declared)
        """Whether the plan includes a `loss_fn`, and with how many bytes if those were declared."""
        self._load, self._seed = load, seed
        state_format.check_precision(decoder.precision)
        self.state_format: StateFormat = state_format
        """How moments and masters are stored."""
        self.compiled: bool = bool(self.settings.get("compile", self.device.type == "cuda"))
        if self.compiled and self.device.type != "cuda":
            raise ConfigError("plan: compile is for CUDA; the CPU runs the layers as they are")
        self.nominal: tuple[tuple[int, int] | None, int | None] = micro_batch, micro_batches
        """The split of a step that was asked for; None: steps are split as the caller gives them."""
        self.micro_batch, self.micro_batches = micro_batch, micro_batches
        self._sized = micro_batch is not None and micro_batches is not None
        self._core: _core.Engine | None = None
        self._templates: StepTemplates | None = None
        self._plan: dict[str, Any] = {}
        self._made: tuple[Cut, dict[str, Any], str] | None = None
        """The present plan's cut, request and text."""
        self._closed = False
        self.undefined = ""
        """Why the weights belong to no single training step, after a load was interrupted."""
        self._emptied = False
        """Whether values were moved out of the model; they are lost when setting up fails after that."""
        self._changing = False
        """Whether the core is being replaced, which another thread may see that prepares inputs."""
        self.busy: threading.Lock = threading.Lock()
        """Held while a core is made, and by each pass: neither begins during the other, whatever the thread."""
        if micro_batch is not None and micro_batches is not None:
            self._start(micro_batch, micro_batches, self._fill)

    @property
    def decoder(self) -> Decoder:
        """The model, cut into units as the present plan has it."""
        return self.cut.decoder

    @property
    def core(self) -> _core.Engine:
        """The native engine; planned, allocated and filled here where it is not yet."""
        if self._core is None:
            seq = min(self.decoder.max_positions or _DEFAULT_SEQ, _DEFAULT_SEQ)
            return self._start(self.micro_batch or (1, seq), self.micro_batches or 1, self._fill)
        return self._core

    @property
    def templates(self) -> StepTemplates:
        """Templates and views over the core's memory."""
        assert self.core is not None  # which makes them
        assert self._templates is not None
        return self._templates

    @property
    def plan(self) -> dict[str, Any]:
        """The current plan."""
        assert self.core is not None  # which makes it
        return self._plan

    def request(
        self,
        cut: Cut,
        micro_batch: tuple[int, int],
        micro_batches: int,
        on_disk: int = 0,  # bytes of present state files, counted as free
        machine: hardware.Machine | None = None,  # whose memory is planned with; None: this one's, as it is now
    ) -> dict[str, Any]:
        """The planner's input; see `profile.plan_request`."""
        machine = machine or self._machine()
        budget = machine.budget(self.device.type, **self._limits)
        if self._disk is not None:
            budget["disk"] = machine.state_disk(self._disk.paths, self._disk.size, budget["host"]) + on_disk
            if self._disk.size is not None:
                budget["disk"] = min(budget["disk"], self._disk.size)
        return plan_request(
            cut.decoder,
            tiles=cut.tiles,
            routed=cut.sent == "routed",
            least=cut.least,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            grad_precision=self.grad_precision,
            state_format=self.state_format,
            update=self._update,
            budget=budget,
            device=self.device.type,
            card_bytes=machine.gpu.total_bytes if machine.gpu is not None else None,
            requests=self.settings,
            rates=self._rates,
            loss_chunk=self.settings.get("loss_chunk"),
            loss_fn=self._loss_fn,
        )

    def set_optimizer(self, optimizer: AdamW) -> None:
        """Settings of the updates from here on. Raises ConfigError where its groups do not fit the model."""
        self._assigned = optimizer.assign(n for n, t in self.decoder.tensors.items() if t.role == "trainable")
        self.optimizer = optimizer
        """AdamW's present settings."""

    def core_groups(self, seen: bool) -> tuple[list[CoreGroup], list[int]]:
        """Hyper-parameters of every group, and which groups have no gradient; `seen`: a micro-batch had an image."""
        return core_groups(self.decoder, self.optimizer, self._assigned, seen)

    def ready(self, prepared: StepInputs, between_passes: bool, larger: tuple[int, int] = (0, 0)) -> _core.Engine:
        """The core, planned at least for these micro-batches, and for `larger` (batch, seq) where it has to be planned.
        `between_passes`: no gradients wait for their update."""
        count = len(prepared.micro_batches)
        largest = max(prepared.largest, larger, key=math.prod)
        if self._core is None:
            self._start(self.micro_batch or largest, self.micro_batches or count, self._fill)
        assert self.micro_batch is not None
        assert self.micro_batches is not None
        more_tokens = largest[0] * largest[1] > self.micro_batch[0] * self.micro_batch[1]
        if not self._sized and between_passes and (more_tokens or count > self.micro_batches):
            return self._plan_again(largest if more_tokens else self.micro_batch, max(count, self.micro_batches))
        if count > self.micro_batches:
            raise ConfigError(
                f"{count} micro-batches, but the engine was planned for {self.micro_batches} a step; create it with "
                f"micro_batches={count}"
            )
        planned_memory = self.templates.stage is not None or self.device.type == "cuda"
        if planned_memory and more_tokens:
            raise ConfigError(
                f"a micro-batch of {largest[0]} by {largest[1]} tokens, but the engine was planned for "
                f"{self.micro_batch[0]} by {self.micro_batch[1]}; create it with the largest micro_batch"
            )
        return self.core

    def plan_sums(self) -> None:
        """Plans a store for gradients of several passes, where sizes were not given and nothing forbids it."""
        if self._sized or self.settings.get("accumulate") or self._update == "immediate":
            return
        self.settings["accumulate"] = True
        if self._core is not None:
            assert self.micro_batch is not None
            assert self.micro_batches is not None
            self._plan_again(self.micro_batch, self.micro_batches)

    def plan_loss_fn(self, between_passes: bool) -> None:
        """Counts what a loss function of the caller's needs, from the first step with one on; nothing moves where the
        plan stays the same otherwise."""
        if self._loss_fn is not False:
            return
        self._loss_fn = True
        if self._core is None or self.micro_batch is None or self.micro_batches is None:
            return
        made = self._first_that_fits(self.micro_batch, self.micro_batches, self._plan["totals"]["disk"])
        cut, planned = made[0], json.loads(made[2])
        if cut == self.cut and _placement(planned) == _placement(self._plan):
            self._plan, self._made, self.templates.torch_bytes = planned, made, torch_bytes(planned)
        elif not between_passes:
            raise ConfigError(
                "the first step with loss_fn plans its memory, and gradients wait for optimizer_step; call that "
                "first, or create the engine with plan={'loss_workspace': …}"
            )
        else:
            self._plan_again(self.micro_batch, self.micro_batches)

    @contextlib.contextmanager
    def planning(self, prepared: StepInputs) -> Iterator[None]:
        """Around the planning of a pass over `prepared`. Where that is refused, what `plan_sums` and `plan_loss_fn`
        asked for is taken back, so that other passes are planned as before."""
        self._refuse_while_busy()
        core, loss_fn, sums = self._core, self._loss_fn, self.settings.get("accumulate")
        try:
            yield
        except BaseException as error:
            if self._core is not core:  # planned with what was asked for
                raise
            counted, self._loss_fn = self._loss_fn is not loss_fn, loss_fn
            if not sums:
                self.settings.pop("accumulate", None)
            if not counted or not isinstance(error, DoesNotFit):
                raise
            tokens = math.prod(self.micro_batch or prepared.largest)
            refusal = DoesNotFit(
                f"{error}\nThis is with the memory of loss_fn: the logits of {tokens} tokens at once, with their "
                "gradients. Use a smaller micro_batch; or use head.logprobs instead of head(hidden), and declare what "
                "loss_fn allocates beside it, such as plan={'loss_workspace': '64MiB'}, when the engine is created"
            )
            refusal.items = error.items
            raise refusal from None

    def lanes(self) -> dict[str, Any]:
        """Where the core's lanes stand; no lanes where there is no core."""
        core = self._core
        found: dict[str, Any] = json.loads(core.lanes()) if core is not None else {"completed": 0, "lanes": []}
        return found

    def check(self) -> None:
        """Raises EngineBroken when nothing can be asked any more, with the cause."""
        if self._closed:
            raise EngineBroken("the engine is closed")
        if self.undefined:
            raise EngineBroken(self.undefined)
        core = self._core
        if core is not None:
            try:
                core.check()
            except ValueError:
                if self._core is core:  # else another thread has replaced it meanwhile
                    raise
        elif self._emptied and not self._changing:
            raise EngineBroken(
                "creating the engine was interrupted after the model's weights were moved into it; load the model again"
            )

    def close(self) -> None:
        """Frees all memory."""
        core, self._core, self._templates, self._closed = self._core, None, None, True
        if core is not None:
            core.close()
            self._release_torch()

    def _release_torch(self) -> None:
        """Takes back what `hold_torch` has refused it."""
        if self._holds_torch:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    @torch.inference_mode(False)  # what is made here is trained with, whatever the mode of the first call
    def _start(
        self, micro_batch: tuple[int, int], micro_batches: int, fill: Callable[[_core.Engine], None]
    ) -> _core.Engine:
        """Plans, allocates, fills the store and makes the templates; changes nothing when one of them fails. Raises
        ConfigError while another thread does so, or computes."""
        core = self._core
        self._refuse_while_busy()
        with self.busy, current(self.device):  # not `acquire`: no interrupt comes between this and the lock's release
            if self._core is not core:  # another thread was here first
                raise under_way()
            return self._start_there(micro_batch, micro_batches, fill)

    def _refuse_while_busy(self) -> None:
        """Raises ConfigError while a core is made, or a pass computes."""
        if self.busy.locked():
            raise under_way()

    def _start_there(
        self, micro_batch: tuple[int, int], micro_batches: int, fill: Callable[[_core.Engine], None]
    ) -> _core.Engine:
        self.check()
        planned = self._first_that_fits(micro_batch, micro_batches)
        core = self._make(planned, self._bytes_beside_the_plan(), fill)
        self.micro_batch, self.micro_batches = micro_batch, micro_batches
        return core

    def _make(
        self,
        made: tuple[Cut, dict[str, Any], str],
        base: int,
        fill: Callable[[_core.Engine], None],
        kept: _core.Kept | None = None,
    ) -> _core.Engine:
        """Of a cut, a request and its plan. `base`: see `_bytes_beside_the_plan`; `kept`: the units' state, which is
        taken over instead of filled in."""
        cut, asked, planned = made
        request = json.dumps(asked)
        options: dict[str, Any] = {k: v for k, v in self.settings.items() if k in _OPTIONS}
        options["seed"] = self._seed
        if self._disk is not None:
            options["disk"] = {"paths": self._disk.paths}
        try:
            core = _core.Engine(self._core_device, request, planned, json.dumps(options), kept)
        except ValueError as error:
            raise ConfigError(f"this cannot be planned: {error}") from error
        for warning in core.warnings():
            log.warning("%s", warning)
        before, self.cut = self.cut, cut
        try:
            if self._holds_torch:
                hold_torch(asked["budget"]["device"] + self._torch_beside, json.loads(planned))
            fill(core)
            templates = step_templates(
                core, asked, json.loads(planned), cut, self.device, PRECISIONS[self.grad_precision], self.compiled
            )
            if self.device.type == "cpu":
                templates.heap = HeapLimit(base, _memory_bytes(json.loads(planned)))
        except BaseException:
            self.cut = before
            core.close()
            self._release_torch()
            raise
        self._core, self._templates, self._plan, self._made = core, templates, json.loads(planned), made
        return core

    def _first_that_fits(
        self, micro_batch: tuple[int, int], micro_batches: int, on_disk: int = 0
    ) -> tuple[Cut, dict[str, Any], str]:
        """How the model is cut, the request and the plan. What layers keep stays as it is, as far as that fits."""
        machine = self._machine()
        idle = machine.idle()
        present = {"kept_tensors": self.cut.keeps} if self._core is not None and self.cut.keeps != "auto" else {}

        def first(settings: dict[str, Any]) -> tuple[Cut, dict[str, Any], str]:
            return planned_when_idle(
                cuts(self._whole, settings, math.prod(micro_batch)),
                lambda cut: self.request(cut, micro_batch, micro_batches, on_disk, idle),
                lambda cut: self.request(cut, micro_batch, micro_batches, on_disk, machine),
            )

        try:
            if present:
                with contextlib.suppress(DoesNotFit):
                    return first({**self.settings, **present})
            return first(self.settings)
        except DoesNotFit as error:
            if not machine.host_reserved:
                raise
            refusal = DoesNotFit(f"{error}\n{machine.reservation}")
            refusal.items = error.items
            raise refusal from None
        except ValueError as error:
            raise ConfigError(f"this cannot be planned: {error}") from error

    def _copy_state(self, cut: Decoder, source: _core.Engine, target: _core.Engine) -> None:
        """Moves every plane and count from a core with the units of `cut` to a new one, a tensor at a time."""
        form = self.state_format
        for name, ref in cut.tensors.items():
            to = self.decoder.tensors[name]
            size = torch.Size(ref.shape).numel()
            planes: list[tuple[Plane, torch.Tensor]]
            if ref.role == "frozen":
                planes = [("weights", torch.empty(size, dtype=ref.dtype))]
            else:
                moment = torch.empty(torch.Size(form.moment_shape(ref.shape)).numel(), dtype=form.moment_dtype)
                planes = [("master", torch.empty(size)), ("exp_avg", moment), ("exp_avg_sq", moment)]
                set_step_count(target, to, step_count(source, ref))
            for plane, values in planes:
                read_plane(source, ref, plane, values)
                write_plane(target, to, plane, values)

    def _bytes_beside_the_plan(self) -> int:
        """What this process holds that is no part of a plan: neither a core that is to be replaced, nor the values of
        a model, which move into the core."""
        values = sum(t.numel() * t.element_size() for t in self.decoder.values.values() if t.device.type == "cpu")
        before = _memory_bytes(self._plan) if self._core is not None else 0
        return max(0, anonymous_bytes() - values - before)

    def _plan_again(self, micro_batch: tuple[int, int], micro_batches: int) -> _core.Engine:
        """A new core for larger steps, with the present one's state; where it does not fit, nothing changes."""
        self._refuse_while_busy()
        before, decoder = self.core, self.decoder
        before.drain()
        log.info("planning again, for %d micro-batches of %d by %d tokens", micro_batches, *micro_batch)
        try:
            made = self._start(micro_batch, micro_batches, lambda core: self._copy_state(decoder, before, core))
        except DoesNotFit as error:
            totals = self._plan["totals"]
            disk = f" and {hardware.format_bytes(totals['disk'])} on disk" if totals["disk"] else ""
            refusal = DoesNotFit(
                f"{error}\nA larger step is planned beside the present engine, whose "
                f"{hardware.format_bytes(totals['host'])} of host memory{disk} are taken until its state was copied. "
                f"An engine created with micro_batch={micro_batch} and micro_batches={micro_batches} is planned once"
            )
            refusal.items = error.items
            raise refusal from None
        before.close()
        return made

    @torch.inference_mode(False)
    def change_plan(self, rates: Mapping[str, float], numbers: Mapping[str, Any]) -> None:
        """Plans again for the same sizes, at other rates and with more numbers asked for, by which all state stays
        where it is. What else the core has is freed before it is allocated again. Where that fails, the plan is the
        one before and the error is raised."""
        arguments.check_rates(rates, RATES)
        arguments.check_change(numbers, REQUESTS)
        assert self.core is not None  # which makes it
        self._refuse_while_busy()
        with self.busy:
            self._change_plan(rates, numbers)

    def _change_plan(self, rates: Mapping[str, float], numbers: Mapping[str, Any]) -> None:
        core, base = self.core, self._bytes_beside_the_plan()
        assert self.micro_batch is not None
        assert self.micro_batches is not None
        templates, before, present = self._templates, (self.settings, self._rates), self._made
        assert present is not None
        self.settings, self._rates = {**self.settings, **numbers}, dict(rates)
        try:
            # Within what the present plan was made for, of which this process holds a part now.
            asked = self.request(self.cut, self.micro_batch, self.micro_batches)
            made = planned([self.cut], self.cut, lambda _: asked | {"budget": present[1]["budget"]})
        except BaseException as error:
            self.settings, self._rates = before
            if isinstance(error, ValueError) and not isinstance(error, DoesNotFit):
                raise ConfigError(f"this cannot be planned: {error}") from error
            raise
        # another thread may ask for a check: there is no core for a while
        self._changing, self._core, self._templates = True, None, None
        try:
            try:
                kept = core.keep()
            except BaseException as error:
                self._core, self._templates = core, templates
                self.settings, self._rates = before
                if isinstance(error, ValueError):
                    raise ConfigError(f"the plan cannot be changed now: {error}") from None
                raise
            del core, templates
            gc.collect()  # arrays over what is to be freed may be in cycles
            with current(self.device):
                try:
                    self._make(made, base, lambda _: None, kept)
                except BaseException as error:
                    traceback.clear_frames(error.__traceback__)  # which refer to memory that is needed
                    self.settings, self._rates = before
                    try:
                        self._make(present, base, lambda _: None, kept)
                    except BaseException:
                        self.undefined = "the plan could be changed neither to another one nor back"
                        raise
                    raise
        finally:
            self._changing = False

    def _machine(self) -> hardware.Machine:
        """This machine, with the engine's own card as the one that is used."""
        if self.device.type == "cpu":
            machine = hardware.read(gpus=False)
        else:
            machine = hardware.read().with_free_memory(self.device.index)
        held = 0 if self._core is not None else int(getattr(self._load, "held_bytes", 0))
        return dataclasses.replace(machine, host_reserved=held)

    def _fill(self, core: _core.Engine) -> None:
        """Moves the model's values into the store; each tensor is freed as soon as it was copied."""
        decoder = self.decoder
        values = decoder.values
        if self._load is not None:
            self._load(decoder, core)
            values.clear()
            return
        if not any(not ref.is_buffer and name in values for name, ref in decoder.tensors.items()):
            initialize.initialize(decoder, core, self._seed, device=self.device.type)
            values.clear()
            return
        missing = [name for name in decoder.tensors if name not in values]
        if missing:
            raise ConfigError(f"{missing[0]} has no values (it is on the meta device) while other parameters have")
        self._emptied = True
        for name, ref in decoder.tensors.items():
            value = values.pop(name).detach().cpu()
            plane: Plane = "master" if ref.role == "trainable" else "weights"
            if ref.role != "trainable":
                value = value.to(ref.dtype)
                if not (ref.is_buffer or bool(torch.isfinite(value).all())):  # the core looks at the others
                    raise ConfigError(f"{name} is frozen and holds values that are not finite; no loss would be finite")
            try:
                write_plane(core, ref, plane, value.contiguous().flatten())
            except ValueError as error:
                raise ConfigError(f"the model's weights cannot be trained: {error}") from None


def hold_torch(budget: int, plan: Mapping[str, Any]) -> None:
    """Refuses torch, all of it in this process, more than a plan leaves it of `budget` bytes of the current card: it
    gives back what it has cached first, as on a card that has no more."""
    context = sum(int(item["bytes"]) for item in plan["items"] if item["what"].startswith("context"))
    left = budget - int(plan["totals"]["device"]) + torch_bytes(plan) - context
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, left / total))


def _placement(plan: dict[str, Any]) -> dict[str, Any]:
    """What of a plan decides where things are, beside what torch allocates."""
    return {key: value for key, value in plan.items() if key not in ("items", "totals", "estimate")}


def _memory_bytes(plan: Mapping[str, Any]) -> int:
    """Bytes of device and host memory in a plan, without its state files on disk."""
    totals = plan["totals"]
    return int(totals["device"] + totals["host"])
