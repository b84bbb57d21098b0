"""Test on a simulated GPU that a prepared launch calls the binary that Triton would choose for the same arguments."""

from pathlib import Path

from tests.toma_core.kernels.cases import printed

PROGRAM = """
import torch, triton
from testbed import offline
from toma_core.kernels.triton import TritonKernels
from toma_core.kernels.triton.product import _merge_kernel
from toma_core.windows import make_budget, make_windows

called = []
class Launcher(offline.Launcher):
    def __call__(self, *given):
        super().__call__(*given)
        called.append((self, given[3], given[9:]))

class Driver(offline.Stub):
    launcher_cls = Launcher
    stream = 0
    def get_current_stream(self, device):
        return self.stream

windows = make_windows(16, 16, 8)
layout = windows, make_budget(windows.counts, 0.5)
kernels = TritonKernels()
weights = torch.zeros(1, 4, 32, 64, dtype=torch.float16)
x = torch.zeros(2, 256, 640, dtype=torch.float16)

ordinary, run = [], _merge_kernel.run
def counted(*args, **kwargs):
    ordinary.append(args)
    return run(*args, **kwargs)
_merge_kernel.run = counted

def merged(x, weights=weights):
    before = len(ordinary)
    out = kernels.merge(x, weights, *layout)
    assert out.shape == (x.shape[0], 128, 640) and out.dtype is x.dtype
    return called[-1], len(ordinary) == before, out

def address(given):
    return given.data_ptr() if isinstance(given, torch.Tensor) else given

with offline.stubbed(Driver()):
    # For other strides, shapes or dtypes, only the first launch goes through Triton. The second is prepared.
    between = torch.zeros(2, 300, 647, dtype=torch.float16)[:, 8:264, :640]
    apart = torch.zeros(2, 640, 256, dtype=torch.float16).transpose(1, 2)
    for tokens in (between, apart, x[:1], x.float(), x):
        used = weights.to(tokens.dtype)
        (first, _, given), direct, out = merged(tokens, used)
        assert not direct and [address(g) for g in given[:3]] == [t.data_ptr() for t in (out, tokens, used)]
        (again, _, same), direct, out = merged(tokens, used)
        assert direct and again is first and same[0] == out.data_ptr() and same[6:9] == tokens.stride()
        assert [address(g) for g in same[1:]] == [address(g) for g in given[1:]]
    y = x + 1
    (_, _, same), direct, out = merged(y)
    assert direct and same[:3] == tuple(t.data_ptr() for t in (out, y, weights))

    # A prepared launch uses the current stream and the current hooks.
    Driver.stream, hooked = 7, []
    hook = lambda metadata: hooked.append(metadata.get()["name"])
    if hasattr(triton.knobs.runtime.launch_enter_hook, "add"):
        triton.knobs.runtime.launch_enter_hook.add(hook)
    (_, stream, _), direct, _ = merged(x)
    assert direct and stream == 7
    if hasattr(triton.knobs.runtime.launch_enter_hook, "add"):
        assert hooked == ["_merge_kernel"]
        triton.knobs.runtime.launch_enter_hook.remove(hook)

    # An address that is no multiple of 16 needs another binary, which aligned addresses must never get.
    room = torch.zeros(2 * 256 * 640 + 1, dtype=torch.float16)
    odd = room[1:].view(x.shape)
    assert odd.stride() == x.stride() and odd.data_ptr() % 16
    (other, _, _), direct, _ = merged(odd)
    assert other is not first and not direct
    (back, _, _), direct, _ = merged(x)
    assert back is first and direct
    kernels = TritonKernels()
    assert merged(odd)[0][0] is other and merged(odd)[0][0] is other and not merged(odd)[1]
    assert merged(x)[0][0] is first and merged(x)[1]

    # If Triton's launchers take other arguments, every launch goes through Triton.
    kernels = TritonKernels()
    Launcher.__call__ = lambda self, *given: called.append((self, given[3], given[9:]))
    merged(x)
    def picky(self, *given):
        if not isinstance(given[9], torch.Tensor):
            raise TypeError("function takes exactly 3 arguments")
        called.append((self, given[3], given[9:]))
    Launcher.__call__ = picky
    for _ in range(2):
        _, direct, _ = merged(x)
        assert not direct
print("done")
"""


def test_prepared_launches(tmp_path: Path) -> None:
    assert printed(PROGRAM, tmp_path).strip() == "done"
