"""Environments and rewards, one file each."""
