"""Wall time to a held-out accuracy: asynchronous, synchronous, TRL's GRPOTrainer and, on the real run, the plain loop.

    make peers
    python -m benchmarks.time_to_reward --output benchmarks/results/time-to-reward.json
    python -m benchmarks.time_to_reward --preset real --seeds 1 --limit-s 1500 --output FILE
    python -m benchmarks.time_to_reward --draw benchmarks/results/time-to-reward.json

Every side has the same model, problems, rewards, batch, learning rate and schedule, all cores, and the same held-out
completions (count and temperature); TRL samples with transformers, as by default. Sides run one after the other, each
seed begins with another one. The clock runs from the start of a side's process to the end of the first step whose
version reaches the goal; evaluations stop it for TRL and the plain loop, which train and evaluate in turn, and not for
us, whose evaluations run beside training. A second figure leaves start-up out: it begins at the end of the first step.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_rl.config import Config, load_config
from async_rl.recipes.summary import read_accuracies
from benchmarks.common import (
    ROOT,
    Headline,
    Repeated,
    add_draw_argument,
    add_result_arguments,
    check_clean,
    draw_result,
    read_result,
    result_file,
)
from benchmarks.time_to_reward_figure import draw, table
from benchmarks.workers import START_S, Late, Worker, peer_python, peers_missing

ASYNC, SYNC, TRL, PLAIN = "asynchronous", "synchronous", "TRL", "plain loop"
EACH = {"quickstart": 256, "real": 16}
"""Completions of one forward of TRL's."""
POLL_S = 0.2


@dataclass
class Course:
    """One side with one seed: when which step ended, and what its version got."""

    side: str
    seed: int
    ended_s: dict[int, float] = field(default_factory=dict)
    """Step -> seconds since the process started, evaluations left out where they stop the loop."""
    accuracy: dict[int, float] = field(default_factory=dict)
    note: str = ""
    """Why it ended, if not by reaching the goal."""

    def reached(self, goal: float) -> tuple[float, float] | None:
        """Seconds to the goal from the start of the process, and from the end of the first step; None: not reached."""
        steps = [step for step in sorted(self.accuracy) if self.accuracy[step] >= goal and step in self.ended_s]
        if not steps or 1 not in self.ended_s:
            return None
        end = self.ended_s[steps[0]]
        return end, max(0.0, end - self.ended_s[1])

    def row(self, goal: float) -> dict[str, Any]:
        """What the result keeps."""
        seconds, after_first = self.reached(goal) or (None, None)
        known = [step for step in sorted(self.accuracy) if step in self.ended_s]
        return {
            "side": self.side,
            "seed": self.seed,
            "seconds": seconds,
            "after_first_step_s": after_first,
            "step": None if seconds is None else min(step for step in known if self.accuracy[step] >= goal),
            "curve": [(step, round(self.ended_s[step], 1), self.accuracy[step]) for step in known],
            "note": "" if seconds is not None else self.note,
        }


def run_ours(side: str, config_path: Path, overrides: list[str], seed: int, goal: float, limit_s: float) -> Course:
    """`async-rl train` with the preset; it ends by itself at the goal."""
    course = Course(side, seed)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        own = [
            f"run.dir={run_dir}",
            f"run.stop_at_accuracy={goal}",
            *(["staleness.max_staleness=0"] if side == SYNC else []),
        ]
        began = time.monotonic()
        with (Path(folder) / "log").open("wb") as log:
            command = [sys.executable, "-m", "async_rl.cli", "train", str(config_path), *overrides, *own]
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT)
        while process.poll() is None and time.monotonic() - began < limit_s:
            _see_steps(run_dir, course, time.monotonic() - began)
            time.sleep(POLL_S)
        _see_steps(run_dir, course, time.monotonic() - began)
        _end(process)
        course.accuracy = {a.version: a.value for a in read_accuracies(run_dir)}
        course.ended_s.setdefault(0, 0.0)
        if course.reached(goal) is None:
            tail = (Path(folder) / "log").read_text(errors="replace")[-1000:]
            course.note = f"exit code {process.returncode}: {tail}"
    return course


def _see_steps(run_dir: Path, course: Course, now: float) -> None:
    """Steps whose metrics are there since the last look."""
    path = run_dir / "metrics.jsonl"
    if path.exists() and (text := path.read_text()).endswith("\n"):
        for row in map(json.loads, text.splitlines()):
            course.ended_s.setdefault(int(row["step"]), now)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a run that is at its limit; its supervisor ends the rest."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(60)


