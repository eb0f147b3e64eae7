#!/bin/sh
# make_image.sh DIR PYTHON: DIR/disk.raw, DIR/vmlinuz and DIR/initrd.img: Debian 13 for 64-bit ARM with systemd, and
# the libraries of the agent in the environment that the tutorial makes. Needs root, mmdebstrap, e2fsprogs, cpio, kmod,
# openssh-client, and PYTHON with pip. Packages are only unpacked: no program for ARM runs here. What their scripts
# would do, and the board needs, is done here.
set -eu
python=$(realpath -s "$2") here=$(dirname "$0")
mkdir -p "$1"
dir=$(cd "$1" && pwd) root=$dir/root native=$dir/native early=$dir/early
rm -rf "$root" "$native" "$early" "$dir"/disk.raw
[ -e "$dir/id" ] || ssh-keygen -q -t ed25519 -N '' -C board -f "$dir/id"
unpack() {
  mmdebstrap --quiet --mode=root --variant=extract --aptopt='Acquire::Languages "none"' "$@"
}

unpack --arch=arm64 --include="linux-image-arm64,busybox-static,base-files,base-passwd,bash,dash,coreutils,grep,sed,\
findutils,util-linux,mount,login,login.defs,passwd,procps,hostname,libc-bin,debianutils,tar,gzip,kmod,e2fsprogs,iproute2,\
sudo,systemd,systemd-sysv,systemd-timesyncd,udev,dbus,dbus-user-session,libpam-systemd,libpam-modules,libpam-runtime,\
openssh-server,python3,python3-venv,python3-pip-whl,tzdata,netbase,ca-certificates,libstdc++6" trixie "$root"
rm -rf "$root"/usr/share/doc "$root"/usr/share/man "$root"/usr/share/locale "$root"/var/lib/apt/lists
for name in bin sbin lib; do [ -e "$root/$name" ] || ln -s "usr/$name" "$root/$name"; done
[ -e "$root/usr/bin/sh" ] || ln -s dash "$root/usr/bin/sh"
release=$(ls "$root/lib/modules")
depmod -b "$root" "$release"
ldconfig -r "$root"

# Users
cp "$root/usr/share/base-passwd/passwd.master" "$root/etc/passwd"
cp "$root/usr/share/base-passwd/group.master" "$root/etc/group"
sed -i 's#^\(root:\)[^:]*\(:.*:\)[^:]*$#\1x\2/bin/bash#' "$root/etc/passwd"
for user in sshd:990:/run/sshd:/usr/sbin/nologin messagebus:989:/nonexistent:/usr/sbin/nologin \
  systemd-network:998:/:/usr/sbin/nologin systemd-timesync:997:/:/usr/sbin/nologin pi:1000:/home/pi:/bin/bash; do
  echo "$user" | { IFS=: read -r name number home shell
    echo "$name:x:$number:$number::$home:$shell" >> "$root/etc/passwd"
    echo "$name:x:$number:" >> "$root/etc/group"; }
done
for name in systemd-journal:996 render:995 kvm:994 sgx:993; do
  echo "${name%:*}:x:${name#*:}:" >> "$root/etc/group"; done
sed -i 's/^adm:.*/&pi/' "$root/etc/group"
sed 's/:.*/:*:20000:0:99999:7:::/' "$root/etc/passwd" > "$root/etc/shadow"
sed 's/:.*/:!::/' "$root/etc/group" > "$root/etc/gshadow"
chmod 640 "$root/etc/shadow" "$root/etc/gshadow"
mkdir -p "$root/home/pi" "$root/root" "$root/etc/ssh" "$root/etc/pam.d" "$root/etc/sudoers.d"
echo 'pi ALL=(ALL) NOPASSWD: ALL' > "$root/etc/sudoers.d/pi"
chmod 440 "$root/etc/sudoers.d/pi"
for home in root home/pi; do
  mkdir -p "$root/$home/.ssh"
  cp "$dir/id.pub" "$root/$home/.ssh/authorized_keys"
  chmod -R go= "$root/$home/.ssh"
done
echo 'auth required pam_unix.so' > "$root/etc/pam.d/common-auth"
echo 'account required pam_unix.so' > "$root/etc/pam.d/common-account"
echo 'password required pam_unix.so' > "$root/etc/pam.d/common-password"
printf 'session required pam_unix.so\nsession optional pam_systemd.so\n' > "$root/etc/pam.d/common-session"
echo 'session required pam_unix.so' > "$root/etc/pam.d/common-session-noninteractive"

