"""Settings: schema, loading, cross-checks and explanation."""

from async_rl.config.checks import ConfigError, check_config, prefetch, reorder_window, run_ahead, warnings
from async_rl.config.effect import age_limit, has_baseline
from async_rl.config.load import build_config, dump_config, dump_json, load_config
from async_rl.config.schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "age_limit",
    "build_config",
    "check_config",
    "dump_config",
    "dump_json",
    "has_baseline",
    "load_config",
    "prefetch",
    "reorder_window",
    "run_ahead",
    "warnings",
]
