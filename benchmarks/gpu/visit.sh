#!/usr/bin/env bash
# Run the benchmarks on a GPU machine without network, from the root of the tree with `.gpu/` (make gpu-kit) in it:
#   OUT=FOLDER bash benchmarks/gpu/visit.sh [--minutes 12] [--only kernels sdxl]
# Options are those of `python -m benchmarks.suite`; `first` and `second` are what matters most, 7 minutes each. A few small files in $OUT are written as results come; in a folder
# of $OUT where others are there. DRY=1: tiny models on the CPU, no speed.
set -uo pipefail
case ${1:-} in
first) set -- --minutes 6.5 --only kernels sdxl-1024-cfg sdxl-rivals micro host ;;
second) set -- --minutes 6.5 --only flux-1024 z-image-1024 qwen-1328 kv-place compile ;;
esac
OUT=${OUT:?the folder for results} DRY=${DRY:-}
PYTHON=${PYTHON:-python3}
WORK=${TMPDIR:-/tmp}/toma-gpu
[ ! -e "$OUT/results.json" ] || OUT=$OUT/$(date +%H%M%S)
mkdir -p "$OUT" "$WORK"
exec > >(tee -a "$OUT/log.txt") 2>&1
TEE=$!
KIT=$WORK/kit-$(sha256sum <.gpu/kit.tar.gz | cut -c1-16) || exit 9 # another kit is another folder
if [ ! -d "$KIT" ]; then # moved into place when complete, because an earlier unpacking may have been interrupted
    UNPACKED=$(mktemp -d "$WORK/XXXXXX")
    tar -xzf .gpu/kit.tar.gz -C "$UNPACKED" && mkdir "$UNPACKED/home" && mv -T "$UNPACKED" "$KIT" || exit 9
fi
export HOME=$KIT/home COMFYUI_PATH=$KIT/ComfyUI PYTHONPATH=$PWD:$KIT/site
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 MPLBACKEND=Agg
export TRITON_CACHE_DIR=$WORK/triton TORCHINDUCTOR_CACHE_DIR=$WORK/inductor
unset TRITON_INTERPRET
[ -n "$DRY" ] || nvidia-smi
"$PYTHON" -m benchmarks.suite --gpu ${DRY:+--dry-run} --out "$OUT" "$@"
CODE=$?
echo "### exit $CODE after $SECONDS s"
ls -la "$OUT"
exec >/dev/null 2>&1 # the log ends with these lines: what is left running when the script ends may be killed
for _ in {1..20}; do kill -0 "$TEE" && sleep 0.1 || break; done
exit "$CODE"
