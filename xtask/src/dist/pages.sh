# Sourced by boot.sh after the installation: pastes the ```sh blocks of the pages, in order, as the user that each page names.
# A block that this table does not know fails, so that a new one cannot be forgotten.
sources=$(cd "${0%/*}/../../.." && pwd)
inside useradd --create-home pasting
inside getent passwd libvirt-qemu >/dev/null || inside useradd --system libvirt-qemu
case $(inside qemu-system-x86_64 --version) in
*"version "[0-8].* | *"version 9."[01]*) reconnect=reconnect=1 ;;
*) reconnect=reconnect-ms=10 ;;
esac

# Prints what is done with the block of $1, a page and the block's first line.
way() {
    case $1 in
    "README.md: cargo run --release -- demo" | "README.md: cargo xtask test") echo "not here: it builds from source" ;;
    # The package is installed already, from the same file.
    "README.md: cargo xtask dist") echo "serves pasting cleave.sock" ;;
    "README.md: qemu-system-x86_64 "*) echo "guest pasting" ;;
    "install.md: usermod "* | "install.md: truncate "* | "install.md: systemctl disable "*) echo "runs root" ;;
    "qemu.md: mkdir "*) echo "serves root /run/cleave/a.sock" ;;
    "qemu.md: qemu-system-x86_64 "*) echo "guest root" ;;
    "qemu.md: usermod "*) echo "runs root" ;;
    "quick-start.md: truncate "* | "quick-start.md: cleave doctor "*) echo "runs root" ;;
    "quick-start.md: systemctl disable "* | "quick-start.md: cleave disk remove "*) echo "runs root" ;;
    "quick-start.md: qemu-system-x86_64 "*) echo "guest root cleave@data" ;;
    "qemu.md: cloud-hypervisor "*) echo "not here: Debian has no Cloud Hypervisor" ;;
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
    first_line=$(printf '%s\n' "$2" | head -n 1)
    # A way has at most three words, or says why there is none.
    set -- "$1" "$2" $(way "$1: $first_line")
    [ $# -gt 2 ] || exit 1
    text=$2
    case $3 in
    not) skipped=$((skipped + 1)); return ;;
    runs) paste_as "$4" "set -e
$text" >"$work.log" 2>&1 || fail "$1: $text: $(cat "$work.log")" ;;
    serves)
        text=$(printf '%s\n' "$text" | grep -v -e '^cargo ' -e '^sudo apt ')
        paste_as "$4" "$text" >"$work.serve" 2>&1 &
        until_true paste_as "$4" "test -S $5" ;;
    guest)
        text=$(printf '%s\n' "$text" | sed "s/-accel kvm/-accel tcg -S -display none/; s/reconnect-ms=10/$reconnect/")
        paste_as "$4" "qemu-img create -q -f qcow2 boot.qcow2 1G"
        paste_as "$4" "$text" >"$work.guest" 2>&1 &
        # The daemon of the block before, or the service that is named.
        unit=${5-}
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
