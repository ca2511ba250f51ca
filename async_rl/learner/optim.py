"""AdamW with a schedule by step, global clipping, and updates that are skipped when the gradient is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from async_rl.config.schema import LearnerConfig

log = logging.getLogger(__name__)


def learning_rate(config: LearnerConfig, step: int, total_steps: int) -> float:
    """Rate of `step` (from 1): linear warm-up, then constant, linear or cosine down to lr * min_lr_ratio at the end."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    match config.decay:
        case "constant":
            share = 1.0
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


@dataclass(frozen=True)
class UpdateReport:
    """What one call of `Optimizer.update` did."""

    applied: bool
    """False: the gradient was not finite, and nothing changed."""
    grad_norm: float
    """Global norm before clipping."""
    clipped: bool


class Optimizer:
    """AdamW over parameters that may be sharded; every method runs on all ranks alike."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: LearnerConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.parameters = list(parameters)
        self.adamw = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.skipped_in_row = 0

    def set_step(self, step: int) -> float:
        """Set the learning rate of a step and return it."""
        rate = learning_rate(self.config, step, self.total_steps)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        return rate

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients; before `update`, so that clipping sees the result."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def update(self, step: int) -> UpdateReport:
        """Clip, apply and clear the gradients; skip a gradient that is not finite.

        The norm is global, so all ranks decide alike. Raises RuntimeError after max_nonfinite_updates skips in a row.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = _global_norm(gradients)
        limit = self.config.max_grad_norm
        finite = math.isfinite(norm)
        clipped = finite and limit is not None and norm > limit
        if clipped:
            assert limit is not None
            clip_grads_with_norm_(self.parameters, limit, torch.tensor(norm, device=gradients[0].device))
        if finite:
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self._count_skipped(finite, norm, step)
        return UpdateReport(applied=finite, grad_norm=norm, clipped=clipped)

    def _count_skipped(self, finite: bool, norm: float, step: int) -> None:
        if finite:
            self.skipped_in_row = 0
            return
        self.skipped_in_row += 1
        limit = self.config.max_nonfinite_updates
        log.warning(
            "step %d: gradient norm %s, update skipped (%d of %d in a row)", step, norm, self.skipped_in_row, limit
        )
        if self.skipped_in_row >= limit:
            raise RuntimeError(
                f"step {step}: the gradient norm was {norm}, and so were those of the last {limit} updates (limit "
                f"learner.max_nonfinite_updates = {limit}); the weights are those of the last finite update. Lower "
                f"learner.lr = {self.config.lr:g}, set learner.max_grad_norm, or use model.dtype = 'float32'"
            )


def _global_norm(gradients: list[torch.Tensor]) -> float:
    """L2 norm over all gradients of all ranks; 0 without any. Collective where they are sharded."""
    norm = get_total_norm(gradients)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
