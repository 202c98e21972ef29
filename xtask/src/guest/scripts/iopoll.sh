# The daemon on disks whose drivers poll, and on one whose driver does not.

# serve WORDS...: in the background, until its socket is there.
serve() {
    rm -f /tmp/d.sock
    cleave serve --socket-path /tmp/d.sock --control /tmp/d.ctl --iopoll on "$@" >/tmp/daemon 2>&1 &
    daemon=$!
    until_true 100 test -S /tmp/d.sock || fail serve "$(tail -n 2 /tmp/daemon | tr '\n' ' ')"
}

stats() { cleave stats --control /tmp/d.ctl --json >/tmp/stats 2>/tmp/no-stats; }

# stat_of KEY: what the daemon says of it first. Its answer may come later than the command waits where the machine
# is late.
stat_of() {
    until_true 100 stats || fail stats "$(cat /tmp/no-stats)" >/dev/console
    tr -d ' "' </tmp/stats | tr ',' '\n' | sed -n "s/^$1://p" | head -n 1
}

# drive_on WORDS...: what comes last of an option counts.
drive_on() {
    drive --socket /tmp/d.sock --depth 8 --span 2097152 --seconds 1 "$@"
}

# leave NAME [CODE]: the daemon ends in time, and in order unless another exit code is expected.
leave() {
    kill -TERM "$daemon"
    leave_start=$(cut -d. -f1 /proc/uptime)
    wait "$daemon"
    check "$1-exit" "${2:-0}" $?
    [ $(($(cut -d. -f1 /proc/uptime) - leave_start)) -le 4 ] || fail "$1-time" "longer than 4 s"
}

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
    run "$device-verify" drive_on --verify --mix 50
    run "$device-verify-64k" drive_on --verify --mix 50 --bs 65536
    requests=$(($(stat_of reads) + $(stat_of writes)))
    polled=$(stat_of polled)
    [ "$requests" -gt 50 ] && ok "$device-requests" || fail "$device-requests" "$requests"
    [ "$polled" -ge "$requests" ] && ok "$device-polled" || fail "$device-polled" "$polled of $requests"
    check "$device-shown" true "$(stat_of iopoll)"
    drive --socket /tmp/d.sock --idle 1 >/tmp/idle 2>&1
    check "$device-idle-wakes-nobody" 1 "$(grep -c '"daemon_wakes":0,.*"daemon_cpu_ns":0}' /tmp/idle)"
    # With requests in flight.
    drive_on --mix 50 --seconds 20 >/tmp/driven 2>&1 &
    driver=$!
    sleep 1
    leave "$device-term"
    kill "$driver"
    # The rest is the daemon's doing, whatever the driver.
    [ "$device" = nvme0n1 ] || continue
    serve --disk "/dev/$device" --cache writethrough
    drive_on --mix 50 --seconds 20 >/tmp/driven 2>&1 &
    driver=$!
    sleep 1
    kill -KILL "$daemon" "$driver"
    wait "$daemon"
    serve --disk "/dev/$device" --cache writethrough
    run "$device-verify-after-kill" drive_on --verify --mix 50
    polled=$(stat_of polled)
    # Durable writes are not polled for, reads are.
    writes=$(stat_of writes)
    reads=$(stat_of reads)
    [ "$polled" -ge "$reads" ] && [ "$polled" -lt $((reads + writes)) ] && ok "$device-durable-is-not-polled" ||
        fail "$device-durable-is-not-polled" "$polled of $reads reads and $writes writes"
    leave "$device-end"
done

# Two devices under one worker, and ops that they share.
serve --disk /dev/nvme0n1 --disk /dev/vda --stripe 4K --stripe-raw
run stripe-verify drive_on --verify --mix 50 --bs 16384
[ "$(stat_of polled)" -ge $((2 * $(stat_of reads))) ] && ok stripe-polled || fail stripe-polled "$(stat_of polled)"
leave stripe-end

