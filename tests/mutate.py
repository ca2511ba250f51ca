"""Break the algorithms one place at a time and see that a test notices: `python -m tests.mutate [module ...]`.

A function alone is `module.function`.

Every sign, operator, comparison, clip, mask, detach and number of async_rl/algos is changed in turn (in memory: no file
is written). Each change, a mutant, runs in a forked process that has the new code in place of the old. Exit code 1 when
a mutant survives that EQUIVALENT does not explain, or when an explanation fits no survivor.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
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
SECONDS_PER_MUTANT = 60
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


class Mutation:
    """A pytest plugin: collects once, then forks a process for each mutant, which runs tests to the first failure."""

    def __init__(self, modules: list[str]) -> None:
        self.modules = modules
        self.total = 0
        self.survivors: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        hypothesis.settings.register_profile("mutate", max_examples=25, database=None, deadline=None, derandomize=True)
        hypothesis.settings.load_profile("mutate")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert self.survives(session, "losses", None), "the tests fail without any mutant"
        for target in self.modules:
            module, _, function = target.partition(".")
            for name, tree in mutants(module):
                if function and not name.startswith(f"{target}:"):
                    continue
                self.total += 1
                if self.survives(session, module, tree):
                    self.survivors.append(name)
                    print(f"{'equivalent' if name in EQUIVALENT else 'SURVIVED'}  {name}", flush=True)
        return True

    def survives(self, session: pytest.Session, module: str, tree: ast.Module | None) -> bool:
        """Whether all tests pass with the mutant in place."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(SECONDS_PER_MUTANT)
                silence()
                if tree is not None:
                    install(module, tree)
                status = self.first_failure(session, module)
            finally:
                os._exit(status)
        return os.waitpid(child, 0)[1] == 0

    def first_failure(self, session: pytest.Session, module: str) -> int:
        """Run the likeliest tests, then the others; 1 at the first failure, 0 when all pass."""
        likely = [f"test_{name}.py" for name in FIRST.get(module, [module])]
        items = sorted(session.items, key=lambda item: item.path.name not in likely)
        for item, following in zip(items, [*items[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
        return 0


def main() -> int:
    """Run all mutants of the modules and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", help="module, or module.function; default: all")
    modules = parser.parse_args().modules or sorted(path.stem for path in ALGOS.glob("*.py") if path.stem != "__init__")
    torch.set_num_threads(1)
    started, mutation = time.monotonic(), Mutation(modules)
    arguments = ["-q", "--capture=no", "--tb=no", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
    if code := pytest.main([*arguments, str(TESTS)], plugins=[mutation]):
        print(f"pytest ended with {code!r}")
        return 1
    covered = [name for name in EQUIVALENT if {name.split(".")[0], name.split(":")[0]} & set(modules)]
    stale = [name for name in covered if name not in mutation.survivors]
    for name in stale:
        print(f"EQUIVALENT explains no survivor: {name}")
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{mutation.total} mutants, {mutation.total - len(mutation.survivors)} killed, "
        f"{len(mutation.survivors)} survived; {time.monotonic() - started:.0f} s, "
        f"{cpu.ru_utime + cpu.ru_stime:.0f} s of CPU"
    )
    return 1 if stale or set(mutation.survivors) - set(EQUIVALENT) else 0


if __name__ == "__main__":
    sys.exit(main())
