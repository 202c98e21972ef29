# fio writes and verifies on every vring; the setting BOOT names the function. A line of a heredoc is a job.
jobs() { sed 's/^[^ ]*/[&]/; s/ /\n/g' >/fio.ini; }

# Sequential and random, 4 KiB to 1 MiB, depth 1 and 32, libaio and io_uring.
verify() {
    check hardware-queues "$QUEUES" "$(ls /sys/block/vda/mq | wc -l)"
    jobs <<'JOBS'
global filename=/dev/vda direct=1 thread ioengine=libaio verify=crc32c verify_fatal=1 do_verify=1 stonewall
seq-4k-qd1 rw=write bs=4k size=2m iodepth=1
seq-4k-qd32 rw=write bs=4k size=8m iodepth=32
seq-1m-qd1 rw=write bs=1m size=12m iodepth=1
seq-1m-qd32 rw=write bs=1m size=32m iodepth=32
rand-4k-qd1 rw=randwrite bs=4k size=2m iodepth=1
rand-4k-qd32 rw=randwrite bs=4k size=12m iodepth=32
rand-1m-qd32 rw=randwrite bs=1m size=32m iodepth=32
rand-mixed-sizes-qd32-io_uring ioengine=io_uring rw=randrw bsrange=4k-1m blockalign=4k size=32m iodepth=32
rand-16k-qd1-io_uring ioengine=io_uring rw=randwrite bs=16k size=4m iodepth=1
every-queue-at-once rw=randwrite bsrange=4k-64k blockalign=4k size=8m offset_increment=8m numjobs=4 iodepth=8
JOBS
    run fio fio --minimal /fio.ini
    # A line a job: terse version;fio version;name;group;error;…
    while IFS=';' read -r version _ name _ error _; do
        [ "$version" = 3 ] && check "fio-$name" 0 "$error"
    done </tmp/output
    check_workers
    end "^$"
}

# The daemon polls.
verify_polled() { verify; }

# The disk is on an NBD server.
verify_nbd() { verify; }

# The disk is an image of a Ceph cluster.
verify_rbd() { verify; }

verify_on() {
    while [ ! -e /tmp/enough ]; do
        fio --minimal /fio.ini >/tmp/fio 2>&1 || return 1
        echo round >>/tmp/rounds
    done
}

# Again and again, while the host kills the daemon.
killed() {
    jobs <<'JOBS'
global filename=/dev/vda direct=1 thread ioengine=libaio verify=crc32c verify_fatal=1 do_verify=1
every-queue rw=randrw bsrange=4k-64k blockalign=4k size=6m offset_increment=8m numjobs=4 iodepth=16
JOBS
    verify_on &
    verifier=$!
    recovered=0
    for kill in $(seq "$KILLS"); do
        # QEMU comes back after a second; then there are requests in flight at any moment.
        usleep $((1300000 + kill * 377000 % 900000))
        ask kill
        recovered=$((recovered + answer))
    done
    # If the guest's CPU is the limit, few kills find a request in flight. So the number is printed and not checked.
    ask note "requests were done again after $recovered of $KILLS kills"
    run fio-goes-on kill -0 $verifier
    touch /tmp/enough
    wait $verifier
    status=$?
    check fio-after-kills 0 $status
    [ $status = 0 ] || tail -n 20 /tmp/fio
    run fio-came-round test -s /tmp/rounds
    end "^$"
}


# While the guest moves: to another QEMU with another daemon, not at all because the move is cancelled, or back from where it was
# stopped for the move.
moved() { through roll-back cancel move; }

# While its QEMU is replaced.
upgraded() { through upgrade; }

# through STEP...: as often as MOVES says, with pauses in which there is always something in flight.
through() {
    jobs <<'JOBS'
global filename=/dev/vda direct=1 thread ioengine=libaio verify=crc32c verify_fatal=1 do_verify=1
every-queue rw=randrw bsrange=4k-64k blockalign=4k size=6m offset_increment=8m numjobs=2 iodepth=16
JOBS
    verify_on &
    verifier=$!
    for round in $(seq "$MOVES"); do
        for step; do
            usleep $((300000 + round * 377000 % 500000))
            ask "$step"
            run "fio-goes-on-after-$step-$round" kill -0 $verifier
        done
    done
    touch /tmp/enough
    wait $verifier
    status=$?
    check fio-after-all 0 $status
    [ $status = 0 ] || tail -n 20 /tmp/fio
    run fio-came-round test -s /tmp/rounds
    end "^$"
}
