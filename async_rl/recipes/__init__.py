"""Policies to start from: built or converted on this machine, no download needed."""
