#!/usr/bin/env bash
# Every Debian package that Millrace needs, in one list, and the way they get installed: only what is missing,
# without questions, and without touching the network where nothing is.
#
#   packages.sh [--list] [build] [guest] [gloo] [coverage]
#
# The default set is build; guest is for hosts that are QEMU guests with the kernel's Soft-RoCE, gloo for the
# comparison under tests/bench, coverage for tests/coverage.
set -euo pipefail

# Compilers and build tools; what the code links; what the lab and its checkers run. libdpdk-dev brings the poll
# mode drivers (net_af_packet among them), which are plugins and would be missed only at run time.
build_packages=(
  g++ clang libclang-rt-14-dev ccache meson ninja-build pkg-config
  dpdk-dev libdpdk-dev librte-net-af-packet23 librte-mempool-ring23 libnuma-dev
  librdmacm-dev libibverbs-dev libmnl-dev libpcap-dev
  libboost-dev libcli11-dev libisal-dev zlib1g-dev libhwy-dev libyaml-cpp-dev nlohmann-json3-dev
  libspdlog-dev libfmt-dev libssl-dev
  libgtest-dev libgmock-dev libbenchmark-dev
  python3 python3-yaml python3-scapy tcpdump tshark iproute2 ethtool iputils-ping
)
# The guests' machine and shell, and the RDMA tools that run in them. Their kernel is downloaded rather than
# installed: see guest_image.py.
guest_packages=(
  qemu-system-x86 busybox-static rdma-core ibverbs-providers ibverbs-utils rdmacm-utils perftest iproute2 ethtool
)
gloo_packages=(libgloo-dev)
coverage_packages=(gcovr)

say() { printf 'packages: %s\n' "$*"; }

# apt-get with its own progress protocol turned into one moving line on a terminal, and into a plain line per
# tenth otherwise. Everything else that it prints goes to the log, which is shown when it fails.
apt() {
  local log=$1 tty=0
  shift
  [ -t 1 ] && tty=1
  { DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a apt-get -y -q -o DPkg::Lock::Timeout=300 \
      -o APT::Status-Fd=3 -o Dpkg::Options::=--force-confold "$@" 3>&1 >>"$log" 2>&1 </dev/null; } |
    { shown=-1
      while IFS=: read -r kind package percent _; do
        case $kind in dlstatus) what=downloading ;; pmstatus) what=installing ;; *) continue ;; esac
        percent=${percent%%.*}
        if [ "$tty" = 1 ]; then
          printf '\rpackages: %s %3s %%  %-40.40s' "$what" "$percent" "${package##dpkg-exec}"
        elif [ "$what$((percent / 10))" != "$shown" ]; then
          shown=$what$((percent / 10))
          say "$what, $percent %"
        fi
      done
      [ "$tty" = 0 ] || printf '\r%-80s\r' ''; }
}

list=0
wanted=()
for argument in "$@"; do
  case $argument in
    --list) list=1 ;;
    build) wanted+=("${build_packages[@]}") ;;
    guest) wanted+=("${guest_packages[@]}") ;;
    gloo) wanted+=("${gloo_packages[@]}") ;;
    coverage) wanted+=("${coverage_packages[@]}") ;;
    *) echo "usage: packages.sh [--list] [build] [guest] [gloo] [coverage]" >&2; exit 2 ;;
  esac
done
[ ${#wanted[@]} -gt 0 ] || wanted=("${build_packages[@]}")
if [ $list = 1 ]; then
  printf '%s\n' "${wanted[@]}"
  exit 0
fi

command -v dpkg-query >/dev/null || { echo "packages: this is not a Debian system (no dpkg-query)" >&2; exit 1; }
missing=()
for package in "${wanted[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ]; then
  echo "packages: only root can install what is missing: ${missing[*]}" >&2
  exit 1
fi
log=$(mktemp)
say "installing what is missing, with all it depends on (a few minutes the first time): ${missing[*]}"
if ! apt "$log" --no-install-recommends install "${missing[@]}"; then
  # The usual reason is a package list that is absent or older than the archive.
  say "reading the package lists again"
  if ! { apt "$log" update && apt "$log" --no-install-recommends install "${missing[@]}"; }; then
    tail -n 25 "$log" >&2
    echo "packages: installation failed; apt-get's output is in $log" >&2
    exit 1
  fi
fi
rm -f "$log"
say "installed"
