#!/bin/busybox sh
# The first process of the guest (xtask/src/guest.rs).
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mount -t tmpfs none /tmp
for module in /modules/*.ko; do
    insmod "$module" || echo "guest: $module was not loaded"
done
/tests --test-threads=1 --show-output
echo "guest: the tests ended with $?"
poweroff -f
