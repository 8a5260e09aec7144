#!/bin/sh
# Libraries that wheels leave to the system: vLLM on CPUs needs libnuma, Mooncake needs libibverbs.
# Root installs what is missing where apt is; anyone else is told. Usage: system.sh PYTHON
missing=""
for each in libnuma.so.1:libnuma1 libibverbs.so.1:libibverbs1; do
    "$1" -c "import ctypes; ctypes.CDLL('${each%%:*}')" 2> /dev/null || missing="$missing ${each##*:}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    # shellcheck disable=SC2086 # names of packages, to be split
    timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq $missing > /dev/null && exit 0
fi
echo "missing system libraries: install Debian's$missing (without libnuma1 no engine starts on CPUs)" >&2
