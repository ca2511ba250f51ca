"""Loading of settings: layers, overrides, and one line that names what is wrong."""

import json
from pathlib import Path

import msgspec
import pytest

from async_rl.config import Config, ConfigError, build_config, dump_config, dump_json, load_config, warnings
from async_rl.config.schema import (
    AlgorithmConfig,
    ArithmeticEnvironment,
    DecoupledPpoLoss,
    MathEnvironment,
    PpoLoss,
    RlooAdvantage,
)

MINIMAL = """
[model]
path = "policy"
[environment]
type = "arithmetic"
max_operand = 5
[learner]
lr = 2e-5
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def refusal(path: Path, *overrides: str) -> str:
    """The one line with which these settings are refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_file_defaults_and_overrides_come_together(minimal: Path) -> None:
    config = load_config(
        minimal, ["learner.batch_groups=4", "run.name=7", "sampling.stop=a,b", "learner.betas=0.8,0.9"]
    )
    assert config.model.path == "policy"
    assert config.learner.lr == 2e-5
    assert config.learner.batch_groups == 4
    assert config.run.name == "7"
    assert config.sampling.stop == ("a", "b")
    assert config.learner.betas == (0.8, 0.9)
    assert config.environment == ArithmeticEnvironment(max_operand=5)
    assert config.staleness.max_staleness == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [("learner.lr=1e-6", 1e-6), ("learner.lr=.5", 0.5), ("learner.lr=1", 1.0), ("learner.lr= 3e-4 ", 3e-4)],
)
def test_numbers_are_read_as_numbers(minimal: Path, override: str, expected: float) -> None:
    lr = load_config(minimal, [override]).learner.lr
    assert (lr, type(lr)) == (expected, float)


def test_none_switches_off_what_may_be_off(minimal: Path) -> None:
    assert load_config(minimal).learner.max_grad_norm == 1.0
    assert load_config(minimal, ["learner.max_grad_norm=none"]).learner.max_grad_norm is None
    assert load_config(minimal, ["algorithm.correction.level=none"]).algorithm.correction.level == "none"
    assert "learner.lr = 'none'" in refusal(minimal, "learner.lr=none")


def test_text_where_a_number_is_wanted_names_the_setting(minimal: Path) -> None:
    message = refusal(minimal, 'learner.lr="1e-6"')
    assert message.startswith("command line: learner.lr = '1e-6'")
    assert "without quotes" in message


@pytest.mark.parametrize(
    ("override", "named", "nearest"),
    [
        ("lerner.lr=1e-6", "lerner.lr", "learner.lr"),
        ("learner.l_r=1e-6", "learner.l_r", "learner.lr"),
        ("lr=1e-6", "unknown setting lr", "learner.lr"),
        ("stalenes.overdue=wait", "stalenes.overdue", "staleness.overdue"),
        ("staleness.max_stalenes=1", "staleness.max_stalenes", "staleness.max_staleness"),
        ("zzz=8", "unknown setting zzz", "--schema"),
    ],
)
def test_unknown_key_is_named_with_the_nearest(minimal: Path, override: str, named: str, nearest: str) -> None:
    message = refusal(minimal, override)
    assert named in message
    assert nearest in message.partition(";")[2]


def test_unknown_key_of_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "typo.toml"
    path.write_text(MINIMAL.replace("[learner]", "[lerner]"))
    assert refusal(path) == f"{path}: unknown setting lerner.lr; did you mean learner.lr?"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run.steps=abc", ("run.steps = 'abc'", "int")),
        ("run.steps=1.5", ("run.steps = 1.5", "int")),
        ("learner.batch_groups=0", ("learner.batch_groups = 0", ">= 1")),
        ("learner.lr=-1e-6", ("learner.lr = -1e-06", "> 0")),
        ("learner.lr=nan", ("learner.lr = nan", "finite")),
        ("staleness.overdue=drop", ("staleness.overdue = 'drop'", "keep, mask, wait")),
        ("environment.kinds=sum,cube", ("environment.kinds[1] = 'cube'", "product")),
        ("environment.type=arithmatic", ("environment.type = 'arithmatic'", "did you mean arithmetic?")),
        ("learner=3", ("learner is a section",)),
        ("algorithm.loss=ppo", ("did you mean algorithm.loss.type = 'ppo'?",)),
        ("learner.lr", ("section.key=value",)),
        ("run.save_model=yes", ("run.save_model = 'yes'", "bool")),
    ],
)
def test_values_that_cannot_be_are_named(minimal: Path, override: str, parts: tuple[str, ...]) -> None:
    message = refusal(minimal, override)
    assert message.startswith("command line: ")
    for part in parts:
        assert part in message


