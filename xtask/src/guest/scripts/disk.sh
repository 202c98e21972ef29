# Boots of a guest with one disk; the setting BOOT names the function. Other settings: BYTES, GROWN_BYTES, SERIAL, BLOCK,
# QUEUES.

sysfs=/sys/block/vda

disk_bytes() { echo $(($(cat $sysfs/size) * 512)); }
has_grown() { [ "$(disk_bytes)" = "$GROWN_BYTES" ]; }
drop_caches() { sync && echo 3 >/proc/sys/vm/drop_caches; }
random() { dd if=/dev/urandom "$@" 2>/dev/null; }
direct_read() { dd if=/dev/vda iflag=direct "$@" 2>/dev/null; }
checksums() { run "checksums$1" sh -c 'cd /mnt && md5sum -c /mnt/sums'; }

# The life of a disk: seen, formatted, filled, trimmed, discarded, grown; then a reboot, and all is still there.
life() {
    if mount /dev/vda /mnt 2>/dev/null && [ -e /mnt/rebooted ]; then
        look "$GROWN_BYTES"
        checksums -after-reboot
        umount /mnt
        run fsck-after-reboot e2fsck -fn /dev/vda
        end "^$"
    fi
    look "$BYTES"
    touch_queues
    fill
    trim
    discard
    grow
    run mount-again mount /dev/vda /mnt
    touch /mnt/rebooted
    sync
    umount /mnt
    reboot -f
}

look() {
    check size "$1" "$(disk_bytes)"
    check serial "$SERIAL" "$(cat $sysfs/serial)"
    check logical-block-size "$BLOCK" "$(cat $sysfs/queue/logical_block_size)"
    check physical-block-size-covers-logical 0 $(($(cat $sysfs/queue/physical_block_size) % BLOCK))
    check hardware-queues "$QUEUES" "$(ls $sysfs/mq | wc -l)"
    check writable 0 "$(cat $sysfs/ro)"
}

# A read on every CPU, so that every vring carries I/O.
touch_queues() {
    for cpu in $(seq 0 $((QUEUES - 1))); do
        run "read-on-cpu-$cpu" /bin/taskset -c "$cpu" dd if=/dev/vda of=/dev/null bs=64k count=16 iflag=direct
    done
    check_workers
}

fill() {
    # The file system leaves the disk's tail free: 96 of 160 MiB.
    run mkfs mkfs.ext4 -q -F -E nodiscard /dev/vda 98304
    run mount mount /dev/vda /mnt
    mkdir /mnt/files
    cp -a /bin /mnt/files/
    for number in $(seq 0 23); do
        random of=/mnt/files/random-"$number" bs=$((4096 + number * 12289)) count=2
    done
    random of=/mnt/ballast bs=1M count=16
    (cd /mnt && find files ballast -type f -exec md5sum {} +) >/tmp/sums
    cp /tmp/sums /mnt/sums
    run umount umount /mnt
    run remount mount /dev/vda /mnt
    drop_caches
    checksums -after-remount
}

trim() {
    rm /mnt/ballast
    grep -v ' ballast$' /tmp/sums >/mnt/sums
    drop_caches
    ask allocated
    before=$answer
    run fstrim /bin/fstrim -v /mnt
    drop_caches
    ask allocated
    # The ballast has 16 MiB; ext4 may keep a few blocks of them.
    run fstrim-shrinks-image test "$before" -gt $((answer + (12 << 20)))
    checksums -after-trim
}

is_zero() {
    drop_caches
    direct_read bs=1M skip=128 count=8 | cmp -s - /tmp/zeroes
}

