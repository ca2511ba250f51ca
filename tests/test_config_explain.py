"""Resolved settings as text, and the page that lists every setting."""

from pathlib import Path

import pytest

from async_rl.config import build_config, load_config
from async_rl.config.explain import config_toml, schema_page, toml_value
from async_rl.config.fields import REQUIRED, settings

BASE = {"model": {"path": "m"}, "environment": {"type": "arithmetic"}}


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ['run.name="a \\"b\\" \\\\ ü"', "learner.max_grad_norm=none", "sampling.stop=.,;", "run.stop_at_accuracy=0.9"],
        ["algorithm.correction.rejections=[{high=0.5},{low=-1.0,level='sequence_mean'}]", "algorithm.loss.type=gspo"],
        [
            "environment.type=function",
            "environment.reward=r.py:f",
            "data.path=d.jsonl",
            "generator.engine.type=simulated",
        ],
    ],
)
def test_resolved_toml_loads_to_the_same_config(tmp_path: Path, overrides: list[str]) -> None:
    config = build_config(BASE, overrides)
    path = tmp_path / "resolved.toml"
    path.write_text(config_toml(config))
    assert load_config(path) == config


def test_resolved_toml_marks_what_differs_from_the_default() -> None:
    lines = config_toml(build_config(BASE, ["learner.lr=2e-5", "learner.max_grad_norm=none"])).splitlines()
    assert "lr = 2e-05  # default: 1e-06" in lines
    assert 'max_grad_norm = "none"  # default: 1.0' in lines
    assert "eps = 1e-08" in lines
    assert lines[lines.index("lr = 2e-05  # default: 1e-06") - 1] == "# AdamW's peak learning rate."


def test_resolved_toml_comments_out_what_has_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model.path = "m"\nenvironment.type = "arithmetic"\nevaluation.samples = 4\n')
    text = config_toml(load_config(path, ["evaluation.every=0"]))
    assert "# samples = 4  # no effect: evaluation.every is 0" in text.splitlines()


def test_toml_values() -> None:
    assert [toml_value(v) for v in (True, None, 3, 1e-6, "x", ("a", 1))] == [
        "true", '"none"', "3", "1e-06", '"x"', '["a", 1]',
    ]  # fmt: skip


def test_every_setting_stands_on_the_page_once() -> None:
    page = schema_page()
    for setting in settings():
        rows = [line for line in page.splitlines() if line.startswith(f"| `{setting.path}` |")]
        same = [other for other in settings() if other.path == setting.path]
        assert len(rows) == len(same), setting.path
        assert setting.default is not REQUIRED or any("| required |" in row for row in rows)


def test_every_setting_has_help() -> None:
    assert [s.path for s in settings() if not s.help and s.path != "environment.type"] == []
