"""Every preset of configs/algorithms: it loads on any run, says all of its algorithm itself, and trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from async_rl.algos.importance import behavior_weight
from async_rl.config import Config, has_baseline, load_config, warnings
from async_rl.config.schema import AlgorithmConfig
from async_rl.learner.batch import prepare_batch
from async_rl.learner.update import Updater
from tests.learner.helpers import make_groups

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted((CONFIGS / "algorithms").rglob("*.toml"))
EVERY = pytest.mark.parametrize("preset", PRESETS, ids=lambda path: str(path.relative_to(CONFIGS / "algorithms")))

OTHER = """
[algorithm]
reduction = "constant"
constant_length = 7
advantage = { type = "grpo", std = "population", eps = 0.5 }
loss = { type = "ppo", clip_low = 0.9, clip_high = 9.0, dual_clip = 99.0 }
correction = { level = "geometric", mode = "mask", floor = 0.1, cap = 77.0, veto = 0.5, rejections = [{ high = 0.1 }] }
overlong = { penalty = 0.3, buffer_tokens = 2, truncated = "exclude" }
"""


@EVERY
def test_a_preset_replaces_whatever_algorithm_a_run_had(preset: Path, tmp_path: Path) -> None:
    plain = load_config(CONFIGS / "quickstart.toml", [str(preset)])
    assert warnings(plain) == []
    run = tmp_path / "run.toml"
    run.write_text(f'base = "{CONFIGS / "quickstart.toml"}"\n{OTHER}')
    other = load_config(run)
    assert other.algorithm.constant_length == 7 and other.algorithm.correction.veto == 0.5
    assert load_config(run, [str(preset)]).algorithm == plain.algorithm
    assert plain.algorithm.advantage != other.algorithm.advantage


@EVERY
def test_a_preset_touches_nothing_but_its_algorithm(preset: Path) -> None:
    run, changed = (load_config(CONFIGS / "quickstart.toml", files) for files in ([], [str(preset)]))
    sampling = msgspec.structs.replace(changed.sampling, max_refills=run.sampling.max_refills)
    assert msgspec.structs.replace(changed, algorithm=run.algorithm, sampling=sampling) == run
    assert (changed.sampling.max_refills > 0) == (preset.stem == "dapo"), "dynamic sampling is part of DAPO alone"


@EVERY
def test_a_preset_trains_two_steps(preset: Path, load: Callable) -> None:
    policy, config = load("tied")
    algorithm = load_config(CONFIGS / "quickstart.toml", [str(preset)]).algorithm
    config = msgspec.structs.replace(config, algorithm=algorithm)
    updater = Updater(policy, config, policy.ctx)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    for step in (1, 2):
        groups = make_groups(seed=step, baseline=has_baseline(algorithm))
        values = updater.step(prepare_batch(groups, step, config), step).resolve()
        assert values["optimizer/updates"] == 1 and math.isfinite(values["loss/policy"])
        assert math.isfinite(values["optimizer/grad_norm"])
        # Nothing of these random groups lies within a rejection's narrow band.
        assert (values["optimizer/grad_norm"] > 0) == (values["correction/masked_share"] < 1)
    moved = any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert moved == (values["correction/masked_share"] < 1)


def kept(algorithm: AlgorithmConfig, log_ratios: list[float]) -> bool:
    """Whether a sequence with these log(prox / mu) stays in the loss."""
    values = torch.tensor(log_ratios)
    mask = torch.ones(len(values), dtype=torch.bool)
    _, keep, _ = behavior_weight(
        algorithm.correction, values, torch.zeros_like(values), mask, torch.zeros(len(values), dtype=torch.int64), 1
    )
    return bool(keep.all())


def verl(name: str) -> AlgorithmConfig:
    config: Config = load_config(CONFIGS / "quickstart.toml", [str(CONFIGS / f"algorithms/verl/{name}.toml")])
    return config.algorithm


@pytest.mark.parametrize("name", [path.stem for path in PRESETS if "geo_rs" in path.stem])
def test_geometric_rejection_keeps_mean_ratios_within_a_thousandth(name: str) -> None:
    for ratio, expected in ((0.9989, False), (0.9991, True), (1.0009, True), (1.0011, False)):
        # Two tokens far apart whose geometric mean is the ratio.
        assert kept(verl(name), [math.log(ratio) + 0.5, math.log(ratio) - 0.5]) == expected, ratio


def test_sequence_rejection_keeps_products_between_a_half_and_two() -> None:
    for product, expected in ((0.49, False), (0.51, True), (1.95, True), (2.05, False)):
        assert kept(verl("decoupled_seq_is_rs"), [math.log(product) + 0.1, -0.1]) == expected, product


@pytest.mark.parametrize("name", [path.stem for path in PRESETS if "k3_rs" in path.stem])
def test_k3_rejection_keeps_sequences_of_a_small_mean(name: str) -> None:
    def k3(log_ratio: float) -> float:
        return math.exp(log_ratio) - 1 - log_ratio

    for log_ratio, expected in ((0.19, True), (0.21, False), (-0.19, True), (-0.21, False)):
        # One of two tokens differs, so that the mean is half of its k3.
        assert (k3(log_ratio) / 2 <= 0.01) == expected
        assert kept(verl(name), [log_ratio, 0.0]) == expected, log_ratio
