#!/bin/sh
# avx512.sh DIR PYTHON: checks DIR/bundles (board_check.py) on a Skylake-X, a processor with AVX-512 that Bochs
# emulates as a whole computer: it starts Debian's kernel from a disc with CPython 3.11, the agent and its wheels, the
# newest onnxruntime and the oldest. Needs Debian 12 on x86-64, and PYTHON with pip. Nothing is installed.
set -eu
here=$(dirname "$0") python=$2
for program in bochs-bin xorriso busybox cpio; do command -v $program >/dev/null || {
  echo "The tests with AVX-512 need $program: see the target test-avx512 of the Makefile" >&2; exit 1; }; done
sh "$here/make_root.sh" amd64 "$1" "$python"
sh "$here/get_wheels.sh" amd64 "$python" "$1/oldest" --no-deps onnxruntime==1.19.2 'numpy<2'
dir=$(cd "$1" && pwd) disc=$dir/disc
mkdir -p "$disc" "$dir/start/bin" "$dir/kernel" "$dir/start/proc" "$dir/start/sys" "$dir/start/dev" "$dir/start/tmp"

(cd "$dir/kernel" && rm -rf ./* && export APT_CONFIG="$dir/apt/apt.conf" &&
  kernel=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends:/ {print $2; exit}') &&
  apt-get -qq download "$kernel" && dpkg-deb -x ./*.deb .)
cp "$dir"/kernel/boot/vmlinuz-* "$disc/vmlinuz"
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$disc"
# Bochs tells another size of XSAVEC's area than Linux computes, and Linux would go on without AVX.
cat > "$disc/isolinux.cfg" <<'END'
DEFAULT check
LABEL check
  KERNEL vmlinuz
  INITRD initrd
  APPEND console=ttyS0,115200 quiet loglevel=3 mitigations=off tsc=reliable clearcpuid=xsavec,xsaves panic=-1
END

cp "$(command -v busybox)" "$dir/start/bin/busybox"
# What is written last has to leave the serial line before the power goes off.
cat > "$dir/start/init" <<'END'
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
export PATH=/usr/bin HOME=/tmp OMP_NUM_THREADS=1
for first in /site /oldest; do
  PYTHONPATH=$first:/site:/:/tests python3.11 /tests/emulated/avx512_check.py /bundles &&
    echo "held with the onnxruntime in $first"
done
/bin/busybox sleep 2
/bin/busybox poweroff -f
END
chmod +x "$dir/start/init"
archive() {
  (cd "$1" && shift && find "$@" -name __pycache__ -prune -o -print | cpio --quiet -o -H newc)
}
# The kernel unpacks archives that follow each other.
{ archive "$dir/start" .
  archive "$dir/sysroot" .
  archive "$dir" site oldest bundles
  archive . device_agent profiles tests
} > "$disc/initrd"
xorriso -as mkisofs -quiet -o "$dir/disc.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 \
  -boot-info-table "$disc"

# Bochs waits for a reader of its screen when it has written some 40 KB, so it draws once in an emulated second.
cat > "$dir/bochsrc" <<END
cpu: model=corei7_skylake_x, ips=50000000, reset_on_triple_fault=0
memory: guest=2048, host=2048
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path=$dir/disc.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$dir/said.txt
sound: waveoutdrv=dummy
display_library: term
vga: extension=vbe, update_freq=1, realtime=0
panic: action=fatal
log: $dir/bochs.log
END

# Debian's Bochs waits in its debugger for `c`.
echo c > "$dir/commands"
rm -f "$dir/said.txt"
timeout 3600 bochs-bin -q -f "$dir/bochsrc" -rc "$dir/commands" < /dev/null > "$dir/screen.txt" 2>&1 || true
touch "$dir/said.txt"
cat "$dir/said.txt"
[ "$(grep -c '^held with' "$dir/said.txt")" = 2 ] || {
  echo "The check did not end well on the emulated processor; Bochs's log is $dir/bochs.log" >&2; exit 1; }
