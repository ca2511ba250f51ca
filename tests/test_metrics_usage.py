"""Every metric that is recorded has its row with that kind, and every row is recorded somewhere."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from async_rl.metrics import CATALOGUE, find_row
from async_rl.metrics.values import Metrics

PACKAGE = Path(__file__).parents[1] / "async_rl"
KINDS = {"mean", "sum", "max", "min", "last", "histogram"}
CATALOGUE_FILE = PACKAGE / "metrics/catalogue.py"


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != CATALOGUE_FILE:
            yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def pattern(node: ast.expr) -> str | None:
    """A text, or an f-string with its varying parts open, as a regular expression."""
    match node:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(".+" if isinstance(part, ast.FormattedValue) else pattern(part) or "" for part in parts)
    return None


def filled(regex: str) -> str:
    """A key that the expression matches."""
    return regex.replace("\\", "").replace(".+", "x")


def matching_rows(regex: str) -> list[str]:
    """Kinds of the rows that a recorded key can belong to."""
    exact = find_row(filled(regex))
    if exact is not None:
        return [exact.kind]
    return [row.kind for row in CATALOGUE if re.fullmatch(regex, row.key)]


def test_recorded_keys_are_catalogued_with_their_kind() -> None:
    wrong, seen = [], 0
    for path, tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(attr=kind), args=[key, _, *_]) if kind in KINDS:
                    regex = pattern(key)
                    if regex is None or ("/" not in regex and regex not in ("step", "policy_version")):
                        continue
                    seen += 1
                    if kind not in matching_rows(regex):
                        wrong.append(f"{path}:{node.lineno}: {kind}({regex})")
    assert wrong == []
    assert seen > 20


def test_every_row_is_recorded_somewhere() -> None:
    texts = [
        regex
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.expr) and (regex := pattern(node))
    ]
    open_ended = [regex for regex in texts if ".+" in regex and re.match("[a-z]+/", regex)]
    exact = {regex.replace("\\", "") for regex in texts}
    unused = [
        row.key
        for row in CATALOGUE
        if row.key not in exact
        and not any(re.fullmatch(regex, row.key) or find_row(filled(regex)) is row for regex in open_ended)
    ]
    assert unused == []


def test_kinds_are_the_methods_of_metrics() -> None:
    assert {row.kind for row in CATALOGUE} <= KINDS
    assert all(callable(getattr(Metrics, kind)) for kind in KINDS)
