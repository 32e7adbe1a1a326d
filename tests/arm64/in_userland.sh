#!/bin/bash
# Runs a command of the arm64 userland: in_userland.sh FOLDER COMMAND... It sees this machine's network, processes and
# devices, and the processor that qemu emulates: a Cortex-A76, as in a Raspberry Pi 5.
set -euo pipefail
exec unshare --mount bash -c '
    userland=$1/userland cpuinfo=$2
    shift 2
    mount --bind /proc "$userland/proc"
    mount --bind "$cpuinfo" "$userland/proc/cpuinfo"
    mount --rbind /dev "$userland/dev"
    exec env --ignore-environment HOME=/root PATH=/usr/bin:/bin LANG=C.UTF-8 QEMU_CPU=cortex-a76 \
        /usr/sbin/chroot "$userland" "$@"
' - "$1" "$(dirname "$(realpath "$0")")/cpuinfo" "${@:2}"
