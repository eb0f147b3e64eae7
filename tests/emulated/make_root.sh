#!/bin/sh
# make_root.sh ARCH DIR PYTHON [EXTRA...]: CPython 3.11 of Debian 12 for ARCH, arm64 or amd64, in DIR/sysroot, and
# the wheels of the agent, of its EXTRAs and of its tests in DIR/site. PYTHON has pip. Nothing is installed.
set -eu
arch=$1 python=$3
mkdir -p "$2"
dir=$(cd "$2" && pwd) apt=$dir/apt
shift 3

mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/debs" "$apt/parts" "$dir/sysroot"
: > "$apt/status"
mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
  awk '$2 == "bookworm" {print $1; exit}')
echo "deb [arch=$arch signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
  "${mirror:-http://deb.debian.org/debian} bookworm main" > "$apt/sources.list"
cat > "$apt/apt.conf" <<END
APT::Architecture "$arch";
APT::Architectures { "$arch"; };
APT::Sandbox::User "";
Acquire::Languages "none";
Dir::State "$apt";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "$apt/parts";
END
export APT_CONFIG="$apt/apt.conf"
apt-get -qq update
(cd "$apt/debs" && apt-get -qq download python3.11-minimal libpython3.11-minimal \
  libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 zlib1g libssl3 libffi8 libexpat1 libbz2-1.0 \
  liblzma5 libsqlite3-0 libcrypt1 libuuid1 libreadline8 libtinfo6)
unset APT_CONFIG
for package in "$apt"/debs/*.deb; do dpkg-deb -x "$package" "$dir/sysroot"; done

"$python" -c '
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
tests = [one for one in extras["dev"] if one.startswith(("pytest>", "hypothesis", "jsonschema"))]
chosen = [one for name in sys.argv[1:] for one in extras[name]]
print("\n".join(project["dependencies"] + chosen + tests))' "$@" > "$dir/wanted.txt"
sh "$(dirname "$0")/get_wheels.sh" "$arch" "$python" "$dir/site" -c constraints.txt -r "$dir/wanted.txt"
