# Runs a command in the unpacked source package, where cargo takes all crates from the folder `vendor`: sh dist/offline.sh COMMAND …
set -eu
export CARGO_TARGET_DIR="$PWD/target" CARGO_HOME="$PWD/target/cargo" CARGO_NET_OFFLINE=true
mkdir -p "$CARGO_HOME"
printf '[source.crates-io]\nreplace-with = "vendor"\n[source.vendor]\ndirectory = "%s/vendor"\n' "$PWD" >"$CARGO_HOME/config.toml"
exec "$@"
