# Sourced by boot.sh after the installation: pastes the ```sh blocks of the pages, in order, as the user that each page names.
# A block that this table does not know fails, so that a new one cannot be forgotten.
sources=$(cd "${0%/*}/../../.." && pwd)
inside useradd --create-home pasting
inside getent passwd libvirt-qemu >/dev/null || inside useradd --system libvirt-qemu
case $(inside qemu-system-x86_64 --version) in
*"version "[0-8].* | *"version 9."[01]*) reconnect=reconnect=1 ;;
*) reconnect=reconnect-ms=10 ;;
esac

# Programs whose commands are left out. The table in docs/testing.md says why, which `cargo xtask tidy` checks.
left_out="cargo apt cloud-hypervisor"

# Prints what is done with the block of $1, a page and the block's first line.
way() {
    case $1 in
    "README.md: truncate "*) echo "serves pasting cleave.sock" ;;
    "README.md: qemu-system-x86_64 "*) echo "guest pasting" ;;
    "install.md: usermod "* | "install.md: truncate "* | "install.md: systemctl disable "*) echo "runs root" ;;
    "qemu.md: mkdir "*) echo "serves root /run/cleave/a.sock" ;;
    "qemu.md: qemu-system-x86_64 "*) echo "guest root" ;;
    "qemu.md: usermod "*) echo "runs root" ;;
    "quick-start.md: truncate "* | "quick-start.md: cleave doctor "*) echo "runs root" ;;
    "quick-start.md: systemctl disable "* | "quick-start.md: cleave disk remove "*) echo "runs root" ;;
    "quick-start.md: qemu-system-x86_64 "*) echo "guest root cleave@data" ;;
    *) fail "pages.sh does not know this block of $1" ;;
    esac
}

# Pastes the text $2 as the user $1.
paste_as() { inside runuser --login "$1" --command "$2"; }

said_by_daemon() {
    case $unit in
    "") cat "$work.serve" ;;
    *) inside journalctl --unit "$unit" --output cat ;;
    esac
}
is_connected() { said_by_daemon | grep 'a frontend has connected'; }

pasted=0 skipped=0
paste_block() {
    text=$(printf '%s\n' "$2" | sed -E ":a; /\\\\$/ { N; s/\\\\\n *//; ba }; /^(sudo )?($(echo "$left_out" | tr ' ' '|')) /d")
    [ -n "$text" ] || { skipped=$((skipped + 1)); return; }
    first_line=$(printf '%s\n' "$text" | head -n 1)
    set -- "$1" $(way "$1: $first_line")
    [ $# -gt 1 ] || exit 1
    case $2 in
    runs) paste_as "$3" "set -e
$text" >"$work.log" 2>&1 || fail "$1: $text: $(cat "$work.log")" ;;
    serves)
        paste_as "$3" "$text" >"$work.serve" 2>&1 &
        until_true paste_as "$3" "test -S $4" ;;
    guest)
        text=$(printf '%s\n' "$text" | sed "s/-accel kvm/-accel tcg -S -display none/; s/reconnect-ms=10/$reconnect/")
        paste_as "$3" "qemu-img create -q -f qcow2 boot.qcow2 1G"
        paste_as "$3" "$text" >"$work.guest" 2>&1 &
        # The daemon of the block before, or the service that is named.
        unit=${4-}
        until_true is_connected
        inside pkill -x qemu-system-x86
        if [ -z "$unit" ]; then
            inside pkill -x cleave
            wait_gone() { ! inside pgrep -x cleave; }
            until_true wait_gone
        fi ;;
    esac
    pasted=$((pasted + 1))
}

for page in README.md docs/install.md docs/qemu.md docs/quick-start.md; do
    blocks=$(awk '/^```sh$/ { n++; in_block = 1; next } /^```/ { in_block = 0 } in_block { print n "\t" $0 }' "$sources/$page")
    for n in $(printf '%s\n' "$blocks" | cut -f 1 | uniq); do
        paste_block "${page##*/}" "$(printf '%s\n' "$blocks" | awk -F '\t' -v n="$n" '$1 == n { print substr($0, length(n) + 2) }')"
    done
done

# The rest of boot.sh starts as after the installation.
inside systemctl disable --quiet --now cleave@a cleave@a.socket cleave
inside rm -r /etc/cleave/a.conf /var/lib/images/a.img /var/lib/images/data.img /var/lib/images/vm1.img
