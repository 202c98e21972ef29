#!/bin/sh
# Generates clients from docs/openapi.json, and runs the examples with them against a node of its own. $1 is the program
# cleave. The generators come from PyPI and from the Go module proxy, into target/examples.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cleave=$(realpath "$1")
document=$here/../docs/openapi.json
built=$here/../target/examples
mkdir -p "$built/python" "$built/go/node"
built=$(cd "$built" && pwd)
work=$(mktemp -d)
node=
end() {
    [ -z "$node" ] || kill "$node"
    rm -rf "$work"
}
trap end EXIT
trap 'exit 1' TERM INT

mkdir "$work/run" "$work/state"
"$cleave" node --state "$work/state" --run "$work/run" 2>"$work/log" &
node=$!
truncate -s 16M "$work/disk1.img"
for _ in $(seq 100); do
    [ ! -S "$work/run/control.sock" ] || break
    sleep 0.1
done
[ -S "$work/run/control.sock" ] || { cat "$work/log"; exit 1; }

echo "Python:"
[ -x "$built/venv/bin/openapi-python-client" ] || {
    python3 -m venv "$built/venv"
    "$built/venv/bin/pip" install --quiet openapi-python-client==0.29.0
}
# It formats what it has written with a program beside it.
PATH=$built/venv/bin:$PATH openapi-python-client generate --path "$document" --meta none --overwrite \
    --fail-on-warning --output-path "$built/python/cleave_node" >/dev/null
PYTHONPATH=$built/python "$built/venv/bin/python" -B "$here/python/disk.py" "$work/run/control.sock" "$work/disk1.img"

echo "Go:"
cp "$here/go/main.go" "$here/go/go.mod" "$built/go/"
cd "$built/go"
go run github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen@v2.8.2 -generate types,client -package node \
    -o node/node.go "$document"
go mod tidy
go run . "$work/run/control.sock" "$work/disk1.img"
