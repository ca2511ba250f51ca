"""Whose fault an error is, decided where it would leave its process."""

from __future__ import annotations

import dis

from async_rl.config import ConfigError


def is_refusal(error: BaseException) -> bool:
    """Whether a `raise` of ours refused the user's input, as against a library or an operation that failed."""
    if isinstance(error, ConfigError):
        return True
    if not isinstance(error, ValueError):
        return False
    last = error.__traceback__
    assert last is not None, "only raised errors come here"
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code.co_code
    ours = str(last.tb_frame.f_globals.get("__name__", "")).startswith("async_rl")
    return ours and code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
