# After the frontend was killed in the middle of writes: the journal brings the file system back.
run mount-replays-journal mount /dev/vda /mnt
run checksums-after-kill sh -c 'cd /mnt && md5sum -c /mnt/sums'
run still-writable dd if=/dev/urandom of=/mnt/after-kill bs=64k count=16 conv=fsync
umount /mnt
run fsck-after-kill e2fsck -fn /dev/vda
end "^$"
