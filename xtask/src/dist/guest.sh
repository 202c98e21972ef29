# A guest that writes its two disks and compares what it reads, until the host says a line. If QEMU loses the connection of a disk, the
# disk hangs.
works() {
    for disk in vda vdb; do drive $disk & done
    read -r answer
    : >/tmp/over
    wait
    end "^$"
}

# In each lap it writes a part of the disk $1, and reads all parts.
drive() {
    dd if=/dev/urandom of="/tmp/$1" bs=64k count=32 2>/dev/null
    dd if="/tmp/$1" of="/dev/$1" bs=64k oflag=direct 2>/dev/null
    part=0
    until [ -e /tmp/over ]; do
        part=$(((part + 4) % 32))
        dd if=/dev/urandom of="/tmp/$1" bs=64k count=4 seek=$part conv=notrunc 2>/dev/null
        dd if="/tmp/$1" of="/dev/$1" bs=64k count=4 skip=$part seek=$part oflag=direct conv=fsync 2>/tmp/output ||
            fail "$1-write" "$(tail -n 1 /tmp/output)"
        dd if="/dev/$1" bs=64k count=32 iflag=direct 2>/dev/null | cmp - "/tmp/$1" >/tmp/output 2>&1 ||
            fail "$1-compare" "$(tail -n 1 /tmp/output)"
        read -r now idle </proc/uptime
        mark lap "$1" "$now"
    done
    ok "$1"
}
