#!/usr/bin/env bash
# A visit to a lent GPU without network, in parts, from the root of the tree with `.gpu/` (make gpu-kit) beside it:
#   bash benchmarks/gpu/visit.sh first    at most 400 s: kernels right, SDXL 1024 and its rivals, kernels fast, the host
#   bash benchmarks/gpu/visit.sh second   at most 420 s: Flux.1, Z-Image, Qwen-Image, SDXL 2048; torch.compile
#   bash benchmarks/gpu/visit.sh third    at most 400 s: keys and values in main memory, Flux 2048, attentions, few steps, sizes, break-even
# No part needs another. At most 8 files in $OUT, written as results come; in a folder of $OUT where others are there.
# DRY=1: tiny models on the CPU, no speed.
set -uo pipefail
PART=${1:?first, second or third} OUT=${OUT:?the folder for results} DRY=${DRY:-}
case $PART in first | third) SECONDS_AT_MOST=400 ;; second) SECONDS_AT_MOST=420 ;; *) exit 2 ;; esac
[ -n "$DRY" ] && SECONDS_AT_MOST=900
PYTHON=${PYTHON:-python3}
WORK=${TMPDIR:-/tmp}/toma-gpu
[ ! -e "$OUT/results.json" ] || OUT=$OUT/$PART-$(date +%H%M%S)
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
LEFT=$((SECONDS_AT_MOST - SECONDS))
timeout --kill-after=5 "$LEFT" "$PYTHON" -m benchmarks.suite --gpu ${DRY:+--dry-run} --visit "$PART" --out "$OUT" \
    --until "$(($(date +%s) + LEFT - 15))"
CODE=$?
echo "### $PART: exit $CODE after $SECONDS s"
ls -la "$OUT"
exec >/dev/null 2>&1 # the log ends with these lines: what is left running when the script ends may be killed
for _ in {1..20}; do kill -0 "$TEE" && sleep 0.1 || break; done
exit "$CODE"
