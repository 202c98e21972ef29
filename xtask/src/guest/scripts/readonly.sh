# A disk served read-only says so, gives its data, and takes no write.
check read-only 1 "$(cat /sys/block/vda/ro)"
run mount mount -o ro,noload /dev/vda /mnt
run checksums sh -c 'cd /mnt && md5sum -c /mnt/sums'
umount /mnt
if dd if=/dev/urandom of=/dev/vda bs=4096 count=1 oflag=direct 2>/dev/null; then
    fail write-is-refused "dd wrote"
else
    ok write-is-refused
fi
end "^$"
