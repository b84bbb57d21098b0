"""Measure how much torch.compile speeds up a merged model whose speed is limited by the host.

    python -m benchmarks.compiled [--model sdxl flux] [--repeats 15] [--backend inductor] [--out FOLDER]

SDXL and Flux have their full depth, but are narrow and run on small pictures. An evaluation then takes as long as the
host needs to launch its operations, and compiling saves launches. The suite's section `compile` measures models of full
width. On a CPU, models of full width show no gain, because Inductor's matrix products in bf16 are slower there than
PyTorch's own. Times are wall-clock times in fp32 with PyTorch's attention (ComfyUI's own attention for CPUs breaks
graphs). The first run of a compiled variant takes a minute.
"""

from __future__ import annotations

from benchmarks import bench, forward, variants
from benchmarks.bench import Row
from testbed import models, stand_ins
from testbed.fullsize import Shape

SIDE = 256
# Numbers of blocks. SDXL: transformer blocks at each resolution and in the middle. Flux: double and single blocks.
DEPTHS, MIDDLE, DOUBLE, SINGLE = (0, 2, 10), 10, 19, 38


def main() -> None:
    """Measure the chosen models, and print and write the rows."""
    parser = bench.command_line(__doc__, "compiled", repeats=15)
    parser.add_argument("--model", nargs="*", choices=["sdxl", "flux"], default=["sdxl", "flux"])
    parser.add_argument("--backend", default="inductor", help="of torch.compile; eager: to see that it runs")
    args = parser.parse_args()
    stand_ins.prepare(own_attention=False)
    device = bench.device_here()
    more = {"repeats": args.repeats, "backend": args.backend, "blocks": "full depth, narrow"}
    conditions = bench.conditions(dtype="float32", **more)
    bench.say(", ".join(f"{key}: {value}" for key, value in conditions.items()))
    compiler = variants.compiled(args.backend)
    merged = forward.toma_variants([0.5], ["stack"], dict(variants.TINY))[0]
    chosen = [merged, compiler, variants.stacked(merged, compiler), variants.stacked(compiler, merged)]
    rows: list[Row] = []
    for name in args.model:
        sdxl, shape = name == "sdxl", Shape(name, SIDE, SIDE, 1, tiny=True)
        patcher = models.unet(depths=DEPTHS, middle=MIDDLE) if sdxl else models.flux(double=DOUBLE, single=SINGLE)
        rows += forward.measure(patcher, shape, chosen, args.repeats, device, "compiled")
    bench.finish(rows, conditions, args.out and args.out / "compiled")


if __name__ == "__main__":
    main()
