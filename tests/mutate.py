"""Break the algorithms one place at a time and see that a test notices: `python -m tests.mutate [module ...]`.

A function alone is `module.function`.

Every sign, operator, comparison, clip, mask, detach and number of async_rl/algos is changed in turn (in memory: no file
is written). Each change, a mutant, runs in a forked process that has the new code in place of the old, up to --workers
at once, limited by its CPU time, so that other work on the machine decides nothing. Exit code 1 when a mutant survives
that EQUIVALENT does not explain, or when an explanation fits no survivor.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import math
import os
import resource
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
import torch

ALGOS = Path(__file__).parents[1] / "async_rl" / "algos"
TESTS = Path(__file__).parent / "algos"
FIRST = {
    "ratios": ["importance", "losses_reference"],
    "importance": ["importance"],
    "losses": ["losses_reference", "losses_properties"],
}
"""Tests that are likeliest to notice; a module not listed has its own."""
CPU_TIMES = 4
"""A mutant may take this many times the CPU time that the tests take without one."""
WALL_S = 3600
"""Behind it, for a process that waits and computes nothing."""
PROGRESS_EVERY = 25
_FAR = "losses.dppo: Gt -> GtE: _binary_divergence(config.divergence, inputs.behavior_logprobs, inputs.logprobs)"
EQUIVALENT: dict[str, str] = {
    "advantages._all_equal: max -> min: max(map(abs, values))": "values that close have the same magnitude",
    "advantages._group_advantages: True -> False: True": "there are as many values as scored members",
    f"{_FAR} > config.threshold": "differs at one divergence, which no formula reaches",
    "losses.dppo: Gt -> GtE: ratio > 1": "where the ratio is 1 the divergence is 0",
    "losses.dppo: Lt -> LtE: ratio < 1": "where the ratio is 1 the divergence is 0",
    "losses.sapo: Gt -> GtE: inputs.advantages > 0": "where the advantage is 0 the loss is, at either tau",
    "reductions.token_weights: without float: mask.float()": "true division makes bool float32 too",
    "shaping.soft_overlong_penalty: Lt -> LtE: excess < buffer_tokens": "both branches are -1 there",
}
"""Mutants that compute the same, by name, each with the reason."""

OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.Gt, ast.LtE),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.Lt, ast.GtE),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}
DROPPED_METHODS = ("clamp", "detach", "exp", "log", "square", "abs", "float", "double")
SWAPPED = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}


def alternatives(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in place of one node, each with a word for the change."""
    match node:
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            for other in OPERATORS[type(op)]:
                yield f"{type(op).__name__} -> {other.__name__}", ast.BinOp(node.left, other(), node.right)
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            for comparison in COMPARISONS[type(op)]:
                yield f"{type(op).__name__} -> {comparison.__name__}", ast.Compare(node.left, [comparison()], [right])
        case ast.UnaryOp(op=ast.USub() | ast.Invert() | ast.Not(), operand=operand):
            yield f"without {type(node.op).__name__}", operand
        case ast.BoolOp(op=op, values=values):
            yield "and <-> or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.Constant(value=bool() as flag):
            yield f"{flag} -> {not flag}", ast.Constant(not flag)
        case ast.Constant(value=int() | float() as number):
            yield f"{number} -> {number + 1}", ast.Constant(number + 1)
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in DROPPED_METHODS:
            yield f"without {name}", value
        case ast.Call(func=ast.Attribute(attr="where"), args=[condition, yes, no]):
            yield "where: always", yes
            yield "where: never", no
            yield "where: swapped", ast.Call(node.func, [condition, no, yes], [])
        case ast.Call(func=ast.Name(id="truncate"), args=[ratio, _]):
            yield "without truncate", ratio
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            yield f"{name} -> {SWAPPED[name]}", ast.Call(ast.Name(SWAPPED[name], ast.Load()), node.args, node.keywords)
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in SWAPPED:
            function = ast.Attribute(value, SWAPPED[name], ast.Load())
            yield f"{name} -> {SWAPPED[name]}", ast.Call(function, node.args, node.keywords)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "if: swapped", ast.IfExp(test, orelse, body)
        case ast.Subscript(value=ast.Name(id="steps" | "values" | "targets"), ctx=ast.Load()):
            yield "shifted", shifted(node)


def shifted(node: ast.Subscript) -> ast.Subscript:
    """The element before."""
    return ast.Subscript(node.value, ast.BinOp(node.slice, ast.Sub(), ast.Constant(1)), node.ctx)


