"""Drives a node with the client that openapi-python-client has generated as the package `cleave_node`.

The argument is the control socket of the node.
"""

import json
import sys

import httpx
from cleave_node import Client
from cleave_node.api.disks import (
    delete_disk,
    fail_disk,
    flush_disk,
    get_disk,
    list_disks,
    patch_disk,
    put_disk,
    quiesce_disk,
    resize_disk,
    resume_disk,
    snapshot_disk,
    start_disk,
)
from cleave_node.api.events import watch_events
from cleave_node.api.node import get_health, get_metrics, get_node, get_openapi, get_readiness
from cleave_node.models import (
    Change,
    ChangeCompletion,
    DeleteDiskMode,
    Disk,
    DiskConfig,
    DiskRow,
    DiskState,
    Event,
    EventName,
    ListDisksFull,
    Problem,
    ProcessKind,
    QuiesceRequest,
    ResumeRequest,
    SnapshotRequest,
    StoreKind,
)

transport = httpx.HTTPTransport(uds=sys.argv[1])
client = Client(base_url="http://localhost", httpx_args={"transport": transport})


def done(operation, *words, status=200, **fields):
    """The reply to a request that has this status."""
    reply = operation.sync_detailed(*words, client=client, **fields)
    assert reply.status_code == status, reply
    return reply.parsed


config = DiskConfig(disk=["ram:1M"], queues=1, persistent=False)
added = done(put_disk, "d1", body=config, status=201)
assert isinstance(added, Disk) and added.state is DiskState.SERVING
assert added.spec.disk == ["ram:1M"] and added.store.kind is StoreKind.RAM
done(put_disk, "d1", body=config)
other = DiskConfig(disk=["ram:2M"], queues=1, persistent=False)
refused = done(put_disk, "d1", body=other, status=409)
assert isinstance(refused, Problem) and refused.type_ == "urn:cleave:fixed-fields"
assert refused.detail.startswith("disk: ")

shown = done(get_disk, "d1")
assert shown.size_bytes == 1 << 20 and shown.totals.reads == 0 and shown.error is None
[row] = done(list_disks)
assert isinstance(row, DiskRow) and (row.id, row.socket) == ("d1", shown.socket)
[full] = done(list_disks, full=ListDisksFull.YES)
assert isinstance(full, Disk) and full.process.pid > 0

change = Change(completion=ChangeCompletion.POLL, spin_cpu_total=None)
assert change.to_dict() == {"completion": "poll", "spin_cpu_total": None}
changed = done(patch_disk, "d1", body=change)
assert changed.tuning.completion == "poll" and changed.spec.completion == "poll"

assert done(resize_disk, "d1").size_bytes == 1 << 20
assert done(start_disk, "d1").state is DiskState.SERVING
assert done(flush_disk, "d1").took_ms >= 0
quiet = done(quiesce_disk, "d1", body=QuiesceRequest(seconds=30)).quiet
assert done(resume_disk, "d1", body=ResumeRequest(quiet=quiet)).quiesced
assert not done(resume_disk, "d1").quiesced
assert done(fail_disk, "d1").requests == 0
copy = SnapshotRequest(to="/no/such/folder/copy.img")
assert done(snapshot_disk, "d1", body=copy, status=400).detail

assert 'cleave_disk_state{disk="d1",state="serving"} 1' in done(get_metrics)
assert done(get_openapi)["openapi"] == "3.1.0"
node = done(get_node)
assert node.kind is ProcessKind.NODE and (node.disks.count, node.pools) == (1, [])
assert done(get_health) == done(get_readiness) == "ok\n"

with client.get_httpx_client().stream(**watch_events._get_kwargs()) as stream:
    events = (Event.from_dict(json.loads(line)) for line in stream.iter_lines())
    first = next(events)
    assert first.event is EventName.LISTENING and not first.replayed
    assert next(events).disk == "d1"
    assert done(delete_disk, "d1", mode=DeleteDiskMode.HARD).id == "d1"
    ended = next(event for event in events if event.event is EventName.ENDED)
    assert ended.disk == "d1"
place = watch_events._get_kwargs(since=first.seq, boot=first.boot)
with client.get_httpx_client().stream(**place) as stream:
    events = (Event.from_dict(json.loads(line)) for line in stream.iter_lines())
    assert next(events).replayed
    assert next(event for event in events if event.event is EventName.ENDED).seq == ended.seq
assert isinstance(done(get_disk, "d1", status=404), Problem)
assert done(list_disks) == []
