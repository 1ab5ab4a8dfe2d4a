#!/bin/sh
# The server's link: TLS, registered sites only, a database that outlives a crash.
# Sites on other machines reach it with  --host 0.0.0.0. Make the keys first:
#  everfed flower keys . --host THIS_HOST --site one --site two --site three
set -e
here=$(cd "$(dirname "$0")/.." && pwd)
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec flower-superlink \
  --ssl-ca-certfile "$here/keys/ca.crt" \
  --ssl-certfile "$here/keys/server.crt" \
  --ssl-keyfile "$here/keys/server.key" \
  --enable-supernode-auth \
  --database "$here/superlink.db" \
  --disable-runtime-dependency-installation \
  --port 9092 \
  "$@"
