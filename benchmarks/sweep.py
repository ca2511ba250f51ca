"""Throughput of the whole loop against max_staleness, publish_every, generators and batch size, with costs set by us.

    python -m benchmarks.sweep --output benchmarks/results/sweep.json
    python -m benchmarks.sweep --draw benchmarks/results/sweep.json
    python -m benchmarks.sweep --table benchmarks/results/sweep.json [--into docs/tuning.md]

Coordinator processes, ledger, sockets, publications and generators are real; engines and the learner's step sleep for
as long as they are told, so that many points run side by side and two cores say what a cluster's loop would. Unless a
point says otherwise, generators and learner have equal rates, so the loop could at best run at that rate: the share of
it that is reached says what waiting for each other costs. The ideal limit is the smaller one of two rates measured in
the same run: what the generators sample while their slots are busy, and what the learner consumes while it trains. The
synchronous baseline is the same loop with max_staleness 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Headline,
    Repeated,
    add_draw_argument,
    add_result_arguments,
    check_clean,
    draw_result,
    read_result,
    result_file,
)
from benchmarks.coordinator import write_inputs
from benchmarks.sweep_figure import draw
from benchmarks.sweep_fleet import END_S, FleetProcess, Job
from benchmarks.sweep_point import SLOTS, Learner, Pace, Point, Steps, check_alive, make_config
from benchmarks.sweep_text import POLICIES, text, write

SIGMAS, BATCHES, BOUNDS = (0.5, 1.0), (1, 2, 4), (1, 2, 4)
LARGEST_BATCH, HEAVY = BATCHES[-1], SIGMAS[-1]
GENERATORS, PUBLISH_EVERY = (1, 2, 4), (1, 2, 4)
REPEATS = 3
"""Seeds of the points that headlines are made of."""
QUICK = Pace(tokens_per_s=2000.0, load_s=0.001, seconds=1.0, parameters=1000)


def points() -> Iterator[tuple[Point, int]]:
    """Every point of the sweep and its number of seeds."""
    for sigma in SIGMAS:
        for batch in BATCHES:
            yield Point("mask", 0, sigma, batch), REPEATS
            for bound in (*BOUNDS, *((8,) if batch < LARGEST_BATCH else ())):
                for policy in POLICIES:
                    yield Point(policy, bound, sigma, batch), REPEATS if (policy, bound) == ("mask", 2) else 1
    for generators in GENERATORS:
        for bound in (0, *BOUNDS):
            for every in PUBLISH_EVERY:
                # run_ahead of at least publish_every - 1: a batch could never fill. The rest is above already.
                if bound >= every - 1 and (every, generators) != (1, 2):
                    yield Point("mask", bound, HEAVY, LARGEST_BATCH, every, generators), 1


def quick_points() -> Iterator[tuple[Point, int]]:
    """A handful, to see that everything works."""
    yield Point("mask", 0, 0.5, 1), 1
    for policy in POLICIES:
        yield Point(policy, 2, 0.5, 1), 1
    yield Point("mask", 2, 0.5, 1, 2, 1), 1


def measure(point: Point, seed: int, pace: Pace, folder: Path, fleet: Sequence[FleetProcess], number: int) -> Steps:
    """Run one point from beginning to end; `number` is its own among those under way."""
    config = make_config(point, pace, folder, folder / "runs" / str(number), seed)
    learner = Learner(config, pace, f"point-{number}")
    generators = []
    try:
        address = learner.open()
        for place in range(point.generators):
            generators.append(fleet[place].begin(Job(number, address, f"g{place}", config)))
        learner.await_fleet(point.generators)
        steps = learner.run(lambda: check_alive(generators))
    finally:
        learner.close()
    ends = [generator.result(END_S) for generator in generators]
    if errors := [end.error for end in ends if end.error]:
        raise RuntimeError(f"{point}: a generator failed: {errors[0]}")
    steps.slot_rate = sum(end.tokens for end in ends) / sum(end.working_s for end in ends)
    return steps


def figures(point: Point, steps: Steps) -> dict[str, Any]:
    """Rates in tokens/s, shares, and medians of the parts of publications."""
    fleet = steps.fleet.resolve()
    generator_rate, learner_rate = steps.slot_rate * SLOTS * point.generators, steps.tokens / steps.train_s
    limit, trained = min(generator_rate, learner_rate), steps.tokens / steps.seconds
    overdue = sum(count for age, count in steps.ages.items() if age > point.max_staleness) / steps.tokens
    in_loss = trained * (1 - overdue if point.overdue == "mask" else 1)
    return {
        "steps": steps.steps,
        "seconds": steps.seconds,
        "generator_rate": generator_rate,
        "learner_rate": learner_rate,
        "generated_tokens_per_s": fleet["throughput/generated_tokens_per_s"],
        "trained_tokens_per_s": trained,
        "in_loss_tokens_per_s": in_loss,
        "dropped_tokens_per_s": fleet["throughput/dropped_tokens_per_s"],
        "limit_share": trained / limit,
        "in_loss_limit_share": in_loss / limit,
        "overdue_share": overdue,
        "wait_share": steps.wait_s / steps.seconds,
        "publish_share": steps.publish_s / steps.seconds,
        # Told at heartbeats: a window without one has none.
        "idle_share": fleet.get("generator/idle_share", 0.0),
        "paused_share": sum(steps.publications.get("time/pause_s", ())) / steps.seconds,
        "staleness": {str(age): count / steps.tokens for age, count in sorted(steps.ages.items())},
        "publication_s": {
            name.removeprefix("time/").removesuffix("_s"): statistics.median(values)
            for name, values in sorted(steps.publications.items())
        },
    }


def run(planned: Sequence[tuple[Point, int]], pace: Pace, lanes: int, apart_s: float = 0.0) -> list[dict[str, Any]]:
    """All points, `lanes` of them side by side, in the order planned; the first ones begin `apart_s` apart."""
    jobs = [(point, seed) for point, repeats in planned for seed in range(repeats)]
    results: dict[int, dict[str, Any]] = {}
    fleet = [FleetProcess() for _ in range(max(point.generators for point, _ in planned))]
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(folder)

        def later(wait_s: float, point: Point, seed: int, number: int) -> Steps:
            time.sleep(wait_s)
            return measure(point, seed, pace, Path(folder), fleet, number)

        try:
            with ThreadPoolExecutor(lanes) as pool:
                futures = {
                    pool.submit(later, number * apart_s if number < lanes else 0.0, point, seed, number): number
                    for number, (point, seed) in enumerate(jobs)
                }
                try:
                    for future in as_completed(futures):
                        number = futures[future]
                        point, seed = jobs[number]
                        results[number] = asdict(point) | {"seed": seed} | figures(point, future.result())
                        _tell(results[number], len(results), len(jobs))
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        finally:
            for process in fleet:
                process.close()
    return [results[number] for number in range(len(jobs))]


def _tell(result: Mapping[str, Any], done: int, of: int) -> None:
    print(f"{done}/{of} {result['overdue']}, max_staleness {result['max_staleness']}, sigma {result['sigma']:g}, batch "
          f"{result['batch_per_slots']} x slots, publish_every {result['publish_every']}, {result['generators']} "
          f"generators: {result['limit_share']:.3f} of the limit, {result['overdue_share']:.3f} overdue, "
          f"{result['steps']} steps in {result['seconds']:.0f} s", flush=True)  # fmt: skip


START_APART_S = 5.0
"""Starting is the one thing that costs processor time: many starts at once would disturb what is measured."""
SETTINGS = tuple(field.name for field in dataclasses.fields(Point))


def summarize(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each point: medians over its seeds, and the speed-up over its synchronous baseline."""
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in runs:
        grouped.setdefault(tuple(one[name] for name in SETTINGS), []).append(one)
    rows = []
    for same in grouped.values():
        row: dict[str, Any] = {name: same[0][name] for name in SETTINGS} | {"n": len(same)}
        for name, value in same[0].items():
            if isinstance(value, float) and name not in SETTINGS:
                row[name] = statistics.median(one[name] for one in same)
        row["staleness"], row["publication_s"] = same[0]["staleness"], same[0]["publication_s"]
        synchronous = _synchronous(runs, same[0])
        row["limit_share_repeated"] = Repeated.of(one["limit_share"] for one in same)
        row["in_loss_limit_share_repeated"] = Repeated.of(one["in_loss_limit_share"] for one in same)
        row["speed_up"] = Repeated.of(one["trained_tokens_per_s"] / synchronous for one in same)
        rows.append(row)
    return rows


