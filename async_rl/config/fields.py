"""The schema as data: every setting with its path, type, default, bounds and help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from async_rl.config.schema import Config

REQUIRED = inspect.NODEFAULT
SectionClass = type[msgspec.Struct]


@dataclass(frozen=True)
class Setting:
    """One row of the schema; `variant` is the tag of the union member that the setting belongs to."""

    path: str
    type: inspect.Type
    default: Any
    """REQUIRED when the user must give a value."""
    help: str
    owner: SectionClass
    """The section's class."""
    variant: str | None = None

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]


def bare(type_: inspect.Type) -> inspect.Type:
    """The type without its description."""
    return type_.type if isinstance(type_, inspect.Metadata) else type_


def help_of(type_: inspect.Type) -> str:
    """The description that the schema gives, or an empty text."""
    extra = type_.extra_json_schema if isinstance(type_, inspect.Metadata) else None
    return str((extra or {}).get("description", ""))


def alternatives(type_: inspect.Type) -> tuple[inspect.Type, ...]:
    """The members of a union, or the type itself."""
    type_ = bare(type_)
    members = type_.types if isinstance(type_, inspect.UnionType) else (type_,)
    return tuple(bare(member) for member in members)


def structs(type_: inspect.Type) -> tuple[inspect.StructType, ...]:
    """The sections that a type can be: none for a plain value, several for a tagged union."""
    return tuple(member for member in alternatives(type_) if isinstance(member, inspect.StructType))


def tags(type_: inspect.Type) -> tuple[str, ...]:
    """Values of `type` that a tagged union knows; empty for anything else."""
    return tuple(str(member.tag) for member in structs(type_) if member.tag is not None)


def allows(type_: inspect.Type, *kinds: type[inspect.Type]) -> bool:
    """Whether one of the alternatives is of one of the kinds."""
    return any(isinstance(member, kinds) for member in alternatives(type_))


def item_type(type_: inspect.Type) -> inspect.Type:
    """Type of a list's items; NoneType where it is no list."""
    for member in alternatives(type_):
        if isinstance(member, inspect.VarTupleType):
            return member.item_type
        if isinstance(member, inspect.TupleType):
            return member.item_types[0]
    return inspect.NoneType()


def fields_of(type_: inspect.Type, values: Mapping[str, Any]) -> dict[str, inspect.Field]:
    """Fields of a section, of the member that `values["type"]` names where it is a union; empty for a plain value."""
    for member in structs(type_):
        if member.tag is None or member.tag == values.get("type"):
            return {field.encode_name: field for field in member.fields}
    return {}


@cache
def root() -> inspect.StructType:
    """The type of `Config`."""
    info = inspect.type_info(Config)
    assert isinstance(info, inspect.StructType)
    return info


def _walk(type_: inspect.Type, prefix: str, default: Any) -> Iterator[Setting]:
    for member in structs(type_):
        variant = None if member.tag is None else str(member.tag)
        known = isinstance(default, member.cls)
        for field in member.fields:
            path = f"{prefix}{field.encode_name}"
            value = getattr(default, field.name) if known else field.default
            if not structs(field.type):
                yield Setting(path, field.type, value, help_of(field.type), member.cls, variant)
                yield from _walk(item_type(field.type), f"{path}[].", REQUIRED)
                continue
            if tags(field.type):
                tag = REQUIRED if value is REQUIRED else tag_of(value)
                yield Setting(f"{path}.type", field.type, tag, help_of(field.type), member.cls)
            yield from _walk(field.type, f"{path}.", value)


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting in the order of the schema; [] in a path stands for each item of a list."""
    return tuple(_walk(root(), "", REQUIRED))


def tag_of(section: object) -> str | None:
    """The `type` of a section that is a member of a tagged union; None for anything else."""
    tag = section.__struct_config__.tag if isinstance(section, msgspec.Struct) else None
    return None if tag is None else str(tag)
