#!/bin/sh
# get_wheels.sh ARCH PYTHON DIR [ARGUMENT...]: wheels for CPython $PYTHON_VERSION (3.11) on ARCH, arm64 or amd64, put into DIR.
# PYTHON has pip, which reads the ARGUMENTs.
set -eu
case $1 in arm64) machine=aarch64;; amd64) machine=x86_64;; esac
python=$2 dir=$3
shift 3
platforms=$(for glibc in 2_35 2_34 2_31 2_28 2_27 2_17; do echo --platform manylinux_${glibc}_$machine; done)
exec "$python" -m pip install --quiet --disable-pip-version-check --upgrade --target "$dir" \
  --only-binary=:all: --python-version "${PYTHON_VERSION:-3.11}" $platforms --platform manylinux2014_$machine "$@"
