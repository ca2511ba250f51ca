"""Combinations of settings that cannot work are refused, and the values that the message offers do work."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import (
    Config,
    ConfigError,
    build_config,
    check_config,
    load_config,
    run_ahead,
    warnings,
)
from async_rl.config.checks import nearest, nearest_multiples
from async_rl.config.schema import StalenessConfig

BASE = {"model": {"path": "m"}, "environment": {"type": "arithmetic"}}


def config(*overrides: str) -> Config:
    return build_config(BASE, overrides)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_work() -> None:
    assert warnings(config()) == []


@pytest.mark.parametrize(
    ("overdue", "max_staleness", "window", "groups", "expected"),
    [
        ("mask", 2, None, 16, 2),
        ("keep", 3, None, 16, 3),
        ("mask", 0, None, 16, 0),
        # wait: max_staleness - ceil((W - 1) / B); W defaults to B
        ("wait", 2, None, 16, 1),
        ("wait", 2, 1, 16, 2),
        ("wait", 2, 17, 16, 1),
        ("wait", 2, 18, 16, 0),
        ("wait", 0, None, 16, -1),
        ("wait", 1, None, 1, 1),
    ],
)
def test_run_ahead(overdue: str, max_staleness: int, window: int | None, groups: int, expected: int) -> None:
    staleness = StalenessConfig(max_staleness=max_staleness, overdue=overdue, reorder_window=window)
    assert run_ahead(staleness, groups) == expected


def test_publication_slower_than_admission_is_refused() -> None:
    message = refusal("staleness.publish_every=4")
    assert "publish_every may be at most 3" in message
    assert message.endswith("staleness.max_staleness = 3 or staleness.publish_every = 3")
    config("staleness.publish_every=3")


def test_waiting_in_order_needs_room_ahead() -> None:
    message = refusal("staleness.overdue=wait", "staleness.max_staleness=0")
    assert message.endswith("staleness.max_staleness = 1 or staleness.reorder_window = 1")


@given(
    overdue=st.sampled_from(["mask", "wait", "keep"]),
    max_staleness=st.integers(0, 5),
    publish_every=st.integers(1, 8),
    window=st.none() | st.integers(1, 40),
    groups=st.integers(1, 9),
)
def test_every_way_out_that_is_offered_works_and_is_the_smallest(
    overdue: str, max_staleness: int, publish_every: int, window: int | None, groups: int
) -> None:
    given_ = [
        f"staleness.overdue={overdue}",
        f"staleness.max_staleness={max_staleness}",
        f"staleness.publish_every={publish_every}",
        f"learner.batch_groups={groups}",
        *([f"staleness.reorder_window={window}"] if window is not None and overdue == "wait" else []),
    ]
    try:
        config(*given_)
    except ConfigError as error:
        ways = re.findall(r"staleness\.(\w+) = (\d+)", str(error).rpartition(": ")[2])
        assert ways
        for key, value in ways:
            config(*given_, f"staleness.{key}={value}")
            worse = int(value) + (-1 if key == "max_staleness" else 1)
            with pytest.raises(ConfigError):
                config(*given_, f"staleness.{key}={worse}")
        assert run_ahead(
            StalenessConfig(overdue=overdue, max_staleness=max_staleness, reorder_window=window), groups
        ) < (publish_every - 1)


def test_uneven_minibatches_are_refused_with_the_nearest_that_work() -> None:
    assert nearest_multiples(512, 6) == (510, 516)
    assert nearest_multiples(4, 6) == (6,)
    message = refusal("learner.batch_groups=256", "sampling.group_size=2", "learner.minibatches=6")
    assert "512 trajectories" in message
    assert "510 or 516 trajectories" in message
    assert message.endswith("learner.batch_groups = 255 or 258")
    config("learner.batch_groups=258", "sampling.group_size=2", "learner.minibatches=6")


@given(groups=st.integers(1, 60), size=st.integers(2, 9), parts=st.integers(1, 12))
def test_the_batch_sizes_that_are_offered_divide(groups: int, size: int, parts: int) -> None:
    given_ = [f"learner.batch_groups={groups}", f"sampling.group_size={size}", f"learner.minibatches={parts}"]
    if groups * size % parts == 0:
        config(*given_)
        return
    offered = refusal(*given_).rpartition("learner.batch_groups = ")[2].split(" or ")
    for value in offered:
        config(*given_, f"learner.batch_groups={value}")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["sampling.top_p=0.9"], ("sampling.top_p = 0.9", "sampling.top_p = 1")),
        (["sampling.group_size=1"], ("'grpo'", "sampling.group_size = 2")),
        (["sampling.group_size=1", "algorithm.advantage.type=rloo"], ("'rloo'", "sampling.group_size = 2")),
        (["run.steps=10", "learner.warmup_steps=10"], ("learner.warmup_steps = 10", "works is 9")),
        (["learner.max_grad_norm=0"], ("learner.max_grad_norm = 0", "none")),
        (["learner.betas=0.9,1.0"], ("learner.betas",)),
        (["algorithm.correction.mode=mask", "algorithm.correction.floor=6"], ("floor = 6.0", "cap = 5.0")),
        (["transport.host=192.0.2.1"], ("transport.host = '192.0.2.1'", "async-rl keys", "transport.insecure = true")),
        (["transport.host=learner.example"], ("transport.host = 'learner.example'",)),
        (["transport.heartbeat_s=10"], ("transport.heartbeat_timeout_s = 15.0", "20.0")),
        (["weights.backend=nccl", "learner.device=cpu"], ("weights.backend = 'nccl'", "gloo")),
        (["environment.type=math"], ("data.path is missing", "'math'")),
        (
            ["algorithm.overlong.penalty=1", "algorithm.overlong.buffer_tokens=300"],
            ("buffer_tokens = 300", "tokens = 256"),
        ),
        (
            ["alarms.stop=entropy_collapse", "alarms.min_entropy=none"],
            ("'entropy_collapse'", "alarms.min_entropy is off"),
        ),
        (["alarms.stop=overdue", "staleness.overdue=keep"], ("'overdue'", "staleness.overdue = 'keep'")),
        (["data.eval_problems=0"], ("evaluation.every = 10", "data.eval_problems >= 1")),
        (["evaluation.every=0", "run.stop_at_accuracy=0.9"], ("run.stop_at_accuracy = 0.9", "evaluation.every >= 1")),
        (
            ["launcher.type=ray", "launcher.learner_resources.gpus=1", "learner.ranks=2"],
            ("launcher.learner_resources.gpus = 1", "learner.ranks = 2", "gpus = 2"),
        ),
        (["launcher.type=ray", "learner.device=cuda"], ("launcher.learner_resources.gpus = 0", "learner.device")),
        (
            ["launcher.type=ray", "generator.engine.tensor_parallel=2"],
            ("launcher.generator_resources.gpus = 0", "set that to 2"),
        ),
        (["generator.engine.max_model_len=512"], ("generator.engine.max_model_len = 512", "1280")),
    ],
)
def test_refused(overrides: list[str], parts: tuple[str, ...]) -> None:
    message = refusal(*overrides)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["transport.host=192.0.2.1", "transport.insecure=true"],
        ["transport.host=192.0.2.1", "transport.keys=keys"],
        ["transport.host=localhost"],
        ["launcher.type=ray", "transport.insecure=true"],
        ["launcher.type=ray", "launcher.learner_resources.gpus=2", "learner.ranks=2"],
        ["launcher.type=ray", "learner.ranks=2"],
        ["transport.host=::1"],
        ["run.steps=10", "learner.warmup_steps=9"],
        ["sampling.group_size=1", "algorithm.advantage.type=reinforce_plus_plus", "algorithm.advantage.baseline=none"],
        ["sampling.group_size=1", "algorithm.advantage.type=remax", "sampling.max_refills=1"],
        ["generator.engine.max_model_len=1280"],
        ["algorithm.correction.max_token_staleness=1"],
        ["algorithm.correction.max_token_staleness=0", "algorithm.proximal=behavior"],
        ["algorithm.correction.max_token_staleness=5", "staleness.overdue=keep"],
    ],
)
def test_accepted(overrides: list[str]) -> None:
    config(*overrides)


@pytest.mark.parametrize(
    ("override", "switch"),
    [
        ("staleness.reorder_window=4", "staleness.overdue"),
        ("learner.min_lr_ratio=0.1", "learner.decay"),
        ("algorithm.constant_length=64", "algorithm.reduction"),
        ("algorithm.correction.floor=0.5", "algorithm.correction.level or algorithm.correction.mode"),
        ("algorithm.overlong.buffer_tokens=9", "algorithm.overlong.penalty"),
        ("data.path=problems.jsonl", "environment.type"),
        ("rewards.max_batch=4", "environment.type or environment.batch"),
        ("transport.insecure=true", "transport.host or transport.keys"),
        ("algorithm.kl.target=0.1", "algorithm.kl.coefficient"),
        ("algorithm.kl.place=reward", "algorithm.kl.coefficient"),
        ("algorithm.kl.horizon=5", "algorithm.kl.target or algorithm.kl.coefficient"),
    ],
)
def test_a_setting_without_effect_is_an_error(override: str, switch: str) -> None:
    message = refusal(override)
    assert message.startswith(override.partition("=")[0])
    assert "has no effect" in message
    assert message.endswith(f"remove it or change {switch}")


def test_what_a_later_layer_turned_off_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'learner.decay = "cosine"\nlearner.min_lr_ratio = 0.1\nevaluation.samples = 4\n'
        'model.path = "m"\nenvironment.type = "arithmetic"\n'
    )
    assert load_config(path, ["learner.decay=constant", "evaluation.every=0"]).learner.min_lr_ratio == 0.1
    with pytest.raises(ConfigError, match=r"learner.min_lr_ratio = 0.2 has no effect: learner.decay is 'constant'"):
        load_config(path, ["learner.decay=constant", "learner.min_lr_ratio=0.2"])


def test_the_behavior_weight_has_no_cap_under_a_loss_that_takes_the_ratio_itself() -> None:
    assert "algorithm.correction.cap" in refusal("algorithm.correction.cap=2", "algorithm.loss.type=ppo")
    config("algorithm.correction.cap=2", "algorithm.loss.type=ppo", "algorithm.correction.mode=mask")
    config("algorithm.correction.cap=2")


@pytest.mark.parametrize(
    ("without", "needed"),
    [
        (["algorithm.denominator=kept"], "algorithm.correction.mode=mask"),
        (["algorithm.denominator=kept"], "algorithm.correction.veto=0.01"),
        (["algorithm.denominator=kept"], "algorithm.correction.rejections=[{high = 0.5}]"),
        (["algorithm.correction.normalize=true", "algorithm.loss.type=ppo"], "algorithm.loss.type=reinforce"),
        (["algorithm.proximal=loglinear", "algorithm.loss.type=ppo"], "algorithm.correction.mode=mask"),
        (["algorithm.proximal=behavior", "algorithm.loss.type=cispo"], "algorithm.loss.type=icepop"),
        (
            ["algorithm.proximal=loglinear", "algorithm.loss.type=reinforce", "algorithm.correction.level=none"],
            "algorithm.correction.level=token",
        ),
        (["algorithm.proximal=behavior", "algorithm.correction.level=sequence"], "algorithm.correction.level=none"),
        (["algorithm.proximal=behavior", "algorithm.correction.cap=2"], "algorithm.proximal=loglinear"),
        (["algorithm.proximal=behavior", "algorithm.correction.mode=mask"], "algorithm.proximal=loglinear"),
        (["algorithm.proximal=behavior", "algorithm.correction.normalize=true"], "algorithm.proximal=loglinear"),
        (["algorithm.proximal=behavior", "algorithm.correction.veto=0.01"], "algorithm.proximal=loglinear"),
        (
            ["algorithm.proximal=behavior", "algorithm.loss.type=icepop", "algorithm.loss.low=0.1"],
            "algorithm.proximal=recompute",
        ),
        (["algorithm.correction.max_token_staleness=2"], "staleness.overdue=keep"),
        (["algorithm.correction.max_token_staleness=3", "staleness.overdue=wait"], "staleness.max_staleness=9"),
        (["algorithm.denominator=kept"], "algorithm.correction.max_token_staleness=1"),
        (["algorithm.kl.horizon=5", "algorithm.kl.coefficient=0.1"], "algorithm.kl.target=0.1"),
        (["algorithm.kl.estimator=k3"], "algorithm.kl.coefficient=0.1"),
    ],
)
def test_a_part_of_the_algorithm_without_effect_is_an_error(without: list[str], needed: str) -> None:
    """Refused alone, and accepted with one more setting."""
    assert "has no effect" in refusal(*without)
    config(*without, needed)


def test_a_mean_weight_beside_penalties_must_be_known_first() -> None:
    given_ = ["algorithm.correction.normalize=true", "algorithm.entropy_coefficient=0.1"]
    message = refusal(*given_, "algorithm.proximal=loglinear")
    assert "algorithm.proximal = 'recompute', algorithm.kl.place = 'reward'" in message
    config(*given_)
    kl = ["algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward", "algorithm.proximal=loglinear"]
    config("algorithm.correction.normalize=true", *kl)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["algorithm.kl.coefficient=0.1", "algorithm.kl.estimator=k1"], "'k2' has the gradient of KL(pi || ref)"),
        (
            ["algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward", "algorithm.kl.estimator=k3"],
            "which only 'k1' has there",
        ),
        (["generator.running_requests=finish"], "generator.running_requests = 'finish'"),
        (["learner.micro_batch_tokens=512"], "learner.micro_batch_tokens = 512"),
        (["run.stall_timeout_s=60"], "run.stall_timeout_s = 60.0"),
        (["sampling.temperature=0.7"], "evaluation.temperature"),
    ],
)
def test_rarely_meant(overrides: list[str], part: str) -> None:
    found = warnings(config(*overrides))
    assert len(found) == 1
    assert part in found[0]


def test_finishing_requests_is_fine_without_masks() -> None:
    assert warnings(config("generator.running_requests=finish", "staleness.max_staleness=0")) == []


def test_checks_of_a_config_built_by_hand() -> None:
    check_config(config())


@pytest.mark.parametrize(
    ("name", "candidates", "expected"),
    [
        ("learner.lrr", ["learner.lr", "learner.eps"], "learner.lr"),
        ("optimizer.lr", ["learner.lr", "learner.eps"], "learner.lr"),
        ("zzz", ["learner.lr"], None),
    ],
)
def test_nearest(name: str, candidates: list[str], expected: str | None) -> None:
    assert nearest(name, candidates) == expected


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", ""])
def test_a_wildcard_host_is_refused_because_generators_are_given_it(host: str) -> None:
    assert "name the address of this machine" in refusal(f'transport.host="{host}"', "transport.insecure=true")


def test_refills_of_groups_of_one_are_refused() -> None:
    single = ('algorithm.advantage.type="reinforce_plus_plus"', 'algorithm.advantage.baseline="none"')
    config(*single, "sampling.group_size=1")
    text = refusal(*single, "sampling.group_size=1", "sampling.max_refills=1")
    assert "the rewards of every group are equal" in text
