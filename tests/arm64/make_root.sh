#!/bin/sh
# make_root.sh DIR PYTHON: 64-bit ARM's CPython 3.11 and the wheels of the agent and of its tests below DIR.
# DIR/cortex-a72 and DIR/cortex-a53 run this Python under qemu-user. Needs Debian 12 or newer, and PYTHON with pip.
# Nothing is installed.
set -eu
mkdir -p "$1"
dir=$(cd "$1" && pwd) python=$2 apt=$dir/apt
command -v qemu-aarch64 >/dev/null || {
  echo "The tests on emulated ARM need qemu-aarch64: apt-get install qemu-user" >&2; exit 1; }

mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/debs" "$apt/parts" "$dir/sysroot"
: > "$apt/status"
mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
  awk '$2 == "bookworm" {print $1; exit}')
echo "deb [arch=arm64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
  "${mirror:-http://deb.debian.org/debian} bookworm main" > "$apt/sources.list"
cat > "$apt/apt.conf" <<EOF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "";
Acquire::Languages "none";
Dir::State "$apt";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "$apt/parts";
EOF
export APT_CONFIG="$apt/apt.conf"
apt-get -qq update
(cd "$apt/debs" && apt-get -qq download python3.11-minimal libpython3.11-minimal \
  libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 zlib1g libssl3 libffi8 libexpat1 libbz2-1.0 \
  liblzma5 libsqlite3-0 libcrypt1 libuuid1 libreadline8 libtinfo6)
unset APT_CONFIG
for package in "$apt"/debs/*.deb; do dpkg-deb -x "$package" "$dir/sysroot"; done

wanted=$("$python" -c '
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
tests = [one for one in extras["dev"] if one.startswith(("pytest>", "hypothesis"))]
chosen = extras["litert"] + extras["openvino"] + extras["images"]
print("\n".join(project["dependencies"] + chosen + tests))')
echo "$wanted" > "$dir/wanted.txt"
"$python" -m pip install --quiet --disable-pip-version-check --upgrade --target "$dir/site" \
  --only-binary=:all: --python-version 3.11 --platform manylinux_2_35_aarch64 \
  --platform manylinux_2_34_aarch64 --platform manylinux_2_31_aarch64 \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
  --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
  -c constraints.txt -r "$dir/wanted.txt"

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
