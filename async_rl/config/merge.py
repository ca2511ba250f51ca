"""Merging sparse layers of settings, and the value of an override as the schema wants it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from msgspec import inspect

from async_rl.config.checks import ConfigError, nearest
from async_rl.config.fields import REQUIRED, allows, fields_of, item_type, root, settings, structs, tag_of, tags


class Layers:
    """Raw settings merged so far; for each path the rank and the source of the layer that gave it."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.ranks: dict[str, int] = {}
        self.sources: dict[str, str] = {}
        self._rank = 0
        self._source = ""

    def begin(self, source: str) -> None:
        """Start the next layer; what is added from now on comes from `source` and wins over everything before."""
        self._rank += 1
        self._source = source

    def add(self, values: Mapping[str, Any]) -> None:
        """Merge nested values into the layer that was begun last; raises ConfigError for a key that no setting has."""
        self._merge(self.data, values, root(), "")

    def drop(self, section: str) -> None:
        """Forget what lower layers gave to a section; raises ConfigError where there is no such section."""
        type_ = type_at(section, self.data)
        if type_ is None or not structs(type_):
            raise ConfigError(f"{self._source}: replaces = {section!r}: there is no such section")
        *path, last = section.split(".")
        holder = self.data
        for key in path:
            holder = holder.get(key, {})
        holder.pop(last, None)
        self._forget(f"{section}.")

    def _merge(self, target: dict[str, Any], values: Mapping[str, Any], type_: inspect.Type, prefix: str) -> None:
        fields = fields_of(type_, target)
        for key, value in values.items():
            path = f"{prefix}{key}"
            if key == "type" and tags(type_):
                continue
            if key not in fields:
                raise ConfigError(f"{self._source}: {_unknown(_first_leaf(path, value), target.get('type'))}")
            field = fields[key]
            if structs(field.type):
                self._merge_section(target, field, value, path)
                continue
            self._note(path)
            off = isinstance(value, str) and value == "none" and allows(field.type, inspect.NoneType)
            target[key] = None if off else value

    def _merge_section(self, target: dict[str, Any], field: inspect.Field, values: Any, path: str) -> None:
        if not isinstance(values, Mapping):
            hint = f"; did you mean {path}.type = {values!r}?" if values in tags(field.type) else ""
            raise ConfigError(
                f"{self._source}: {path} is a section with keys of its own, not one value {values!r}{hint}"
            )
        section = target.setdefault(field.encode_name, {})
        if tags(field.type):
            self._choose(section, field, values.get("type"), path)
        self._merge(section, values, field.type, f"{path}.")

    def _choose(self, section: dict[str, Any], field: inspect.Field, wanted: Any, path: str) -> None:
        """Settle the `type` of a tagged union; another type than before drops the keys of the old one."""
        current = section.get("type", default_tag(field))
        choices = tags(field.type)
        if wanted is None and current is None:
            raise ConfigError(f"{self._source}: {path}.type is missing; choose one of {', '.join(choices)}")
        if wanted is not None and wanted not in choices:
            hint = nearest(str(wanted), choices)
            more = f"; did you mean {hint}?" if hint else ""
            raise ConfigError(f"{self._source}: {path}.type = {wanted!r} is not one of {', '.join(choices)}{more}")
        if wanted not in (None, current):
            section.clear()
            self._forget(f"{path}.")
        if wanted is not None:
            self._note(f"{path}.type")
        section["type"] = current if wanted is None else wanted

    def _note(self, path: str) -> None:
        self.ranks[path], self.sources[path] = self._rank, self._source

    def _forget(self, prefix: str) -> None:
        for path in [path for path in self.sources if path.startswith(prefix)]:
            del self.sources[path], self.ranks[path]


def default_tag(field: inspect.Field) -> str | None:
    """The `type` that a tagged union has when nobody says one; None where one must be given."""
    return None if field.default is REQUIRED else tag_of(field.default)


def _first_leaf(path: str, value: Any) -> str:
    while isinstance(value, Mapping) and value:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}"
    return path


def _unknown(path: str, variant: str | None) -> str:
    candidates = [setting.path for setting in settings() if setting.variant in (None, variant)]
    hint = nearest(path, candidates)
    of = f" for type {variant!r}" if variant else ""
    return f"unknown setting {path}{of}" + (
        f"; did you mean {hint}?" if hint else "; `async-rl config --schema` lists all"
    )


def type_at(path: str, data: Mapping[str, Any]) -> inspect.Type | None:
    """Type of the setting at a path, given the union members chosen in `data`; None when there is no such setting."""
    type_: inspect.Type = root()
    for key in path.split("."):
        if key == "type" and tags(type_):
            return inspect.StrType()
        field = fields_of(type_, data).get(key)
        if field is None:
            return None
        type_ = field.type
        data = data.get(key, {})
        if tags(type_) and "type" not in data:
            data = {**data, "type": default_tag(field)}
    return type_


def parse_value(text: str, type_: inspect.Type | None) -> Any:
    """Value of an override: TOML, except that bare words are text and `a,b` is a list where one is wanted."""
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        value = text
    if type_ is None or (isinstance(value, str) and value != text):
        return value
    if type(value) is int and allows(type_, inspect.IntType):
        return value
    if allows(type_, inspect.StrType, inspect.LiteralType):
        return text
    if isinstance(value, str) and allows(type_, inspect.FloatType, inspect.IntType):
        return number(value)
    if not isinstance(value, list) and allows(type_, inspect.VarTupleType, inspect.TupleType):
        return [parse_value(part.strip(), item_type(type_)) for part in text.split(",")]
    return value


def number(text: str) -> Any:
    """The number that a text spells, such as '.5', which TOML does not know; else the text itself."""
    try:
        return float(text)
    except ValueError:
        return text
