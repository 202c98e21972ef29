# The life of a disk: seen, formatted, filled, trimmed, discarded, grown; then a reboot, and all is still there.
# Settings: BYTES, GROWN_BYTES, SERIAL, BLOCK, QUEUES.

sysfs=/sys/block/vda

disk_bytes() { echo $(($(cat $sysfs/size) * 512)); }
has_grown() { [ "$(disk_bytes)" = "$GROWN_BYTES" ]; }

look() {
    check size "$1" "$(disk_bytes)"
    check serial "$SERIAL" "$(cat $sysfs/serial)"
    check logical-block-size "$BLOCK" "$(cat $sysfs/queue/logical_block_size)"
    physical=$(cat $sysfs/queue/physical_block_size)
    run physical-block-size-covers-logical [ $((physical % BLOCK)) = 0 ]
    check hardware-queues "$QUEUES" "$(ls $sysfs/mq | wc -l)"
    check writable 0 "$(cat $sysfs/ro)"
}

# A read on every CPU, so that every vring carries I/O.
touch_queues() {
    cpu=0
    while [ $cpu -lt "$QUEUES" ]; do
        run "read-on-cpu-$cpu" /bin/taskset -c $cpu dd if=/dev/vda of=/dev/null bs=64k count=16 iflag=direct
        cpu=$((cpu + 1))
    done
    ask queues-touched
}

drop_caches() { sync && echo 3 >/proc/sys/vm/drop_caches; }

fill() {
    # The file system leaves the disk's tail free: 96 of 160 MiB.
    run mkfs mkfs.ext4 -q -F -E nodiscard /dev/vda 98304
    run mount mount /dev/vda /mnt
    mkdir /mnt/files
    cp -a /bin /mnt/files/
    number=0
    while [ $number -lt 24 ]; do
        dd if=/dev/urandom of=/mnt/files/random-$number bs=$((4096 + number * 12289)) count=2 2>/dev/null
        number=$((number + 1))
    done
    dd if=/dev/urandom of=/mnt/ballast bs=1M count=16 2>/dev/null
    (cd /mnt && find files ballast -type f -exec md5sum {} +) >/tmp/sums
    cp /tmp/sums /mnt/sums
    run umount umount /mnt
    run remount mount /dev/vda /mnt
    drop_caches
    run checksums-after-remount sh -c 'cd /mnt && md5sum -c /mnt/sums'
}

trim() {
    rm /mnt/ballast
    grep -v ' ballast$' /tmp/sums >/mnt/sums
    drop_caches
    ask before-trim
    run fstrim /bin/fstrim -v /mnt
    drop_caches
    ask after-trim
    run checksums-after-trim sh -c 'cd /mnt && md5sum -c /mnt/sums'
}

# is_zero OFFSET LENGTH, in MiB
is_zero() {
    drop_caches
    dd if=/dev/vda bs=1M skip="$1" count="$2" iflag=direct 2>/dev/null | cmp -s - /tmp/zeroes
}

# Unmounted, so that what follows is the discards alone; -f, for the file system is not where they go.
discard() {
    run umount-for-discard umount /mnt
    dd if=/dev/zero of=/tmp/zeroes bs=1M count=8 2>/dev/null
    dd if=/dev/urandom of=/tmp/pattern bs=1M count=16 2>/dev/null
    run write-tail dd if=/tmp/pattern of=/dev/vda bs=1M seek=128 oflag=direct
    run blkdiscard /bin/blkdiscard -f -o $((128 << 20)) -l $((8 << 20)) /dev/vda
    run blkdiscard-reads-zero is_zero 128 8
    run write-zeroes /bin/blkdiscard -f -z -o $((136 << 20)) -l $((4 << 20)) /dev/vda
    dd if=/dev/vda of=/tmp/back bs=1M skip=136 count=8 iflag=direct 2>/dev/null
    run write-zeroes-reads-zero cmp -n $((4 << 20)) /tmp/back /tmp/zeroes
    dd if=/tmp/pattern of=/tmp/rest bs=1M skip=12 2>/dev/null
    dd if=/tmp/back of=/tmp/back-rest bs=1M skip=4 2>/dev/null
    run write-zeroes-spares-neighbours cmp /tmp/back-rest /tmp/rest
    rm -f /tmp/zeroes /tmp/pattern /tmp/back /tmp/back-rest /tmp/rest
}

grow() {
    mark resize
    run resize-seen until_true 100 has_grown
    # The new end can be used at once.
    last=$((GROWN_BYTES / 4096 - 1))
    run write-grown-end dd if=/dev/urandom of=/dev/vda bs=4096 seek=$last count=1 oflag=direct
}

if mount /dev/vda /mnt 2>/dev/null && [ -e /mnt/rebooted ]; then
    mark second-boot
    look "$GROWN_BYTES"
    run checksums-after-reboot sh -c 'cd /mnt && md5sum -c /mnt/sums'
    umount /mnt
    run fsck-after-reboot e2fsck -fn /dev/vda
    end "^$"
else
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
    mark rebooting
    reboot -f
fi
