"""The error of every failed transfer; stands apart so that processes without torch can catch it."""


class WeightsError(Exception):
    """A transfer of weights failed; the message names the wait, the member and the limit."""
