"""The process that runs a reward function: reads calls from stdin, writes values to stdout, imports user code only.

A frame is a 4-byte little-endian length and a msgpack body. `RewardPool` (rewards.py) starts it with
`python -P -m async_rl.envs.reward_worker` and kills it when a call takes too long: nothing here needs a timeout.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import math
import os
import re
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

LENGTH = struct.Struct("<I")
MAX_ERROR_CHARS = 300
_PR_SET_PDEATHSIG = 1
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class RewardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which function scores, and how it is called."""

    path: str
    """'rewards.py:score' or 'package.module:score'."""
    batch: bool = False
    """One call takes lists and returns a list."""
    options: dict[str, Any] = {}
    """Keyword arguments that are equal for all problems."""


class RewardItem(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to score."""

    problem_id: str
    completion: str
    answer: Any = None
    prompt: str = ""
    truncated: bool = False
    metadata: dict[str, Any] = {}

    def arguments(self) -> dict[str, Any]:
        """Return everything that a reward function may ask for by name; columns never hide the first five."""
        own = {name: getattr(self, name) for name in self.__struct_fields__ if name != "metadata"}
        return {**self.metadata, **own}


class Value(msgspec.Struct, frozen=True):
    """One result: a finite number, or the reason why there is none."""

    value: float | None = None
    error: str | None = None


def main() -> None:
    """Load the function that the first frame names, then answer calls until stdin ends."""
    _die_with_parent()
    source, sink = _take_pipes()
    sys.path.insert(0, os.getcwd())
    spec = msgspec.msgpack.decode(_read(source) or b"", type=RewardSpec)
    with asyncio.Runner() as runner:
        try:
            function = load_function(spec.path)
        except BaseException as error:  # process boundary: the pool raises it again
            return _write(sink, Value(error=describe(error)))
        _write(sink, Value())
        while (frame := _read(source)) is not None:
            items = msgspec.msgpack.decode(frame, type=list[RewardItem])
            _write(sink, run(runner, function, spec, items))


def load_function(path: str) -> Callable[..., Any]:
    """Import 'file.py:name' or 'package.module:name'; raises ValueError for a path or name that does not exist."""
    module_path, _, name = path.rpartition(":")
    if not module_path or not name:
        raise ValueError(f"reward {path!r} must be 'file.py:function' or 'package.module:function'")
    if module_path.endswith(".py"):
        file = Path(module_path).resolve()
        if not file.is_file():
            raise ValueError(f"reward {path!r}: no file {str(file)!r}")
        # Its neighbours can be imported as in a script.
        sys.path.insert(0, str(file.parent))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_path)
    function = getattr(module, name, None)
    if not callable(function):
        own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
        names = sorted(n for n, value in own.items() if callable(value) and not n.startswith("_"))
        raise ValueError(
            f"reward {path!r}: {module_path} has no function {name!r}; it has {', '.join(names) or 'none'}"
        )
    return function


def run(
    runner: asyncio.Runner, function: Callable[..., Any], spec: RewardSpec, items: Sequence[RewardItem]
) -> list[Value]:
    """Score the items with one call (batch) or one each; what goes wrong is the error of every item of the call."""
    if not spec.batch:
        return [_scored(runner, function, {**item.arguments(), **spec.options}, None)[0] for item in items]
    rows = [item.arguments() for item in items]
    names = {name: None for row in rows for name in row}
    columns = {name: [row.get(name) for row in rows] for name in names}
    return _scored(runner, function, {**columns, **spec.options}, len(items))


def _scored(
    runner: asyncio.Runner, function: Callable[..., Any], arguments: dict[str, Any], count: int | None
) -> list[Value]:
    """Call once; `count` is the length of the list that a batch function must return, None for a single one."""
    try:
        result = function(**select_arguments(function, arguments))
        if inspect.isawaitable(result):
            result = runner.run(_await(result))
        if count is None:
            return [read_number(result)]
        values = list(result)
        if len(values) != count:
            raise ValueError(f"returned {len(values)} values for {count} completions")
        return [read_number(value) for value in values]
    except BaseException as error:  # process boundary: reported as the reason why the member failed
        return [Value(error=describe(error))] * (1 if count is None else count)


async def _await(result: Any) -> Any:
    return await result


def select_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Keep the arguments that the function declares (all for **kwargs); TypeError for one that does not exist."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    wanted = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in wanted if p.default is p.empty and p.name not in arguments]
    if missing:
        raise TypeError(f"it asks for {', '.join(missing)}; a problem has {', '.join(arguments)}")
    return {p.name: arguments[p.name] for p in wanted if p.name in arguments}


def read_number(result: Any) -> Value:
    """Read a finite number, whole: 1, -2, True, '1e-1', numpy and one-element tensors; anything else is an error."""
    if result is None:
        return Value(error="returned None, not a number")
    if isinstance(result, str):
        number = float(result) if _NUMBER.fullmatch(result.strip()) else None
    else:
        try:
            number = float(result)
        except (TypeError, ValueError, OverflowError):
            number = None
    if number is None:
        return Value(error=f"returned {str(result)[:60]!r} ({type(result).__name__}), not a number")
    return Value(value=number) if math.isfinite(number) else Value(error=f"returned {number}, not a finite number")


def describe(error: BaseException) -> str:
    """Return one line: type, message, and the line of the user's file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_ERROR_CHARS] + place


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes for frames; user code reads an empty stdin and prints to stderr."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return source, sink


def _read(source: BinaryIO) -> bytes | None:
    header = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else None


def _write(sink: BinaryIO, message: Any) -> None:
    body = msgspec.msgpack.encode(message)
    sink.write(LENGTH.pack(len(body)) + body)
    sink.flush()


def _die_with_parent() -> None:
    """On Linux, ask to be killed when the parent goes, even from within a reward that never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