# A file: the device beneath it counts, and its blocks are written already.
run mkfs mkfs.ext4 -q -F /dev/vda
run mount mount -t ext4 /dev/vda /mnt
run file dd if=/dev/zero of=/mnt/disk bs=64k count=32
sync
serve --disk /mnt/disk
run file-verify drive_on --verify --mix 50
[ "$(stat_of polled)" -ge "$(stat_of reads)" ] && ok file-polled || fail file-polled "$(stat_of polled)"
leave file-end

# Every kind of op and bounced ones against a model, byte by byte; set-up levels; memory tables; what is polled for; and
# that an engine ends although a watch was signalled as it was removed, which this kernel would wait for.
for test in a_polled_disk every_way_to_set_a_polled_ring memory_is_kept_for_polled only_steps a_watch_that_is_signalled; do
    run "engine-$test" env CLEAVE_POLLED_DEVICE=/dev/nvme0n1 engine-tests "$test" --test-threads 1
done
# A drive that is pulled out with requests in flight: they fail, and what comes after them. The driver goes on kicking
# while the daemon ends.
serve --disk /dev/nvme0n1
drive --socket /tmp/d.sock --depth 8 --span 2097152 --mix 50 --seconds 20 >/tmp/driven 2>&1 &
driver=$!
sleep 1
check pulled-in-flight 0 "$(stat_of failed)"
echo 1 >/sys/block/nvme0n1/device/device/remove
sleep 1
failed=$(stat_of failed)
[ "$failed" -gt 0 ] && ok pulled-fails || fail pulled-fails "$(tail -n 2 /tmp/daemon | tr '\n' ' ')"
sleep 1
[ "$(stat_of failed)" -gt "$failed" ] && ok pulled-goes-on || fail pulled-goes-on "$failed, then $(stat_of failed)"
leave pulled-term
grep -q 'the frontend was disconnected' /tmp/daemon && ok pulled-left || fail pulled-left "$(tail -n 3 /tmp/daemon | tr '\n' ' ')"
kill "$driver"

# A drive whose reads fail here and there, and whose writes hang. It comes last: until those writes end, the kernel of
# this guest spins on behalf of the daemon that has gone, and starts nothing else.
late=$(grep -l late /sys/class/nvme/*/serial | cut -d/ -f5)n1
serve --disk "/dev/$late"
# Eight blocks, of which the second is bad.
run late-errors drive_on --span 32768
[ "$(stat_of failed)" -gt 0 ] && ok late-errors-failed || fail late-errors-failed "$(stat_of failed)"
check late-errors-logged 1 "$(grep -m 1 -c 'Read of 4096 bytes at .* failed' /tmp/daemon)"
failed=$(stat_of failed)
run late-goes-on drive_on --span 4096
check late-goes-on-well "$failed" "$(stat_of failed)"
polled=$(stat_of polled)
[ "$polled" -ge "$(stat_of reads)" ] && ok late-polled || fail late-polled "$polled of $(stat_of reads)"
drive --socket /tmp/d.sock --depth 8 --span 2097152 --write --seconds 20 >/tmp/driven 2>&1 &
driver=$!
sleep 1
oldest=$(stat_of oldest_seconds)
# Asked ever less often, it leaves the core to others.
ticks=$(cut -d' ' -f14,15 "/proc/$daemon/stat" | tr ' ' +)
sleep 2
ticks=$(($(cut -d' ' -f14,15 "/proc/$daemon/stat" | tr ' ' +) - ($ticks)))
[ "$ticks" -lt 100 ] && ok hung-naps || fail hung-naps "$ticks of 200 ticks"
check hung-in-flight 1 "$(cleave stats --control /tmp/d.ctl | grep -c ' 8 in flight')"
[ "$(stat_of oldest_seconds | cut -d. -f1)" -gt "$(echo "$oldest" | cut -d. -f1)" ] && ok hung-oldest-grows ||
    fail hung-oldest-grows "$oldest, then $(stat_of oldest_seconds)"
leave hung-term 1
# The drive may end one of them while the daemon waits.
said=$(grep -c ': [1-8] requests\? \(are\|is\) lost: still in flight after' /tmp/daemon)
[ "$said" = 1 ] && ok hung-said || fail hung-said "$(tail -n 2 /tmp/daemon | tr '\n' ' ')"
kill "$driver"
end "dev nvme"
