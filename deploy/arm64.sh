#!/usr/bin/env bash
# The kernels' tests on ARM64, emulated: Debian's Python and the wheels of that processor, in a folder that is kept for the next time.
# Needs root, and Debian's packages debootstrap and qemu-user-static. The first time takes a minute or two, and 300 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
ROOT="${ARM64_ROOT:-$PWD/.arm64}"
PIP="${PIP:-python3 -m pip}"
for program in debootstrap qemu-aarch64-static dpkg-deb; do
  PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null || {
    echo "error: '$program' was not found. On Debian and Ubuntu: apt install debootstrap qemu-user-static." >&2; exit 1; }
done
if [ ! -e "$ROOT/.unpacked" ]; then
  PATH="$PATH:/usr/sbin" debootstrap --foreign --arch=arm64 --variant=minbase --include=python3.11 \
    bookworm "$ROOT" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"}
  for package in "$ROOT"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$ROOT"; done
  touch "$ROOT/.unpacked"
fi
# Wheels are unpacked and not run, so that the pip of this machine can do it.
$PIP install --quiet --upgrade --target "$ROOT/site" --only-binary=:all: --python-version 3.11 \
  --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
  -c constraints.txt numpy numba ml_dtypes jaxtyping array-api-compat typing_extensions filelock safetensors pytest gguf
exec env PYTHONPATH="$PWD/src:$PWD:$ROOT/site" NUMBA_CACHE_DIR="$ROOT/compiled" NUMBA_NUM_THREADS=1 OMP_NUM_THREADS=1 \
  qemu-aarch64-static -L "$ROOT" "$ROOT/usr/bin/python3.11" -m pytest --noconftest -p no:cacheprovider \
  -o addopts="-q -W ignore --import-mode=importlib" tests/models/test_products.py "$@"
