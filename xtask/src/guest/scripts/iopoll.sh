# The daemon on disks whose drivers poll, and on one whose driver does not.

# For the driver of the test; what comes last of an option counts.
on="--socket /tmp/d.sock --depth 8 --span 2097152 --seconds 0.4"

# How long the daemon may take to end, for a guest that is late.
deadline=20

# serve WORDS...: in the background, until its socket is there.
serve() {
    rm -f /tmp/d.sock
    cleave serve --socket-path /tmp/d.sock --control /tmp/d.ctl --iopoll on --stop-deadline $deadline "$@" >/tmp/daemon 2>&1 &
    daemon=$!
    until_true 100 test -S /tmp/d.sock || fail serve "$(tail -n 2 /tmp/daemon | tr '\n' ' ')"
}

stats() { cleave stats --control /tmp/d.ctl --json >/tmp/stats 2>/tmp/no-stats; }

# stat_of KEY: what the daemon says of it first. Its answer may come later than the command waits where the machine
# is late.
stat_of() {
    until_true 100 stats || fail stats "$(cat /tmp/no-stats)" >/dev/console
    said_of "$1"
}

# said_of KEY: what it said of another key when it was asked last.
said_of() { tr -d ' "' </tmp/stats | tr ',' '\n' | sed -n "s/^$1://p" | head -n 1; }

# load WORDS...: in the background; a second later there are requests in flight.
load() {
    drive $on "$@" --seconds 200 >/tmp/driven 2>&1 &
    driver=$!
    sleep 1
}

# leave NAME [CODE]: the daemon ends in time, and in order unless another exit code is expected.
leave() {
    kill -TERM "$daemon"
    leave_start=$(uptime)
    wait "$daemon"
    check "$1-exit" "${2:-0}" $?
    # A disk that hangs is waited for for two seconds, and this machine may be late.
    run "$1-time" test $(($(uptime) - leave_start)) -le 40
}

# The daemon wakes nobody for a second. What it did before may be late.
idles() {
    drive --socket /tmp/d.sock --idle 1 >/tmp/idle 2>&1
    grep -q '"daemon_wakes":0,.*"daemon_cpu_ns":0}' /tmp/idle
}

# fails_more COUNT: more requests have failed than that.
fails_more() { [ "$(stat_of failed)" -gt "$1" ]; }

hangs() { cleave stats --control /tmp/d.ctl 2>/tmp/no-stats | grep -q ' 8 in flight'; }

# A kernel that hangs says where, before the host gives up.
(
    sleep 250
    for what in w l; do echo $what >/proc/sysrq-trigger; done
    dmesg | tail -n 100
    tail -n 5 /tmp/daemon
) &

if [ "$(cat /sys/block/vda/queue/io_poll)" = 0 ]; then
    cleave serve --socket-path /tmp/r.sock --disk /dev/vda --iopoll on >/tmp/refusal 2>&1
    check refused 2 $?
    check refusal-names-disk-and-remedy 1 "$(grep -c '/dev/vda.*virtio_blk.poll_queues=N' /tmp/refusal)"
    rmmod virtio_blk
    insmod /modules/virtio_blk.ko poll_queues=1
    until_true 100 test -b /dev/vda
fi

for device in nvme0n1 vda; do
    until_true 100 test -b "/dev/$device" || fail "$device" "not there"
    check "$device-io-poll" 1 "$(cat /sys/block/$device/queue/io_poll)"
    # Even where it is told to sleep.
    serve --disk "/dev/$device" --completion interrupt
    run "$device-verify" drive $on --verify --mix 50
    run "$device-verify-64k" drive $on --verify --mix 50 --bs 65536
    requests=$(($(stat_of reads) + $(said_of writes)))
    run "$device-requests" test "$requests" -gt 50
    run "$device-polled" test "$(said_of polled)" -ge "$requests"
    check "$device-shown" true "$(said_of iopoll)"
    run "$device-idle-wakes-nobody" until_true 5 idles
    load --mix 50
    leave "$device-term"
    kill "$driver"
    # The rest is the daemon's doing, whatever the driver.
    [ "$device" = nvme0n1 ] || continue
    serve --disk "/dev/$device" --cache writethrough
    load --mix 50
    kill -KILL "$daemon" "$driver"
    wait "$daemon"
    serve --disk "/dev/$device" --cache writethrough
    run "$device-verify-after-kill" drive $on --verify --mix 50
    # Durable writes are not polled for, reads are.
    polled=$(stat_of polled) reads=$(said_of reads) writes=$(said_of writes)
    run "$device-durable-is-not-polled" test "$polled" -ge "$reads" -a "$polled" -lt $((reads + writes))
    leave "$device-end"
