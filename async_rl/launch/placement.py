"""What a run asks of a cluster, whether that can ever fit, and both in words; nothing here knows Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from async_rl.config import Config
from async_rl.config.schema import RayLauncher, RayResources

Amounts = Mapping[str, float]
"""Resource -> amount, with Ray's names: CPU, GPU, and custom ones."""
_EPSILON = 1e-6


class Ask(NamedTuple):
    """What one process needs on one node."""

    name: str
    amounts: Amounts


def asks_of(config: Config, launcher: RayLauncher) -> list[Ask]:
    """The bundles of a run's placement group: the learner's first, then one a generator."""
    generator = amounts_of(launcher.generator_resources)
    names = [f"generator-{index}" for index in range(config.generator.count)]
    return [Ask("learner", amounts_of(launcher.learner_resources)), *(Ask(name, generator) for name in names)]


def amounts_of(resources: RayResources) -> Amounts:
    """Resources as a bundle; amounts of 0 are left out, as Ray wants it."""
    amounts = {"CPU": resources.cpus, "GPU": resources.gpus}
    for text in resources.custom:
        name, _, amount = text.rpartition("=")
        amounts[name] = float(amount)
    return {name: amount for name, amount in amounts.items() if amount > 0}


def threads(asked: int | None, resources: RayResources, processes: int) -> int:
    """CPU threads of each process that shares a bundle: what was asked for, else an even share of its CPUs."""
    return asked or max(1, int(resources.cpus) // processes)


def can_ever_fit(asks: Sequence[Ask], nodes: Sequence[Amounts], strategy: str) -> bool:
    """False where even the idle nodes could not hold the bundles; True does not promise that they can."""
    total = _sum(ask.amounts for ask in asks)
    if strategy == "STRICT_PACK":
        return any(_fits(total, node) for node in nodes)
    if strategy == "STRICT_SPREAD" and len(asks) > len(nodes):
        return False
    return _fits(total, _sum(nodes)) and all(any(_fits(ask.amounts, node) for node in nodes) for ask in asks)


def _fits(amounts: Amounts, room: Amounts) -> bool:
    return all(amount <= room.get(name, 0.0) + _EPSILON for name, amount in amounts.items())


def _sum(parts: Iterable[Amounts]) -> Amounts:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)  # type: ignore[arg-type]  # a Counter of floats
    return total


def describe_asks(asks: Sequence[Ask], strategy: str) -> str:
    """For people: "a learner with 1 CPU and 2 generators with 1 CPU, 1 GPU each (strategy PACK)"."""
    learner, *generators = asks
    text = f"a learner with {_text(learner.amounts)}"
    if generators:
        count = f"{len(generators)} generators" if len(generators) > 1 else "a generator"
        each = " each" if len(generators) > 1 else ""
        text += f" and {count} with {_text(generators[0].amounts)}{each}"
    return f"{text} (strategy {strategy})"


def describe_nodes(nodes: Sequence[Amounts], free: Amounts | None, names: Iterable[str]) -> str:
    """For people: "3 nodes (2 x 2 CPU, 1 x 1 CPU), of which 3 CPU are free"; only the resources `names`."""
    wanted = sorted(set(names))
    kinds = Counter(_text({name: node.get(name, 0.0) for name in wanted}) for node in nodes)
    text = f"{len(nodes)} nodes ({', '.join(f'{count} x {kind}' for kind, count in kinds.most_common())})"
    return (
        text if free is None else f"{text}, of which {_text({name: free.get(name, 0.0) for name in wanted})} are free"
    )


def _text(amounts: Amounts) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def host_for(configured: str, default: str, learner_node: str, nodes: Iterable[str]) -> str:
    """The address that the learner binds.

    A configured one that is not the default stays. So does the default (loopback) where all nodes of the cluster are
    one machine. Elsewhere it is the address under which the cluster knows the learner's node.
    """
    return configured if configured != default or set(nodes) <= {learner_node} else learner_node
