"""The error that is the user's to mend."""

from __future__ import annotations


class InputError(ValueError):
    """What the user gave cannot be used: settings, files, arguments or addresses.

    The message is one line that says what is wrong, the value, the limit and the way out. `async-rl` ends with exit
    code 2 for it alone, and whoever supervises that process does not start it again: nothing would have changed.
    """
