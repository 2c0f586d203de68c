"""List pages and watch messages."""

from __future__ import annotations

from collections.abc import Iterable

from controld.core.ids import JobId
from controld.replica.hub import Cursor
from controld.service.convert.common import NODES, job_name
from virialpb.v1 import cluster_pb2, common_pb2, job_pb2


def cursor_from_proto(message: common_pb2.Cursor) -> Cursor:
    return Cursor(message.history, message.revision)


def _cursor(cursor: Cursor | None) -> common_pb2.Cursor | None:
    """None while the first pass is under way: it cannot be resumed in the middle."""
    return None if cursor is None else common_pb2.Cursor(history=cursor.history, revision=cursor.revision)


def jobs_page(jobs: Iterable[job_pb2.Job], next_page_token: str, cursor: Cursor) -> job_pb2.ListJobsResponse:
    return job_pb2.ListJobsResponse(jobs=jobs, next_page_token=next_page_token, cursor=_cursor(cursor))


def nodes_page(
    nodes: Iterable[cluster_pb2.Node], next_page_token: str, cursor: Cursor
) -> cluster_pb2.ListNodesResponse:
    return cluster_pb2.ListNodesResponse(nodes=nodes, next_page_token=next_page_token, cursor=_cursor(cursor))


def events_page(events: Iterable[common_pb2.Event], next_page_token: str) -> cluster_pb2.ListEventsResponse:
    return cluster_pb2.ListEventsResponse(events=events, next_page_token=next_page_token)


def watched_event(event: common_pb2.Event) -> cluster_pb2.WatchEventsResponse:
    return cluster_pb2.WatchEventsResponse(event=event)


def watched_job(job: job_pb2.Job, cursor: Cursor | None) -> job_pb2.WatchJobsResponse:
    return job_pb2.WatchJobsResponse(job=job, cursor=_cursor(cursor))


def deleted_job(id_: JobId, cursor: Cursor | None) -> job_pb2.WatchJobsResponse:
    return job_pb2.WatchJobsResponse(job=job_pb2.Job(name=job_name(id_)), deleted=True, cursor=_cursor(cursor))


def jobs_marker(cursor: Cursor) -> job_pb2.WatchJobsResponse:
    return job_pb2.WatchJobsResponse(synced=True, cursor=_cursor(cursor))


def watched_node(node: cluster_pb2.Node, cursor: Cursor | None) -> cluster_pb2.WatchNodesResponse:
    return cluster_pb2.WatchNodesResponse(node=node, cursor=_cursor(cursor))


def deleted_node(uid: str, name: str, cursor: Cursor | None) -> cluster_pb2.WatchNodesResponse:
    node = cluster_pb2.Node(name=f"{NODES}{name or uid}", uid=uid)
    return cluster_pb2.WatchNodesResponse(node=node, deleted=True, cursor=_cursor(cursor))


def removed_node(uid: str) -> cluster_pb2.RemoveNodeResponse:
    return cluster_pb2.RemoveNodeResponse(uid=uid)


def nodes_marker(cursor: Cursor) -> cluster_pb2.WatchNodesResponse:
    return cluster_pb2.WatchNodesResponse(synced=True, cursor=_cursor(cursor))
