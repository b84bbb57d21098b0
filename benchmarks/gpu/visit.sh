#!/usr/bin/env bash
# A visit to a lent GPU without network, in parts, from the root of the tree with `.gpu/` (make gpu-kit) beside it:
#   bash benchmarks/gpu/visit.sh first    at most 400 s: kernels right, SDXL 1024 and its rivals, kernels fast, the host
#   bash benchmarks/gpu/visit.sh second   at most 420 s: Flux.1, Z-Image, Qwen-Image, SDXL 2048; torch.compile
#   bash benchmarks/gpu/visit.sh third    at most 400 s: Flux 2048, attentions, few steps, sizes, break-even
# No part needs another. At most 8 files in $OUT, written as results come. DRY=1: tiny models on the CPU, no speed.
set -u
PART=${1:?first, second or third} OUT=${OUT:?the folder for results} DRY=${DRY:-}
case $PART in first | third) SECONDS_AT_MOST=400 ;; second) SECONDS_AT_MOST=420 ;; *) exit 2 ;; esac
[ -n "$DRY" ] && SECONDS_AT_MOST=900
PYTHON=${PYTHON:-python3}
WORK=${TMPDIR:-/tmp}/toma-gpu
mkdir -p "$OUT" "$WORK"
exec > >(tee -a "$OUT/log.txt") 2>&1
if [ ! -d "$WORK/kit" ]; then # in place only when it is complete: whoever unpacked before may have been stopped
    UNPACKED=$(mktemp -d "$WORK/XXXXXX")
    tar -xzf .gpu/kit.tar.gz -C "$UNPACKED" && mkdir "$UNPACKED/home" && mv -T "$UNPACKED" "$WORK/kit" || exit 9
fi
export HOME=$WORK/kit/home COMFYUI_PATH=$WORK/kit/ComfyUI PYTHONPATH=$PWD:$WORK/kit/site
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
exit "$CODE"