def run_peer(side: str, settings: dict[str, Any], seed: int, goal: float, limit_s: float, threads: int) -> Course:
    """TRL or the plain loop, until it has reached the goal or its time is over."""
    python = peer_python() if side == TRL else Path(sys.executable)
    assert python is not None, peers_missing()
    course, began, evaluated = Course(side, seed), time.monotonic(), 0.0
    worker = Worker(python, "benchmarks.reward_worker", settings, threads)
    try:
        while course.reached(goal) is None:
            # What is left of its time, in which evaluations do not count; they have their own.
            left = limit_s - (time.monotonic() - began - evaluated)
            told = worker.hear("for a step", max(1.0, left) + START_S / 2)
            evaluated = told["evaluating_s"]
            course.ended_s[told["step"]] = time.monotonic() - began - evaluated
            if told["accuracy"] is not None:
                course.accuracy[told["step"]] = told["accuracy"]
            if course.ended_s[told["step"]] >= limit_s or told["step"] >= settings["steps"]:
                course.note = f"{told['step']} steps in {course.ended_s[told['step']]:.0f} s"
                break
    except Late as error:
        course.note = str(error)
    finally:
        worker.close()
    return course


def sides_of(preset: str) -> list[str]:
    """Every side that can run here."""
    return [ASYNC, SYNC, *([] if peers_missing() else [TRL]), *([PLAIN] if preset == "real" else [])]


def run(arguments: argparse.Namespace, config: Config, config_path: Path) -> list[Course]:
    """Every side with every seed."""
    courses, sides = [], sides_of(arguments.preset)
    common = {"config": str(config_path), "steps": config.run.steps,
              "completions_each": arguments.trl_each or EACH[arguments.preset]}  # fmt: skip
    goal, limit_s = arguments.goal, arguments.limit_s
    for seed in range(1, arguments.seeds + 1):
        overrides = [*arguments.overrides, f"run.seed={seed}"]
        for side in sides[seed % len(sides) :] + sides[: seed % len(sides)]:
            if side in (ASYNC, SYNC):
                course = run_ours(side, config_path, overrides, seed, goal, limit_s)
            else:
                settings = common | {"overrides": overrides, "loop": "trl" if side == TRL else "plain"}
                course = run_peer(side, settings, seed, goal, limit_s, arguments.threads)
            courses.append(course)
            print(f"seed {seed}, {side}: {course.reached(goal) or 'not reached: ' + course.note}", flush=True)
    return courses


def ratios(rows: Sequence[Mapping[str, Any]], side: str, peer: str, key: str) -> list[float]:
    """The side's time over the peer's, of every seed with which both reached the goal."""
    of = {(row["side"], row["seed"]): row[key] for row in rows}
    seeds = [row["seed"] for row in rows if row["side"] == side]
    pairs = [(of[side, seed], of.get((peer, seed))) for seed in seeds]
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs]


def headlines(rows: Sequence[Mapping[str, Any]], goal: float) -> list[Headline]:
    """Times of every side, how often each reached the goal, and our time over the others'."""
    found = []
    sides = list(dict.fromkeys(row["side"] for row in rows))
    for side in sides:
        own = [row for row in rows if row["side"] == side]
        times = [row["seconds"] for row in own if row["seconds"] is not None]
        found.append(Headline(f"{side}: runs that reached {goal:g}, share", len(times) / len(own)))
        if times:
            found.append(Headline(f"{side}: seconds to {goal:g}", Repeated.of(times), "s"))
    for peer in (TRL, PLAIN, SYNC):
        for key, what in (("seconds", ""), ("after_first_step_s", ", from the end of the first step")):
            if values := ratios(rows, ASYNC, peer, key):
                target = "<= 0.6" if (peer, key) == (TRL, "seconds") else ""
                found.append(Headline(f"asynchronous, share of {peer}'s time{what}", Repeated.of(values), "", target))
    return found


def make_model(preset: str, folder: Path) -> None:
    """The preset's policy, if it is not there."""
    from async_rl.recipes import smollm2, tiny_model

    if preset == "quickstart":
        tiny_model.build(folder, print)
    else:
        smollm2.convert(folder)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="settings for every side, such as learner.lr=1e-4")
    parser.add_argument("--preset", choices=sorted(EACH), default="quickstart")
    parser.add_argument("--goal", type=float, default=0.9, help="held-out accuracy")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=600.0, help="for one side and seed")
    parser.add_argument("--threads", type=int, default=2, help="of TRL and the plain loop; ours are the preset's")
    parser.add_argument("--trl-each", type=int, help=f"completions of one forward of TRL's; default {EACH}")
    add_draw_argument(parser)
    parser.add_argument("--table", type=Path, metavar="RESULT", help="measure nothing: print a result as Markdown")
    add_result_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.table:
        print(table(read_result(arguments.table)))
        return 0
    if arguments.draw:
        draw_result(arguments.draw, draw)
        return 0
    check_clean(arguments)
    if peers_missing():
        print(f"not compared with TRL: {peers_missing()}", flush=True)
    config_path = ROOT / "configs" / f"{arguments.preset}.toml"
    config = load_config(config_path, arguments.overrides)
    make_model(arguments.preset, Path(config.model.path))
    rows = [course.row(arguments.goal) for course in run(arguments, config, config_path)]
    figures = {"preset": arguments.preset, "goal": arguments.goal, "limit_s": arguments.limit_s,
               "skipped": peers_missing(), "runs": rows}  # fmt: skip
    result_file(arguments, "benchmarks.time_to_reward", figures, headlines(rows, arguments.goal))
    if arguments.output:
        draw_result(arguments.output, draw)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
