"""The low-rank kernels: are they right, and how near are they to the least bytes that must move?

    python -m benchmarks.kernels [--json FILE] [--repeats 5] [--layers N]

Needs torch and, for the Triton half, triton; the CUDA half runs too if it has been built
(python -m essa_mpi.kernels.build) or nvcc is there. Neither MPI nor vLLM is imported.

First every operation of every backend is checked against float64. Then, on a GPU, slot writes and
merged weights are timed at the shapes of Qwen2.5-7B and 32B beside a plain device copy measured in
the same run: `share` is the time that copy's bandwidth would need for the least bytes, divided by
the time taken. Launches are replayed from a CUDA graph, so that a row times the GPU; `call` rows
time the Python call as well. Without a GPU the timing half is left out and the run says so.
"""

import argparse
import importlib.util
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from essa_mpi import perturbation
from essa_mpi.kernels import build, cuda_kernels, dispatch, reference
from essa_mpi.kernels.tables import MergeTable, SlotTable, cores as make_cores

from . import record

MODELS = {  # layers, hidden size, rows of q and of k (= v)
    "Qwen2.5-7B": (28, 3584, 3584, 512),
    "Qwen2.5-32B": (64, 5120, 5120, 1024),
}


# ------------------------------------------------------------------------------------- checks

def relative(got, want):
    want = want.double().cpu()
    return float((got.double().cpu() - want).norm() / want.norm())


def basis(generator, m, r):
    return torch.linalg.qr(torch.randn(m, r, dtype=torch.float64, generator=generator))[0]


def check(device):
    """Rows (operation, error, allowed): relative Frobenius errors against float64 for results, counts
    of differing values where every bit is fixed. Low precision may be off by twice what plain PyTorch is."""
    g = torch.Generator().manual_seed(1)
    rows = []
    for r, length in ((2, 8), (8, 8), (16, 16), (32, 32)):
        heights, n, k = [300, 72, 72, 300], 264, 5
        u_b, v_a = [basis(g, m, r) for m in heights], [basis(g, n, r) for _ in heights]
        mixing = torch.stack([basis(g, r, r) for _ in heights])
        s_a, s_b = torch.rand(4, r, generator=g).double() + 0.5, torch.rand(4, r, generator=g).double() + 0.5
        d_a, d_b = 0.1 * torch.randn(2, k, 4, r, generator=g)
        core = make_cores(mixing, s_a, s_b, d_a, d_b, 2.0)                       # (k, 4, r, r)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            name = f"r{r} {str(dtype).removeprefix('torch.')}"
            slots = [torch.full((k + 2, 1, m, length), float("nan"), dtype=dtype, device=device) for m in heights]
            SlotTable(slots, u_b, mixing, s_a, s_b, 2.0).write(d_a, d_b, list(range(1, k + 1)))
            want = torch.cat([u @ core[:, p] for p, u in enumerate(u_b)], 1)
            got = torch.cat([s[1:k + 1, 0, :, :r] for s in slots], 1)
            plain = torch.cat([u.to(dtype) @ core[:, p].to(dtype) for p, u in enumerate(u_b)], 1)
            rows.append((f"write_slots {name}", relative(got, want), max(1e-6, 2 * relative(plain, want))))
            stray = sum(int((~s[[0, -1]].isnan()).sum()) for s in slots)
            rows.append((f"write_slots {name}: neighbours written", stray, 0))

            tokens = 37
            h = torch.randn(tokens, 4, r, generator=g)[:, :3]
            idx = torch.randint(-1, k, (tokens,), generator=g)
            u_t = torch.cat(u_b[:3]).t().float().contiguous()
            out = torch.randn(tokens, u_t.shape[1], generator=g).to(dtype)
            moved = out.clone().to(device)
            dispatch.shared_basis_(moved, h.to(device), core[:, :3].float().contiguous().to(device), idx.to(device),
                                   u_t.to(device), heights[:3])
            chosen = core[:, :3][idx.clamp(min=0)] * (idx >= 0)[:, None, None, None]
            step = torch.einsum("tsi,tsji->tsj", h.double(), chosen)
            update = torch.cat([step[:, p] @ u_b[p].t() for p in range(3)], 1)
            plain = out + torch.cat([step[:, p].to(dtype) @ u_b[p].t().to(dtype) for p in range(3)], 1)
            want = out.double() + update
            rows.append((f"shared_basis {name}", relative(moved, want), max(1e-6, 2 * relative(plain, want))))
            rows.append((f"shared_basis {name}: tokens without a candidate changed",
                         int((moved.cpu()[idx < 0] != out[idx < 0]).sum()), 0))

            pristine = [torch.randn(m, n, generator=g).to(dtype).to(device) for m in heights]
            weights = [torch.full_like(w, float("nan")) for w in pristine]
            table = MergeTable(weights, pristine, u_b, v_a)
            table.apply(core[0])
            want = [w.cpu().double() + u @ c @ v.t() for w, u, c, v in zip(pristine, u_b, core[0], v_a)]
            plain = [w.cpu() + (u.to(dtype) @ c.to(dtype)) @ v.t().to(dtype)
                     for w, u, c, v in zip(pristine, u_b, core[0], v_a)]
            rows.append((f"merged {name}", relative(torch.cat(weights), torch.cat(want)),
                         max(1e-6, 2 * relative(torch.cat(plain), torch.cat(want)))))
            if dtype == torch.bfloat16:
                table.apply(core[0], "stochastic", 2**63 + 5)
                off = sum(int((w.cpu() != reference.round_stochastically(
                    x, reference.rounding_noise(2**63 + 5, p, *w.shape))).sum())
                    for p, (w, x) in enumerate(zip(weights, want)))
                rows.append((f"merged {name} stochastic: values unlike the reference", off,
                             int(2e-3 * sum(w.numel() for w in weights))))
            table.restore()
            rows.append((f"restore {name}: values changed",
                         sum(int((w != p).sum()) for w, p in zip(weights, pristine)), 0))
            sums = [int(dispatch.checksum(w)) for w in pristine]
            with dispatch.forced("reference"):
                rows.append((f"checksum {name}: unlike the reference",
                             sum(s != int(dispatch.checksum(w)) for s, w in zip(sums, pristine)), 0))
    z = torch.full((3, 1001), float("nan"), dtype=torch.float64, device=device)
    candidates = [0, 5, 2**32 - 1]
    dispatch.normals_(z, 2**64 - 59, 7, candidates)
    want = perturbation.population_normals(2**64 - 59, 7, candidates, 1001)
    differ = z.cpu().numpy().view(np.int64) != want.view(np.int64)
    rows.append(("normals: bits unlike the authority", int(differ.sum()), 0))
    return rows