done

# Two devices under one worker, and ops that they share.
serve --disk /dev/nvme0n1 --disk /dev/vda --stripe 4K --stripe-raw
run stripe-verify drive $on --verify --mix 50 --bs 16384
run stripe-polled test "$(stat_of polled)" -ge $((2 * $(said_of reads)))
leave stripe-end

# A file: the device beneath it counts, and its blocks are written already.
run mkfs mkfs.ext4 -q -F -O ^has_journal -E nodiscard /dev/vda
run mount mount -t ext4 /dev/vda /mnt
run file dd if=/dev/zero of=/mnt/disk bs=64k count=32
sync
serve --disk /mnt/disk
run file-verify drive $on --verify --mix 50
run file-polled test "$(stat_of polled)" -ge "$(said_of reads)"
leave file-end

# Every kind of op and bounced ones against a model, byte by byte; set-up levels; memory tables; what is polled for; and
# that an engine ends although a watch was signalled as it was removed, which this kernel would wait for.
for test in a_polled_disk every_way_to_set_a_polled_ring memory_is_kept_for_polled only_steps a_watch_that_is_signalled; do
    run "engine-$test" env CLEAVE_POLLED_DEVICE=/dev/nvme0n1 engine-tests "$test" --test-threads 1
done

# A drive that is pulled out with requests in flight: they fail, and what comes after them. The driver goes on kicking
# while the daemon ends.
serve --disk /dev/nvme0n1
load --mix 50
check pulled-in-flight 0 "$(stat_of failed)"
echo 1 >/sys/block/nvme0n1/device/device/remove
run pulled-fails until_true 100 fails_more 0
run pulled-goes-on until_true 100 fails_more "$(stat_of failed)"
leave pulled-term
run pulled-left grep -q 'the frontend was disconnected' /tmp/daemon
kill "$driver"

# A drive whose reads fail here and there, and whose writes hang. It comes last: until those writes end, the kernel of
# this guest spins on behalf of the daemon that has gone, and starts nothing else.
late=$(grep -l late /sys/class/nvme/*/serial | cut -d/ -f5)n1
deadline=2
serve --disk "/dev/$late"
# Eight blocks, of which the second is bad.
run late-errors drive $on --span 32768
failed=$(stat_of failed)
run late-errors-failed test "$failed" -gt 0
run late-errors-logged until_true 100 grep -q 'Read of 4096 bytes at .* failed' /tmp/daemon
run late-goes-on drive $on --span 4096
check late-goes-on-well "$failed" "$(stat_of failed)"
run late-polled test "$(stat_of polled)" -ge "$(said_of reads)"
load --write
run hung-in-flight until_true 100 hangs
oldest=$(stat_of oldest_seconds)
# Asked ever less often, it leaves the core to others.
ticks() { cut -d' ' -f14,15 "/proc/$daemon/stat" | tr ' ' +; }
naps() {
    before=$(ticks)
    sleep 2
    [ $(($(ticks) - ($before))) -lt 100 ]
}
# It checks a few thousand times first, which takes long where the machine is late.
run hung-naps until_true 100 naps
run hung-oldest-grows test "$(stat_of oldest_seconds | cut -d. -f1)" -gt "${oldest%.*}"
leave hung-term 1
# The drive may end one of them while the daemon waits.
run hung-said grep -q ': [1-8] requests\? \(are\|is\) lost: still in flight after' /tmp/daemon
kill "$driver"
end "dev nvme"
