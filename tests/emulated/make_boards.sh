#!/bin/sh
# make_boards.sh DIR PYTHON: DIR/cortex-a72 and DIR/cortex-a53 run 64-bit ARM's CPython 3.11 under qemu-user, with
# the wheels of the agent and of its tests. Needs Debian 12 or newer, and PYTHON with pip. Nothing is installed.
set -eu
command -v qemu-aarch64 >/dev/null || {
  echo "The tests on emulated ARM need qemu-aarch64: apt-get install qemu-user" >&2; exit 1; }
sh "$(dirname "$0")/make_root.sh" arm64 "$1" "$2" litert images
dir=$(cd "$1" && pwd)

# Processes that this Python starts have to run under qemu-user, too.
cat > "$dir/site/sitecustomize.py" <<'EOF'
import os, sys
sys.executable = os.environ["BOARD_PYTHON"]
EOF
# qemu looks up absolute paths below its root first. onnxruntime reads the processor there, and
# crashes on that of the host.
cat > "$dir/board" <<'EOF'
#!/bin/sh
set -eu
here=$(cd "$(dirname "$0")" && pwd) cpu=$(basename "$0")
case $cpu in cortex-a53) part=0xd03 midr=0x410fd034;; cortex-a72) part=0xd08 midr=0x410fd083;; esac
system=$here/sysroot/sys/devices/system/cpu
if [ ! -e "$here/sysroot/proc/$cpu" ]; then
  mkdir -p "$here/sysroot/proc" "$system"
  for file in possible present online; do echo 0-3 > "$system/$file"; done
  echo 255 > "$system/kernel_max"
  for core in 0 1 2 3; do
    printf 'processor\t: %d\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\n' $core
    printf 'CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: %s\nCPU revision\t: 3\n\n' $part
    own=$system/cpu$core
    mkdir -p "$own/regs/identification" "$own/topology"
    echo $midr > "$own/regs/identification/midr_el1"
    echo $core > "$own/topology/core_id"
    echo 0 > "$own/topology/physical_package_id"
    echo 0-3 > "$own/topology/core_siblings_list"
    echo $core > "$own/topology/thread_siblings_list"
    index=0
    for cache in "1 Data 32K $core" "1 Instruction 32K $core" "2 Unified 1024K 0-3"; do
      set_of=$own/cache/index$index index=$((index + 1))
      mkdir -p "$set_of"
      echo "$cache" | { read -r level type size shared
        echo $level > "$set_of/level"; echo $type > "$set_of/type"; echo $size > "$set_of/size"
        echo $shared > "$set_of/shared_cpu_list"; echo 64 > "$set_of/coherency_line_size"; }
    done
  done > "$here/sysroot/proc/cpuinfo"
  rm -f "$here"/sysroot/proc/cortex-*
  touch "$here/sysroot/proc/$cpu"
fi
export BOARD_PYTHON="$here/$cpu" PYTHONHOME="$here/sysroot/usr" PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$here/site:${PYTHONPATH:-.}:$here/torch"
exec qemu-aarch64 -L "$here/sysroot" -cpu "$cpu" "$here/sysroot/usr/bin/python3.11" "$@"
EOF
chmod +x "$dir/board"
for cpu in cortex-a72 cortex-a53; do ln -sf board "$dir/$cpu"; done