def test_what_must_be_given_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[environment]\ntype = "arithmetic"\n')
    assert refusal(path).startswith("model.path is missing")
    path.write_text('[model]\npath = "m"\n')
    assert refusal(path).startswith("environment.type is missing")
    path.write_text('[model]\npath = "m"\n[environment]\nmax_operand = 3\n')
    assert "environment.type is missing; choose one of arithmetic, math" in refusal(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert "nowhere.toml: cannot be read: No such file" in refusal(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    assert "bad.toml: not valid TOML" in refusal(tmp_path / "bad.toml")


def test_another_type_drops_the_keys_of_the_old_one(minimal: Path) -> None:
    config = load_config(minimal, ["environment.instruction=Think.", "data.path=d.jsonl", "environment.type=math"])
    assert config.environment == MathEnvironment(instruction="Think.")
    # The same type again keeps what the file gave.
    assert load_config(minimal, ["environment.type=arithmetic"]).environment == ArithmeticEnvironment(max_operand=5)
    message = refusal(minimal, "environment.type=math", "data.path=d.jsonl", "environment.max_operand=3")
    assert "environment.max_operand for type 'math'" in message


def test_a_union_keeps_its_default_type_until_told_otherwise(minimal: Path) -> None:
    config = load_config(minimal, ["algorithm.loss.clip_high=0.28"])
    assert config.algorithm.loss == DecoupledPpoLoss(clip_high=0.28)
    config = load_config(minimal, ["algorithm.loss.clip_high=0.28", "algorithm.loss.type=ppo"])
    assert config.algorithm.loss == PpoLoss(clip_high=0.28)


def test_bases_are_combined_and_later_wins(tmp_path: Path) -> None:
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets/model.toml").write_text(MINIMAL)
    (tmp_path / "presets/algorithm.toml").write_text('[algorithm.advantage]\ntype = "rloo"\n[learner]\nlr = 3e-5\n')
    (tmp_path / "run.toml").write_text('base = ["presets/model.toml", "presets/algorithm.toml"]\n[run]\nsteps = 3\n')
    config = load_config(tmp_path / "run.toml", ["learner.batch_groups=2"])
    assert (config.model.path, config.learner.lr, config.learner.batch_groups) == ("policy", 3e-5, 2)
    assert (config.algorithm.advantage, config.run.steps) == (RlooAdvantage(), 3)


def test_bases_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"\n')
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    assert "circle: a.toml -> b.toml -> a.toml" in refusal(tmp_path / "a.toml")


def test_resolved_settings_load_to_the_same_config(minimal: Path, tmp_path: Path) -> None:
    # A setting that an earlier layer gave and a later one put out of effect must not be refused the second time.
    minimal.write_text(MINIMAL + 'decay = "linear"\nmin_lr_ratio = 0.1\n')
    config = load_config(minimal, ["learner.decay=constant", "learner.max_grad_norm=none"])
    resolved = tmp_path / "config.json"
    resolved.write_text(dump_json(config))
    assert load_config(resolved) == config
    resolved.write_text(json.dumps({"from": "run.toml", "config": dump_config(config)}))
    assert load_config(resolved, ["run.steps=5"]).run.steps == 5
    assert msgspec.convert(dump_config(config), Config) == config


def test_build_config_takes_what_a_file_would_hold() -> None:
    config = build_config({"model": {"path": "m"}, "environment": {"type": "arithmetic"}}, ["run.seed=4"])
    assert (config.model.path, config.run.seed) == ("m", 4)


def test_a_list_of_tables_is_checked_too(minimal: Path) -> None:
    config = load_config(minimal, ["algorithm.correction.rejections=[{high = 0.5}]"])
    assert config.algorithm.correction.rejections[0].high == 0.5
    message = refusal(minimal, "algorithm.correction.rejections=[{high = 0.5, hihg = 1}]")
    assert "algorithm.correction.rejections[0]" in message and "hihg" in message


PRESETS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.name)
def test_every_preset_loads(preset: Path) -> None:
    assert warnings(load_config(preset)) == []


def test_further_files_are_merged_on_top_and_settings_win_over_all(minimal: Path, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('[algorithm.loss]\ntype = "ppo"\nclip_high = 0.3\n[learner]\nlr = 1e-3\n')
    (tmp_path / "two.toml").write_text("[learner]\nlr = 1e-4\nbatch_groups = 4\n")
    files = [str(tmp_path / "one.toml"), str(tmp_path / "two.toml")]
    config = load_config(minimal, [files[0], "learner.batch_groups=8", files[1]])
    assert config.algorithm.loss == PpoLoss(clip_high=0.3)
    assert (config.learner.lr, config.learner.batch_groups) == (1e-4, 8)
    assert load_config(minimal, files[::-1]).learner.lr == 1e-3
    assert "three.toml: cannot be read" in refusal(minimal, str(tmp_path / "three.toml"))
    assert "'two.tml' is not of the form section.key=value" in refusal(minimal, "two.tml")


def test_a_file_can_start_a_section_afresh(minimal: Path, tmp_path: Path) -> None:
    minimal.write_text(MINIMAL + '[algorithm]\nreduction = "constant"\nconstant_length = 9\ncorrection.veto = 0.1\n')
    preset = tmp_path / "preset.toml"
    preset.write_text('replaces = ["algorithm"]\n[algorithm.loss]\ntype = "ppo"\n')
    config = load_config(minimal, [str(preset)])
    assert config.algorithm == AlgorithmConfig(loss=PpoLoss())
    assert config.learner.lr == 2e-5
    preset.write_text('replaces = "algorithm.correction"\n')
    assert load_config(minimal, [str(preset)]).algorithm == AlgorithmConfig(reduction="constant", constant_length=9)
    for wrong in ("algoritm", "learner.lr", "algorithm.correction.nothing"):
        preset.write_text(f'replaces = "{wrong}"\n')
        assert f"preset.toml: replaces = '{wrong}': there is no such section" in refusal(minimal, str(preset))
    preset.write_text("replaces = 3\n")
    assert "replaces = 3: expected a section or a list of them" in refusal(minimal, str(preset))


def test_a_file_on_top_of_resolved_settings_is_what_the_user_chose(minimal: Path, tmp_path: Path) -> None:
    resolved, preset = tmp_path / "config.json", tmp_path / "preset.toml"
    resolved.write_text(dump_json(load_config(minimal)))
    preset.write_text("learner.min_lr_ratio = 0.1\n")
    assert "learner.min_lr_ratio = 0.1 has no effect" in refusal(resolved, str(preset))
