"""What controllers say to each other. A peer may be a release ahead: a verdict that is not known is no agreement."""

from __future__ import annotations

from controld.replica.election import Verdict
from controld.replica.peers import HandedOver, HandOver, Ping
from controld.replica.survey import Role, Told
from controld.service.convert.common import epoch_from_proto, epoch_to_proto
from controld.service.failures import invalid_field
from controld.store.members import Look
from virialpb.v1 import replica_pb2 as pb

ADDRESS_LENGTH_MAX = 300


def ping_request(address: str) -> pb.PingRequest:
    return pb.PingRequest(address=address)


def listener_from_proto(request: pb.PingRequest) -> str:
    """Raises CallError."""
    if not 0 < len(request.address) <= ADDRESS_LENGTH_MAX:
        raise invalid_field("address", "must be HOST:PORT of the controller that listens")
    return request.address


def ping_to_proto(ping: Ping) -> pb.PingResponse:
    return pb.PingResponse(
        leader_epoch=epoch_to_proto(ping.epoch), proof_age_ns=max(0, ping.proof_age_ns), revision=ping.revision
    )


def ping_from_proto(message: pb.PingResponse) -> Ping:
    return Ping(epoch_from_proto(message.leader_epoch), message.proof_age_ns, message.revision)


def question_to_proto(token: int) -> pb.AskAgreementRequest:
    return pb.AskAgreementRequest(token=token)


def verdict_to_proto(verdict: Verdict) -> pb.AskAgreementResponse:
    return pb.AskAgreementResponse(verdict=pb.AskAgreementResponse.Verdict.Value(verdict.value))


def verdict_from_proto(message: pb.AskAgreementResponse) -> Verdict:
    try:
        return Verdict(pb.AskAgreementResponse.Verdict.Name(message.verdict))
    except ValueError:
        return Verdict.BLIND


def hand_over_to_proto(request: HandOver) -> pb.HandOverRequest:
    return pb.HandOverRequest(token=request.token, revision=request.revision)


def hand_over_from_proto(message: pb.HandOverRequest) -> HandOver:
    return HandOver(message.token, message.revision)


def handed_over_to_proto(answer: HandedOver) -> pb.HandOverResponse:
    epoch = None if answer.epoch is None else epoch_to_proto(answer.epoch)
    return pb.HandOverResponse(leader_epoch=epoch, why=answer.why)


def handed_over_from_proto(message: pb.HandOverResponse) -> HandedOver:
    epoch = epoch_from_proto(message.leader_epoch) if message.HasField("leader_epoch") else None
    return HandedOver(epoch, message.why)


def told_to_proto(told: Told) -> pb.LookResponse:
    return pb.LookResponse(
        identity=told.identity,
        leads=told.role is Role.LEADS,
        loaded=told.role is not Role.LOADING,
        version=told.version,
        member=None if told.member is None else look_to_proto(told.member),
    )


def told_from_proto(message: pb.LookResponse) -> Told:
    role = Role.LEADS if message.leads else Role.FOLLOWS if message.loaded else Role.LOADING
    member = look_from_proto(message.member) if message.HasField("member") else None
    return Told(message.identity, role, message.version, member)


def look_to_proto(look: Look) -> pb.MemberLook:
    return pb.MemberLook(
        id=look.id,
        version=look.version,
        leader_id=look.leader_id,
        applied_index=look.applied_index,
        size_bytes=look.size_bytes,
        used_bytes=look.used_bytes,
        full_ids=look.full_ids,
        corrupt_ids=look.corrupt_ids,
        defragmenting=look.defragmenting,
    )


def look_from_proto(message: pb.MemberLook) -> Look:
    return Look(
        id=message.id,
        version=message.version,
        leader_id=message.leader_id,
        applied_index=message.applied_index,
        size_bytes=message.size_bytes,
        used_bytes=message.used_bytes,
        full_ids=tuple(message.full_ids),
        corrupt_ids=tuple(message.corrupt_ids),
        defragmenting=message.defragmenting,
    )


def look_request() -> pb.LookRequest:
    return pb.LookRequest()


def defragment_request() -> pb.DefragmentRequest:
    return pb.DefragmentRequest()


def defragmented_to_proto(size_bytes: int) -> pb.DefragmentResponse:
    return pb.DefragmentResponse(size_bytes=size_bytes)
