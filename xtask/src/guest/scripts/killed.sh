# fio writes and verifies on every vring, again and again, while the host kills the daemon.
cat >/fio.ini <<'JOBS'
[every-queue]
filename=/dev/vda
direct=1
thread
ioengine=libaio
verify=crc32c
verify_fatal=1
do_verify=1
rw=randrw
bsrange=4k-64k
blockalign=4k
size=6m
offset_increment=8m
numjobs=4
iodepth=16
JOBS

verify_on() {
    while [ ! -e /tmp/enough ]; do
        fio --minimal /fio.ini >/tmp/fio 2>&1 || return 1
        echo round >>/tmp/rounds
    done
}

verify_on &
verifier=$!
ask busy
run fio-goes-on kill -0 $verifier
touch /tmp/enough
wait $verifier
status=$?
check fio-after-kills 0 $status
[ $status = 0 ] || tail -n 20 /tmp/fio
run fio-came-round test -s /tmp/rounds
check no-error-in-the-kernel-log 0 "$(dmesg | grep -ciE 'i/o error|blk_update_request')"
end "^$"
