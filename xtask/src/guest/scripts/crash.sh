# Writes without end to a disk that holds files; the host kills the frontend in the middle of it.
run mount mount /dev/vda /mnt
run checksums-after-restart sh -c 'cd /mnt && md5sum -c /mnt/sums'
mark busy
while :; do
    dd if=/dev/urandom of=/mnt/torn bs=64k count=64 conv=fsync 2>/dev/null
    mv /mnt/torn /mnt/torn-before
done
