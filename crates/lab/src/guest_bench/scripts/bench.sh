# Runs fio as the host says, over the console, and gives back what fio wrote through a port, for a console is slow.
# Settings: DISKS, how many disks there must be.
#   fio          then the lines of a job file, then a line with a dot
#   probe        counts kicks from now on
#   end          looks at the kernel's log, and ends
disk_names() { ls /sys/block | grep -E '^(sd|vd|nvme)'; }
all_there() { [ "$(disk_names | wc -l)" = "$DISKS" ]; }

# The guest's own count of interrupts of its disks, of kicks where they are counted, and of busy ticks of its CPU.
cat >/counts <<'COUNTS'
#!/bin/sh
irqs=$(awk '/virtio[0-9]+-req|ahci|ata_piix|sym53c8xx|pvscsi|megasas|nvme[0-9]+q/ { n += $2 } END { print n + 0 }' /proc/interrupts)
kicks=$(awk '$1 == "kick" { n = $2 } END { print n + 0 }' /sys/kernel/tracing/kprobe_profile 2>/dev/null)
busy=$(awk '$1 == "cpu" { print $2 + $3 + $4 + $7 + $8 }' /proc/stat)
echo "$irqs ${kicks:-0} $busy"
COUNTS
# What is slow comes outside of what is measured: before the begin, after the end.
cat >/begin <<'BEGIN'
#!/bin/sh
counts=$(/counts)
echo "CLEAVE-MARK begin $1 $counts" >/dev/console
BEGIN
cat >/end <<'END'
#!/bin/sh
echo "CLEAVE-MARK end $1" >/dev/console
echo "CLEAVE-MARK counted $1 $(/counts)" >/dev/console
END
chmod +x /counts /begin /end

send() {
    cat "$1" >"$port"
    mark file "${1##*/}" "$(wc -c <"$1")"
}

run_fio() {
    while IFS= read -r line && [ "$line" != . ]; do echo "$line"; done >/tmp/job
    rm -f /tmp/*.log /tmp/result
    fio --output-format=json --output=/tmp/result /tmp/job >/tmp/said 2>&1
    status=$?
    [ $status = 0 ] || mark said "$(head -c 300 /tmp/said | tr '\n' ' ')"
    for file in /tmp/result /tmp/*_lat.log; do
        [ -e "$file" ] && send "$file"
    done
    mark done $status
}

count_kicks() {
    mount -t tracefs tracing /sys/kernel/tracing 2>/dev/null
    echo 'p:kick vp_notify' >/sys/kernel/tracing/kprobe_events &&
        echo 1 >/sys/kernel/tracing/events/kprobes/kick/enable
    mark probing $?
}

cd /tmp
until_true 100 all_there
mark disks $(for name in $(disk_names); do echo "$name:$(cat "/sys/block/$name/size")"; done)
port=$(ls /dev/vport*p1)
while read -r word; do
    case $word in
        fio) run_fio ;;
        probe) count_kicks ;;
        end) end "^$" ;;
    esac
done
