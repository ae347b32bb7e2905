"""One pass over the units: forward, loss, backward. What to compute next, and where everything is, the core says."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from megatrain._core import ComputeOp, Engine
from megatrain.engine.device_memory import CastBuffer, Region
from megatrain.engine.embed_head import EmbedTemplate, HeadTemplate, LossOptions, RowSums, accumulate
from megatrain.engine.expert_groups import SpreadCall
from megatrain.engine.host_heap import HeapLimit
from megatrain.engine.inputs import InputPreprocessor, MicroBatch, StepInputs
from megatrain.engine.keyed_random import KeyedRandom
from megatrain.engine.layer_graphs import CapturedPass, LayerGraphs, Recording
from megatrain.engine.out_of_memory import OutOfMemory
from megatrain.engine.saved_tensors import CheckpointedCall
from megatrain.engine.template import GradientViews, LayerTemplate, UnitLayout, has_dropout
from megatrain.engine.tiles import TiledCall, in_tiles
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.state_changes import StateSnapshot, refusal
from megatrain.models.types import Unit
from megatrain.models.vision import add_features, feature_grad
from megatrain.names import format_names
from megatrain.system.out_of_memory import is_out_of_memory
from megatrain.system.splitmix import draw

T = TypeVar("T")

Phase = Literal["embed", "forward", "loss", "backward", "embed_backward"]


@dataclasses.dataclass(slots=True)
class StepTemplates:
    """What passes share: templates, and views of the engine's regions."""

    decoder: Decoder
    layouts: list[UnitLayout]
    weights: Region
    casts: CastBuffer | None
    """None where every weight is computed in the type it is stored in."""
    stage: Region | None
    staged_bytes: list[int]
    """By unit: what the core copies of the stage to the host and back for one micro-batch."""
    embed: EmbedTemplate
    layers: dict[int, LayerTemplate]
    """By unit that is a layer or half of one; those of one structure whose tensors are laid out alike share theirs."""
    head: HeadTemplate
    grads: list[GradientViews]
    """By unit: views in region `grads`, transfer precision."""
    sums: list[GradientViews]
    """By unit: views in region `accumulators`, fp32."""
    tiles: dict[int, int]
    """By unit that is computed in tiles of tokens: how many."""
    random: KeyedRandom
    """What layers draw random numbers from."""
    group: int
    """Micro-batches that pass through a unit before the next one is loaded."""
    keeps: bool
    """Whether any layer's activations are kept on the device."""
    torch_bytes: int
    """What the plan allows torch to allocate on the device."""
    heap: HeapLimit | None
    """On the CPU, where torch allocates from malloc's heap."""
    graphs: LayerGraphs | None
    """None where layers are launched kernel by kernel."""
    routed: dict[int, list[int]]
    """By unit that routes: the units of experts of which those alone are sent that it routes to."""

    @property
    def lighter(self) -> list[str]:
        """Values of `plan` under which a pass needs less device memory than now."""
        tiles = max(self.tiles.values(), default=0)
        return ["'activation': 'recompute'"] * self.keeps + [f"'mlp_tiles': {2 * tiles}"] * (tiles > 0)

    def train(self, training: bool) -> None:
        """Switches dropout on or off everywhere."""
        self.embed.train(training)
        self.head.train(training)
        for layer in set(self.layers.values()):
            layer.train(training)

    def drawing(self, template: "EmbedTemplate | LayerTemplate", call: Callable[..., T]) -> Callable[..., T]:
        """`call` of a template, with the random numbers it draws in training from our generator. What has drawn none in
        its first call is called as it is from then on."""
        if template.draws is False:
            return call

        def run(*args: Any) -> T:
            self.random.drew = False
            with self.random:
                result = call(*args)
            template.draws = bool(template.draws) or self.random.drew or has_dropout(template.module)
            return result

        return run


class Held(Generic[T]):
    """A value that one operation of a pass leaves for a later one. The schedule orders them, so a missing value is a
    bug of ours."""

    __slots__ = ("_value",)

    def __init__(self, value: T | None = None) -> None:
        self._value = value

    def put(self, value: T) -> None:
        """Leaves a value, in place of what was there."""
        self._value = value

    def get(self) -> T:
        """The value, which stays."""
        if self._value is None:
            raise RuntimeError("an operation ran before the one whose result it needs")
        return self._value

    def take(self) -> T:
        """The value, which nothing here refers to any more: its memory is free when the caller drops it."""
        value = self.get()
        self._value = None
        return value


