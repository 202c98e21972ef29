# Sourced by boot.sh: daemons that end below a driver, or a guest, that cannot connect again, and that compares all that it reads.

# Starts such a driver with the options $@. It works until its input ends, or a daemon closes a connection.
begin_drive() {
    rm -f "$work.input"
    # It begins its file a moment later, and the words of the last one would be taken for its own.
    : >"$work.drive"
    mkfifo "$work.input"
    inside /drive "$@" --mix 50 --depth 8 --rate 1000 --verify --until-eof \
        <"$work.input" >"$work.drive" 2>&1 &
    driver=$!
    exec 9>"$work.input"
    until_true grep -q '^driving' "$work.drive"
    inside journalctl --sync
    inside journalctl --cursor-file=/tmp/cursor >/dev/null
}

# Ends the driver, and prints the pauses that the unit $1 has logged. Each of its $2 hand-overs has to be among them, and each
# take-over after a kill, of which there were $3.
end_drive() {
    # A process says so when it serves, which the end of a restart does not wait for.
    until_true has_logged "$1" "$2" "${3-0}"
    exec 9>&-
    wait $driver || fail "the driver of $1: $(cat "$work.drive"); $(inside journalctl --no-pager -n 60 -u "$1")"
    grep -q 'failed 0$' "$work.drive" || fail "the driver of $1: $(cat "$work.drive")"
    inside journalctl --sync
    inside journalctl --cursor-file=/tmp/cursor --output=cat --unit="$1" >"$work.log"
    pauses=$(sed -n 's/.*was taken over after a pause of \(.*\) ms$/\1/p' "$work.log" | sort -n)
    killed=$(grep -c 'of a daemon that died was taken over' "$work.log" || true)
    [ "$(echo "$pauses" | wc -l) $killed" = "$2 ${3-0}" ] || fail "not $2 and ${3-0} hand-overs of $1: $(cat "$work.log")"
    # The daemon may still have to notice that the driver has left.
    until_true keeps_nothing "$1"
    echo "$1: $2 hand-overs, pauses of $(echo "$pauses" | head -n 1) to $(echo "$pauses" | tail -n 1) ms"
}

# The unit $1 has logged $2 hand-overs and $3 take-overs after a kill since the driver began.
has_logged() {
    inside journalctl --sync
    inside sh -c 'journalctl --after-cursor="$(cat /tmp/cursor)" --output=cat --unit="$0"' "$1" >"$work.log"
    [ "$(grep -c 'was taken over after a pause of' "$work.log") $(grep -c 'of a daemon that died was taken over' "$work.log")" = "$2 $3" ]
}

# systemd keeps the connections of so many disks of a unit, for the case of a kill.
keeps() {
    [ "$(inside systemctl show --property NFileDescriptorStore --value "$1")" -ge "$2" ]
}

# systemd has closed what it kept: a connection that it had open would outlive the daemon.
keeps_nothing() {
    [ "$(inside systemctl show --property NFileDescriptorStore --value "$1")" = 0 ]
}

# Restarts the unit $1 five times.
restart() {
    for _ in $(seq 5); do inside systemctl restart "$1" || fail "$(inside systemctl status --no-pager "$1")"; done
}

# Has a new process take over in the unit $1 five times, or $2 times. systemd goes on with it, though it has not started it.
reload() {
    for _ in $(seq "${2-5}"); do
        was=$(pid "$1")
        # A disk that is late for two seconds stays, and nothing has changed.
        until_true inside systemctl reload "$1"
        until_true is_another "$1" "$was"
    done
}

# The process $1 has taken the connections of $2 disks over, and has said so.
took_over() {
    inside journalctl --sync
    [ "$(inside journalctl --output=cat "_PID=$1" | grep -c 'was taken over')" -ge "$2" ]
}

# Kills the daemon, which systemd starts again.
kill_it() {
    was=$(pid "$1")
    # It serves before, which is what systemd waits for.
    until_true took_over "$was" "${2-1}"
    # Until then the connections that it has just taken would end with it.
    until_true keeps "$1" "${2-1}"
    inside systemctl kill --signal=KILL "$1"
    until_true is_another "$1" "$was"
}

# A stop, unlike a restart, is the end of all connections.
stops() {
    stopped=$(date +%s%N)
    inside systemctl stop "$1"
    ! wait $driver || fail "the driver of $1 has noticed nothing"
    took=$((($(date +%s%N) - stopped) / 1000000))
    exec 9>&-
    grep -q 'a daemon closed its connection' "$work.drive" || fail "the driver of $1: $(cat "$work.drive")"
    [ $took -lt 60000 ] || fail "the driver of $1 has noticed its end only after $took ms"
    keeps_nothing "$1" || fail "systemd keeps descriptors of $1, which was stopped"
    inside journalctl --sync
    inside journalctl --cursor-file=/tmp/cursor --output=cat --unit="$1" >"$work.log"
    ! grep -q 'taken over' "$work.log" || fail "$1 was stopped and goes on: $(cat "$work.log")"
    echo "$1: stopped, noticed after $took ms"
}

# Boots a guest by the command $@, and waits until it works: it writes its two disks and compares what it reads, until `end_guest`.
begin_guest() {
    rm -f "$work.input"
    mkfifo "$work.input"
    # Longer than anything that waits for it.
    inside timeout 600 "$@" <"$work.input" >"$work.guest" 2>&1 &
    guest=$!
    exec 9>"$work.input"
    seen=0
    goes_on "at first"
}

# Waits until the guest has gone through a lap on each of its disks since $1, and prints the longest lap since the last call.
goes_on() {
    for disk in vda vdb; do
        # The lap that has begun before does not count.
        wanted=$(($(laps $disk) + 2))
        for _ in $(seq 1000); do
            [ "$(laps $disk)" -lt $wanted ] && ! grep -q FAIL "$work.guest" || break
            sleep 0.1
        done
        ! grep -q FAIL "$work.guest" || fail "the guest, $1: $(grep FAIL "$work.guest")"
        [ "$(laps $disk)" -ge $wanted ] ||
            fail "the guest does not go on, $1: $(cat "$work.guest"); $(inside journalctl --no-pager -n 60 -u 'cleave*')"
    done
    awk -v what="$1" -v seen=$seen '
        sub(/.*CLEAVE-MARK lap /, "") {
            if (NR > seen && $1 in ended) { laps++; lap = $2 - ended[$1]; sum += lap; if (lap > longest) longest = lap }
            ended[$1] = $2
        }
        END { printf "guest, %s: %d laps of %.2f s, the longest %.2f s\n", what, laps, sum / laps, longest }' "$work.guest"
    seen=$(wc -l <"$work.guest")
}

# The number of laps on the disk $1. The guest tells when each ended, in seconds since it booted.
laps() { grep -c "CLEAVE-MARK lap $1 " "$work.guest" || true; }

end_guest() {
    echo end >&9
    wait $guest || fail "QEMU: $(cat "$work.guest")"
    exec 9>&-
    grep -q CLEAVE-END "$work.guest" && ! grep -q FAIL "$work.guest" || fail "the guest: $(cat "$work.guest")"
}