# Unmounted, so that what follows is the discards alone; -f, for the file system is not where they go.
discard() {
    run umount-for-discard umount /mnt
    dd if=/dev/zero of=/tmp/zeroes bs=1M count=8 2>/dev/null
    random of=/tmp/pattern bs=1M count=16
    run write-tail dd if=/tmp/pattern of=/dev/vda bs=1M seek=128 oflag=direct
    run blkdiscard /bin/blkdiscard -f -o $((128 << 20)) -l $((8 << 20)) /dev/vda
    run blkdiscard-reads-zero is_zero
    run write-zeroes /bin/blkdiscard -f -z -o $((136 << 20)) -l $((4 << 20)) /dev/vda
    direct_read of=/tmp/back bs=1M skip=136 count=8
    run write-zeroes-reads-zero cmp -n $((4 << 20)) /tmp/back /tmp/zeroes
    dd if=/tmp/pattern of=/tmp/rest bs=1M skip=12 2>/dev/null
    dd if=/tmp/back of=/tmp/back-rest bs=1M skip=4 2>/dev/null
    run write-zeroes-spares-neighbours cmp /tmp/back-rest /tmp/rest
    rm -f /tmp/zeroes /tmp/pattern /tmp/back /tmp/back-rest /tmp/rest
}

grow() {
    [ -z "$OURS" ] || ask grow
    run resize-seen until_true 100 has_grown
    # The new end can be used at once.
    run write-grown-end dd if=/dev/urandom of=/dev/vda bs=4096 seek=$((GROWN_BYTES / 4096 - 1)) count=1 oflag=direct
}

# The frontend is killed in the middle of writes to a disk that holds files.
crash() {
    run mount mount /dev/vda /mnt
    checksums -after-restart
    while :; do
        random of=/mnt/torn bs=64k count=64 conv=fsync
        mv /mnt/torn /mnt/torn-before
    done &
    # Not luck but load: there are always writes in flight by then.
    sleep 2
    mark crash
    wait
}

# After that, the journal brings the file system back.
recover() {
    run mount-replays-journal mount /dev/vda /mnt
    checksums -after-kill
    run still-writable dd if=/dev/urandom of=/mnt/after-kill bs=64k count=16 conv=fsync
    umount /mnt
    run fsck-after-kill e2fsck -fn /dev/vda
    end "^$"
}

# A disk served read-only says so, gives its data, and takes no write.
read_only() {
    ask sum
    before=$answer
    check read-only 1 "$(cat $sysfs/ro)"
    run mount mount -o ro,noload /dev/vda /mnt
    checksums
    umount /mnt
    random of=/dev/vda bs=4096 count=1 oflag=direct
    check write-is-refused 1 $?
    ask sum
    check image-untouched "$before" "$answer"
    end "^$"
}

# copy_in OFFSET and same_at OFFSET, in MiB
copy_in() { dd if=/tmp/data of=/dev/vda bs=4k seek=$(($1 * 256)) oflag=direct 2>/tmp/dd; }
same_at() { direct_read bs=1M skip="$1" count=4 | cmp - /tmp/data; }

write_on() {
    while [ ! -e /tmp/enough ]; do
        copy_in 8 || return 1
    done
}

# The daemon ends and another takes its place: while the disk is idle, and in the middle of writes.
reconnect() {
    random of=/tmp/data bs=1M count=4
    run write copy_in 0
    ask stop
    # No daemon serves the disk now; the read waits for the next one.
    same_at 0 >/tmp/difference 2>&1 &
    reader=$!
    usleep 300000
    run read-waits kill -0 $reader
    ask start
    wait $reader
    check read-after-restart 0 $?

    write_on &
    writer=$!
    usleep 300000
    ask stop
    run writes-go-on kill -0 $writer
    ask start
    # The pass in which the daemon went away has to end.
    touch /tmp/enough
    wait $writer
    check writes-after-restart 0 $?
    run write-again copy_in 8
    run both-are-there same_at 0
    run written-is-there same_at 8
    end "^$"
}

# The disk that libvirt has attached: seen, written, and read back.
attached() {
    check size "$BYTES" "$(disk_bytes)"
    check serial "$SERIAL" "$(cat $sysfs/serial)"
    random of=/tmp/data bs=1M count=4
    run write copy_in 0
    run same same_at 0
    end "^$"
}

