"""Settings for people: a resolved configuration as TOML with help, and the page that lists every setting."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import inspect

from async_rl.config.effect import value_at, without_effect
from async_rl.config.fields import REQUIRED, Setting, alternatives, settings, structs, tag_of, tags
from async_rl.config.schema import Config


def config_toml(config: Config) -> str:
    """All settings as TOML that `load_config` reads back; a value other than the default says what that would be."""
    inert = without_effect(config)
    lines: list[str] = []
    for section, rows in _by_section(_applying(config)).items():
        lines += ["", f"[{section}]"]
        for setting in rows:
            lines += [f"# {setting.help}"] if setting.help else []
            lines.append(_toml_line(setting, _value(config, setting), inert.get(setting.path)))
    return "\n".join(lines).lstrip() + "\n"


def _applying(config: Config) -> Iterator[Setting]:
    """The settings that this configuration has: those of other types than the chosen ones are left out."""
    for setting in settings():
        section = value_at(config, setting.section)
        if "[]" not in setting.path and section is not None and setting.variant in (None, tag_of(section)):
            yield setting


def _value(config: Config, setting: Setting) -> Any:
    return tag_of(value_at(config, setting.section)) if tags(setting.type) else value_at(config, setting.path)


def _by_section(rows: Iterable[Setting]) -> dict[str, list[Setting]]:
    """Settings by section, every section before its subsections."""
    found: dict[str, list[Setting]] = {}
    for setting in rows:
        found.setdefault(setting.section, []).append(setting)
    tops = list(dict.fromkeys(section.split(".")[0] for section in found))
    return dict(sorted(found.items(), key=lambda item: (tops.index(item[0].split(".")[0]), item[0].count("."))))


def _toml_line(setting: Setting, value: Any, inert: str | None) -> str:
    key = setting.path.rpartition(".")[2]
    if value is None and setting.default is None:
        return f"# {key} ="
    line = f"{key} = {toml_value(value)}"
    if value == setting.default:
        return line
    if inert:
        return f"# {line}  # no effect: {inert}"
    return f"{line}  # {'required' if setting.default is REQUIRED else f'default: {toml_value(setting.default)}'}"


def toml_value(value: Any) -> str:
    """A value as TOML; None as the text "none", which the loader understands."""
    match value:
        case None:
            return '"none"'
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case int() | float():
            return repr(value)
        case msgspec.Struct():
            fields = {k: v for k, v in msgspec.structs.asdict(value).items() if v is not None}
            return "{ " + ", ".join(f"{k} = {toml_value(v)}" for k, v in fields.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise AssertionError(f"no TOML for {type(value).__name__}")


# --- the page -----------------------------------------------------------------------------------


INTRODUCTION = """# Configuration

Written by `make docs` from `async_rl/config/schema.py`; `async-rl config --schema` prints it.

A configuration is a sparse TOML file: what it leaves out has the default below. `base = "other.toml"` (or a list of
files, later ones win), relative to the file, puts other files underneath. A command takes further files after the
first, `async-rl train run.toml configs/algorithms/dapo.toml`, each merged on top; with `replaces = ["algorithm"]` a
file drops what those before it gave to that section. `section.key=value` on the command line wins over all files; the
value is TOML, except that bare words are text and `a,b` is a list where one is wanted.

- A setting that may be `"none"` is switched off by that word.
- A section with a `type` is one of several; another type drops the keys of the old one that lower layers gave.
- Unknown keys, wrong types, values out of bounds and combinations that cannot work are refused before anything starts:
  one line, exit code 2. So is a setting without effect, unless a later layer turned off what an earlier one had set up.
- Paths are relative to the working directory. Names carry units: `_s` seconds, `_bytes`, `_tokens`; `_every` steps.

`async-rl config CONFIG` prints what a file comes to, with every default that it takes.
"""


def schema_page() -> str:
    """docs/configuration.md."""
    parts = [INTRODUCTION]
    for section, rows in _by_section(settings()).items():
        for variant in dict.fromkeys(setting.variant for setting in rows):
            parts += _table(section, variant, [setting for setting in rows if setting.variant == variant])
    return "\n".join(parts)


def _table(section: str, variant: str | None, rows: list[Setting]) -> list[str]:
    """Heading, docstring and table of one section, or of one of its types."""
    choice = bool(tags(rows[0].type))
    doc = rows[0].help if choice else (rows[0].owner.__doc__ or "").strip()
    level = "#" * min(2 + section.count(".") + (variant is not None), 4)
    heading = f"{level} {section}" + (f", type `{variant}`" if variant else "")
    lines = [f"{heading}\n", f"{doc}\n" if doc else "", "| setting | type | default | meaning |", "|---|---|---|---|"]
    for setting in rows:
        default = "required" if setting.default is REQUIRED else _code(toml_value(setting.default))
        meaning = _choices(setting.type) if choice else setting.help
        lines.append(f"| `{setting.path}` | {_escape(type_text(setting.type))} | {default} | {_escape(meaning)} |")
    return [*lines, ""]


def _choices(type_: inspect.Type) -> str:
    """What each type is, from its docstring."""
    return "<br>".join(f"`{member.tag}`: {(member.cls.__doc__ or '').strip()}" for member in structs(type_))


def type_text(type_: inspect.Type) -> str:
    """A type with its bounds, for people."""
    if tags(type_):
        return "one of " + ", ".join(_code(tag) for tag in tags(type_))
    return " or ".join(_one_type(member) for member in alternatives(type_))


def _one_type(type_: inspect.Type) -> str:
    match type_:
        case inspect.NoneType():
            return '`"none"`'
        case inspect.BoolType():
            return "true, false"
        case inspect.LiteralType():
            return "one of " + ", ".join(_code(str(value)) for value in type_.values)
        case inspect.StrType():
            return "text"
        case inspect.IntType() | inspect.FloatType():
            return ("integer" if isinstance(type_, inspect.IntType) else "number") + _bounds(type_)
        case inspect.VarTupleType():
            return f"list of {type_text(type_.item_type)}"
        case inspect.TupleType():
            return f"list of {len(type_.item_types)}: {type_text(type_.item_types[0])}"
        case inspect.StructType():
            return "tables, see below"
    raise AssertionError(f"no text for {type_}")


def _bounds(type_: inspect.IntType | inspect.FloatType) -> str:
    signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    bounds = [f"{sign} {getattr(type_, name)}" for name, sign in signs if getattr(type_, name) is not None]
    return f" {', '.join(bounds)}" if bounds else ""


def _code(text: str) -> str:
    return f"`{text}`"


def _escape(text: str) -> str:
    """Bars would end a table's cell, and <words> would be tags."""
    return text.replace("|", "\\|").replace("<dir>", "&lt;dir&gt;").replace("<run.dir>", "&lt;run.dir&gt;")
