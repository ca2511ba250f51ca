"""The loss of one optimizer update, sequence by sequence and token by token, with its derivatives.

Correction, normalisation, penalties and reduction in the order in which docs/algorithms.md states them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.reference import importance, losses

TokenLoss = Callable[[float, float, float, float, float], tuple[float, float]]
"""(pi, prox, mu, advantage, weight) -> loss and its derivative with respect to log pi."""


@dataclass(frozen=True)
class Token:
    """Log-probabilities of one token in the loss, and the entropy of the current policy there."""

    pi: float
    prox: float
    mu: float
    ref: float
    entropy: float
    staleness: int = 0


@dataclass(frozen=True)
class Rules:
    """What the settings say."""

    loss: TokenLoss
    level: str = "token"
    mode: str = "truncate"
    floor: float = 0.0
    cap: float = 5.0
    rejection: tuple[str, str, float | None, float | None] | None = None
    """Estimator, level, low, high."""
    most_staleness: int | None = None
    normalize: bool = False
    denominator: str = "all"
    reduction: str = "token_mean"
    constant_length: int = 1
    entropy_coefficient: float = 0.0
    kl: tuple[str, float] | None = None
    """Estimator and coefficient."""


@dataclass
class Result:
    """Values and derivatives; one list a sequence."""

    policy_loss: float = 0.0
    by_logprob: list[list[float]] = field(default_factory=list)
    by_entropy: list[list[float]] = field(default_factory=list)


def update(sequences: list[list[Token]], advantages: list[float], rules: Rules) -> Result:
    """1 / N sum over kept tokens of w l - c_H H + c_KL k, with its derivatives by log pi and by H."""
    corrected = [correct(tokens, rules) for tokens in sequences]
    kept_weights = [weight for sequence in corrected for weight, kept in sequence if kept]
    mean_weight = sum(kept_weights) / len(kept_weights) if rules.normalize else 1.0
    counted = [[kept or rules.denominator == "all" for _, kept in sequence] for sequence in corrected]
    result = Result()
    for tokens, advantage, pairs, counts in zip(sequences, advantages, corrected, counted, strict=True):
        by_logprob, by_entropy = [], []
        for token, (weight, kept) in zip(tokens, pairs, strict=True):
            share = token_share(rules, sum(counts), counted) if kept else 0.0
            loss, slope = rules.loss(token.pi, token.prox, token.mu, advantage, weight / mean_weight)
            result.policy_loss += share * loss
            if rules.kl is not None:
                slope += rules.kl[1] * losses.kl(rules.kl[0], token.pi, token.ref)[1]
            by_logprob.append(share * slope)
            by_entropy.append(-share * rules.entropy_coefficient)
        result.by_logprob.append(by_logprob)
        result.by_entropy.append(by_entropy)
    return result


def correct(tokens: list[Token], rules: Rules) -> list[tuple[float, bool]]:
    """Behavior weight of each token, and whether it stays."""
    prox, mu = [token.prox for token in tokens], [token.mu for token in tokens]
    pairs = importance.weights(prox, mu, rules.level, rules.mode, rules.floor, rules.cap)
    stays = [True] * len(tokens)
    if rules.rejection is not None:
        stays = importance.kept_by_rejection(prox, mu, *rules.rejection)
    young = [True] * len(tokens)
    if rules.most_staleness is not None:
        young = importance.young([token.staleness for token in tokens], rules.most_staleness)
    return [(pair[0], pair[1] and stay and new) for pair, stay, new in zip(pairs, stays, young, strict=True)]


def token_share(rules: Rules, own: int, counted: list[list[bool]]) -> float:
    """Weight of a token of a sequence in which `own` tokens count."""
    tokens = sum(sum(counts) for counts in counted)
    num_sequences = sum(any(counts) for counts in counted)
    match rules.reduction:
        case "token_mean":
            return 1 / tokens
        case "sequence_mean_token_mean":
            return 1 / (num_sequences * own)
        case "sequence_mean_token_sum":
            return 1 / num_sequences
        case "constant":
            return 1 / (num_sequences * rules.constant_length)
    raise AssertionError(rules.reduction)
