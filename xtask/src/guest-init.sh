#!/bin/busybox sh
# The first process of the guest (xtask/src/guest/system.rs).
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mount -t tmpfs none /tmp
# Virtio cards are for the tests, not for the kernel's driver of all that is virtio.
for device in /sys/bus/pci/devices/*; do
    case "$(cat "$device/vendor") $(cat "$device/class")" in
    "0x1af4 0x020000") echo nobody >"$device/driver_override" ;;
    esac
done
for module in /modules/*.ko; do
    insmod "$module" || echo "guest: $module was not loaded"
done
. /commands
echo "guest: ended with $?"
poweroff -f
