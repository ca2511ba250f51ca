"""Engines: the libraries that sample tokens inside a generator."""
