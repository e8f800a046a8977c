#!/bin/bash
# Becomes PID 1 of a machine of its own: this one's files with every write thrown away, and systemd.
#
# machine.sh FOLDER [SOURCE TARGET [rw]]...: run by `unshare` with namespaces of its own. FOLDER takes what is written; each
# SOURCE is seen at TARGET, read-only unless rw. Nothing of this machine's /tmp, /run, /dev, cgroups or kernel settings is
# reached: a systemd that cleans, mounts or tunes does so inside.
set -euo pipefail

folder=$1
shift
mount --make-rprivate /
mount -t tmpfs tmpfs "$folder"
mkdir "$folder"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"
cd "$folder/root"

mount -t proc proc proc
# As container managers do: what is not this namespace's own is not to be written.
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
for node in null zero full random urandom tty; do
  touch "dev/$node"
  mount --bind "/dev/$node" "dev/$node"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=1777 tmpfs var/tmp

# Only what a test adds is started, besides the journal.
mount -t tmpfs -o mode=755 tmpfs etc/systemd/system
printf '[Unit]\nDescription=Nothing but what is asked for\nRequires=basic.target\nAfter=basic.target\n' >etc/systemd/system/machine.target
ln -s machine.target etc/systemd/system/default.target
rm -rf var/log/journal
: >etc/fstab

while (($# > 0)); do
  mkdir -p ".$2"
  # Found before the root changes, written after this one is gone.
  mount --bind "$1" ".$2"
  if [[ ${3:-} == rw ]]; then
    shift 3
  else
    mount -o remount,bind,ro ".$2"
    shift 2
  fi
done
# A Python that was built for another folder finds its library.
if compgen -G 'mnt/python/lib/libpython*.so*' >/dev/null; then
  echo /mnt/python/lib >etc/ld.so.conf.d/machine.conf
  chroot . ldconfig
fi
ip link set lo up

mkdir old
pivot_root . old
umount -l old
rmdir old
# Or a service's credentials, which systemd mounts from a namespace of its own, would be seen by nobody.
mount --make-rshared /
cd /
# shellcheck disable=SC2093
exec env -i container=other PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --system --show-status=no --log-target=journal </dev/null
