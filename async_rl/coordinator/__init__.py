"""The coordinator: owns the socket, the ledger, the members and the publications; it imports no torch.

`core` is the coordinator itself. A run has it in a process beside rank 0 of the learner (`process` is its end there,
`handle` the learner's, `link` what lies between, `calls` what is said); tests run it as a thread.
"""

from async_rl.coordinator.calls import StallError
from async_rl.coordinator.core import Coordinator
from async_rl.coordinator.facade import BatchRequest, CoordinatorEnded, Facade
from async_rl.coordinator.publishing import Transfer

__all__ = ["BatchRequest", "Coordinator", "CoordinatorEnded", "Facade", "StallError", "Transfer"]
