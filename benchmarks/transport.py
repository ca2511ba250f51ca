"""Groups of 100 kB through the real coordinator, against raw ZeroMQ with the same frames and a Ray actor queue.

    python -m benchmarks.transport --output benchmarks/results/transport.json --figure docs/img/transport.png

Four sides carry the same trajectories from the same number of peers (processes that do nothing else) to one consumer,
in alternated rounds: `coordinator` is the real process, with checks, ledger, leases, acknowledgements and batches for
the learner; `raw` receives the same frames on a ROUTER and drops them; `relay` also passes them on to another process;
`ray` is one queue actor with pickled groups. The main figure is the processor time of the process in the middle, which
holds on a busy machine too; groups per second are those of a saturated middle, on a machine with a core to spare.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Headline, Repeated, add_result_arguments, check_clean, result_file
from benchmarks.transport_peers import MEMBER_TOKENS, whole_group
from benchmarks.transport_sides import CoordinatorSide, Load, RaySide, Side, ZmqSide

WARM_S = 0.5
"""Of every round, before it counts."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="transport", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one round")
    parser.add_argument("--peers", type=int, default=32)
    parser.add_argument("--makers", type=int, default=2, help="processes that the peers share")
    parser.add_argument("--slots", type=int, default=32, help="members that a peer works on at once")
    parser.add_argument("--bundle", type=int, default=8, help="finished members in one message")
    parser.add_argument("--sides", default="coordinator,raw,relay,ray", help="comma-separated")
    parser.add_argument("--figure", type=Path, help="PNG of cost and rate by side")
    add_result_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    check_clean(arguments)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments, Path(folder))
    result_file(arguments, "benchmarks.transport", figures, headlines(figures))
    if arguments.figure:
        draw(figures, arguments.figure)
    return 0


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Alternate the sides; every round of one is followed by one of each other."""
    sides: list[Side] = []
    skipped: dict[str, str] = {}
    try:
        for name in arguments.sides.split(","):
            if name == "ray" and importlib.util.find_spec("ray") is None:
                skipped[name] = "ray is not installed"
                continue
            sides.append(open_side(name, arguments, folder))
        samples: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}
        for _ in range(arguments.rounds):
            for side in sides:
                for key, value in one_round(side, arguments.seconds).items():
                    samples[side.name].setdefault(key, []).append(value)
    finally:
        for side in sides:
            side.close()
    return summary(arguments, samples) | ({"skipped": skipped} if skipped else {})


def open_side(name: str, arguments: argparse.Namespace, folder: Path) -> Side:
    load = Load(arguments.peers, arguments.makers, arguments.slots, arguments.bundle)
    match name:
        case "coordinator":
            return CoordinatorSide(folder, load)
        case "ray":
            return RaySide(arguments.makers)
        case "raw" | "relay":
            return ZmqSide(name, folder, load)
    raise SystemExit(f"error: no side {name!r}; there are coordinator, raw, relay and ray")


def one_round(side: Side, seconds: float) -> dict[str, float]:
    """What a side carries and what that costs, per group; the others stand still."""
    side.resume(WARM_S + seconds)
    time.sleep(WARM_S)
    before = side.reading()
    time.sleep(seconds)
    after = side.reading()
    side.pause()
    groups = after.groups - before.groups
    if groups <= 0:
        raise RuntimeError(f"no group came through the side {side.name!r} within {seconds:g} s")
    took = after.at - before.at
    cost = {f"{who}_cpu_ms_per_group": (after.cpu_s[who] - cpu_s) * 1e3 / groups for who, cpu_s in before.cpu_s.items()}
    share = (after.cpu_s["middle"] - before.cpu_s["middle"]) / took
    return {
        "groups_per_s": groups / took,
        "mb_per_s": groups / took * group_bytes() / 1e6,
        "middle_core_share": share,
    } | cost


def group_bytes() -> int:
    """Array bytes of a group."""
    return 8 * MEMBER_TOKENS * 9


def summary(arguments: argparse.Namespace, samples: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Spreads by side, and ratios of the medians to the coordinator."""
    sides = {name: {key: Repeated.of(values) for key, values in found.items()} for name, found in samples.items()}
    messages = whole_group(arguments.bundle)
    figures: dict[str, Any] = {
        "peers": arguments.peers,
        "bundle": arguments.bundle,
        "group_bytes": group_bytes(),
        "wire_bytes_per_group": sum(len(frame) for message in messages for frame in message),
        "messages_per_group": len(messages),
        "frames_per_group": sum(map(len, messages)),
        "sides": sides,
    }
    if "coordinator" in sides:
        ours = sides["coordinator"]
        for other, found in sides.items():
            if other != "coordinator":
                rate, cost = "groups_per_s", "middle_cpu_ms_per_group"
                figures[f"rate_against_{other}"] = ours[rate].median / found[rate].median
                figures[f"cost_against_{other}"] = ours[cost].median / found[cost].median
    return figures


def headlines(figures: dict[str, Any]) -> list[Headline]:
    """What stands for the result."""
    targets = {"rate_against_raw": ">= 0.8", "rate_against_ray": ">= 5"}
    rows = [
        Headline(f"{name}: processor time of the middle per group", found["middle_cpu_ms_per_group"], "ms")
        for name, found in figures["sides"].items()
    ]
    ratios = ("rate_against_raw", "rate_against_relay", "rate_against_ray", "cost_against_raw", "cost_against_relay")
    return rows + [
        Headline(f"coordinator, {key.replace('_', ' ')}", figures[key], "times", targets.get(key, ""))
        for key in ratios
        if key in figures
    ]


def draw(figures: dict[str, Any], path: Path) -> None:
    """Two panels of bars: processor time of the middle, and groups per second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    names = list(figures["sides"])
    panels = (
        ("middle_cpu_ms_per_group", "processor time of the middle, ms per group"),
        ("groups_per_s", "groups per second"),
    )
    for axis, (key, title) in zip(axes, panels, strict=True):
        found = [figures["sides"][name][key] for name in names]
        medians = [one.median for one in found]
        errors = [[one.median - one.min for one in found], [one.max - one.median for one in found]]
        axis.bar(names, medians, yerr=errors, color=["tab:blue", "tab:gray", "tab:gray", "tab:orange"][: len(names)])
        axis.set_title(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
