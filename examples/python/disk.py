"""Adds a disk to a node, changes it, and removes it, and prints what the node reports meanwhile.

The arguments are the control socket of the node and an image. run.sh generates the package `cleave_node`.
"""

import json
import pathlib
import sys

import httpx
from cleave_node import Client
from cleave_node.api.disks import delete_disk, patch_disk, put_disk
from cleave_node.api.events import watch_events
from cleave_node.models import Change, ChangeCompletion, DeleteDiskMode, DiskConfig, Event, EventName, Problem

socket, image = sys.argv[1:]
disk = pathlib.Path(image).stem
client = Client(base_url="http://node", httpx_args={"transport": httpx.HTTPTransport(uds=socket)})


def done(reply):
    """Returns the reply. A refusal ends the program with what the node says."""
    if reply is None or isinstance(reply, Problem):
        sys.exit(f"refused: {reply.detail if reply else 'unexpected reply'}")
    return reply


with client.get_httpx_client().stream(**watch_events._get_kwargs()) as stream:
    events = (Event.from_dict(json.loads(line)) for line in stream.iter_lines())

    def wait_for(name):
        """Prints events of the disk, up to the first of this name."""
        for event in events:
            if event.disk == disk:
                print(f"{event.seq}: {event.event.value}")
                if event.event is EventName.FAILED:
                    sys.exit(event.additional_properties["error"])
                if event.event is name:
                    return event
        sys.exit("the node has ended")

    # The first line says that nothing from here on is missed.
    assert next(events).event is EventName.LISTENING
    done(put_disk.sync(disk, client=client, body=DiskConfig(disk=[image], queues=2)))
    served = wait_for(EventName.SERVING)
    print(f"a VMM can connect to {served.additional_properties['socket']}")
    change = Change(completion=ChangeCompletion.INTERRUPT)
    print(f"its generation is {done(patch_disk.sync(disk, client=client, body=change)).generation} now")
    wait_for(EventName.CHANGED)
    done(delete_disk.sync(disk, client=client, mode=DeleteDiskMode.SAFE))
    wait_for(EventName.REMOVED)