class Pass:
    """The micro-batches of one step on their way through the model."""

    def __init__(
        self,
        templates: StepTemplates,
        prepared: StepInputs,
        preparer: InputPreprocessor,
        options: LossOptions,
        *,
        training: bool,
        seed: int = 0,
        step: int = 0,
        collect: Callable[[HeadTemplate, Tensor], Tensor] | None = None,  # instead of scoring, without training
        graphs: bool = True,  # whether layers may be replayed as CUDA graphs, where the plan has them
    ) -> None:
        self._templates = templates
        self._options = options
        self._training = training
        self._seed, self._step = seed, step
        self._collect = collect
        self._preparer = preparer
        self._prepared = prepared
        if templates.casts is not None:
            templates.casts.clear()
        count = len(prepared.micro_batches)
        # Now, before the core sends any weights: a copy of a few kilobytes would wait for every load that is queued.
        with_batch = options.loss_fn is not None
        moved = [preparer.to_device(m, with_batch) for m in prepared.micro_batches]
        captures = templates.graphs if training and graphs and not preparer.has_own_masks(prepared) else None
        self._with_records = count if captures is not None else templates.group
        moved[: self._with_records] = map(preparer.with_record, moved[: self._with_records])
        self._micro = [Held(micro) for micro in moved]
        tables = prepared.tables if training else {}
        self._tables = {table: (preparer.move(rows), padding) for table, (rows, padding) in tables.items()}
        preparer.end_copies()
        found = captures.begin(moved) if captures is not None else None
        self._captured = found if isinstance(found, CapturedPass) else None
        self._recording = found if isinstance(found, Recording) else None
        self._hidden: list[Held[Tensor]] = [Held() for _ in range(count)]
        self._grad: list[Held[Tensor]] = [Held() for _ in range(count)]
        self._features: list[dict[int, Tensor]] = [{} for _ in range(count)]
        """Per micro-batch: by layer, the features added after it in the forward pass, then their gradients in the
        backward pass."""
        self._turns: dict[tuple[int, int], CheckpointedCall | SpreadCall] = {}
        self._spread: dict[int, SpreadCall] = {}
        """By micro-batch: the layer whose experts it passes through, where those are spread over several units."""
        self._core: Engine | None = None
        """What this pass is computed for, once it has begun."""
        self._rows: dict[int, RowSums] = {}
        # by the step alone: a plan with accumulators for more micro-batches than there are must not change the bits
        self._fp32_sums = count > 1 or templates.grads[0].dtype == torch.float32
        self._routed: dict[tuple[int, int], Tensor] = {}
        """By unit and micro-batch: (2, E) sums of its routers."""
        self._router_grad: Tensor | None = None
        self._without: dict[int, set[int]] = {}
        """By unit: trained tensors that no micro-batch has given a gradient so far."""
        self.aux_loss: Tensor | None = None
        """The router's auxiliary loss over all tokens of the step (0-d, on the device), without its coefficient."""
        self.losses: dict[int, Tensor] = {}
        """By micro-batch: sum of its losses (0-d, on the device)."""
        self.logprobs: dict[int, Tensor] = {}
        """Without training, by micro-batch: log-probabilities of its targets (batch * seq,)."""
        self.correct: dict[int, Tensor] = {}
        """Without training, by micro-batch: how many of its targets have the largest logit (0-d, on the device)."""
        self.collected: dict[int, Tensor] = {}
        """By micro-batch: what `collect` made of it."""
        self._phases: dict[Phase, Callable[[Any], None]] = {
            "embed": self._embed,
            "forward": self._forward,
            "loss": self._loss,
            "backward": self._backward,
            "embed_backward": self._embed_backward,
        }

    @property
    def loss_sum(self) -> float:
        """Sum of the losses of all micro-batches, in their order."""
        return sum_in_order(self.losses)

    def run(
        self, core: Engine, on_loss: Callable[[Tensor], None] | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        """Computes whatever the core has ready until the pass has no more. `on_loss` sees every micro-batch's loss
        before its backward begins; `check` may raise before each operation."""
        try:
            self._run(core, on_loss, check)
        finally:  # of a pass that has failed
            for turn in (*self._turns.values(), *self._spread.values()):
                turn.release()
            self._turns.clear()
            self._spread.clear()
        if self._recording is not None:
            self._recording.capture(self._templates, fp32_sums=self._fp32_sums)

    def _run(self, core: Engine, on_loss: Callable[[Tensor], None] | None, check: Callable[[], None]) -> None:
        self._core = core
        with torch.no_grad():  # templates switch gradients on where a graph is wanted
            while (op := core.next()) is not None:
                check()
                self._compute(op)
                if self._recording is not None:
                    self._recording.add(op, self._templates.weights.device)
                if on_loss is not None and op.phase == "loss":
                    on_loss(self.losses[op.micro_batch])
                core.finish(op)

    def _compute(self, op: ComputeOp) -> None:
        """One operation. Raises OutOfMemory for whatever says that memory ran out."""
        try:
            self._phases[op.phase](op)
        except Exception as error:
            if not is_out_of_memory(error) or isinstance(error, OutOfMemory):
                raise
            templates = self._templates
            device = templates.weights.device
            card = device.type == "cuda"
            in_use, held = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)) if card else (0, 0)
            name = f"{op.phase.replace('_', ' ')} of {templates.decoder.units[op.unit].name}"
            operation = f"{name}, micro-batch {op.micro_batch}"
            raise OutOfMemory(
                operation, templates.torch_bytes, in_use, error, held=held, lighter=templates.lighter
            ) from error
        if self._templates.heap is not None:
            self._templates.heap.check()

    def _embed(self, op: ComputeOp) -> None:
        m = op.micro_batch
        templates = self._templates
        micro = self._micro[m].get()
        if m >= self._with_records:  # masks of one group at a time
            micro = self._preparer.with_record(micro)
            self._micro[m].put(micro)
        templates.embed.bound.bind(op.weights, 0)
        self._reseed(m, 0)
        forward = (
            templates.drawing(templates.embed, templates.embed.forward) if self._training else templates.embed.forward
        )
        hidden, features = forward(micro)
        self._hidden[m].put(hidden)
        self._features[m] = dict(enumerate(features))

    def _forward(self, op: ComputeOp) -> None:
        unit, m = op.unit, op.micro_batch
        templates, micro, hidden = self._templates, self._micro[m].get(), self._hidden[m].take()
        if self._captured is not None and (replayed := self._captured.run(op, hidden)) is not None:
            self._hidden[m].put(replayed)
            return
        template = templates.layers[unit]
        number = template.bind(op.weights, unit)
        of = templates.decoder.units[unit]
        if of.part is not None:
            self._forward_part(op, template, of, hidden)
            return
        layer = self._layer(template, micro, unit, number)
        tiles = templates.tiles.get(unit)
        if not self._training:
            after = layer(hidden) if tiles is None else in_tiles(layer, hidden, tiles)
            self._hidden[m].put(self._with_features(micro, unit, m, after))
            return
        turn = (CheckpointedCall if tiles is None else TiledCall)(
            layer,
            templates.weights,
            frozenset((templates.weights.storage,)),
            op.weights,
            lambda: self._reseed(m, number + 1),
            templates.casts.region if templates.casts is not None else None,
        )
        if isinstance(turn, TiledCall) and tiles is not None:
            turn.use_tiles(tiles)
        if op.stage is not None:
            shared = micro.recorded.storages() | (
                micro.document_buckets.storages() if micro.document_buckets is not None else frozenset()
            )
            turn.use_stage(templates.stage, op.stage, templates.staged_bytes[unit], shared)
        before = None if template.tried else StateSnapshot(template.module)
        after = turn.forward(hidden, op.activation, op.input_on_host)
        self._hidden[m].put(self._with_features(micro, unit, m, after))
        if before is not None:
            if changed := before.changed():
                raise ConfigError(refusal(templates.decoder.units[unit].name, changed))
            template.tried = True
        if turn.aux is not None:
            self._routed[unit, m] = turn.aux
        self._turns[unit, m] = turn

    def _forward_part(self, op: ComputeOp, template: LayerTemplate, of: Unit, hidden: Tensor) -> None:
        """One of the units that an MLP half is whose experts are spread over several. The half's input is passed on
        until what is after the experts is computed."""
        m = op.micro_batch
        templates, micro = self._templates, self._micro[m].get()
        self._hidden[m].put(hidden)
        if of.part == "before":
            assert template.boundary is not None
            assert of.layer is not None
            layer = of.layer
            call = self._layer(template, micro, op.unit, layer)
            groups = templates.routed.get(op.unit, ())
            spread = SpreadCall(
                call,
                template.boundary,
                template.num_experts,
                lambda: self._reseed(m, layer + 1),
                of.name if groups else "",
            )
            spread.before(hidden)
            self._spread[m] = spread
            for unit in groups:
                experts = templates.decoder.units[unit].experts
                assert experts is not None
                assert self._core is not None
                self._core.route(unit, spread.routed.wanted(experts))
        elif of.experts is not None:
            assert template.experts is not None
            self._spread[m].routed.compute(template.experts, of.experts)
        else:
            spread = self._spread.pop(m)
            before = None if template.tried or not self._training else StateSnapshot(template.module)
            after = spread.after()
            self._hidden[m].put(self._with_features(micro, op.unit, m, after))
            if before is not None:
                if changed := before.changed():
                    raise ConfigError(refusal(of.name, changed))
                template.tried = True
            if not self._training:
                return
            if op.stage is not None:
                assert templates.stage is not None
                spread.put_on_stage(templates.stage, op.stage)
            if spread.aux is not None:
                self._routed[op.unit, m] = spread.aux
            self._turns[op.unit, m] = spread

    def _with_features(self, micro: MicroBatch, unit: int, m: int, hidden: Tensor) -> Tensor:
        """What a layer returned, with the features of images that the model adds to it."""
        of = self._templates.decoder.units[unit]
        features = self._features[m].pop(of.layer, None) if of.layer is not None and of.ends_layer else None
        visual = micro.recorded.visual
        return hidden if features is None or visual is None else add_features(hidden, visual, features)

    def _layer(self, template: LayerTemplate, micro: MicroBatch, unit: int, layer: int) -> Any:
        """The `unit`-th unit, which is the `layer`-th layer or half of it, as a function of the micro-batch's hidden
        states."""
        # in tiles, and around experts that are spread, no token sees another one anyway
        by_document = (
            micro.document_buckets is not None
            and layer in micro.document_buckets.layers
            and unit not in self._templates.tiles
            and self._templates.decoder.units[unit].part is None
        )
        record = micro.recorded
        if by_document and micro.document_buckets is not None:
            call: Any = micro.document_buckets.call(template, layer, self._training)
        elif self._training:
            call = template.training_call(record.args[layer], record.kwargs[layer], micro.counted)
        else:
            return template.call(record.args[layer], record.kwargs[layer])
        compiled = template.compiled and not by_document
        return call if compiled or not self._training else self._templates.drawing(template, call)

    def _loss(self, op: ComputeOp) -> None:
        m = op.micro_batch
        templates, micro, hidden = self._templates, self._micro[m].get(), self._hidden[m].take()
        templates.head.bind(op.weights, op.tied_weights)
        if not self._training:
            if self._collect is not None:
                self.collected[m] = self._collect(templates.head, hidden)
            else:
                scores = templates.head.score(hidden, micro, self._options)
                self.losses[m], self.logprobs[m], self.correct[m] = scores
            self._micro[m].take()
            return
        self._reseed(m, templates.decoder.num_layers + 1)
        sums = self._targets(op)
        self.losses[m], grad = templates.head.train_step(
            hidden, micro, self._options, sums, self._tied_sum(op), op.first
        )
        self._grad[m].put(grad)
        self._round(op)
        if op.round_tied:
            self._round_tied(op)

    def _backward(self, op: ComputeOp) -> None:
        unit, m = op.unit, op.micro_batch
        templates, grad = self._templates, self._grad[m].get()
        if self._captured is not None and (replayed := self._captured.run(op, grad)) is not None:
            self._grad[m].put(replayed)
            return
        vision_spec, visual = templates.decoder.vision_spec, self._micro[m].get().recorded.visual
        template, of = templates.layers[unit], templates.decoder.units[unit]
        if of.part == "before":  # bound since what follows the experts was computed again
            assert of.layer is not None
            layer = of.layer
        else:
            layer = template.bind(op.weights, unit)
        added = templates.decoder.units[unit].ends_layer and vision_spec is not None and layer < vision_spec.deepstack
        if visual is not None and added:
            self._features[m][layer] = feature_grad(grad, visual)
        if self._routed and self._router_grad is None:
            self._balance()
        if of.part is not None:
            self._backward_part(op, template, of, grad)
            return
        turn = self._turns.pop((unit, m))
        assert not isinstance(turn, SpreadCall)
        weight_grads = template.weight_grads
        targets = [t for t in self._targets(op) if t is not None]
        if isinstance(turn, TiledCall):
            without = set(range(len(targets)))
            of_input: Tensor | None = turn.backward_by_tile(
                grad,
                template.parameters,
                op.weights,
                op.stage,
                lambda first: weight_grads.begin(targets, first=op.first and first, in_fp32=True),
                lambda grads: without.intersection_update(weight_grads.finish(grads)),
            )
        else:
            weight_grads.begin(targets, first=op.first, in_fp32=self._fp32_sums)
            of_input, *grads = turn.backward(grad, template.parameters, op.weights, op.stage, self._router_grad)
            without = weight_grads.finish(grads)
        self._end_backward(op, of_input, without)

    def _backward_part(self, op: ComputeOp, template: LayerTemplate, of: Unit, grad: Tensor) -> None:
        """One of the units that an MLP half is whose experts are spread over several. The gradient of the half's output
        is passed on until that of its input is made, by what is before the experts."""
        m = op.micro_batch
        if of.part == "after":
            spread = self._turns.pop((op.unit, m))
            assert isinstance(spread, SpreadCall)
            spread.begin_backward(grad, self._templates.stage, op.stage)
            self._spread[m] = spread
            return
        template.weight_grads.begin(
            [t for t in self._targets(op) if t is not None], first=op.first, in_fp32=self._fp32_sums
        )
        of_input: Tensor | None = grad
        grads: Sequence[Tensor | None]
        if of.experts is not None:
            assert template.experts is not None
            grads = self._spread[m].routed.backward(template.experts, of.experts, template.parameters)
        else:
            of_input, *grads = self._spread.pop(m).backward(template.parameters, self._router_grad)
        self._end_backward(op, of_input, template.weight_grads.finish(grads))

    def _end_backward(self, op: ComputeOp, of_input: Tensor | None, without: set[int]) -> None:
        assert of_input is not None
        self._grad[op.micro_batch].put(of_input)
        self._require_gradients(op, without)
        self._round(op)

    def _require_gradients(self, op: ComputeOp, without: set[int]) -> None:
        """Raises ConfigError for a trained parameter of a layer that no micro-batch of the pass gives a gradient: torch
        would skip its update, decay included. `models/layer_check.py` has frozen those that never get one."""
        self._without[op.unit] = without & self._without.get(op.unit, without)
        if op.last and self._without[op.unit]:
            trained = [ref for ref in self._templates.decoder.units[op.unit].tensors if ref.role == "trainable"]
            names = format_names([trained[index].name for index in sorted(self._without[op.unit])])
            raise ConfigError(
                f"the step gives no gradient to {names}: the layer does not use it for these inputs. torch would not "
                "update it in such a step, which is not supported; freeze it, or use it for all inputs"
            )

    def _balance(self) -> None:
        """The router's auxiliary loss, once every layer has seen every micro-batch, and what it sends back to each."""
        router, count = self._templates.decoder.router, len(self._micro)
        assert router is not None
        units = {unit for unit, _ in self._routed}
        assert len(self._routed) == len(units) * count, "backward began before all routers had run"
        # in one order, whatever the plan's was
        sums = torch.stack([self._routed[key] for key in sorted(self._routed)]).double().sum(0)
        self.aux_loss, grad = router.total(sums)
        self._router_grad = grad.to(next(iter(self._routed.values())).dtype)

    def _embed_backward(self, op: ComputeOp) -> None:
        m = op.micro_batch
        templates, micro, grad = self._templates, self._micro[m].take(), self._grad[m].take()
        templates.embed.bound.bind(op.weights, 0)
        if op.first:
            self._rows = {table: RowSums(rows, padding) for table, (rows, padding) in self._tables.items()}
        if op.grad is not None:
            self._reseed(m, 0)
            features = self._features[m]
            backward = templates.drawing(templates.embed, templates.embed.backward)
            of_rows, of_others = backward(micro, grad, [features[layer] for layer in sorted(features)])
            for (table, _), where, part in zip(templates.decoder.tables, micro.lookups, of_rows, strict=True):
                if table in self._rows and part is not None:
                    self._rows[table].add(where, part)
            targets = self._targets(op)
            accumulate([t for i in templates.embed.others if (t := targets[i]) is not None], of_others, op.first)
        if op.last and op.grad is not None:
            self._finish_embedding(op)

    def _finish_embedding(self, op: ComputeOp) -> None:
        """The embedding's own use is added once to the head's, where tied, and rounded with everything else."""
        templates = self._templates
        assert op.grad is not None
        grads, sums = templates.grads[0].at(op.grad), self._targets(op)
        tied = self._tied_tensor()
        for table, rows in self._rows.items():
            grad = grads[table]
            assert grad is not None
            if table != tied:
                rows.write(grad)
                continue
            total = grad
            if op.tied_accumulator is not None:
                view = templates.sums[0].at(op.tied_accumulator)[table]
                assert view is not None
                total = view
            rows.add_to(total)
            if total is not grad:
                grad.copy_(total)
        if op.accumulator is not None and templates.embed.others:
            rounded = [
                (g, s) for i in templates.embed.others if (g := grads[i]) is not None and (s := sums[i]) is not None
            ]
            torch._foreach_copy_([g for g, _ in rounded], [s for _, s in rounded])
        self._rows = {}

    def _targets(self, op: ComputeOp) -> list[Tensor | None]:
        """Where each tensor's gradient is summed: the accumulator where there is one, else the transfer buffer."""
        if op.accumulator is not None:
            return self._templates.sums[op.unit].at(op.accumulator)
        if op.grad is not None:
            return self._templates.grads[op.unit].at(op.grad)
        return [None] * len(self._templates.layouts[op.unit].slices)

    def _round(self, op: ComputeOp) -> None:
        """After a unit's last micro-batch its sum is rounded into the transfer buffer."""
        if op.last and op.accumulator is not None and op.grad is not None:
            views, plane = self._templates.grads[op.unit], self._templates.sums[op.unit]
            views.flat(op.grad).copy_(plane.flat(op.accumulator))

    def _round_tied(self, op: ComputeOp) -> None:
        """Where no token is looked up, the head's use of the tied weight is all of its gradient."""
        tied = self._tied_tensor()
        if tied is not None and op.tied_accumulator is not None and op.tied_grad is not None:
            grad, total = (
                self._templates.grads[0].at(op.tied_grad)[tied],
                self._templates.sums[0].at(op.tied_accumulator)[tied],
            )
            if grad is not None and total is not None:
                grad.copy_(total)

    def looked_up(self) -> tuple[int, Tensor] | None:
        """The embedding table whose other rows get no gradient from the embedding's backward, as `core.begin` takes
        it: index in the embed unit and distinct rows (U,); the largest one, or the one that the head uses too."""
        tables = self._prepared.tables
        shapes = self._templates.layouts[0].slices
        largest = max(tables, key=lambda table: shapes[table].shape[0], default=None)
        table = self._tied_tensor() if self._templates.decoder.tied else largest
        return (table, tables[table][0]) if table is not None and table in tables else None

    def _tied_tensor(self) -> int | None:
        """Index in the embed unit of the tensor that the head uses too."""
        decoder = self._templates.decoder
        return decoder.tensors[decoder.head.weight].tensor if decoder.tied and decoder.head.weight else None

    def _tied_sum(self, op: ComputeOp) -> Tensor | None:
        tied = self._tied_tensor()
        if tied is None:
            return None
        if op.tied_accumulator is not None:
            return self._templates.sums[0].at(op.tied_accumulator)[tied]
        if op.tied_grad is not None:
            return self._templates.grads[0].at(op.tied_grad)[tied]
        return None

    def _reseed(self, m: int, layer: int) -> None:
        """Randomness is a function of seed, step, micro-batch and layer (0 before the layers, counted from 1), so that
        no plan changes it."""
        if self._training:
            micro = self._prepared.micro_batches[m].index
            self._templates.random.seed(random_key(self._seed, self._step, micro, layer))


def random_key(*numbers: int) -> int:
    """63 bits that depend on every number and on their order: splitmix64, chained."""
    key = 0
    for number in numbers:
        key = draw(key + number)
    return key >> 1


def sum_in_order(parts: dict[int, Tensor]) -> float:
    """Sum of 0-d tensors by their micro-batches' order, after one copy from the device."""
    values: list[float] = torch.stack([parts[number] for number in sorted(parts)]).tolist()
    return sum(values)
