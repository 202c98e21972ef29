# The disk that libvirt has attached: seen, written, and read back.
check size "$BYTES" "$(($(cat /sys/block/vda/size) * 512))"
check serial "$SERIAL" "$(cat /sys/block/vda/serial)"
dd if=/dev/urandom of=/tmp/data bs=1M count=8 2>/dev/null
run write dd if=/tmp/data of=/dev/vda bs=64k oflag=direct
run read dd if=/dev/vda of=/tmp/back bs=64k count=128 iflag=direct
run same cmp /tmp/data /tmp/back
end "^$"