def _synchronous(runs: Sequence[Mapping[str, Any]], point: Mapping[str, Any]) -> float:
    """Trained tokens/s of the same fleet, lengths and batch with max_staleness 0; median of its seeds."""
    same = ("sigma", "batch_per_slots", "generators")
    found = [one["trained_tokens_per_s"] for one in runs
             if one["max_staleness"] == 0 and all(one[name] == point[name] for name in same)]  # fmt: skip
    return statistics.median(found) if found else float("nan")


def headlines(rows: Sequence[Mapping[str, Any]]) -> list[Headline]:
    """Both tails at max_staleness 2, masked, with the largest batch; and what a publication is made of there."""
    found = []
    for row in rows:
        settings = {"overdue": "mask", "max_staleness": 2, "publish_every": 1, "generators": 2}
        if all(row[name] == value for name, value in settings.items()) and row["batch_per_slots"] == LARGEST_BATCH:
            where = f"sigma {row['sigma']:g}"
            found += [
                Headline(f"share of the ideal limit, {where}", row["limit_share_repeated"], "", ">= 0.95"),
                Headline(f"the same without masked tokens, {where}", row["in_loss_limit_share_repeated"]),
                Headline(f"times synchronous, {where}", row["speed_up"], "", ">= 2.3"),
            ]
            parts = row["publication_s"]
            found += [Headline(f"publication: {name}, {where}", parts[name], "s") for name in parts]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=Pace.seconds, help="for which each point is measured")
    parser.add_argument("--lanes", type=int, default=14, help="points side by side; they sleep most of the time")
    parser.add_argument("--quick", action="store_true", help="a handful of points, a second each: not for results")
    add_draw_argument(parser)
    parser.add_argument("--table", type=Path, metavar="RESULT", help="measure nothing: print a result as Markdown")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT", help="with --table: write it between the marks there")
    add_result_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.table:
        rows = read_result(arguments.table)["summary"]
        if arguments.into:
            write(rows, arguments.into)
        else:
            print(text(rows))
        return 0
    if arguments.draw:
        draw_result(arguments.draw, draw)
        return 0
    check_clean(arguments)
    planned = list(quick_points() if arguments.quick else points())
    pace = QUICK if arguments.quick else Pace(seconds=arguments.seconds)
    runs = run(planned, pace, arguments.lanes, apart_s=0.0 if arguments.quick else START_APART_S)
    rows = summarize(runs)
    result = {"pace": asdict(pace), "summary": rows, "runs": runs}
    result_file(arguments, "benchmarks.sweep", result, headlines(rows))
    if arguments.output:
        draw_result(arguments.output, draw)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