# The machine
echo board > "$root/etc/hostname"
echo '127.0.0.1 localhost board' > "$root/etc/hosts"
od -An -N16 -tx1 /dev/urandom | tr -d ' \n' > "$root/etc/machine-id"
printf '/dev/vda / ext4 defaults,noatime 0 1\n' > "$root/etc/fstab"
rm -f "$root/etc/resolv.conf"
echo 'nameserver 10.0.2.3' > "$root/etc/resolv.conf"
mkdir -p "$root/etc/systemd/network" "$root/var/log/journal" "$root/var/lib/systemd/linger"
printf '[Match]\nName=e*\n[Network]\nDHCP=ipv4\n' > "$root/etc/systemd/network/10-board.network"
cp "$root/usr/share/openssh/sshd_config" "$root/etc/ssh/sshd_config"
ssh-keygen -q -t ed25519 -N '' -C board -f "$root/etc/ssh/ssh_host_ed25519_key"
mkdir -p "$root/etc/ssl/certs"
cat "$root"/usr/share/ca-certificates/mozilla/*.crt > "$root/etc/ssl/certs/ca-certificates.crt"
mkdir -p "$root/etc/systemd/system.conf.d" # emulation on a busy machine is slow
printf '[Manager]\nDefaultTimeoutStartSec=900\n' > "$root/etc/systemd/system.conf.d/board.conf"
units=$root/etc/systemd/system
mkdir -p "$units/multi-user.target.wants"
for unit in systemd-networkd systemd-timesyncd ssh; do
  ln -sf "/usr/lib/systemd/system/$unit.service" "$units/multi-user.target.wants/$unit.service"; done
ln -sf /usr/lib/systemd/system/multi-user.target "$units/default.target"
# What a boot would do for minutes: the tables of hardware and of the linker's libraries, users, and events for devices
# that no test needs.
ln -sf /dev/null "$units/systemd-hwdb-update.service"
mkdir "$units/systemd-udev-trigger.service.d"
printf '[Service]\nExecStart=\nExecStart=-udevadm trigger --action=add %s %s\n' --subsystem-match=net \
  --subsystem-match=block > "$units/systemd-udev-trigger.service.d/board.conf"
touch "$root/etc/.updated" "$root/var/.updated"

# The environment of the tutorial, with all that its pip would fetch. Python files are compiled by this processor's
# build of the same Python, because compiling them in emulation takes minutes.
site=$root/home/pi/edgetailor/lib/python3.13/site-packages
mkdir -p "$site" "$root/home/pi/edgetailor/bin"
"$python" -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))' \
  > "$dir/wanted.txt"
PYTHON_VERSION=3.13 sh "$here/../emulated/get_wheels.sh" arm64 "$python" "$site" -c constraints.txt -r "$dir/wanted.txt"
"$python" -m zipfile -e "$root"/usr/share/python-wheels/pip-*.whl "$site"
printf '#!/home/pi/edgetailor/bin/python3\nfrom pip._internal.cli.main import main\nraise SystemExit(main())\n' \
  > "$root/home/pi/edgetailor/bin/pip"
chmod +x "$root/home/pi/edgetailor/bin/pip"
# By "no-compile = no", the words of pip's manual, the agent's Python files are compiled when they are first used.
printf '[global]\nno-index = true\ndisable-pip-version-check = true\n[install]\nno-compile = no\n' > "$root/etc/pip.conf"
unpack --include=python3-minimal,libpython3-stdlib trixie "$native"
for name in bin lib lib64; do [ -e "$native/$name" ] || ln -s "usr/$name" "$native/$name"; done
mkdir "$native/library" "$native/site"
mount --bind "$root/usr/lib/python3.13" "$native/library"
mount --bind "$site" "$native/site"
trap 'umount "$native/library" "$native/site"' EXIT
chroot "$native" /usr/bin/python3.13 -m compileall -q -s /library -p /usr/lib/python3.13 \
  --invalidation-mode unchecked-hash -x '/test/|lib2to3' /library
chroot "$native" /usr/bin/python3.13 -m compileall -q -s /site -p "${site#"$root"}" \
  --invalidation-mode unchecked-hash -x '/tests/' /site
# `python -m venv` runs pip from a zip file, whose modules Python would compile each time.
wheel=$(ls "$root"/usr/share/python-wheels/pip-*.whl)
"$python" -m zipfile -e "$wheel" "$native/wheel"
chroot "$native" /usr/bin/python3.13 -m compileall -q -b --invalidation-mode unchecked-hash /wheel
rm "$wheel"
(cd "$native/wheel" && "$python" -m zipfile -c "$wheel" ./*)
umount "$native/library" "$native/site"
trap - EXIT
chown -R 1000:1000 "$root/home/pi"

# The first file system: busybox, and the modules of all devices. systemd gives up on modules after 90 seconds, which
# emulation on a busy machine may take.
mkdir -p "$early/bin" "$early/dev" "$early/proc" "$early/sys" "$early/new" "$early/lib"
cp "$root/usr/bin/busybox" "$early/bin/busybox"
ln -s busybox "$early/bin/sh"
number=100
for wanted in virtio_pci virtio_blk ext4 virtio_net virtio_scsi virtio_rng sd_mod; do
  modprobe -d "$root" -S "$release" --show-depends $wanted | sed -n 's/^insmod \([^ ]*\).*/\1/p'
done | awk '!seen[$0]++' | while read -r path; do
  number=$((number + 1)) name=$(basename "$path")
  case $path in *.xz) xz -dc "$path" > "$early/lib/$number-${name%.xz}";; *) cp "$path" "$early/lib/$number-$name";; esac
done
cat > "$early/init" <<'END'
#!/bin/sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
for module in /lib/*; do $b insmod $module; done
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -e /dev/vda ] && break; $b sleep 1; done
$b mount -t ext4 -o ro /dev/vda /new || exec $b sh
$b umount /proc; $b umount /sys; $b mount --move /dev /new/dev
exec $b switch_root /new /sbin/init
END
chmod +x "$early/init"
(cd "$early" && find . | cpio -o -H newc --quiet | gzip -1) > "$dir/initrd.img"
cp "$root"/boot/vmlinuz-* "$dir/vmlinuz"
rm -rf "$root"/boot/*
truncate -s 2G "$dir/disk.part"
mke2fs -q -t ext4 -d "$root" "$dir/disk.part"
rm -rf "$root" "$native" "$early"
mv "$dir/disk.part" "$dir/disk.raw"
