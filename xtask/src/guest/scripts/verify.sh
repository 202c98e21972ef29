# fio writes and verifies: sequential and random, 4 KiB to 1 MiB, depth 1 and 32, libaio and io_uring.
check hardware-queues "$QUEUES" "$(ls /sys/block/vda/mq | wc -l)"
cat >/fio.ini <<'JOBS'
[global]
filename=/dev/vda
direct=1
thread
ioengine=libaio
verify=crc32c
verify_fatal=1
do_verify=1
[seq-4k-qd1]
rw=write
bs=4k
size=2m
iodepth=1
[seq-4k-qd32]
stonewall
rw=write
bs=4k
size=8m
iodepth=32
[seq-1m-qd1]
stonewall
rw=write
bs=1m
size=12m
iodepth=1
[seq-1m-qd32]
stonewall
rw=write
bs=1m
size=32m
iodepth=32
[rand-4k-qd1]
stonewall
rw=randwrite
bs=4k
size=2m
iodepth=1
[rand-4k-qd32]
stonewall
rw=randwrite
bs=4k
size=12m
iodepth=32
[rand-1m-qd32]
stonewall
rw=randwrite
bs=1m
size=32m
iodepth=32
[rand-mixed-sizes-qd32-io_uring]
stonewall
ioengine=io_uring
rw=randrw
bsrange=4k-1m
blockalign=4k
size=32m
iodepth=32
[rand-16k-qd1-io_uring]
stonewall
ioengine=io_uring
rw=randwrite
bs=16k
size=4m
iodepth=1
[every-queue-at-once]
stonewall
rw=randwrite
bsrange=4k-64k
blockalign=4k
size=8m
offset_increment=8m
numjobs=4
iodepth=8
JOBS
if fio --minimal /fio.ini >/tmp/fio 2>&1; then ok fio; else
    fail fio "$(grep -vE '^[0-9]+;' /tmp/fio | head -n 5 | tr '\n' ' ')"
fi
# A line a job: terse version;fio version;name;group;error;…
while IFS=';' read -r version _ name _ error _; do
    [ "$version" = 3 ] && check "fio-$name" 0 "$error"
done </tmp/fio
ask fio-done
end "^$"
