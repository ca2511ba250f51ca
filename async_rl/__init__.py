"""Asynchronous off-policy reinforcement learning of language models: a learner and a fleet of generators."""

__version__ = "0.1.0"
