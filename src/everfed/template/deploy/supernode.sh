#!/bin/sh
# A site's node:  deploy/supernode.sh SITE HOST:9092 [more options]
# It needs keys/ca.crt and the site's own keys/SITE; nothing else of keys/ belongs here.
set -e
here=$(cd "$(dirname "$0")/.." && pwd)
site=$1 link=$2
shift 2
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec flower-supernode \
  --superlink "$link" \
  --root-certificates "$here/keys/ca.crt" \
  --auth-supernode-private-key "$here/keys/$site" \
  --node-config "site=\"$site\"" \
  "$@"
