# The daemon ends and another takes its place: while the disk is idle, and in the middle of writes.

dd if=/dev/urandom of=/tmp/data bs=1M count=4 2>/dev/null

# copy_in OFFSET, in MiB
copy_in() { dd if=/tmp/data of=/dev/vda bs=4k seek=$(($1 * 256)) oflag=direct 2>/tmp/dd; }

# same_at OFFSET, in MiB
same_at() { dd if=/dev/vda bs=1M skip="$1" count=4 iflag=direct 2>/dev/null | cmp - /tmp/data; }

write_on() {
    while [ ! -e /tmp/enough ]; do
        copy_in 8 || return 1
    done
}

run write copy_in 0
ask idle
# No daemon serves the disk now; the read waits for the next one.
same_at 0 >/tmp/difference 2>&1 &
reader=$!
usleep 300000
run read-waits kill -0 $reader
mark waiting
wait $reader
check read-after-restart 0 $?

write_on &
writer=$!
usleep 300000
ask busy
run writes-go-on kill -0 $writer
mark waiting
# The pass in which the daemon went away has to end.
touch /tmp/enough
wait $writer
check writes-after-restart 0 $?
run write-again copy_in 8
run both-are-there same_at 0
run written-is-there same_at 8
end "^$"