def gpu_backends():
    """(names of the backends that can run on this machine's GPU, reasons for the others)."""
    if not torch.cuda.is_available():
        return [], ["triton, cuda: left out, no GPU here"]
    names, reasons = [], []
    if importlib.util.find_spec("triton"):
        names.append("triton")
    else:
        reasons.append("triton: left out, it is not installed")
    if not cuda_kernels.available() and build.find_nvcc():
        with tempfile.TemporaryDirectory() as folder:   # for this GPU and this run only
            major, minor = torch.cuda.get_device_capability()
            cuda_kernels.load(build.build([10 * major + minor], Path(folder) / "libessa_kernels.so")[0])
    if cuda_kernels.available():
        names.append("cuda")
    else:
        reasons.append(f"cuda: left out, {cuda_kernels.why_not()}")
    return names, reasons


def check_all():
    """Checks of every backend that can run here, as rows for the report."""
    rows = []

    def one(label, backend, device):
        with dispatch.forced(backend):
            found = check(torch.device(device))
        rows.extend({"name": name, "backend": label, "error": error, "allowed": allowed, "ok": bool(error <= allowed)}
                    for name, error, allowed in found)
        bad = [name for name, error, allowed in found if not error <= allowed]
        print(f"{label:24} {len(found) - len(bad)} of {len(found)} checks pass"
              + (f"; NOT: {', '.join(bad)}" if bad else ""))

    one("reference", "reference", "cpu")
    if shutil.which("g++"):
        with tempfile.TemporaryDirectory() as folder:
            cuda_kernels.load(build.build_host(Path(folder) / "libessa_host.so"))
            one("cuda source on the CPU", "cuda", "cpu")
            cuda_kernels.unload()
    else:
        print("cuda source on the CPU: left out, no g++")
    names, reasons = gpu_backends()
    for name in names:
        one(name, name, "cuda")
    print(*reasons, sep="\n")
    return rows


# ------------------------------------------------------------------------------------- timing

