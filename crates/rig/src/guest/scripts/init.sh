#!/bin/busybox sh
# First process of the test guest. Talks to the harness over the serial console, a line at a time:
#   CLEAVE-TEST name ok | CLEAVE-TEST name FAIL detail    a check
#   CLEAVE-MARK name values                               something the host waits for
#   CLEAVE-END                                            the script ran to its end
/bin/busybox mkdir -p /busybox /dev /proc /sys /tmp /mnt /etc
/bin/busybox --install -s /busybox
# Real tools in /bin win over busybox's own; where the shell has an applet of that name built in, only by full path.
export PATH=/bin:/busybox
ln -s busybox /bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
ln -s /proc/mounts /etc/mtab
exec </dev/console >/dev/console 2>&1
stty -echo -onlcr

ok() { echo "CLEAVE-TEST $1 ok"; }
fail() { echo "CLEAVE-TEST $1 FAIL $2"; }

# check NAME EXPECTED ACTUAL
check() {
    if [ "$2" = "$3" ]; then ok "$1"; else fail "$1" "expected '$2', found '$3'"; fi
}

# run NAME COMMAND...: ok where the command succeeds.
run() {
    run_name=$1
    shift
    if "$@" >/tmp/output 2>&1; then ok "$run_name"; else
        fail "$run_name" "'$*' ended with $?: $(tail -n 5 /tmp/output | tr '\n' ' ')"
    fi
}

mark() { echo "CLEAVE-MARK $*"; }

# ask NAME VALUES...: a mark at which the host does its part and answers a line.
ask() {
    mark "$@"
    read -r answer
}

# Each vring that the guest started has a worker of its own.
check_workers() {
    [ "$OURS" ] || return 0
    ask workers
    check worker-per-vring "$QUEUES" "$answer"
}

uptime() { cut -d. -f1 /proc/uptime; }

# until_true SECONDS COMMAND...
until_true() {
    until_end=$(($(uptime) + $1))
    shift
    while ! "$@"; do
        [ "$(uptime)" -lt "$until_end" ] || return 1
        usleep 100000
    done
}

# end PATTERN: the script's end. The kernel may complain, of the disk or of anything that the disk could have broken, only
# in lines of this pattern.
end() {
    complaints='I/O error|blk_update_request|EXT4-fs (error|warning)|JBD2.*(fail|error)|virtio.*(fail|error|broken)'
    complaints="$complaints|BUG:|WARNING:|Oops|hung_task|blocked for more"
    check kernel-log "" "$(dmesg | grep -E "$complaints" | grep -vE "$1" | head -n 3 | tr '\n' ' ')"
    echo CLEAVE-END
    poweroff -f
}

for module in $(cat /modules/order); do
    insmod "/modules/$module" || fail "module-$module" "insmod failed"
done
. /settings
# Settings: DISK, where the script needs one before it starts; BOOT, a function of the script.
[ -z "$DISK" ] || until_true 100 test -b "$DISK" || fail disk "no $DISK"
. /script
$BOOT
