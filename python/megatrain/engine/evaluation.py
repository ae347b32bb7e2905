"""Passes without an update: the mean loss, log-probabilities of tokens, the logits of the next one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.embed_head import HeadTemplate
from megatrain.engine.inputs import Batch, InputPreprocessor, check_list_of_batches, largest_shape
from megatrain.engine.loss import default_chunk
from megatrain.engine.runtime import Runtime
from megatrain.engine.step import sum_in_order
from megatrain.engine.transactions import EvalOutput, Passes
from megatrain.errors import ConfigError


class Evaluation:
    """What an engine computes of batches with its present weights; see `Engine.evaluate` and the methods after it."""

    def __init__(self, runtime: Runtime, preparer: InputPreprocessor, passes: Passes) -> None:
        self._runtime, self._preparer, self._passes = runtime, preparer, passes

    def metrics(self, batches: Sequence[Batch]) -> EvalOutput:
        """Means over the supervised tokens. Raises ConfigError where there is none."""
        total, correct, tokens, weight, weighted = 0.0, 0.0, 0, 0.0, False
        check_list_of_batches(batches)
        if not batches:
            raise ConfigError("evaluate needs at least one batch")
        for prepared in self._preparer.in_groups(batches, self._runtime.micro_batches or 1):
            run = self._passes.evaluate(prepared, largest=largest_shape(batches))
            total += run.loss_sum
            correct += sum_in_order(run.correct)
            tokens += prepared.num_tokens
            weight += prepared.total_weight
            weighted = weighted or prepared.weighted
        if not tokens:
            raise ConfigError("no batch has a supervised token, so there is no loss to take the mean of")
        return EvalOutput(
            loss=total / weight,
            accuracy=correct / weight,
            num_tokens=tokens,
            total_weight=weight if weighted else None,
        )

    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        """For each batch (batch, seq - 1), fp32 on the CPU; 0 where not supervised."""
        check_list_of_batches(batches)
        given: Sequence[Any] = batches  # whether each is a dict is said when it is prepared
        labelled = [
            {**b, "labels": b.get("input_ids")} if isinstance(b, Mapping) and b.get("labels") is None else b
            for b in given
        ]
        found: list[Tensor] = []
        for prepared in self._preparer.in_groups(labelled, self._runtime.micro_batches or 1, keep_empty=True):
            run = self._passes.evaluate(prepared, largest=largest_shape(labelled))
            for number, micro in enumerate(prepared.micro_batches):
                found.append(run.logprobs[number].view(micro.shape)[:, :-1].float().cpu())
        return found

    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits (1, V), fp32 on the CPU, of the token after `input_ids` (1, length)."""
        prepared = self._preparer.prepare([{"input_ids": input_ids}], need_labels=False, keep_empty=True)
        run = self._passes.evaluate(prepared, lambda head, hidden: head.logits(head.tail(hidden)[:, -1:])[:, 0])
        return run.collected[0].float().cpu()

    def all_logits(self, batch: Batch) -> Tensor:
        """Logits (batch, seq, V) of every token, fp32 on the CPU, computed a few rows at a time; those of padding are
        undefined (`inputs._without_what_follows`)."""
        prepared = self._preparer.prepare([batch], need_labels=False, keep_empty=True)

        def collect(head: HeadTemplate, hidden: Tensor) -> Tensor:
            rows = default_chunk(self._preparer.decoder.vocab_size, self._runtime.device.type)
            flat = head.tail(hidden).flatten(0, 1)
            found = [head.logits(part.unsqueeze(0))[0].float().cpu() for part in torch.split(flat, rows)]
            return torch.cat(found).view(*hidden.shape[:2], -1)

        run = self._passes.evaluate(prepared, collect)
        return run.collected[0]
