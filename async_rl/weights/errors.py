"""The error of every failed transfer; stands apart so that processes without torch can catch it."""

from collections.abc import Iterable


class WeightsError(Exception):
    """A transfer of weights failed; the message names the wait, the member and the limit."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        """Ranks that did not answer; empty when everybody answered, or when the failure was on this side."""
