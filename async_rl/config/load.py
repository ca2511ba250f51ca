"""Loading: sparse TOML files, then overrides `section.key=value`, into one checked `Config`.

Layers are merged in order: the files named in `base` (later wins), the file itself, further files, the overrides.
Where a layer gives a tagged union another `type`, the keys of the old type are dropped; a file with
`replaces = ["algorithm"]` drops all that lower layers gave to that section. The text "none" switches off a setting
whose type allows that, since TOML has no null.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from async_rl.config.checks import ConfigError, check_config
from async_rl.config.fields import alternatives, item_type, settings
from async_rl.config.merge import Layers, number, parse_value, type_at
from async_rl.config.schema import Config

COMMAND_LINE = "command line"


class _Layer(NamedTuple):
    """What one file gives."""

    source: str
    values: Mapping[str, Any]
    replaces: Sequence[str] = ()
    """Sections that start afresh with this layer."""
    resolved: bool = False
    """Gives every key, so none of them says what the user chose."""


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Load a TOML file (or the config.json of a run) with overrides; raises ConfigError with one line.

    An override without "=" that ends in .toml is a further file: it is merged on top, before any section.key=value.
    """
    files = [path, *(text for text in overrides if _is_file(text))]
    layers = [layer for file in files for layer in _read(Path(file))]
    return _build(layers, [text for text in overrides if not _is_file(text)])


def _is_file(override: str) -> bool:
    return "=" not in override and override.endswith(".toml")


def build_config(data: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "settings") -> Config:
    """A checked `Config` out of nested dicts, as a file would give them; raises ConfigError with one line."""
    return _build([_Layer(source, data)], overrides)


def dump_config(config: Config) -> dict[str, Any]:
    """All settings as plain data, as they stand in <run.dir>/config.json."""
    return msgspec.to_builtins(config)


def dump_json(config: Config) -> str:
    """All settings as indented JSON; `load_config` reads it back."""
    return json.dumps(dump_config(config), indent=2, ensure_ascii=False) + "\n"


def _read(path: Path, seen: tuple[Path, ...] = ()) -> list[_Layer]:
    """The layers of a file, those of its bases first."""
    if path.resolve() in seen:
        raise ConfigError(
            f"{path}: base files name each other in a circle: {' -> '.join(p.name for p in seen)} -> {path.name}"
        )
    data = _parse_file(path)
    bases = _names(data, "base", path, 'a file name or a list of them, such as base = "small.toml"')
    replaces = _names(data, "replaces", path, 'a section or a list of them, such as replaces = ["algorithm"]')
    below = [layer for name in bases for layer in _read(path.parent / name, (*seen, path.resolve()))]
    return [*below, _Layer(str(path), data, replaces, resolved=path.suffix == ".json")]


def _names(data: dict[str, Any], key: str, path: Path, expected: str) -> list[str]:
    """Take a text or a list of texts out of a file's values."""
    value = data.pop(key, [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: {key} = {value!r}: expected {expected}")
    return names


def _parse_file(path: Path) -> dict[str, Any]:
    is_json = path.suffix == ".json"
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if is_json else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {'JSON' if is_json else 'TOML'}: {error}") from error
    if is_json and isinstance(data, dict):
        data = data.get("config", data)  # a run directory's config.json also says where the settings came from
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {type(data).__name__}, not sections of settings")
    return data


def _build(files: Sequence[_Layer], overrides: Sequence[str]) -> Config:
    layers = Layers()
    for file in files:
        layers.begin(file.source)
        for section in file.replaces:
            layers.drop(section)
        layers.add(file.values)
        if file.resolved:
            layers.ranks.clear()
    _add_overrides(layers, overrides)
    _refuse_nonfinite(layers.data, "", layers.sources)
    try:
        config = msgspec.convert(layers.data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_one_line(error, layers)) from error
    check_config(config, layers.ranks)
    return config


def _add_overrides(layers: Layers, overrides: Sequence[str]) -> None:
    pairs = []
    for override in overrides:
        path, equals, text = (part.strip() for part in override.partition("="))
        if not equals or not path:
            raise ConfigError(
                f"{COMMAND_LINE}: {override!r} is not of the form section.key=value, such as learner.lr=1e-6, and "
                "not a .toml file"
            )
        pairs.append((path, text))
    # Types first, so that the order on the command line does not matter.
    pairs.sort(key=lambda pair: not pair[0].endswith(".type"))
    layers.begin(COMMAND_LINE)
    for path, text in pairs:
        value = parse_value(text, type_at(path, layers.data))
        for key in reversed(path.split(".")):
            value = {key: value}
        layers.add(value)


def _refuse_nonfinite(data: Any, path: str, sources: Mapping[str, str]) -> None:
    if isinstance(data, Mapping):
        for key, value in data.items():
            _refuse_nonfinite(value, f"{path}.{key}".lstrip("."), sources)
    elif isinstance(data, float) and not math.isfinite(data):
        raise ConfigError(f"{sources.get(path, 'settings')}: {path} = {data}: expected a finite number")


def _one_line(error: msgspec.ValidationError, layers: Layers) -> str:
    """Source, setting, value, and what was expected, out of msgspec's message."""
    message, _, where = str(error).partition(" - at `$")
    item_path = where.rstrip("`").lstrip(".")
    if missing := re.search(r"missing required field `(\w+)`", message):
        return _missing(f"{item_path}.{missing[1]}".lstrip("."))
    path = re.sub(r"\[.*", "", item_path)
    value: Any = layers.data
    for key in re.findall(r"[^.\[\]]+", item_path):
        value = value[int(key)] if isinstance(value, list) else value[key]
    expected = _choices(path) if message.startswith("Invalid enum") else message.replace("`", "")
    expected = expected[:1].lower() + expected[1:]
    hint = "; write the number without quotes" if isinstance(value, str) and isinstance(number(value), float) else ""
    return f"{layers.sources.get(path, 'settings')}: {item_path} = {value!r}: {expected}{hint}"


def _missing(path: str) -> str:
    leaf = next((setting for setting in settings() if setting.path.startswith(path)), None)
    return f"{leaf.path} is missing ({leaf.help.rstrip('.')})" if leaf else f"{path} is missing"


def _choices(path: str) -> str:
    """The values of a setting, or of the items of one that is a list."""
    found: list[str] = []
    for setting in settings():
        if setting.path == path:
            types = (*alternatives(setting.type), *alternatives(item_type(setting.type)))
            found += [str(value) for t in types if isinstance(t, inspect.LiteralType) for value in t.values]
    return f"expected one of {', '.join(found)}"
