"""Rows of a parquet or jsonl file, and what is wrong with them, by file, row and column."""

from __future__ import annotations

import codecs
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from async_rl.errors import InputError


@dataclass(frozen=True)
class Rows:
    """The rows of a file, counted from 1 as people do (for jsonl: lines)."""

    path: Path
    columns: tuple[str, ...]
    rows: list[tuple[int, dict[str, Any]]]

    def error(self, row: int, column: str, problem: str) -> InputError:
        """Return the error that names file, row and column."""
        return InputError(f"{self.path}, row {row}, column {column!r}: {problem}")

    def require(self, column: str, setting: str, hint: str = "") -> None:
        """Raise InputError for a column that no row has, naming those that exist and the nearest."""
        if column not in self.columns:
            near = difflib.get_close_matches(column, self.columns, n=1, cutoff=0.4)
            raise InputError(
                f"{self.path} has no column {column!r} ({setting}); it has {', '.join(map(repr, self.columns))}"
                + (f"; nearest: {near[0]!r}" if near else "")
                + hint
            )


def read_rows(path: str | Path, setting: str = "data.path") -> Rows:
    """Read a .parquet or .jsonl file; raises InputError that names the setting or the row."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{setting} = {str(path)!r}: no such file (from {str(Path.cwd())!r})")
    match path.suffix:
        case ".parquet":
            import pyarrow.parquet

            try:
                table = pyarrow.parquet.read_table(path)
            except (pyarrow.ArrowException, OSError) as error:
                raise InputError(f"{setting} = {str(path)!r}: no parquet file that can be read: {error}") from error
            rows = list(enumerate(table.to_pylist(), start=1))
            columns = tuple(table.column_names)
        case ".jsonl":
            rows = _read_jsonl(path)
            columns = tuple(dict.fromkeys(name for _, row in rows for name in row))
        case suffix:
            raise InputError(f"{setting} = {str(path)!r}: {suffix or 'no suffix'!r} is neither .parquet nor .jsonl")
    if not rows:
        raise InputError(f"{setting} = {str(path)!r} has no rows")
    return Rows(path, columns, rows)


def _read_jsonl(path: Path) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    # Lines end at \n alone: JSON strings may hold U+2028, U+0085 and the like, where str.splitlines would cut.
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append((number, msgspec.json.decode(line, type=dict[str, Any])))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InputError(f"{path}, row {number}: not a JSON object: {error}") from None
    return rows


def check_prompt(prompt: Any) -> str | None:
    """Return what is wrong with a prompt as it stands in a file; None for text, or messages that await the policy."""
    if prompt is None:
        return "null; every problem needs a prompt"
    if isinstance(prompt, str):
        return None if prompt else "empty text"
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not prompt:
        return f"{type(prompt).__name__}; expected text, or a list of {{role, content}} messages"
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {i + 1} is not an object with a role"
        if not isinstance(message.get("content"), str):
            found = "null" if message.get("content") is None else type(message["content"]).__name__
            return f"message {i + 1} has {found} as content; expected text"
    if prompt[-1]["role"] == "assistant":
        return "the last message is the assistant's, which the policy is to write; leave it out"
    return None


def check_plain(rows: Rows, number: int, column: str, value: Any) -> None:
    """Refuse what could not travel to a generator in a message."""
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise rows.error(number, column, f"cannot be sent to a generator: {error}") from None
