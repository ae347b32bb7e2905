"""The two ends of a model on the device: what runs before the first layer, and what runs after the last one."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.engine.device_memory import CastBuffer, Region
from megatrain.engine.logprobs import LossHead, PlainHead
from megatrain.engine.loss import chunked_loss, default_chunk, is_largest
from megatrain.engine.template import BoundTensors, UnitLayout, move_shared_buffers, places_of
from megatrain.engine.tiles import cut_tokens, in_tiles
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.lm_head import HeadKind, HeadShell
from megatrain.models.modules import copy_without, replace_module
from megatrain.models.recorder import NO_MASK, EmbeddingCalls, Replay, forward_until_layers, stopping_layers
from megatrain.models.vision import recompute_blocks
from megatrain.names import IGNORED

if TYPE_CHECKING:
    from megatrain.engine.inputs import MicroBatch

_DENSE_ROWS = 0.9
"""Fraction of supervised rows above which gathering them first is not worth its copies."""

_TAIL_TOKENS = 8192
"""Tokens that the final norm is applied to at a time, and goes back through: it computes in fp32, and for a row of
262,144 tokens of width 3,584 its backward would have 26 GiB allocated."""
_TAIL_STATES = 15
"""Hidden states that a final norm's forward and backward have allocated at most: those of Gemma 3 and Qwen 2 as
transformers writes them, in bf16."""

LossFn = Callable[[Tensor, LossHead, dict[str, Any]], Tensor]
"""`fn(hidden, head, batch)` -> sum of losses; hidden (batch, seq, width), `head(hidden)` the model's logits and
`head.logprobs(hidden, labels)` log-probabilities in chunks."""


def tail_bytes(decoder: Decoder, tokens: int) -> int:
    """Upper bound of what the final norm's forward and backward allocate beyond their arguments and results."""
    hidden = decoder.hidden_size * decoder.dtype.itemsize
    return _TAIL_STATES * hidden * -(-tokens // _tail_tiles(decoder, tokens))


def tail_kept_bytes(decoder: Decoder, tokens: int) -> int:
    """What the final norm keeps for its backward while the loss is computed: nothing where it is computed again."""
    if _tail_tiles(decoder, tokens) > 1:
        return 0
    kept_per_token = decoder.tail_kept_bytes
    if kept_per_token is None:
        return tail_bytes(decoder, tokens)  # whatever it allocates may be kept
    return tokens * kept_per_token


def _tail_tiles(decoder: Decoder, tokens: int) -> int:
    return -(-tokens // _TAIL_TOKENS) if tokens > _TAIL_TOKENS and decoder.tail_is_token_wise else 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """How a step's loss is formed."""

    scale: float
    """Gradients are those of scale times the sum of losses."""
    chunk: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_fn: LossFn | None = None


def accumulate(targets: Sequence[Tensor], grads: Sequence[Tensor | None], first: bool) -> None:
    """Starts (`first`) or continues the sums in `targets`; None adds nothing."""
    pairs = [(t, g) for t, g in zip(targets, grads, strict=True) if g is not None]
    if first:
        for target, grad in zip(targets, grads, strict=True):
            if grad is None:
                target.zero_()
    if pairs:
        into, what = [t for t, _ in pairs], [g for _, g in pairs]
        if first:
            torch._foreach_copy_(into, what)
        else:
            torch._foreach_add_(into, what)


class EmbedTemplate:
    """The model's own forward up to its first layer."""

    def __init__(self, decoder: Decoder, layout: UnitLayout, region: Region, casts: CastBuffer | None = None) -> None:
        self.decoder = decoder
        real = decoder.base.get_submodule(decoder.layers_name)
        assert isinstance(real, nn.ModuleList)
        self._base = copy_without(decoder.base, real)
        replace_module(self._base, decoder.layers_name, stopping_layers(real))
        if decoder.vision_spec is not None:
            recompute_blocks(self._base.get_submodule(part) for part in decoder.vision_spec.parts)
        self.draws: bool | None = None if decoder.vision_spec is None else False
        """Whether it draws random numbers in training; None before its first call. The checkpoints of the blocks that
        see images restore torch's default generator, so that these draw from that."""
        self._build_no_masks(self._base.get_submodule(decoder.layers_name.rpartition(".")[0]))
        self._features: tuple[Tensor, ...] = ()
        self._replays: dict[str, Replay] = {}
        for name in decoder.probe.side:
            self._replays[name] = Replay(self._base.get_submodule(name), [])
            replace_module(self._base, name, self._replays[name])
        move_shared_buffers(self._base, region.device)
        prefix = f"{decoder.base_name}." if decoder.base_name else ""
        names = {n.removeprefix(prefix): i for n, i in decoder.local_names(0).items()}
        self.bound: BoundTensors = BoundTensors(places_of(self._base, names), layout, region, casts)
        self.layout = layout
        self._tables = {index for index, _ in decoder.tables}
        self.others: list[int] = [i for i, cut in enumerate(layout.slices) if cut.trainable and i not in self._tables]
        """Trained tensors that are not embedding tables."""

    def _build_no_masks(self, language: nn.Module) -> None:
        """Keeps the language part from making attention masks, which were recorded."""
        outer: Any = copy.copy(self._base.config)
        inner: Any = outer if language is self._base else copy.copy(language.config)
        for name, value in vars(outer).items():
            if value is language.config and outer is not inner:
                setattr(outer, name, inner)
        inner._attn_implementation_internal = NO_MASK
        language.config, self._base.config = inner, outer
        if outer is not inner:
            language.register_forward_pre_hook(self._note_features, with_kwargs=True)

    def _note_features(self, _module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._features = tuple(kwargs.get("deepstack_visual_embeds") or ())

    @property
    def module(self) -> nn.Module:
        """The model's base up to its first layer."""
        return self._base

    def train(self, training: bool) -> None:
        """Switches dropout on or off."""
        if self._base.training != training:
            self._base.train(training)

    @torch.no_grad()
    def forward(self, micro: "MicroBatch") -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states (batch, seq, width) that reach the first layer, and features of images (T, width) that are
        added after the first layers, one by one; the weights must be bound."""
        if self.decoder.probe.plain_embedding and not micro.images:
            return F.embedding(micro.input_ids, self.bound.tensors[self.decoder.tables[0][0]]), ()
        return self._run(micro, lambda ids, weight, _: F.embedding(ids, weight))

    def backward(
        self,
        micro: "MicroBatch",
        grad: Tensor,  # of the hidden states
        of_features: Sequence[Tensor],  # a gradient for each of the features that `forward` returned
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of each embedding call (one row per token, flattened), and of `others`."""
        if self.decoder.probe.plain_embedding and not micro.images:
            return [grad.reshape(-1, grad.shape[-1])], [None] * len(self.others)
        rows: list[Tensor] = []

        def answer(ids: Tensor, weight: Tensor, _: int | None) -> Tensor:
            rows.append(F.embedding(ids, weight.detach()).requires_grad_())
            return rows[-1] if torch.is_grad_enabled() else rows[-1].detach()  # the model may look up in no_grad

        others = [self.bound.tensors[i] for i in self.others]
        with torch.enable_grad():
            hidden, features = self._run(micro, answer)
        # features that no trained weight made have no gradient to pass on
        pairs = [(f, g) for f, g in zip(features, of_features, strict=True) if f.requires_grad]
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(
            (hidden, *(f for f, _ in pairs)), (*rows, *others), (grad, *(g for _, g in pairs)), allow_unused=True
        )
        of_rows = [g.reshape(-1, g.shape[-1]) if g is not None else None for g in grads[: len(rows)]]
        return of_rows, list(grads[len(rows) :])

    def _run(
        self, micro: "MicroBatch", answer: Callable[[Tensor, Tensor, int | None], Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        record = micro.recorded
        for name, replay in self._replays.items():
            replay.outputs = list(record.side[name])
        positions = micro.position_ids if record.positions is None else record.positions
        call = self.decoder.recorder.call(micro.input_ids, micro.attention_mask, positions, micro.images)
        tables = {id(self.bound.tensors[index]) for index in self._tables}

        def of_tokens(ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
            # a table of the vision part has few rows, each with a gradient: it is a weight like the others
            return answer(ids, weight, padding) if id(weight) in tables else F.embedding(ids, weight, padding)

        self._features = ()
        with EmbeddingCalls(of_tokens):
            hidden = forward_until_layers(self._base, self.decoder.layers_name, call)
        features, self._features = self._features, ()
        return hidden, features


class RowSums:
    """Gradient of one embedding table over a step: fp32 sums of the rows that the step looked up, and no others."""

    def __init__(self, rows: Tensor, padding: int) -> None:
        """`rows` (U,) are the rows looked up, on the device; `padding` the one among them without gradient, or -1."""
        self.rows = rows
        self._padding = padding
        self._sums: Tensor | None = None

    def add(self, where: Tensor, grad: Tensor) -> None:
        """Adds a micro-batch: `grad` (T, width) of the rows `where` (T,), counted in `rows`."""
        part = torch.ops.aten.embedding_dense_backward(grad.float(), where, self.rows.shape[0], self._padding, False)
        self._sums = part if self._sums is None else self._sums.add_(part)

    def write(self, grad: Tensor) -> None:
        """`grad` (V, width) becomes these sums, zero elsewhere."""
        grad.zero_()
        grad.index_copy_(0, self.rows, self._take().to(grad.dtype))

    def add_to(self, grad: Tensor) -> None:
        """These sums are added to `grad` (V, width)."""
        # the rows are distinct, so no two additions meet
        grad.index_copy_(0, self.rows, grad.index_select(0, self.rows) + self._take().to(grad.dtype))

    def _take(self) -> Tensor:
        sums, self._sums = self._sums, None
        if sums is None:
            raise RuntimeError("an embedding's gradient is written before any micro-batch was added")
        return sums


class HeadTemplate:
    """Final norm and language-model head, and the loss on them."""

    def __init__(
        self,
        decoder: Decoder,
        layout: UnitLayout,
        region: Region,
        embed: UnitLayout,
        casts: CastBuffer | None = None,
    ) -> None:
        self.decoder = decoder
        self.layout = layout
        self.kind: HeadKind = decoder.head
        real = decoder.base.get_submodule(decoder.layers_name)
        base = copy_without(decoder.base, real)
        self._tail = [base.get_submodule(name) for name in decoder.probe.tail]
        self._shell = HeadShell(decoder.model, decoder.base_name)
        for module in (*self._tail, self._shell.model):
            move_shared_buffers(module, region.device)
        prefix = f"{decoder.base_name}." if decoder.base_name else ""
        places: list[tuple[nn.Module, str] | None] = [None] * len(layout.slices)
        for name, index in decoder.local_names(len(decoder.units) - 1).items():
            root = base if name.startswith(prefix) and prefix else self._shell.model
            owner, _, leaf = (name.removeprefix(prefix) if root is base else name).rpartition(".")
            places[index] = (root.get_submodule(owner), leaf)
        self.bound: BoundTensors = BoundTensors(places, layout, region, casts)
        self._region = region
        self._embed_slice = None
        self._tied: nn.Parameter | None = None
        self._tied_cast: Tensor | None = None
        """Where the copy of a tied weight is that is stored in another type than the head computes with."""
        names = decoder.local_names(len(decoder.units) - 1)
        if decoder.tied:
            assert self.kind.weight is not None
            self._embed_slice = embed.slices[decoder.tensors[self.kind.weight].tensor]
            view = region.view(self._embed_slice.byte, self._embed_slice.shape, self._embed_slice.dtype)
            if view.dtype != decoder.dtype:
                view = self._tied_cast = self.bound.reserve_cast(self._embed_slice.shape, decoder.dtype)
            self._tied = nn.Parameter(view, requires_grad=self._embed_slice.trainable)
            for alias in decoder.aliases:
                owner, _, leaf = alias.rpartition(".")
                self._shell.model.get_submodule(owner)._parameters[leaf] = self._tied
        self._weight = names.get(self.kind.weight) if self.kind.weight and not decoder.tied else None
        self._bias = names.get(self.kind.bias) if self.kind.bias else None
        own = {self._weight, self._bias} if self.kind.plain else set()
        trained = [i for i, cut in enumerate(layout.slices) if cut.trainable]
        self.tail_indices: list[int] = [i for i in trained if i not in own and self._in_tail(i, names, prefix)]
        """Trained tensors of the modules before the head proper."""
        self.head_indices: list[int] = [i for i in trained if i not in self.tail_indices]

    def _in_tail(self, index: int, names: dict[str, int], prefix: str) -> bool:
        name = next(n for n, i in names.items() if i == index)
        return bool(prefix) and name.startswith(prefix)

    def bind(self, image: int, tied_image: int | None) -> None:
        """Makes the weights views of the head's image, and a tied one a view of the embed unit's."""
        unit = len(self.decoder.units) - 1
        if self._tied is None or tied_image is None or self._embed_slice is None:
            self.bound.bind(image, unit)
            return
        cut = self._embed_slice
        view = self._region.view(tied_image + cut.byte, cut.shape, cut.dtype)
        if self._tied_cast is not None:
            self.bound.bind(image, unit, [(self._tied_cast, view)])
            return
        self.bound.bind(image, unit)
        self._tied.data = view

    def train(self, training: bool) -> None:
        """Switches dropout on or off."""
        for module in (*self._tail, self._shell.model):
            module.train(training)

    @property
    def weight(self) -> Tensor:
        """(V, H) weight of a plain head."""
        if self._tied is not None:
            return self._tied
        assert self._weight is not None
        return self.bound.tensors[self._weight]

    @property
    def bias(self) -> Tensor | None:
        """(V,) bias of a plain head."""
        return self.bound.tensors[self._bias] if self._bias is not None else None

    def tail(self, hidden: Tensor) -> Tensor:
        """What the head proper is applied to."""
        for module in self._tail:
            hidden = module(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits of hidden states after the final norm, with its scale and cap."""
        if not self.kind.plain:
            return self._shell(hidden)
        logits = F.linear(hidden, self.weight, self.bias)
        if self.kind.logit_scale != 1.0:
            logits = logits * self.kind.logit_scale
        if self.kind.softcap is not None:
            logits = self.kind.softcap * torch.tanh(logits / self.kind.softcap)
        return logits

    def train_step(
        self,
        hidden: Tensor,  # (batch, seq, width), what the last layer returned
        micro: "MicroBatch",
        options: LossOptions,
        sums: list[Tensor | None],  # a tensor of the unit each: where its gradient is summed
        tied_sum: Tensor | None,  # (V, width): where the head's use of a tied weight is summed
        first: bool,  # whether the sums start here
    ) -> tuple[Tensor, Tensor]:
        """Sum of losses (0-d) and the gradient of `hidden`; all other gradients are added to their sums."""
        tiles = _tail_tiles(self.decoder, hidden.numel() // hidden.shape[-1])
        leaf = hidden.detach().contiguous().requires_grad_(tiles == 1)
        if tiles > 1:
            normed = in_tiles(self.tail, leaf, tiles)
        else:
            with torch.enable_grad():
                normed = self.tail(leaf)
        if options.loss_fn is not None:
            loss, grad_normed = self._custom(options.loss_fn, normed.detach(), micro, options, sums, tied_sum, first)
        elif self.kind.plain:
            loss, grad_normed = self._plain(normed.detach(), micro, options, sums, tied_sum, first)
        else:
            loss, grad_normed = self._own(normed.detach(), micro, options, sums, first)
        parameters = [self.bound.tensors[i] for i in self.tail_indices]
        of_parameters: Sequence[Tensor | None]
        if tiles == 1:
            grads = torch.autograd.grad(normed, (leaf, *parameters), grad_normed, allow_unused=True)
            grad, of_parameters = grads[0], grads[1:]
        else:
            del normed
            grad, of_parameters = self._tail_backward(leaf, grad_normed.contiguous(), parameters, tiles)
        accumulate([t for i in self.tail_indices if (t := sums[i]) is not None], of_parameters, first)
        assert grad is not None
        return loss, grad

    def _tail_backward(
        self, hidden: Tensor, grad_normed: Tensor, parameters: Sequence[Tensor], tiles: int
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Computes the final norm again, a tile of tokens at a time, and goes back through it: the gradient of `hidden`
        and those of `parameters`, summed in fp32."""
        result = torch.empty_like(hidden)
        totals: list[Tensor | None] = [None] * len(parameters)
        parts = (cut_tokens(tensor, tiles) for tensor in (hidden, grad_normed, result))
        for source, of_output, target in zip(*parts, strict=True):
            leaf = source.detach().requires_grad_()
            with torch.enable_grad():
                output = self.tail(leaf)
            grad, *found = torch.autograd.grad(output, (leaf, *parameters), of_output, allow_unused=True)
            assert grad is not None
            target.copy_(grad)
            for index, of_parameter in enumerate(found):
                total = totals[index]
                if total is not None:
                    total += of_parameter
                elif of_parameter is not None:
                    totals[index] = of_parameter.float()
        return result, totals

    def _plain(
        self,
        normed: Tensor,
        micro: "MicroBatch",
        options: LossOptions,
        sums: list[Tensor | None],
        tied_sum: Tensor | None,
        first: bool,
    ) -> tuple[Tensor, Tensor]:
        flat = normed.reshape(-1, normed.shape[-1])
        targets, rows, row_weights = micro.targets, micro.rows, micro.weights
        gather = rows.shape[0] < _DENSE_ROWS * flat.shape[0]
        if gather:
            flat, targets = flat.index_select(0, rows), targets.index_select(0, rows)
            row_weights = None if row_weights is None else row_weights.index_select(0, rows)
        weight_sum = tied_sum if self._tied is not None else sums[self._weight] if self._weight is not None else None
        bias_sum = sums[self._bias] if self._bias is not None else None
        if first:
            for total in (weight_sum, bias_sum):
                if total is not None:
                    total.zero_()
        bias = self.bias
        result = chunked_loss(
            flat,
            targets,
            self.weight.detach(),
            bias.detach() if bias is not None else None,
            row_weights=row_weights,
            scale=options.scale,
            chunk=options.chunk,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            logit_scale=self.kind.logit_scale,
            softcap=self.kind.softcap,
            grad_weight=weight_sum,
            grad_bias=bias_sum,
        )
        grad = result.grad_hidden
        assert grad is not None
        if gather:
            whole = torch.zeros_like(normed).reshape(-1, normed.shape[-1])
            grad = whole.index_copy_(0, rows, grad)
        return result.loss_sum, grad.view_as(normed)

    def _parameters(self, sums: list[Tensor | None], tied_sum: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """What the head proper trains, and where each gradient is summed."""
        pairs = [(self.bound.tensors[i], total) for i in self.head_indices if (total := sums[i]) is not None]
        if self._tied is not None and tied_sum is not None:
            pairs.append((self._tied, tied_sum))
        return [p for p, _ in pairs], [t for _, t in pairs]

    def _own(
        self, normed: Tensor, micro: "MicroBatch", options: LossOptions, sums: list[Tensor | None], first: bool
    ) -> tuple[Tensor, Tensor]:
        """A head that is no plain matmul: its own forward and autograd, in chunks of tokens."""
        parameters, totals = self._parameters(sums, None)
        flat = normed.reshape(-1, normed.shape[-1])
        grad = torch.empty_like(flat)
        loss_sum = torch.zeros((), dtype=torch.float64, device=flat.device)
        chunk = options.chunk or default_chunk(self.kind.vocab, flat.device.type)
        for start in range(0, flat.shape[0], chunk):
            part = flat[start : start + chunk].detach().requires_grad_()
            with torch.enable_grad():
                losses = token_losses(self.logits(part.unsqueeze(0))[0], micro.targets[start : start + chunk], options)
                if micro.weights is not None:
                    losses = losses * micro.weights[start : start + chunk]
                total = losses.sum() * options.scale
            grads = torch.autograd.grad(total, (part, *parameters), allow_unused=True)
            loss_sum += losses.detach().sum(dtype=torch.float64)
            accumulate([grad[start : start + chunk]], grads[:1], True)
            accumulate(totals, grads[1:], first and start == 0)
        return loss_sum, grad.view_as(normed)

    def _custom(
        self,
        loss_fn: LossFn,
        normed: Tensor,
        micro: "MicroBatch",
        options: LossOptions,
        sums: list[Tensor | None],
        tied_sum: Tensor | None,
        first: bool,
    ) -> tuple[Tensor, Tensor]:
        """A loss of the caller's."""
        parameters, totals = self._parameters(sums, tied_sum)
        chunk = options.chunk or default_chunk(self.kind.vocab, normed.device.type)
        plain = self._plain_head(chunk, totals, sums, tied_sum, first) if self.kind.plain else None
        leaf = normed.requires_grad_()
        with torch.enable_grad():
            loss = loss_fn(leaf, LossHead(self.logits, plain, self.kind.vocab, chunk), micro.batch)
            _check_loss(loss, leaf.device)
            total = loss * options.scale
        if plain is not None:
            plain.in_backward = True
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(total, (leaf, *parameters), allow_unused=True)
        accumulate(totals, grads[1:], first if plain is None else plain.starting)
        grad = grads[0]
        return loss.detach().double(), grad if grad is not None else torch.zeros_like(normed)

    def _plain_head(
        self, chunk: int, totals: list[Tensor], sums: list[Tensor | None], tied_sum: Tensor | None, first: bool
    ) -> PlainHead:
        """What `head.logprobs` of a plain head computes with."""
        bias = self.bias
        weight_sum = tied_sum if self._tied is not None else sums[self._weight] if self._weight is not None else None
        return PlainHead(
            weight=self.weight.detach(),
            bias=None if bias is None else bias.detach(),
            logit_scale=self.kind.logit_scale,
            softcap=self.kind.softcap,
            chunk=chunk,
            grad_weight=weight_sum,
            grad_bias=sums[self._bias] if self._bias is not None else None,
            sums=totals,
            starting=first,
        )

    @torch.no_grad()
    def score(self, hidden: Tensor, micro: "MicroBatch", options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of losses (0-d), log-probabilities of the targets (batch * seq,), 0 where not supervised, and number of
        targets with the largest logit (0-d). Losses and that number are weighted where the micro-batch has weights."""
        tiles = _tail_tiles(self.decoder, hidden.numel() // hidden.shape[-1])
        normed = self.tail(hidden) if tiles == 1 else in_tiles(self.tail, hidden.contiguous(), tiles)
        flat = normed.reshape(-1, normed.shape[-1])
        if self.kind.plain:
            result = chunked_loss(
                flat,
                micro.targets,
                self.weight,
                self.bias,
                row_weights=micro.weights,
                chunk=options.chunk,
                logit_scale=self.kind.logit_scale,
                softcap=self.kind.softcap,
                need_grad=False,
                need_logprobs=True,
            )
            assert result.logprobs is not None
            assert result.correct is not None
            return result.loss_sum, result.logprobs, _weighted_sum(result.correct, micro.weights)
        chunk = options.chunk or default_chunk(self.kind.vocab, flat.device.type)
        parts, largest = [], []
        for part, targets in zip(torch.split(flat, chunk), torch.split(micro.targets, chunk), strict=True):
            logits = self.logits(part.unsqueeze(0))[0]
            parts.append(token_losses(logits, targets, options))
            largest.append(is_largest(logits, targets))
        losses, correct = torch.cat(parts), _weighted_sum(torch.cat(largest), micro.weights)
        loss_sum = losses if micro.weights is None else losses * micro.weights
        return loss_sum.sum(dtype=torch.float64), -losses, correct


def _weighted_sum(correct: Tensor, weights: Tensor | None) -> Tensor:
    """Number of `correct` (N,) bool, or the sum of their `weights` (N,) (0-d)."""
    return correct.sum() if weights is None else (correct * weights).sum(dtype=torch.float64)


def _check_loss(loss: Any, device: torch.device) -> None:
    """Raises ConfigError when a loss function of the caller's has returned what no gradient can be taken of."""
    wrong = ""
    if not isinstance(loss, Tensor):
        wrong = f"{type(loss).__name__} {loss!r}" if loss is not None else "None"
    elif loss.ndim != 0:
        wrong = f"a tensor of shape {tuple(loss.shape)}"
    elif not loss.is_floating_point():
        wrong = f"a tensor of {loss.dtype}"
    elif loss.device != device:
        wrong = f"a tensor on {loss.device}, while the model computes on {device}"
    elif not loss.requires_grad:
        wrong = "a tensor without a gradient (was it detached, or formed under no_grad?)"
    if wrong:
        raise ConfigError(
            f"loss_fn returned {wrong}; it must return the sum of the micro-batch's losses: a 0-d floating tensor "
            "formed from `hidden` or `head(hidden)`"
        )


def token_losses(logits: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """(N,) losses of logits (N, V), 0 where not supervised."""
    logits = logits.float() if logits.dtype != torch.float64 else logits
    losses = F.cross_entropy(
        logits, targets, ignore_index=IGNORED, reduction="none", label_smoothing=options.label_smoothing
    )
    if options.z_loss:
        losses = losses + options.z_loss * logits.logsumexp(-1).square() * (targets != IGNORED)
    return losses