class Mutator(ast.NodeTransformer):
    """Applies change number `number`, or only counts them (None); errors, texts and types are left alone."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.count = 0
        self.name = ""
        self.scope: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.scope.append(node.name)
        node.args.defaults = [self.visit(default) for default in node.args.defaults]
        node.body = [self.visit(statement) for statement in node.body]
        self.scope.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        negated = ast.UnaryOp(ast.Not(), node.test)
        if self._take("if: negated", node):
            node.test = negated
            return node
        return super().generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for word, other in alternatives(node):
            if self._take(word, node):
                return other
        return super().generic_visit(node)

    def _take(self, word: str, node: ast.AST) -> bool:
        chosen = self.count == self.number
        if chosen:
            self.name = f"{'.'.join(self.scope) or 'module'}: {word}: {ast.unparse(node).splitlines()[0]}"
        self.count += 1
        return chosen


def mutants(module: str) -> Iterator[tuple[str, ast.Module]]:
    """All mutants of a module, named; names that repeat get a number."""
    tree = ast.parse((ALGOS / f"{module}.py").read_text())
    counter = Mutator(None)
    counter.visit(copy.deepcopy(tree))
    seen: dict[str, int] = {}
    for number in range(counter.count):
        mutator = Mutator(number)
        changed = ast.fix_missing_locations(mutator.visit(copy.deepcopy(tree)))
        name = f"{module}.{mutator.name}"
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name} ({seen[name]})", changed


def install(name: str, tree: ast.Module) -> None:
    """Give the loaded module the mutant's code, in place: whoever imported a function has the mutant too."""
    module = sys.modules[f"async_rl.algos.{name}"]
    namespace = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(tree, str(module.__file__), "exec"), namespace)
    for key, new in namespace.items():
        old = getattr(module, key)
        if isinstance(new, types.FunctionType) and new.__module__ == module.__name__:
            replace_code(old, new)
        elif isinstance(new, type) and new.__module__ == module.__name__:
            for method, value in vars(new).items():
                if isinstance(value, types.FunctionType) and value.__code__.co_filename == module.__file__:
                    replace_code(vars(old)[method], value)
        elif isinstance(new, int | float | tuple):
            setattr(module, key, new)


def replace_code(old: Callable[..., object], new: Callable[..., object]) -> None:
    """Code and defaults of one function, behind its decorators."""
    inner, changed = inspect.unwrap(old), inspect.unwrap(new)
    assert isinstance(inner, types.FunctionType) and isinstance(changed, types.FunctionType)
    inner.__code__, inner.__defaults__, inner.__kwdefaults__ = (
        changed.__code__,
        changed.__defaults__,
        changed.__kwdefaults__,
    )


