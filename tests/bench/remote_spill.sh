#!/usr/bin/env bash
# Whether remote spill fills a shaped port (tests/bench/README.md). On a fresh machine it first installs what is missing
# and builds. Options: remote_spill.sh --help
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/testbed/packages.sh" build
"$root/testbed/build.sh" switch/millrace-switch tools/millrace-flow tools/millrace-memd
exec /usr/bin/python3 -B "$root/tests/bench/remote_spill.py" "$@"
