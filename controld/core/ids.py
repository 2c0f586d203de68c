"""Names of the controller's own: re-exports the shared tokens, so that rooms import one place."""

from virialpb.ids import (
    ID_LENGTH_MAX,
    NO_EPOCH,
    CheckpointId,
    Epoch,
    Incarnation,
    JobId,
    NodeUid,
    SlotId,
    Token,
    slot_id,
    valid_id,
    valid_request_id,
)

__all__ = [
    "ID_LENGTH_MAX",
    "NO_EPOCH",
    "CheckpointId",
    "Epoch",
    "Incarnation",
    "JobId",
    "NodeUid",
    "SlotId",
    "Token",
    "slot_id",
    "valid_id",
    "valid_request_id",
]
