#!/bin/sh
# Installs Seer's units: `install.sh head`, `install.sh node 0 1 ...` (one number per model replica), `exporter`, `gateway`,
# `pool-master` and `pool-owner`, or several: `install.sh head exporter node 0`. Run it as root, from anywhere;
# running it again changes nothing but the units. Those of services get the keys in /etc/seer/keys, if there are any:
# server.key on the head, engine.key on nodes, observer.key for the exporter, gateway-http.key for the gateway, and the
# folder public (docs/security.md).
#   PREFIX   where `bin/seer` is installed (default /opt/seer)
#   ALLOW    addresses that services may talk to besides this machine's own, e.g. "10.0.0.0/8 fd00::/8"; name servers
#            count, too (default: what an earlier run was given, else all)
#   DESTDIR  another root to install into, for images; nothing is started there
set -eu

usage() { sed -n '2,10s/^# //p' "$0" >&2; exit 2; }
die() { echo "error: $*" >&2; exit 1; }

prefix=${PREFIX:-/opt/seer} root=${DESTDIR:-} here=$(cd "$(dirname "$0")" && pwd)
units=
while [ $# -gt 0 ]; do
  case $1 in
    head) units="$units seer-buffer.service seer-context.service seer-dgds.service"; shift ;;
    exporter | gateway | pool-master | pool-owner) units="$units seer-$1.service"; shift ;;
    node)
      shift
      case ${1:-} in [0-9]*) ;; *) die "node: give a number per model replica, e.g. node 0 1" ;; esac
      while [ $# -gt 0 ]; do
        case $1 in *[!0-9]*) break ;; esac
        units="$units seer-engine@$1.service"; shift
      done ;;
    *) usage ;;
  esac
done
[ -n "$units" ] || usage
[ "$(id -u)" = 0 ] || die "installing units needs root"
[ -x "$root$prefix/bin/seer" ] || die "$root$prefix/bin/seer is not there: install seer-rollout into $prefix, or set PREFIX"

into=$root/usr/local/lib/systemd/system  # leaves /etc/systemd/system to `systemctl edit`
install -d -m 755 "$into" "$root/etc/seer" "$root/usr/lib/sysusers.d"
for file in "$here"/seer*.service "$here"/seer.target "$here"/seer*.service.d/*.conf; do
  name=${file#"$here"/}
  install -d -m 755 "$(dirname "$into/$name")"
  sed "s#/opt/seer/#$prefix/#g" "$file" > "$into/$name"
done
if [ -n "${ALLOW:-}" ]; then
  printf '[Service]\nIPAddressDeny=any\nIPAddressAllow=localhost %s\n' "$ALLOW" > "$into/seer-.service.d/30-addresses.conf"
fi
install -m 644 "$here/seer.sysusers.conf" "$root/usr/lib/sysusers.d/seer.conf"
keys=/etc/seer/keys
for unit in $units; do
  case $unit in
    seer-engine@*) unit=seer-engine@.service key=$keys/engine.key ;;
    seer-exporter.service) key=$keys/observer.key ;;
    seer-gateway.service) key=$keys/gateway-http.key
      [ -e "$root$key" ] || key=$keys/trainer-gateway.key ;;  # as releases up to 0.4 had it
    seer-pool-*) continue ;;
    *) key=$keys/server.key ;;
  esac
  [ -e "$root$key" ] || continue
  install -d -m 755 "$into/$unit.d"
  { echo '[Service]'
    echo "LoadCredential=key:$key"
    echo "Environment=SEER_SECURITY__KEY=%d/key SEER_SECURITY__SERVER=$keys/public/server.pub"
    [ ! -e "$root$keys/public/peers" ] || echo "Environment=SEER_SECURITY__PEERS=$keys/public/peers"
  } > "$into/$unit.d/20-keys.conf"
done
[ -e "$root/etc/seer/seer.toml" ] || install -m 644 "$here/../seer.toml" "$root/etc/seer/seer.toml"
systemd-sysusers ${root:+--root="$root"} "$root/usr/lib/sysusers.d/seer.conf"
systemctl ${root:+--root="$root"} --quiet enable seer.target $units
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  echo "Edit /etc/seer/seer.toml, then: systemctl start seer.target"
fi