def measure(work, repeats, graph=True):
    """Microseconds of one `work()`: `repeats` numbers, each over about 20 ms of the GPU's time."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    inner = 1
    if graph:
        captured, inner = torch.cuda.CUDAGraph(), 5
        with torch.cuda.graph(captured):
            for _ in range(inner):
                work()
        step = captured.replay
    else:
        step = work
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once(count):
        start.record()
        for _ in range(count):
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count
    count = max(1, int(20e3 / max(once(2), 1)))
    return [once(count) / inner for _ in range(repeats)]


def free_memory():
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def timings(repeats, layers_asked):
    """Rows of timings, and the ratios worth quoting."""
    device = torch.device("cuda")
    size = min(2 << 30, free_memory() // 8) // 16 * 16
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rows, ratios = [], {}

    def row(name, backend, bytes_moved, times, bandwidth=None):
        middle = statistics.median(times)
        entry = {"name": name, "backend": backend, "bytes": bytes_moved, "us": middle,
                 "us_min": min(times), "us_max": max(times), "repeats": len(times),
                 "gb_per_s": bytes_moved / middle / 1e3}
        if bandwidth:
            entry["floor_us"] = bytes_moved / bandwidth
            entry["share"] = entry["floor_us"] / middle
            ratios[f"{name}, {backend}: share of the byte floor"] = entry["share"]
        rows.append(entry)
        print(f"{name:44} {backend:16} {bytes_moved / 1e6:10.2f} MB {middle:10.1f} us "
              f"({min(times):.1f} to {max(times):.1f}) {entry['gb_per_s']:7.0f} GB/s"
              + (f"  share {entry['share']:.2f}" if bandwidth else ""), flush=True)
        return entry

    copy = row("device copy", "torch", 2 * size, measure(lambda: target.copy_(source), repeats))
    bandwidth = copy["bytes"] / copy["us"]   # bytes a microsecond
    del source, target
    kinds = gpu_backends()[0]
    for model, (layers, hidden, q_rows, kv_rows) in MODELS.items():
        layers = min(layers, layers_asked or layers)
        projections = [(q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden), (hidden, q_rows)] * layers
        g = torch.Generator().manual_seed(2)
        for r in (8, 16):
            u_b = [torch.randn(m, r, generator=g) / m**0.5 for m, _ in projections]
            mixing = torch.stack([basis(g, r, r) for _ in projections])
            s = torch.rand(len(projections), r, generator=g) + 0.5
            for k in (8, 64):
                need = k * sum(m for m, _ in projections) * r * 2
                if need > 0.8 * free_memory():
                    print(f"slots {model} r{r} K={k}: left out, {need / 1e9:.1f} GB do not fit")
                    continue
                slots = [torch.zeros(k, 1, m, r, dtype=torch.bfloat16, device=device) for m, _ in projections]
                table = SlotTable(slots, u_b, mixing, s, s)
                d = 0.01 * torch.randn(k, len(projections), 2, r, generator=g).to(device)
                least = k * table.bytes_a_candidate + table.bytes_read + d.numel() * 4
                name = f"slots {model} ({layers} layers) r{r} K={k}"

                def write():
                    table.write(d[:, :, 0], d[:, :, 1])
                for kind in kinds:
                    with dispatch.forced(kind):
                        row(name, kind, least, measure(write, repeats), bandwidth)
                        row(name + ", call", kind, least, measure(write, repeats, graph=False), bandwidth)
                core = make_cores(mixing, s, s, d[:, :, 0].cpu(), d[:, :, 1].cpu()).float().to(device)
                on_gpu = [u.to(device) for u in u_b]

                def plain():
                    for p, slot in enumerate(slots):
                        slot[:, 0].copy_(on_gpu[p] @ core[:, p])
                row(name, "torch", least, measure(plain, repeats), bandwidth)
                del slots, table, core, on_gpu
        weights_bytes = sum(m * n for m, n in projections) * 2
        if 2 * weights_bytes > 0.9 * free_memory():
            print(f"merged {model}: left out, {2 * weights_bytes / 1e9:.1f} GB do not fit; try --layers")
            continue
        pristine = [torch.randn(m, n, device=device, dtype=torch.bfloat16) for m, n in projections]
        weights = [torch.empty_like(w) for w in pristine]
        r = 8
        table = MergeTable(weights, pristine, [torch.randn(m, r, generator=g) / m**0.5 for m, _ in projections],
                           [torch.randn(n, r, generator=g) / n**0.5 for _, n in projections])
        core = torch.randn(len(projections), r, r, generator=g).to(device)
        for rounding in ("nearest", "stochastic"):
            name = f"merged {model} ({layers} layers) r{r} {rounding}"
            for kind in kinds:
                with dispatch.forced(kind):
                    row(name, kind, table.bytes_moved, measure(lambda: table.apply(core, rounding, 7), repeats), bandwidth)
        row(f"restore {model} ({layers} layers)", "torch", table.bytes_moved, measure(table.restore, repeats), bandwidth)
        del pristine, weights, table
    return rows, ratios


def versions():
    return {**record.versions("torch", "numpy", "triton"), "cuda": torch.version.cuda, "kernel_source": build.source_digest()}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--repeats", type=int, default=5, help="times a timing is repeated (default 5)")
    parser.add_argument("--layers", type=int, help="time only the first N layers, for a GPU with little memory")
    options = parser.parse_args(arguments)
    rows, ratios = check_all(), {}
    right = all(row["ok"] for row in rows)
    if not right:
        print("some results are wrong, so nothing is timed")
    elif torch.cuda.is_available():
        timed, ratios = timings(options.repeats, options.layers)
        rows += timed
    else:
        print("no GPU: nothing is timed")
    record.write(options.json, "kernels", rows, ratios, versions=versions())
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