def silence() -> None:
    """Send what this process writes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


@dataclass(frozen=True)
class Mutant:
    """One change of one module; `tree` None: the code as it is."""

    module: str
    name: str
    tree: ast.Module | None


class Mutation:
    """A pytest plugin: collects once, then forks a process for each mutant, which runs tests to the first failure."""

    def __init__(self, modules: list[str], workers: int) -> None:
        self.modules = modules
        self.workers = workers
        self.total: Counter[str] = Counter()
        """Mutants by module."""
        self.survivors: list[str] = []
        self.undecided: list[str] = []
        """Mutants whose process was ended by something else than its tests or its CPU time, which says nothing."""
        self.cpu_s = 0.0
        self._limit_s = WALL_S
        self._running: dict[int, Mutant] = {}
        self._started = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        hypothesis.settings.register_profile("mutate", max_examples=25, database=None, deadline=None, derandomize=True)
        hypothesis.settings.load_profile("mutate")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.begin(session, Mutant("losses", "", None))
        self.collect()
        assert self.survivors == [""], "the tests fail without any mutant"
        self.survivors.clear()
        self._limit_s = math.ceil(CPU_TIMES * self.cpu_s) + 5
        print(f"the tests take {self.cpu_s:.0f} s of CPU; a mutant may take {self._limit_s} s", flush=True)
        todo = [mutant for target in self.modules for mutant in matching(target)]
        for done, mutant in enumerate(todo):
            if len(self._running) == self.workers:
                self.collect()
            if done % PROGRESS_EVERY == 0:
                self.report(done, len(todo), mutant.module)
            self.total[mutant.module] += 1
            self.begin(session, mutant)
        while self._running:
            self.collect()
        return True

    def report(self, done: int, num: int, module: str) -> None:
        """One line on how far it is."""
        elapsed = time.monotonic() - self._started
        print(f"{done} of {num} mutants ({module}), {len(self.survivors)} survived, {elapsed:.0f} s, "
              f"{self.cpu_s:.0f} s of CPU", flush=True)  # fmt: skip

    def begin(self, session: pytest.Session, mutant: Mutant) -> None:
        """Fork a process that runs the tests with the mutant in place: it exits with 0 when all pass, 1 otherwise."""
        child = os.fork()
        if child:
            self._running[child] = mutant
            return
        status = 1
        try:
            # A mutant may loop for ever; the time of other processes must not count as its own.
            resource.setrlimit(resource.RLIMIT_CPU, (self._limit_s, self._limit_s))
            signal.alarm(WALL_S)
            silence()
            if mutant.tree is not None:
                install(mutant.module, mutant.tree)
            status = self.first_failure(session, mutant)
        finally:
            os._exit(status)

    def collect(self) -> None:
        """Wait for one process to end and judge its mutant; running out of CPU time is a failure like any other."""
        child, status, used = os.wait4(-1, 0)
        mutant, cpu_s = self._running.pop(child), used.ru_utime + used.ru_stime
        self.cpu_s += cpu_s
        if status == 0:
            self.survivors.append(mutant.name)
            if mutant.tree is not None:
                print(f"{'equivalent' if mutant.name in EQUIVALENT else 'SURVIVED'}  {mutant.name}", flush=True)
        elif os.WIFSIGNALED(status) and cpu_s < self._limit_s - 1:
            self.undecided.append(mutant.name)
            print(f"UNDECIDED, signal {os.WTERMSIG(status)} after {cpu_s:.0f} s of CPU  {mutant.name}", flush=True)

    def first_failure(self, session: pytest.Session, mutant: Mutant) -> int:
        """Run the likeliest and quickest tests, then the others; 1 at the first failure, 0 when all pass."""
        likely = [f"test_{name}.py" for name in FIRST.get(mutant.module, [mutant.module])]
        function = mutant.name.split(":")[0].rpartition(".")[2].replace("_", "")

        def order(item: pytest.Item) -> tuple[bool, bool, bool]:
            named = bool(function) and function in item.name.lower().replace("_", "")
            drawn = bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))
            return item.path.name not in likely, not named, drawn

        items = sorted(session.items, key=order)
        for item, following in zip(items, [*items[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
        return 0


def matching(target: str) -> Iterator[Mutant]:
    """The mutants of a module, or of module.function."""
    module, _, function = target.partition(".")
    for name, tree in mutants(module):
        if not function or name.startswith(f"{target}:"):
            yield Mutant(module, name, tree)


def table(mutation: Mutation) -> str:
    """Counts by module, as in docs/algorithms.md."""
    lines = ["| module | mutants | killed | equivalent | survived |", "|---|---|---|---|---|"]
    for module, total in mutation.total.items():
        left = [name for name in mutation.survivors if name.startswith(f"{module}.")]
        equivalent = sum(name in EQUIVALENT for name in left)
        lines.append(f"| `{module}` | {total} | {total - len(left)} | {equivalent} | {len(left) - equivalent} |")
    return "\n".join(lines)


def main() -> int:
    """Run all mutants of the modules and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", help="module, or module.function; default: all")
    parser.add_argument("--workers", type=int, default=1, help="mutants tested at once, one core each")
    arguments = parser.parse_args()
    modules = arguments.modules or sorted(path.stem for path in ALGOS.glob("*.py") if path.stem != "__init__")
    torch.set_num_threads(1)
    started, mutation = time.monotonic(), Mutation(modules, max(1, arguments.workers))
    options = ["-q", "--capture=no", "--tb=no", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
    if code := pytest.main([*options, str(TESTS)], plugins=[mutation]):
        print(f"pytest ended with {code!r}")
        return 1
    covered = [name for name in EQUIVALENT if {name.split(".")[0], name.split(":")[0]} & set(modules)]
    stale = [name for name in covered if name not in mutation.survivors]
    for name in stale:
        print(f"EQUIVALENT explains no survivor: {name}")
    print(f"{table(mutation)}\n{time.monotonic() - started:.0f} s, {mutation.cpu_s:.0f} s of CPU")
    return 1 if stale or mutation.undecided or set(mutation.survivors) - set(EQUIVALENT) else 0


if __name__ == "__main__":
    sys.exit(main())
