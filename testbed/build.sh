#!/usr/bin/env bash
# Configures (once) and builds the tree with meson and ninja.
#
#   build.sh [--dir DIR] [--say WHAT] [-Doption=value ...] [target ...]
#
# DIR is $MILLRACE_BUILD or build/. Options count only when DIR is configured for the first time. $MILLRACE_JOBS
# limits ninja. Two builds of one directory wait for each other.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
dir=${MILLRACE_BUILD:-$root/build} what=build options=() targets=()
while [ $# -gt 0 ]; do
  case $1 in
    --dir) dir=$2; shift ;;
    --say) what=$2; shift ;;
    -D*) options+=("$1") ;;
    *) targets+=("$1") ;;
  esac
  shift
done
mkdir -p "$dir"
exec 9>"$dir/.millrace-lock"
flock 9

log=$dir/build.log
fail() {
  tail -n 60 "$log" >&2
  echo "$what: failed; the whole output is in $log" >&2
  exit 1
}

if [ ! -f "$dir/build.ninja" ]; then
  echo "$what: configuring $dir"
  meson setup "${options[@]}" "$dir" "$root" >"$log" 2>&1 9>&- || fail
fi
ninja=(ninja -C "$dir")
[ -z "${MILLRACE_JOBS:-}" ] || ninja+=(-j "$MILLRACE_JOBS")
if [ -t 1 ]; then
  "${ninja[@]}" "${targets[@]}" 9>&- || { echo "$what: failed" >&2; exit 1; }
else
  # One plain line per tenth of the way: enough to see that it moves.
  shown=
  "${ninja[@]}" "${targets[@]}" 2>&1 9>&- | tee "$log" | while IFS= read -r line; do
    if [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]]; then
      tenth=$((10 * BASH_REMATCH[1] / BASH_REMATCH[2]))
      [ "$tenth" = "$shown" ] || echo "$what: ${BASH_REMATCH[1]} of ${BASH_REMATCH[2]} steps"
      shown=$tenth
    fi
  done || fail
fi
