// Adds a disk to a node, changes it, and removes it, and prints what the node reports meanwhile.
//
// The arguments are the control socket of the node and an image. run.sh generates the package node.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"cleave.example/disk/node"
)

// event is what the events of a disk have beside the fields of all events.
type event struct {
	node.Event
	Socket, Error string
}

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: disk SOCKET IMAGE")
	}
	socket, image := os.Args[1], os.Args[2]
	disk := strings.TrimSuffix(filepath.Base(image), filepath.Ext(image))
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}
	transport := &http.Client{Transport: &http.Transport{DialContext: dial}}
	client, err := node.NewClientWithResponses("http://node", node.WithHTTPClient(transport))
	check(err)
	ctx := context.Background()

	stream, err := client.WatchEvents(ctx, &node.WatchEventsParams{})
	check(err)
	defer stream.Body.Close()
	lines := json.NewDecoder(stream.Body)
	// Prints events of the disk, up to the first of this name.
	waitFor := func(name node.EventName) event {
		for {
			var next event
			check(lines.Decode(&next))
			if next.Disk == nil || *next.Disk != disk {
				continue
			}
			fmt.Printf("%d: %s\n", next.Seq, next.Event.Event)
			switch next.Event.Event {
			case node.EventNameFailed:
				log.Fatal(next.Error)
			case name:
				return next
			}
		}
	}
	// The first line says that nothing from here on is missed.
	var first event
	check(lines.Decode(&first))
	if first.Event.Event != node.EventNameListening {
		log.Fatalf("the first event is %s", first.Event.Event)
	}

	queues := 2
	added, err := client.PutDiskWithResponse(ctx, disk, nil, node.DiskConfig{Disk: []string{image}, Queues: &queues})
	check(err)
	done(added.StatusCode(), added.Body)
	fmt.Println("a VMM can connect to", waitFor(node.EventNameServing).Socket)
	interrupt := node.ChangeCompletionInterrupt
	changed, err := client.PatchDiskWithResponse(ctx, disk, nil, node.Change{Completion: &interrupt})
	check(err)
	done(changed.StatusCode(), changed.Body)
	fmt.Println("its generation is", changed.JSON200.Generation, "now")
	waitFor(node.EventNameChanged)
	mode := node.Safe
	removed, err := client.DeleteDiskWithResponse(ctx, disk, &node.DeleteDiskParams{Mode: &mode})
	check(err)
	done(removed.StatusCode(), removed.Body)
	waitFor(node.EventNameRemoved)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// done ends the program if the node has refused; the body says why.
func done(status int, body []byte) {
	if status >= 300 {
		log.Fatalf("refused: %s", body)
	}
}
