#!/usr/bin/env bash
# Compares an all-reduce in the network with Gloo's rings over TCP on shaped links. On a fresh machine it first
# installs what is missing and builds. Options: vs_gloo.sh --help
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/testbed/packages.sh" build gloo
"$root/testbed/build.sh" switch/millrace-switch tools/millrace-perf
exec /usr/bin/python3 "$root/tests/bench/vs_gloo.py" "$@"
