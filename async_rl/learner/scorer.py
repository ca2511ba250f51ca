"""The module that FSDP shards as the root: a Hugging Face model, its head, and nothing between them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from async_rl.learner.layout import MicroBatch
from async_rl.learner.logprobs import token_logprobs


class CompletionScorer(nn.Module):
    """Runs model and head in one forward, so that a head (tied or not) is gathered with the root when it is needed."""

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        """Positions whose logits exist at once."""

    def forward(self, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of each token in the loss, float32 [max(T, 1)]."""
        arguments: dict[str, Any] = {"input_ids": micro_batch.input_ids, "use_cache": False}
        if micro_batch.packed is not None:
            arguments |= {"position_ids": micro_batch.position_ids, "packed": micro_batch.packed}
        hidden = self.model.base_model(**arguments).last_hidden_state.flatten(0, 1)
        head = self.model.get_output_embeddings()
        return token_logprobs(
            hidden.index_select(0, micro_batch.predictors),
            head.weight,
            getattr(head, "bias", None),
            micro_batch.targets,
            temperature,
            self.chunk,
        )
