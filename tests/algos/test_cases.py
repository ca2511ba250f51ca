"""Right values from public bug reports of other projects and from float64 sums (`cases/*.json`)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from async_rl.algos import reductions
from async_rl.algos.advantages import compute_advantages, compute_batch_advantages
from async_rl.algos.importance import behavior_weight, effective_sample_size
from async_rl.algos.kl import kl_penalty
from async_rl.algos.losses import LossInputs, loss_function
from async_rl.algos.ratios import importance_ratio
from async_rl.algos.shaping import soft_overlong_penalty
from async_rl.algos.temporal import gae
from async_rl.config.schema import (
    CispoLoss,
    CorrectionConfig,
    DecoupledPpoLoss,
    GrpoAdvantage,
    GspoLoss,
    IcePopLoss,
    Loss,
    OpoAdvantage,
    PpoLoss,
    ReinforcePlusPlusAdvantage,
    RlooAdvantage,
    SapoLoss,
    TruncatedIsLoss,
)
from tests.algos.test_losses_properties import LOSSES


def load(name: str) -> dict[str, Any]:
    cases = json.loads((Path(__file__).parent / "cases" / name).read_text())["cases"]
    return {case["id"]: case for case in cases}


ADVANTAGES, CASES, RANDOM = load("advantages.json"), load("losses.json"), load("losses_random.json")


def test_every_case_is_used() -> None:
    source = Path(__file__).read_text()
    assert [name for name in (*ADVANTAGES, *CASES) if f'"{name}"' not in source] == []


# --- advantages ---------------------------------------------------------------------------------


def test_group_of_four() -> None:
    case = ADVANTAGES["group-1100"]
    assert compute_advantages(GrpoAdvantage(), case["rewards"]) == pytest.approx(case["expected"], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("grpo_sample_std_eps0", GrpoAdvantage(eps=0.0)),
        ("grpo_population_std_eps0", GrpoAdvantage(std="population", eps=0.0)),
        ("dr_grpo", GrpoAdvantage(std="none")),
        ("rloo", RlooAdvantage()),
    ],
)
def test_group_of_eight(name: str, config: Any) -> None:
    case = ADVANTAGES["group-8-3"]
    assert compute_advantages(config, case["rewards"]) == pytest.approx(case["expected"][name], rel=1e-12)


@pytest.mark.parametrize("name", ["group-of-one", "all-equal"])
def test_no_signal_is_exactly_zero(name: str) -> None:
    case = ADVANTAGES[name]
    lengths = [list(range(1, len(case["rewards"]) + 1))]
    for config in (
        GrpoAdvantage(),
        GrpoAdvantage(eps=0.0),
        RlooAdvantage(),
        OpoAdvantage(),
        ReinforcePlusPlusAdvantage(),
    ):
        assert compute_batch_advantages(config, [case["rewards"]], lengths) == [case["expected"]]


def test_statistics_are_per_problem() -> None:
    case = ADVANTAGES["two-groups"]
    advantages = compute_batch_advantages(GrpoAdvantage(), case["groups"])
    assert advantages[0] == pytest.approx(case["expected"][0], rel=1e-12)
    assert advantages[1] == case["expected"][1]


def test_members_are_dropped_after_their_advantages() -> None:
    case = ADVANTAGES["filter-after"]
    advantages = compute_batch_advantages(RlooAdvantage(), case["groups"])
    assert [advantages[0][:1], advantages[1][1:]] == [pytest.approx(expected) for expected in case["expected"]]


@pytest.mark.parametrize("name", ["gae-mask", "gae-tool-gap"])
def test_gae(name: str) -> None:
    case = ADVANTAGES[name]
    actual = gae(case["rewards"], case["values"], case["mask"], case["gamma"], case["lam"])
    assert actual == pytest.approx(case["expected"], rel=1e-12)


def test_overlong() -> None:
    case = ADVANTAGES["overlong"]
    actual = [soft_overlong_penalty(length, max_tokens=100, buffer_tokens=20) for length in case["lengths"]]
    assert actual == pytest.approx(case["expected"])


# --- losses ---------------------------------------------------------------------------------------


def tokens(
    logprobs: Any,
    proximal: Any,
    behavior: Any,
    advantages: Any,
    mask: Any = None,
    lengths: Any = None,
    weight: Any = None,
) -> LossInputs:
    """Inputs from lists; one sequence unless `lengths` says otherwise."""
    size = len(logprobs)
    lengths = [size] if lengths is None else lengths
    return LossInputs(
        logprobs=torch.as_tensor(logprobs, dtype=torch.float32).requires_grad_(),
        proximal_logprobs=torch.as_tensor(proximal, dtype=torch.float32),
        behavior_logprobs=torch.as_tensor(behavior, dtype=torch.float32),
        advantages=torch.as_tensor(advantages, dtype=torch.float32),
        mask=torch.ones(size, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool(),
        sequence_index=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
        behavior_weight=weight,
    )


def reduced(config: Loss, inputs: LossInputs, reduction: str, constant_length: int | None = None) -> torch.Tensor:
    where = (inputs.mask, inputs.sequence_index, inputs.num_sequences)
    weights = reductions.token_weights(reduction, *where, reductions.count(*where), constant_length)
    return reductions.reduce(loss_function(config)(inputs).loss, weights)


@pytest.mark.parametrize(
    ("name", "clip_low", "clip_high", "dual_clip"),
    [("ppo-grid", 0.2, 0.2, None), ("ppo-dual", 0.2, 0.2, 3.0), ("clip-higher", 0.2, 0.28, None)],
)
def test_clip_grids(name: str, clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    case = CASES[name]
    ratios, advantages = zip(*case["inputs"], strict=True)
    logprobs, zeros = [math.log(ratio) for ratio in ratios], [0.0] * len(ratios)
    for config in (PpoLoss, DecoupledPpoLoss):
        output = loss_function(config(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip))(
            tokens(logprobs, zeros, zeros, advantages)
        )
        assert output.loss.tolist() == pytest.approx(case["expected"], rel=1e-6)


@pytest.mark.parametrize("parts", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_partition(parts: list[list[int]]) -> None:
    case = CASES["partition"]
    counts = [
        reductions.count(torch.ones(len(sequence)).bool(), torch.zeros(len(sequence)).long(), 1)
        for sequence in case["sequences"]
    ]
    denominator = counts[0] + counts[1]
    total, gradients = 0.0, []
    for part in parts:
        losses = torch.tensor([loss for number in part for loss in case["sequences"][number]], requires_grad=True)
        lengths = torch.tensor([len(case["sequences"][number]) for number in part])
        index = torch.repeat_interleave(torch.arange(len(part)), lengths)
        weights = reductions.token_weights("token_mean", torch.ones(len(losses)).bool(), index, len(part), denominator)
        loss = reductions.reduce(losses, weights)
        gradients += torch.autograd.grad(loss, losses)[0].tolist()
        total += float(loss.detach())
    assert total == pytest.approx(case["expected"])
    assert gradients == pytest.approx([1 / 12] * 12)


@pytest.mark.parametrize(
    ("name", "reduction", "constant_length"),
    [
        ("token_mean", "token_mean", None),
        ("sequence_mean_token_mean", "sequence_mean_token_mean", None),
        ("sequence_mean_token_sum", "sequence_mean_token_sum", None),
        ("constant_L10", "constant", 10),
    ],
)
def test_reductions(name: str, reduction: str, constant_length: int | None) -> None:
    case = CASES["reductions"]
    advantages = [a for a, length in zip(case["advantages"], case["lengths"], strict=True) for _ in range(length)]
    zeros = [0.0] * len(advantages)
    inputs = tokens(zeros, zeros, zeros, advantages, lengths=case["lengths"])
    assert reduced(PpoLoss(), inputs, reduction, constant_length).item() == pytest.approx(
        case["expected"][name], abs=1e-7
    )


def test_masked_tokens_leave_numerator_and_denominator() -> None:
    case = CASES["masked-truncated"]
    zeros = [0.0] * case["total"]
    mask = [1] * (case["total"] - case["masked"]) + [0] * case["masked"]
    inputs = tokens(zeros, zeros, zeros, [-1.0] * case["total"], mask, [case["total"] - case["masked"], case["masked"]])
    for reduction in ("token_mean", "sequence_mean_token_mean"):
        assert reduced(PpoLoss(), inputs, reduction).item() == pytest.approx(case["expected"])


@pytest.mark.parametrize("config", LOSSES, ids=str)
def test_everything_masked(config: Loss) -> None:
    case = CASES["all-masked"]
    inputs = tokens([1.0, -3.0], [0.0, float("nan")], [-1e9, 0.0], [1.0, -1.0], [0, 0], [1, 1])
    loss = reduced(config, inputs, "token_mean")
    loss.backward()
    assert loss.item() == case["expected"]
    assert inputs.logprobs.grad is not None and inputs.logprobs.grad.tolist() == [0.0, 0.0]


def test_masks_come_from_lengths() -> None:
    case = CASES["mask-by-length"]
    longest = max(case["lengths"])
    mask = [int(place < length) for length in case["lengths"] for place in range(longest)]
    advantages = [advantage for advantage in case["advantages"] for _ in range(longest)]
    zeros = [0.0] * len(mask)
    inputs = tokens(zeros, zeros, zeros, advantages, mask, [longest, longest])
    assert reduced(PpoLoss(), inputs, "token_mean").item() == pytest.approx(case["expected"])


@pytest.mark.parametrize("config", [PpoLoss(), DecoupledPpoLoss(), IcePopLoss(), SapoLoss(tau_positive=4.0)], ids=str)
def test_overflow_of_a_masked_token(config: Loss) -> None:
    case = CASES["overflow"]
    inputs = tokens(case["log_ratios"], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0], case["mask"])
    loss = reduced(config, inputs, "token_mean")
    loss.backward()
    scale = 0.5 if isinstance(config, SapoLoss) else 1.0
    assert loss.item() == pytest.approx(scale * case["expected_loss"])
    assert inputs.logprobs.grad is not None and inputs.logprobs.grad.tolist() == case["expected_grad"]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("config", LOSSES, ids=str)
def test_a_log_ratio_of_89_is_finite(config: Loss, advantage: float) -> None:
    case = CASES["log-ratio-89"]
    for proximal in (case["logprob"], case["behavior"]):
        inputs = tokens([case["logprob"]], [proximal], [case["behavior"]], [advantage])
        loss = loss_function(config)(inputs).loss
        loss.sum().backward()
        assert inputs.logprobs.grad is not None
        assert math.isfinite(loss.item()) and math.isfinite(inputs.logprobs.grad.item())


def test_temperature() -> None:
    case = CASES["temperature"]
    scaled = torch.log_softmax(torch.tensor(case["logits"]) / case["temperature"], 0)
    assert float(scaled[0]) == pytest.approx(case["expected"], rel=1e-5)


def test_kl_values() -> None:
    case = CASES["kl-values"]
    for estimator, expected in case["expected"].items():
        actual = kl_penalty(estimator, torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), torch.tensor([True]))
        assert float(actual) == pytest.approx(expected, rel=1e-6)


def test_gspo_length() -> None:
    case = CASES["gspo-length"]
    log_ratios = torch.full((100,), 0.012)
    where = (torch.ones(100, dtype=torch.bool), torch.zeros(100, dtype=torch.int64), 1)
    for level, name in (("geometric", "geometric"), ("sequence", "product")):
        ratio = importance_ratio(log_ratios, torch.zeros(100), *where, level)
        assert ratio.tolist() == pytest.approx([case["expected"][name]] * 100, rel=1e-6)


def test_gspo_reduction() -> None:
    case = CASES["gspo-reduction"]
    zeros = [0.0] * 10
    inputs = tokens(zeros, zeros, zeros, [1.0] * 2 + [-1.0] * 8, lengths=[2, 8])
    assert reduced(GspoLoss(), inputs, "sequence_mean_token_mean").item() == pytest.approx(case["expected"], abs=1e-7)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_sequence_underflow(level: Literal["sequence", "geometric"]) -> None:
    case = CASES["sequence-underflow"]
    size, log_ratio = case["tokens"], math.log(case["ratio"])
    inputs = tokens([log_ratio] * size, [log_ratio] * size, [0.0] * size, [1.0] * size)
    where = (inputs.mask, inputs.sequence_index, inputs.num_sequences)
    config = CorrectionConfig(level=level)
    weight, keep, _ = behavior_weight(config, inputs.proximal_logprobs, inputs.behavior_logprobs, *where)
    expected = max(case["ratio"] ** size, math.exp(-20)) if level == "sequence" else case["ratio"]
    assert keep.all()
    assert weight.tolist() == pytest.approx([expected] * size, rel=1e-4)
    for loss_config in LOSSES:
        weighted = tokens([log_ratio] * size, [log_ratio] * size, [0.0] * size, [1.0] * size, weight=weight)
        loss = reduced(loss_config, weighted, "token_mean")
        loss.backward()
        assert weighted.logprobs.grad is not None
        assert math.isfinite(loss.item()) and torch.isfinite(weighted.logprobs.grad).all()


def decoupled(behavior: float, mode: Literal["truncate", "mask"]) -> float:
    """The loss of the `decoupled` cases for a probability of the behavior policy."""
    mu, prox, pi = ([math.log(probability)] for probability in (behavior, 0.3, 0.33))
    inputs = tokens(pi, prox, mu, [1.0])
    where = (inputs.mask, inputs.sequence_index, inputs.num_sequences)
    config = CorrectionConfig(mode=mode, cap=5.0)
    weight, keep, _ = behavior_weight(config, inputs.proximal_logprobs, inputs.behavior_logprobs, *where)
    inputs = tokens(pi, prox, mu, [1.0], keep, weight=weight)
    return loss_function(DecoupledPpoLoss())(inputs).loss.item()


def test_decoupled() -> None:
    assert decoupled(0.2, "truncate") == pytest.approx(CASES["decoupled"]["expected"], rel=1e-6)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_decoupled_above_the_cap(mode: Literal["truncate", "mask"]) -> None:
    assert decoupled(0.05, mode) == pytest.approx(CASES["decoupled-cap"]["expected"][mode], rel=1e-6)


@pytest.mark.parametrize("config", LOSSES, ids=str)
def test_on_policy_limit(config: Loss) -> None:
    assert "REINFORCE" in CASES["on-policy-limit"]["what"]
    logprobs, advantages = [-0.3, -2.0, -5.0], [1.5, -0.7, 0.0]
    inputs = tokens(logprobs, logprobs, logprobs, advantages)
    loss_function(config)(inputs).loss.sum().backward()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([-advantage for advantage in advantages], rel=1e-6)


# --- random sequences -----------------------------------------------------------------------------


def random_inputs(case: dict[str, Any], cap: float) -> tuple[LossInputs, torch.Tensor]:
    """Inputs with the truncated token weight, and the reference policy."""
    flat = [token for sequence in case["sequences"] for token in sequence["tokens"]]
    lengths = [len(sequence["tokens"]) for sequence in case["sequences"]]
    advantages = [sequence["advantage"] for sequence in case["sequences"] for _ in sequence["tokens"]]
    pi, prox, mu = ([token[name] for token in flat] for name in ("logprob", "proximal", "behavior"))
    inputs = tokens(pi, prox, mu, advantages, [token["mask"] for token in flat], lengths)
    where = (inputs.mask, inputs.sequence_index, inputs.num_sequences)
    config = CorrectionConfig(cap=cap)
    weight, _, _ = behavior_weight(config, inputs.proximal_logprobs, inputs.behavior_logprobs, *where)
    reference = torch.tensor([token["reference"] for token in flat])
    return tokens(pi, prox, mu, advantages, inputs.mask, lengths, weight), reference


@pytest.mark.parametrize("name", RANDOM)
def test_random_sequences(name: str) -> None:
    case = RANDOM[name]
    settings, expected = case["settings"], case["expected"]
    inputs, reference = random_inputs(case, settings["cap"])
    low, high = settings["clip_low"], settings["clip_high"]
    decoupled_config = DecoupledPpoLoss(clip_low=low, clip_high=high)
    gspo_low, gspo_high = settings["gspo_clip"]
    icepop_low, icepop_high = settings["icepop"]
    losses: dict[str, tuple[Loss, str]] = {
        "decoupled_ppo_truncated_token_mean": (decoupled_config, "token_mean"),
        "cispo_token_mean": (CispoLoss(clip_high=high), "token_mean"),
        "truncated_is_token_mean": (TruncatedIsLoss(cap=settings["cap"]), "token_mean"),
        "icepop_token_mean": (IcePopLoss(low=icepop_low, high=icepop_high), "token_mean"),
        "gspo_sequence_mean": (GspoLoss(clip_low=gspo_low, clip_high=gspo_high), "sequence_mean_token_mean"),
    }
    for key, (config, reduction) in losses.items():
        masked = tokens(
            inputs.logprobs.detach(),
            inputs.proximal_logprobs,
            inputs.behavior_logprobs,
            inputs.advantages,
            inputs.mask,
            [len(sequence["tokens"]) for sequence in case["sequences"]],
            None if key.startswith("gspo") else inputs.behavior_weight,
        )
        assert reduced(config, masked, reduction).item() == pytest.approx(expected[key], rel=2e-5, abs=1e-6), key
    per_token = [value for sequence in expected["decoupled_ppo_truncated_per_token"] for value in sequence]
    assert loss_function(decoupled_config)(inputs).loss.tolist() == pytest.approx(per_token, rel=2e-5, abs=1e-6)
    ratio = (inputs.proximal_logprobs - inputs.behavior_logprobs).exp()
    assert effective_sample_size(ratio, inputs.mask) == (
        None
        if expected["effective_sample_size"] is None
        else pytest.approx(expected["effective_sample_size"], rel=1e-5)
    )
    for estimator, mean in expected["kl_token_mean"].items():
        kl = kl_penalty(estimator, inputs.logprobs.detach(), reference, inputs.mask)
        assert float(kl.sum()) / max(int(inputs.mask.sum()), 1) == pytest.approx(mean, rel=2e-5, abs=1e-6)


def test_random_case_keys_are_all_used() -> None:
    source = Path(__file__).read_text()
    keys = {key for case in RANDOM.values() for key in (*case["expected"], *case["settings"])}
    assert [key for key in keys if f'"{key}"' not in source] == []
