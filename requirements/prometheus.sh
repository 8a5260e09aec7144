#!/bin/sh
# Debian's Prometheus and promtool, unpacked into DIR and not installed, so that no daemon starts: for the tests of
# ops/. Usage: prometheus.sh DIR; the tests look into build/prometheus, and into PATH.
set -eu
dir=$1
[ -x "$dir/usr/bin/prometheus" ] && exit 0
command -v prometheus promtool > /dev/null && exit 0
mkdir -p "$dir"
cd "$dir"
timeout 300 apt-get download -qq prometheus 2> /dev/null || {
    timeout 300 apt-get update -qq && timeout 300 apt-get download -qq prometheus
}
dpkg -x prometheus_*.deb .
rm prometheus_*.deb
