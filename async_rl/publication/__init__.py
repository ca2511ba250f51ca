"""Publication: a new version reaches every member, or the member is evicted; nobody is skipped silently."""

from async_rl.publication.actions import (
    Abandon,
    Action,
    Done,
    Evict,
    JoinGroup,
    PublicationSettings,
    Report,
    SendRelabel,
    SendSnapshot,
    SendWeights,
    WriteSnapshot,
)
from async_rl.publication.round import Publication
from async_rl.publication.sequence import Publications

__all__ = [
    "Abandon",
    "Action",
    "Done",
    "Evict",
    "JoinGroup",
    "Publication",
    "PublicationSettings",
    "Publications",
    "Report",
    "SendRelabel",
    "SendSnapshot",
    "SendWeights",
    "WriteSnapshot",
]
